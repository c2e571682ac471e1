"""config.json for transformers: one file that 4.57 and 5.13+ read as the same function, or one spelling alone."""

from __future__ import annotations

from ..olmo_jax.config import FULL, SLIDING, Olmo3Config
from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.errors import BadInput

SPELLINGS = ("both", "4", "5")


def hf_config(config: Olmo3Config, spelling: str = "both") -> dict:
    """The dictionary of a config.json.

    transformers 4.57 reads rope_theta and rope_scaling and ignores rope_parameters; 5.13+ reads rope_parameters, and takes
    sliding layers' theta for 500000 where only the older keys are there. So "both" writes both, which agree by construction.
    "4" and "5" write one spelling. Raises BadInput where 4.57 has no way to say what the model computes.
    """
    if spelling not in SPELLINGS:
        raise BadInput(f"transformers {spelling!r} is not supported ({', '.join(SPELLINGS)} are)")
    raw = {**to_hf(config), "use_cache": True, "torch_dtype": config.dtype}
    if spelling == "5":
        del raw["torch_dtype"]
        return raw
    problem = _not_for_4(config)
    if problem:
        raise BadInput(
            f"no config.json says this to transformers 4.57: {problem}",
            ["Pass --transformers 5 to write the spelling of 5.13 and later alone"] if spelling == "both" else [],
        )
    rope = config.rope.get(FULL) or config.rope[SLIDING]
    scaled = rope.rope_type != "default"
    raw["rope_theta"] = rope.rope_theta
    raw["rope_scaling"] = (
        {k: v for k, v in vars(rope).items() if v is not None and k != "rope_theta"} if scaled else None
    )
    if spelling == "4":
        del raw["rope_parameters"], raw["dtype"]
    return raw


def _not_for_4(config: Olmo3Config) -> str | None:
    """What keeps the flat spelling from saying it: one theta for all layers, scaling on full-attention layers alone."""
    sliding, full = config.rope.get(SLIDING), config.rope.get(FULL)
    if sliding is not None and sliding.rope_type != "default":
        return f"sliding layers have {sliding.rope_type} rotary, 4.57 keeps plain rotary there"
    if sliding is not None and full is not None and sliding.rope_theta != full.rope_theta:
        return f"sliding layers have theta {sliding.rope_theta:g}, full-attention layers {full.rope_theta:g}"
    return None
