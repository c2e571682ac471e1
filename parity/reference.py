"""The torch side: transformers' Olmo3ForCausalLM, checked against the config before a logit of it is believed."""

from __future__ import annotations

import gc
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ..olmo_jax.config import FULL, SLIDING, Olmo3Config
from ..olmo_jax.errors import BadInput
from ..olmo_jax.rope import RopeTable, rope_tables
from . import losses
from .batches import Sequence, mask_length, probe_positions
from .devices import full_float32_torch

# What makes the reference a benignly changed version of itself; all of them at once.
BENIGN = (
    "attention sdpa for eager",
    "rows padded to another length",
    "other thread count",
    "head summed in other order",
)
BENIGN_PADDING = 9  # tokens
HEAD_ROWS = 8192  # rows of the head multiplied at a time: 134 MB of a 7B head in float32
# Relative difference of an inverse frequency that two right float32 computations may have: four units in the last
# place (measured: at most one between NumPy and torch). YaRN or another theta changes them by tenths.
FREQUENCY_TOLERANCE = 4 * 2.0**-23


def import_torch():
    """torch and transformers; BadInput where one of them is there and does not import."""
    try:
        import torch
        import transformers
    except Exception as error:  # a broken installation raises anything
        raise BadInput(
            f"PyTorch or transformers is installed but does not import: {type(error).__name__}: {error}"
        ) from None
    return torch, transformers


def require_torch() -> None:
    """Raise BadInput with what to install, where torch or transformers is missing. Imports neither."""
    for name in ("torch", "transformers"):
        if sys.modules.get(name, ...) is None or (name not in sys.modules and importlib.util.find_spec(name) is None):
            raise BadInput(
                f"the PyTorch reference needs {name}, which is not installed: pip install 'olmo-parity[torch]'"
            )


def run_reference(
    source: Path,
    config: Olmo3Config,
    sequences: list[Sequence],
    *,
    dtype: str,
    round_to: str | None = None,
    benign: bool = False,
    streamed: bool = False,
    device: str = "cpu",
    keep: str = losses.LOGITS,
    folder: Path,
) -> dict:
    """Load the checkpoint once in dtype, check it, and write folder/<index>.npy, logits [T, V] float32, a sequence each.

    round_to rounds the loaded float32 weights to bfloat16 or float16 first, as a candidate stored that way holds them;
    this is also what shows the cost of bfloat16 arithmetic apart from that of bfloat16 storage. benign changes what must not matter
    (BENIGN), to measure the reference's own noise. Eager attention, one sequence at a time, no padding, no cache. The model
    is released before returning. streamed holds one layer at a time (streamed_reference.py), on the CPU, and gives the same
    numbers. device is torch's name for where a whole model runs. keep: logits, or
    the losses of losses.py alone. Raises BadInput where the live module is not what the config says.
    """
    from . import streamed_reference  # here, because it is made of parts of this file

    torch, transformers = import_torch()
    folder.mkdir()
    precision = full_float32_torch(device)
    if streamed:
        model = streamed_reference.empty_model(source, torch, transformers)
    else:
        model = _load(source, getattr(torch, dtype), torch, transformers).to(
            device
        )  # no dtype: rotary tables keep theirs
    if benign:
        model.set_attn_implementation("sdpa")
    check_reference(model, config, transformers.__version__)
    with torch.no_grad():
        if streamed:
            streamed_reference.write_logits(
                model,
                source,
                config,
                sequences,
                dtype=dtype,
                round_to=round_to,
                benign=benign,
                keep=keep,
                folder=folder,
            )
        else:
            _write_logits(model, config, sequences, round_to, benign, keep, folder, torch)
        impose_window(model, config, None)
        keys = visible_keys(model, config)
    settings = {
        "implementation": "transformers Olmo3ForCausalLM",
        "attention": model.config._attn_implementation,
        "dtype": dtype,
        "device": "cpu" if streamed else str(next(model.parameters()).device),
        **precision,
        "threads": torch.get_num_threads(),
        "weights_rounded_to": round_to,
        "streamed": streamed,
        "benign_changes": list(BENIGN) if benign else [],
        "visible_keys": keys,
    }
    del model
    gc.collect()
    return settings


def _write_logits(
    model,
    config: Olmo3Config,
    sequences: list[Sequence],
    round_to: str | None,
    benign: bool,
    keep: str,
    folder: Path,
    torch,
) -> None:
    """The logits of a model that holds all its weights, a sequence at a time."""
    if round_to:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(getattr(torch, round_to)))
    for index, sequence in enumerate(sequences):
        impose_window(model, config, sequence.window)
        alone = {}  # a document that occurs twice is run once
        for tokens, first in sequence.parts():
            key = tokens.tobytes()
            if key not in alone:
                alone[key] = _forward(model, tokens, first, benign, torch)
        logits = np.concatenate([alone[tokens.tobytes()] for tokens, _ in sequence.parts()])
        if logits.shape[1] != config.vocab_size:
            raise BadInput(f"the reference gave {logits.shape[1]} logits a token, the config says {config.vocab_size}")
        losses.write(keep, folder, index, sequence.tokens, logits)


def _forward(model, tokens: np.ndarray, first: int, benign: bool, torch) -> np.ndarray:
    """Logits [T, V] float32 of one document alone."""
    length = len(tokens)
    if benign:
        tokens = np.pad(tokens, (0, BENIGN_PADDING))
    device = next(model.parameters()).device
    ids = torch.from_numpy(tokens.astype(np.int64))[None].to(device)
    positions = torch.arange(first, first + len(tokens), device=device)[None]
    if not benign:
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float().cpu().numpy()
    with other_thread_count(torch):
        hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0, :length]
        head = model.get_output_embeddings()
        parts = [head_part(head, rows, hidden, True, torch) for rows in head.weight.split(HEAD_ROWS)]
        return torch.cat(parts, dim=-1).float().cpu().numpy()


def head_part(head, rows, hidden, benign: bool, torch):
    """Logits [T, R] of some rows [R, D] of the head for hidden [T, D].

    A benign change sums in the other order; the whole head's reordered copy would be as large as the head.
    """
    if benign:
        return torch.nn.functional.linear(hidden.flip(-1), rows.flip(-1))
    return torch.func.functional_call(head, {"weight": rows}, (hidden,))


@contextmanager
def other_thread_count(torch) -> Iterator[None]:
    """One thread instead of several, or two instead of one: sums are split elsewhere."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def visible_keys(model, config: Olmo3Config) -> dict[str, list[list[int]]]:
    """By layer type, [position, keys seen] around the edge of the window, counted in the masks that transformers builds.

    This proves the true window without running as many tokens through the model.
    """
    import torch
    from transformers import masking_utils

    length = mask_length(config)
    builders = {SLIDING: masking_utils.create_sliding_window_causal_mask, FULL: masking_utils.create_causal_mask}
    width = torch.empty(1, length, 1)
    positions = torch.arange(length)
    offered = {
        "config": model.config,
        "inputs_embeds": width,  # 5.x
        "input_embeds": width,  # 4.57
        "attention_mask": None,
        "cache": None,
        "past_key_values": None,
        "cache_position": positions,
        "position_ids": positions[None],
    }
    implementation, counts = model.config._attn_implementation, {}
    model.config._attn_implementation = "eager"  # sdpa may leave the mask out where it is only causal
    try:
        for layer_type in sorted(set(config.layer_types)):
            wanted = inspect.signature(builders[layer_type]).parameters
            mask = builders[layer_type](**{k: v for k, v in offered.items() if k in wanted})
            seen = (mask[0, 0] == 0).sum(-1)
            counts[layer_type] = [[int(p), int(seen[p])] for p in probe_positions(config)]
    finally:
        model.config._attn_implementation = implementation
    return counts


def require_olmo3(transformers) -> None:
    """Raise BadInput where the installed transformers is older than OLMo 3."""
    if not hasattr(transformers, "Olmo3ForCausalLM"):
        raise BadInput(f"transformers {transformers.__version__} has no OLMo 3: 4.57 or 5.13 and later do")


def _load(source: Path, dtype, torch, transformers):
    """from_pretrained with dtype=: building and then casting would round the rotary frequencies too."""
    require_olmo3(transformers)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, info = transformers.Olmo3ForCausalLM.from_pretrained(
        source, dtype=dtype, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    faults = [
        f"{len(info[key])} {key.replace('_', ' ')}: {', '.join(map(str, sorted(info[key])[:5]))}"
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info.get(key)
    ]
    wrong = [f"{n} is {p.dtype}" for n, p in model.named_parameters() if p.dtype != dtype]
    if wrong:
        faults.append(f"{len(wrong)} weights are not {dtype} after loading: {', '.join(wrong[:5])}")
    if faults:
        raise BadInput(f"transformers {transformers.__version__} did not load {source} whole", faults)
    return model.eval()


def impose_window(model, config: Olmo3Config, window: int | None) -> None:
    """Set the window that masks are built with (config) and that fused attention would be told (module)."""
    window = window or config.sliding_window
    model.config.sliding_window = window or 1  # where no layer slides transformers builds that mask too, and drops it
    for layer, kind in zip(model.model.layers, config.layer_types, strict=True):
        layer.self_attn.sliding_window = window if kind == SLIDING else None


def check_reference(model, config: Olmo3Config, version: str) -> None:
    """Compare what the live module holds with the config: rotary tables, windows, epsilon, heads, dtypes.

    A reference that computes something else than its config says would make a right conversion fail and, worse, a wrong
    one pass. Raises BadInput with both values and the transformers version.
    """
    faults = []
    for layer_type, table in rope_tables(config).items():
        live = live_rope_table(model, layer_type)
        if live is None:
            faults.append(f"{layer_type}: the module holds no rotary table that could be found")
        else:
            faults += [f"{layer_type}: {fault}" for fault in _compare_tables(table, live)]
    for name, buffer in model.named_buffers():
        if "inv_freq" in name and str(buffer.dtype) != "torch.float32":
            faults.append(
                f"{name} is {buffer.dtype}, float32 is wanted: rounded frequencies turn late positions wrongly"
            )
    layers = model.model.layers
    if len(layers) != config.num_hidden_layers:
        faults.append(f"the module has {len(layers)} layers, the config says {config.num_hidden_layers}")
    for index, layer in enumerate(layers[: config.num_hidden_layers]):
        attention = layer.self_attn
        wanted = {
            "sliding_window": (attention.sliding_window, config.window(index)),
            "head_dim": (attention.head_dim, config.head_dim),
            "query heads per kv head": (
                attention.num_key_value_groups,
                config.num_attention_heads // config.num_key_value_heads,
            ),
            "score scale": (float(attention.scaling), config.head_dim**-0.5),
        }
        for norm in ("self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm", "post_feedforward_layernorm"):
            module = layer.get_submodule(norm)
            wanted[f"{norm} epsilon"] = (module.variance_epsilon, config.rms_norm_eps)
        faults += [
            f"layer {index}: {what} is {live!r} in the module, {stated!r} by the config"
            for what, (live, stated) in wanted.items()
            if live != stated
        ]
    if model.model.norm.variance_epsilon != config.rms_norm_eps:
        faults.append(f"final norm epsilon is {model.model.norm.variance_epsilon!r}, not {config.rms_norm_eps!r}")
    if faults:
        if len(faults) > 12:
            faults = [*faults[:12], f"and {len(faults) - 12} more"]
        raise BadInput(
            f"transformers {version} does not compute what the config says, so its logits prove nothing. "
            "(5.0 to 5.12 apply YaRN to sliding layers; 5.13 and later ignore a flat rope_parameters block; 4.57 ignores "
            "rope_parameters.)",
            faults,
        )


def live_rope_table(model, layer_type: str) -> RopeTable | None:
    """The rotary table a live module uses for a layer type, in each way transformers has kept it."""
    inner = model.model
    rotary = getattr(inner, "rotary_emb", None)
    if rotary is not None and hasattr(rotary, f"{layer_type}_inv_freq"):  # 5.13 and later: one module, a table per type
        inv_freq = getattr(rotary, f"{layer_type}_inv_freq")
        factor = getattr(rotary, f"{layer_type}_attention_scaling")
    else:
        by_type = getattr(inner, "rotary_embs", None)  # 4.57: a module per type
        module = by_type[layer_type] if by_type is not None else rotary
        if module is None or not hasattr(module, "inv_freq"):
            return None
        inv_freq, factor = module.inv_freq, module.attention_scaling
    return RopeTable(inv_freq.detach().float().cpu().numpy(), float(factor))


def _compare_tables(stated: RopeTable, live: RopeTable) -> list[str]:
    if live.inv_freq.shape != stated.inv_freq.shape:
        return [f"{live.inv_freq.size} frequencies in the module, {stated.inv_freq.size} by the config"]
    faults = []
    off = np.abs(live.inv_freq - stated.inv_freq) > FREQUENCY_TOLERANCE * stated.inv_freq
    if off.any() or np.isnan(live.inv_freq).any():
        worst = int(np.argmax(np.abs(live.inv_freq / stated.inv_freq - 1)))
        faults.append(
            f"{int(off.sum())} of {off.size} rotary frequencies differ; dimension {worst}: {live.inv_freq[worst]:.6g} "
            f"radians per token in the module, {stated.inv_freq[worst]:.6g} by the config"
        )
    if not abs(live.attention_factor - stated.attention_factor) <= 1e-9:
        faults.append(
            f"attention factor {live.attention_factor!r} in the module, {stated.attention_factor!r} by the config"
        )
    return faults
