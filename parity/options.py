"""What may be chosen for a run of the gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class GateOptions:
    """What may be chosen. The defaults are the gate that a launch should stand behind."""

    batch: Path | None = None  # prompts.jsonl, run beside the built-in sequences
    only_batch: bool = False  # leave the built-in sequences out
    max_tokens: int | None = None  # cut longer prompts, and say so
    accept_uncovered: tuple[str, ...] = ()
    weights_may_differ: bool = False
    allow_unknown_keys: tuple[str, ...] = ()
    profile: str = "default"  # of gate.PROFILES
    limits: Mapping[str, float] = field(default_factory=dict)  # by gate.LIMIT_NAMES, instead of the profile's
    also: str | None = None  # core:DIR, AI2's own OLMo-core model as a third side of the float32 leg
    candidate_fn: str | None = None  # package.module:function, the candidate instead of olmo_jax
    gradients: bool = False  # loss and the gradient of every parameter too
    z_loss: float | None = None  # its coefficient in the loss; None leaves it out
    streamed: bool | None = None  # layer by layer; None: where the whole model does not fit into memory
    candidate_device: str | None = None  # cpu, gpu or tpu; None: what JAX finds by itself
    reference_device: str | None = None  # cpu or cuda; None: cpu
    mesh: str | None = None  # fsdp=4,tensor=2: devices that the candidate is spread over
    processes: int | None = None  # of the candidate, under jax.distributed
    override: tuple[str, ...] = ()  # KEY=VALUE, changed in the config of both sides
    trace: bool = True  # where a leg fails, find the first module that diverges
    recalibrate: bool = False  # measure the reference's noise again, whatever the cache holds
    settings_file: Path | None = None  # the parity.toml that some of these came from


DEFAULTS = GateOptions()
