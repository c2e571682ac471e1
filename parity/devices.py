"""Where either side runs: devices, mesh, processes; and whether their float32 is true float32 there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..olmo_jax.errors import BadInput

# What JAX_PLATFORMS calls them, the default one first. The CPU stays beside the others: host arrays live there.
JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}
TORCH_DEVICES = ("cpu", "cuda")
MESH_AXES = ("fsdp", "tensor")  # that olmo_jax.sharding.RULES lays parameters along
# XLA leaves out casts to bfloat16 inside fused code unless told not to: then "where the reference casts, we cast" is true.
NO_EXCESS_PRECISION = "--xla_allow_excess_precision=false"
# A float32 that no shorter product keeps: TF32 has 10 bits of fraction, bfloat16 7, and two bfloat16 pieces 16 of the 23.
PROBE = 1 + 2**-11 + 2**-23
PROBE_SIZE = 256  # rows and columns: small products may take another path than those of a model
START_SECONDS = 120  # for all processes to find each other


@dataclass(frozen=True)
class Placement:
    """Where the two sides of a run are. On a TPU host torch runs on the CPU, or the reference comes from a record."""

    candidate: str | None = None  # of JAX_PLATFORMS; None: what JAX finds by itself
    reference: str = "cpu"  # of TORCH_DEVICES
    mesh: Mapping[str, int] | None = None  # devices along each axis; None: one device, or all processes' along fsdp
    processes: int = 1  # of the candidate, under jax.distributed

    @property
    def spread(self) -> bool:
        """Is the candidate on more than one device?"""
        return self.mesh is not None or self.processes > 1

    @property
    def chosen(self) -> bool:
        """Was anything chosen for the candidate, which should be tried before the work?"""
        return self.spread or self.candidate is not None

    def environment(self, *, exact_casts: bool = True) -> dict[str, str]:
        """Of a child process of the candidate. exact_casts turns XLA's excess precision off."""
        env = dict(os.environ)
        if self.candidate:
            env["JAX_PLATFORMS"] = JAX_PLATFORMS[self.candidate]
        if exact_casts:  # of two contrary flags the last counts
            env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} {NO_EXCESS_PRECISION}".strip()
        return env


def placement(
    candidate: str | None = None,
    reference: str | None = None,
    mesh: str | None = None,
    processes: int | None = None,
    *,
    streamed: bool | None = None,
    function: bool = False,
    recorded: bool = False,
    gradients: bool = False,
) -> Placement:
    """The options' values, checked together. Raises BadInput with every fault; a device that is not there is among them."""
    faults = []
    if candidate is not None and candidate not in JAX_PLATFORMS:
        faults.append(f"--candidate-device {candidate}: {', '.join(JAX_PLATFORMS)} are known")
    if reference is not None and reference not in TORCH_DEVICES:
        faults.append(f"--reference-device {reference}: {', '.join(TORCH_DEVICES)} are known")
    elif reference == "cuda" and recorded:
        faults.append("--reference-device cuda: a record was computed already, leave it out")
    elif reference == "cuda":
        faults += cuda_faults()
    axes = parse_mesh(mesh, faults) if mesh is not None else None
    wanted = Placement(candidate, reference or "cpu", axes, processes or 1)
    spread = [name for name, given in (("--mesh", axes), ("--processes", wanted.processes > 1)) if given]
    for option, given, why in (
        ("--streamed", streamed, "one layer at a time is run on one device"),
        ("--gradients", gradients, "gradients are computed on one device"),
    ):
        if given and spread:
            faults.append(f"{' and '.join(spread)} with {option}: {why}; leave one of them out")
    if streamed and wanted.reference == "cuda":
        faults.append("--reference-device cuda with --streamed: layer by layer the reference runs on the CPU")
    if axes and function:
        faults.append("--mesh lays out olmo_jax; a candidate function makes its own mesh")
    if candidate == "tpu" and wanted.processes > 1:
        faults.append("--processes on a TPU: one process has all chips of its host; use --mesh")
    if faults:
        raise BadInput("the two sides cannot be placed like that", faults)
    return wanted


def parse_mesh(text: str, faults: list[str]) -> dict[str, int] | None:
    """'fsdp=4,tensor=2' as {'fsdp': 4, 'tensor': 2}; None, and a fault noted, where it is something else."""
    axes = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES or name in axes or not size.isdecimal() or int(size) < 1:
            faults.append(
                f"--mesh {text}: {part!r} is not one of {', '.join(f'{a}=DEVICES' for a in MESH_AXES)}, each given once"
            )
            return None
        axes[name] = int(size)
    return axes


def cuda_faults() -> list[str]:
    """Why torch cannot use a GPU here; empty where it can."""
    import torch

    if torch.cuda.is_available():
        return []
    return [f"--reference-device cuda: torch {torch.__version__} finds no GPU on this machine"]


def start_jax(request: Mapping, index: int = 0, address: str = ""):
    """Call first in a child: the wanted processes and devices, float32 products in full. Returns the mesh, None for one device.

    request: device, mesh and processes as in Placement. address: host and port at which process 0 waits for the others.
    Raises BadInput where a device is not there, the mesh does not fit, or float32 is rounded all the same.
    """
    import jax
    from jax.sharding import AxisType, Mesh

    full_float32_jax()
    wanted, axes, processes = request["device"], request["mesh"], request["processes"]
    try:
        if processes > 1:
            # local_device_ids is about GPUs: without it each process would take all of them.
            jax.distributed.initialize(
                address, processes, index, local_device_ids=[index], initialization_timeout=START_SECONDS
            )
        devices = jax.devices()
    except Exception as error:  # a platform that is not there ends in an AssertionError without a word
        platforms = os.environ.get("JAX_PLATFORMS") or "not set"
        raise BadInput(
            f"--candidate-device {wanted or '(not given)'}: JAX does not start with JAX_PLATFORMS {platforms}: "
            f"{error or type(error).__name__}"
        ) from None
    found = jax.default_backend()
    if wanted and found != wanted:  # with "cuda" JAX goes on without a word where no GPU is visible
        raise BadInput(f"--candidate-device {wanted}: JAX finds none on this machine, only {found}")
    if not products_in_full(lambda a, b: jax.numpy.dot(a, b)):
        raise BadInput(
            f"{devices[0].device_kind} rounds the factors of float32 products although jax_default_matmul_precision is "
            f"{jax.config.jax_default_matmul_precision}: the float32 leg would prove nothing"
        )
    if not axes and processes == 1:
        return None
    axes = axes or {"fsdp": len(devices)}
    if math.prod(axes.values()) != len(devices):
        raise BadInput(
            f"--mesh {','.join(f'{k}={v}' for k, v in axes.items())} is {math.prod(axes.values())} devices, JAX finds "
            f"{len(devices)}" + (f" in {processes} processes" if processes > 1 else "")
        )
    grid = np.array(devices).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def full_float32_jax() -> None:
    """Float32 products in full on GPU and TPU too, whatever JAX_DEFAULT_MATMUL_PRECISION says."""
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


def jax_settings(mesh=None) -> dict:
    """What is in effect, read back: devices, mesh, precision of float32 products."""
    import jax

    return {
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "mesh": dict(mesh.shape) if mesh is not None else None,
        "processes": jax.process_count(),
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "float32_products_in_full": products_in_full(lambda a, b: jax.numpy.dot(a, b)),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def full_float32_torch(device: str) -> dict:
    """Float32 products in full (TF32 off), and what is in effect then, read back. Raises BadInput where it is not."""
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

    def multiply(a, b):
        return (torch.from_numpy(a).to(device) @ torch.from_numpy(b).to(device)).cpu().numpy()

    found = {
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32),
        "float32_products_in_full": products_in_full(multiply),
    }
    if not found["float32_products_in_full"]:
        raise BadInput(
            f"torch on {device} rounds the factors of float32 products although TF32 is off: the float32 leg would prove "
            "nothing. Is NVIDIA_TF32_OVERRIDE set?"
        )
    return found


def products_in_full(multiply: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> bool:
    """Does a product of two float32 matrices keep all bits of its factors? Asked of the device itself, not of a setting."""
    factor = np.full((PROBE_SIZE, PROBE_SIZE), PROBE, np.float32)
    return bool((np.asarray(multiply(factor, np.eye(PROBE_SIZE, dtype=np.float32))) == factor).all())


def gathered(array) -> np.ndarray:
    """All of an array, wherever its parts lie. Where processes hold parts of it, every one of them must call this."""
    if getattr(array, "is_fully_addressable", True):
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(array, tiled=True)
