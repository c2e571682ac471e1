"""Next-token loss and the gradient of every parameter, in torch and in JAX, written under their HF names."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ..convert.mapping import apply_layout, weights
from ..olmo_jax.config import Olmo3Config
from ..olmo_jax.errors import BadInput
from .batches import Sequence
from .candidate import LENGTH_STEP, padded_row
from .children import PYTHON

# The loss is the mean over every target token of all documents, in nats, from float32 logits; with z_loss it also has
# z_loss times the mean of logsumexp squared. Both sides sum over a row, divide by the targets of the whole run, and add
# the rows' gradients up in float32: no side holds two rows' activations. The reference runs each packed document alone.


def targets(sequences: list[Sequence]) -> int:
    """Tokens that are predicted: all but each document's first."""
    return sum(len(tokens) - 1 for s in sequences for tokens, _ in s.parts())


def file_of(folder: Path, name: str) -> Path:
    """Where the gradient of a weight lies. HF names hold no slash."""
    return folder / f"{name}.npy"


def torch_gradients(
    source: Path,
    config: Olmo3Config,
    sequences: list[Sequence],
    folder: Path,
    *,
    z_loss: float | None = None,
    round_to: str | None = None,
) -> dict:
    """Loss and gradients of transformers' model in float32; folder/<HF name>.npy [shape of the weight] float32.

    The model is loaded and checked like the gate's reference. round_to rounds the weights first, as run_reference does.
    Returns {loss, nll, z, settings}: loss is nll + z, in nats per token.
    """
    import torch

    folder.mkdir()
    model, padding_row = torch_model(source, config, round_to)
    nll, z = torch_backward(model, config, sequences, z_loss)
    for name, parameter in model.named_parameters():  # a tied head is named once, under the embedding
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        np.save(file_of(folder, name), gradient.numpy())
        parameter.grad = None
    settings = {
        "implementation": "transformers Olmo3ForCausalLM, torch.autograd",
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "weights_rounded_to": round_to,
        "embedding_padding_idx": f"None (transformers sets {padding_row})",
    }
    del model
    gc.collect()
    return {"loss": nll + z, "nll": nll, "z": z, "settings": settings}


def torch_model(source: Path, config: Olmo3Config, round_to: str | None):
    """transformers' model in float32, checked like the gate's reference, and the padding row that was taken from it."""
    import torch
    import transformers

    from .reference import _load, check_reference

    model = _load(source, torch.float32, torch, transformers)
    check_reference(model, config, transformers.__version__)
    if round_to:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, round_to)))
    # transformers drops the gradient of the embedding's row of pad_token_id; OLMo-core, which trains the model, does not.
    padding_row, model.model.embed_tokens.padding_idx = model.model.embed_tokens.padding_idx, None
    return model, padding_row


def torch_backward(
    model, config: Olmo3Config, sequences: list[Sequence], z_loss: float | None = None
) -> tuple[float, float]:
    """Add the gradients of all sequences to the parameters' own; returns the two terms of the loss, nats per token."""
    import torch

    from .reference import impose_window

    total, nll, z = targets(sequences), 0.0, 0.0
    for sequence in sequences:
        impose_window(model, config, sequence.window)
        for document, first in sequence.parts():
            if len(document) < 2:
                continue
            tokens = torch.from_numpy(document.astype(np.int64))[None]
            positions = torch.arange(first, first + tokens.shape[1])[None]
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0, :-1].float()
            normaliser = torch.logsumexp(logits, dim=-1)  # [T - 1]
            observed = logits.gather(1, tokens[0, 1:, None])[:, 0]
            own_nll = (normaliser - observed).sum() / total
            own_z = (z_loss or 0.0) * normaliser.square().sum() / total
            (own_nll + own_z).backward()
            nll, z = nll + float(own_nll.detach()), z + float(own_z.detach())
            del logits, normaliser, observed, own_nll, own_z
    return nll, z


def jax_gradients(
    config: Olmo3Config, tree: dict, sequences: list[Sequence], folder: Path, *, z_loss: float | None = None
) -> dict:
    """Loss and gradients of olmo_jax on these leaves in float32, written and returned as torch_gradients does."""
    import jax
    import jax.numpy as jnp

    from ..olmo_jax.tree import flatten

    folder.mkdir(exist_ok=True)
    tree = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)
    sums, nll, z = jax_backward(config, sequences, z_loss)(tree)
    flat = flatten(sums)
    for weight in weights(config):
        gradient = np.ascontiguousarray(apply_layout(weight.layout, np.asarray(flat[weight.jax])))
        np.save(file_of(folder, weight.hf), gradient)
    settings = {
        "implementation": "olmo_jax, jax.grad",
        "devices": [f"{d.platform}:{d.device_kind}" for d in jax.devices()],
        "matmul_precision": jax.config.jax_default_matmul_precision,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    return {"loss": nll + z, "nll": nll, "z": z, "settings": settings}


def jax_backward(config: Olmo3Config, sequences: list[Sequence], z_loss: float | None = None) -> Callable:
    """A function from a tree of float32 leaves to (gradients of all sequences, a tree like it; the two terms of the loss)."""
    import jax
    import jax.numpy as jnp

    from ..olmo_jax.model import from_tree

    total = targets(sequences)

    def loss_of(tree, tokens, positions, segments, real, window):
        own = config if window is None else config.replace(sliding_window=window)
        logits = from_tree(own, tree, dtype=jnp.float32)(tokens, positions, segments)[0, :-1].astype(jnp.float32)
        nll, z = summed_loss(logits, tokens[0, 1:], real)
        nll, z = nll / total, (z_loss or 0.0) * z / total
        return nll + z, (nll, z)

    def step(sums, tree, *rest):
        gradients, parts = jax.grad(loss_of, has_aux=True)(tree, *rest)
        return jax.tree.map(jnp.add, sums, gradients), parts

    step = jax.jit(step, static_argnums=6, donate_argnums=0)

    def backward(tree) -> tuple[dict, float, float]:
        sums, nll, z = jax.tree.map(jnp.zeros_like, tree), 0.0, 0.0
        for sequence in sequences:
            if not targets([sequence]):
                continue
            length = len(sequence.tokens)
            tokens, positions, segments = padded_row(sequence, -(-length // LENGTH_STEP) * LENGTH_STEP)
            real = np.arange(tokens.shape[1] - 1) < length - 1  # [T - 1]: the next token belongs to the same document
            real &= True if segments is None else segments[0, 1:] == segments[0, :-1]
            sums, (own_nll, own_z) = step(sums, tree, tokens, positions, segments, real, sequence.window)
            nll, z = nll + float(own_nll), z + float(own_z)
        return sums, nll, z

    return backward


def summed_loss(logits, observed, real):
    """logits [T, V] float32, observed [T] tokens, real [T] bool -> sums over real of -log p(observed), logsumexp squared."""
    import jax
    import jax.numpy as jnp

    normaliser = jax.nn.logsumexp(logits, axis=-1)  # [T]
    nll = normaliser - jnp.take_along_axis(logits, observed[:, None], axis=1)[:, 0]
    return jnp.where(real, nll, 0.0).sum(), jnp.where(real, jnp.square(normaliser), 0.0).sum()


def run_jax_gradients(
    target: Path,
    sequences: list[Sequence],
    folder: Path,
    *,
    z_loss: float | None = None,
    allow_unknown_keys: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> dict:
    """jax_gradients of an Orbax tree in a child process. Raises BadInput with the child's own sentence."""
    folder.mkdir()
    request = {
        "target": str(target),
        "z_loss": z_loss,
        "allow_unknown_keys": list(allow_unknown_keys),
        "sequences": [s.to_json() for s in sequences],
    }
    (folder / "request.json").write_text(json.dumps(request))
    child = subprocess.run(
        [*PYTHON, "-m", "olmo_parity.parity.gradient_sides", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
    )
    answer = folder / "answer.json"
    result = json.loads(answer.read_text()) if answer.exists() else {}
    if "faults" in result:
        raise BadInput(result["headline"], result["faults"])
    if child.returncode or not result:
        ending = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        hint = " (out of memory?)" if child.returncode == -9 else ""
        raise BadInput(f"the JAX side ended with {ending}{hint} in its gradients: {child.stderr.strip()[-2000:]}")
    return result


def _child(folder: Path) -> None:
    """The child process: read request.json, write gradients and answer.json."""
    import jax

    from ..convert.orbax_io import read_tree
    from ..convert.sources import open_source

    request = json.loads((folder / "request.json").read_text())
    jax.config.update("jax_default_matmul_precision", "highest")  # float32 is float32 on GPU and TPU too
    try:
        source = open_source(Path(request["target"]), allow_unknown_keys=tuple(request["allow_unknown_keys"]))
        sequences = [Sequence.from_json(s) for s in request["sequences"]]
        answer = jax_gradients(source.config, read_tree(source.path), sequences, folder, z_loss=request["z_loss"])
    except BadInput as error:
        answer = {"headline": error.headline, "faults": list(error.faults)}
    partial = folder / "answer.partial"
    partial.write_text(json.dumps(answer))
    partial.rename(folder / "answer.json")


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
