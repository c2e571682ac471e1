"""Names of modules within a layer, and of the model's ends, as the catalogue needs them."""

Q, K, V, O = (f"self_attn.{n}_proj" for n in "qkvo")  # noqa: E741
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
ATTENTION_NORM, MLP_NORM = "post_attention_layernorm", "post_feedforward_layernorm"
GATE, UP, DOWN = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
PROJECTIONS = (Q, K, V, O, GATE, UP, DOWN)
NORMS = (Q_NORM, K_NORM, ATTENTION_NORM, MLP_NORM)
QK_NORMS = (Q_NORM, K_NORM)
QK_ROTARY = ("self_attn.q_rotary", "self_attn.k_rotary")
MIX, SWIGLU = ("self_attn.mix",), ("mlp.swiglu",)
RESIDUALS = ("attention_residual", "mlp_residual")
EMBEDDING, NORM, HEAD = "embed_tokens", "norm", "lm_head"
