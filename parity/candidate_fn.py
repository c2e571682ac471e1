"""Any implementation as the candidate: a factory named on the command line, called in a process of its own.

docs/candidate-fn.md is the protocol: make(checkpoint, config, dtype, sliding_window) returns
forward(tokens, positions, segment_ids) -> logits.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from ..convert.sources import Source, open_source
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.config_hf import to_hf
from ..olmo_jax.errors import BadInput
from .batches import Sequence
from .candidate import LENGTH_STEP, padded_row
from .children import run_children, serve
from .devices import Placement, full_float32_jax, gathered, jax_settings, start_jax
from .identity import file_hash

ACTIVATIONS = (
    "_activations"  # <function>_activations: a factory like make, of a function that gives {module name: array}
)
LAST_LINES = 6  # of a traceback of the user's own code


@dataclass(frozen=True)
class CandidateFn:
    """What --candidate-fn names. checkpoint is handed on; config is the reference's."""

    spec: str  # package.module:function
    checkpoint: Path | None
    config: Olmo3Config
    source: Source | None = None  # the checkpoint, where this package can read it too
    unread: str = ""  # why it cannot
    imported: dict = field(default_factory=dict)  # what a first import found: file and its hash
    placement: Placement = field(default_factory=Placement)

    def run(self, sequences: list[Sequence], *, dtype: str, folder: Path, exact_casts: bool = True) -> dict:
        """Compute float32 logits of every sequence into folder/<index>.npy, in a child process; returns its settings.

        Like candidate.run_candidate. Raises BadInput where the function cannot be used; wrong numbers are for the gate.
        """
        folder.mkdir()
        request = {
            "spec": self.spec,
            "checkpoint": str(self.checkpoint.absolute()) if self.checkpoint else None,
            "config": to_hf(self.config),
            "dtype": dtype,
            "device": self.placement.candidate,
            "mesh": None,
            "processes": self.placement.processes,
            "sequences": [s.to_json() for s in sequences],
        }
        environment = self.placement.environment(exact_casts=exact_casts)
        what = f"the process of --candidate-fn {self.spec} in its {dtype} run"
        return run_children(__name__, folder, request, environment, what)

    def side(self, checkpoint: dict) -> dict:
        """The candidate's entry in the record. checkpoint: its own entry, {} where it cannot be read."""
        unknown = {"form": "function", "dtype": "known to its function alone", "tensors": 0, "bytes": 0}
        unknown |= dict.fromkeys(("rotary_tables_sha256", "config_sha256", "weights_sha256"))
        return {
            "path": str(self.checkpoint or self.spec),
            **(checkpoint or unknown),
            "function": self.spec,
            "function_file": self.imported["file"],
            "function_sha256": self.imported["file_sha256"],
        }


def open_candidate(
    spec: str,
    checkpoint: Path | None,
    config: Olmo3Config,
    allow_unknown_keys: tuple[str, ...] = (),
    placement: Placement | None = None,
) -> CandidateFn:
    """The candidate function, imported once in a process of its own: a misspelt name is said before the work.

    Its checkpoint is opened where this package can read it too: its config and weights are then compared.
    """
    if checkpoint is not None and not Path(checkpoint).exists():
        raise BadInput(f"--candidate {checkpoint} does not exist")
    source, unread = None, "no --candidate was given beside --candidate-fn"
    if checkpoint is not None:
        try:
            source, unread = open_source(checkpoint, allow_unknown_keys), ""
        except BadInput as error:
            unread = f"only the candidate function can read {checkpoint}: {error.headline}"
    function = CandidateFn(spec, checkpoint, config, source, unread, placement=placement or Placement())
    with tempfile.TemporaryDirectory(prefix="olmo-parity-") as folder:
        return replace(function, imported=function.run([], dtype="float32", folder=Path(folder) / "import"))


def load(spec: str, option: str = "--candidate-fn") -> tuple[Callable, Callable | None]:
    """The factory that package.module:function names, and the one of activations beside it or None.

    The working directory is looked in first. Raises BadInput saying what is missing; option is what named it.
    """
    module_name, colon, name = spec.partition(":")
    if not (colon and module_name and name):
        raise BadInput(f"{option} {spec!r} is not of the form package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise BadInput(
                f"{option} {spec}: no module {error.name} in {os.getcwd()} or in this Python ({sys.executable})"
            ) from None
        raise BadInput(f"{option} {spec}: {module_name} imports {error.name}, which is not installed") from None
    except Exception:  # the user's own code: anything can happen
        raise BadInput(f"{option} {spec}: {module_name} cannot be imported\n{_last_lines()}") from None
    function = getattr(module, name, None)
    if function is None:
        public = sorted(
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name
        )
        raise BadInput(
            f"{option} {spec}: {module.__file__} has no {name}; it has {', '.join(public) or 'no functions'}"
        )
    if not callable(function):
        raise BadInput(f"{option} {spec}: {name} is a {type(function).__name__}, a function is wanted")
    return function, getattr(module, name + ACTIVATIONS, None)


def logits_of(
    make: Callable, checkpoint: Path | None, config: dict, dtype: str, vocab_size: int
) -> Callable[[Sequence], np.ndarray]:
    """A function from a sequence of T tokens to checked logits [T, V] float32 of what make builds.

    make is called once for every window, at its first use.
    """
    models: dict[int | None, Callable] = {}

    def forward(sequence: Sequence) -> np.ndarray:
        window, length = sequence.window, len(sequence.tokens)
        if window not in models:
            models[window] = called("make", make, checkpoint, config, dtype, window)
            if not callable(models[window]):
                raise BadInput(
                    f"the candidate function returned a {type(models[window]).__name__}; it must return a function "
                    "forward(tokens, positions, segment_ids) -> logits (docs/candidate-fn.md)"
                )
        tokens, positions, segments = function_row(sequence, -(-length // LENGTH_STEP) * LENGTH_STEP)
        logits = called("forward", models[window], tokens, positions, segments)
        return _checked(logits, (*tokens.shape, vocab_size))[0, :length]

    return forward


def function_row(sequence: Sequence, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segment ids [1, length] as a candidate function is given them."""
    tokens, positions, segments = padded_row(sequence, length)
    if segments is None:  # one document, and the padding after it
        segments = np.where(np.arange(length) < len(sequence.tokens), 1, 2).astype(np.int32)[None]
    return tokens, positions, segments


def called(what: str, function: Callable, *arguments):
    """function(*arguments). Raises BadInput with the last lines of whatever the user's code raised."""
    try:
        return function(*arguments)
    except BadInput:
        raise
    except Exception:
        raise BadInput(f"the candidate's {what} raised\n{_last_lines()}") from None


def _checked(logits, wanted: tuple[int, int, int]) -> np.ndarray:
    """Logits as float32 [B, T, V]. NaN and infinity stay: they are wrong numbers, which the gate fails."""
    try:
        array = gathered(logits)
        kind = "float" if array.dtype.name in ("float16", "bfloat16", "float32", "float64") else array.dtype.name
    except Exception as error:
        raise BadInput(f"the candidate's logits are a {type(logits).__name__}, an array is wanted: {error}") from None
    if kind != "float":
        raise BadInput(f"the candidate's logits are {kind}, a floating type is wanted")
    if array.ndim == 3 and array.shape[:2] == wanted[:2] and array.shape[2] != wanted[2]:
        raise BadInput(
            f"the candidate gave {array.shape[2]} logits a token, the reference's vocabulary has {wanted[2]}. "
            "Is its vocabulary padded? Then forward must cut the padding off"
        )
    if array.shape != wanted:
        raise BadInput(f"the candidate's logits have shape {array.shape}, [B, T, V] = {wanted} is wanted")
    return array.astype(np.float32)


def source_hash(spec: str) -> str:
    """sha256 of the file that holds the function, without running it more than an import does."""
    function, _ = load(spec)
    return hashlib.sha256(Path(inspect.getsourcefile(inspect.unwrap(function))).read_bytes()).hexdigest()


def function_entry(spec: str | None, option: str) -> dict | None:
    """A user's function as a record has it: name, and file with its sha256 where it has one; None where none was named."""
    if spec is None:
        return None
    function, _ = load(spec, option)
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # an object that can be called, not a function
        file = inspect.getsourcefile(type(function))
    return {"name": spec, "file": file, "sha256": file_hash(Path(file)) if file else None}


def _last_lines() -> str:
    return "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])


def _run(request: dict, folder: Path, index: int, address: str) -> dict:
    """The child process: write logits, return settings."""
    if request["device"] or request["processes"] > 1:
        start_jax(request, index, address)  # before the function's module can touch JAX
    make, activations = load(request["spec"])
    if "jax" in sys.modules:  # float32 is float32 on GPU and TPU too, unless the function's own code says otherwise
        full_float32_jax()
    checkpoint = Path(request["checkpoint"]) if request["checkpoint"] else None
    forward = logits_of(make, checkpoint, request["config"], request["dtype"], request["config"]["vocab_size"])
    for number, fields in enumerate(request["sequences"]):
        logits = forward(Sequence.from_json(fields))
        if index == 0:
            np.save(folder / f"{number}.npy", logits)
    settings = {
        "implementation": request["spec"],
        "file": inspect.getsourcefile(inspect.unwrap(make)),
        "file_sha256": source_hash(request["spec"]),
        "names_activations": activations is not None,
        "dtype": request["dtype"],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if "jax" in sys.modules:
        settings |= jax_settings()
        settings["versions"] = {"jax": sys.modules["jax"].__version__}
    return settings


if __name__ == "__main__":
    serve(_run)
