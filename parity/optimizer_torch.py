"""torch.optim.AdamW: on the probe's gradients in float64, and three real steps of transformers' model in float32."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import numpy as np

from ..convert.mapping import weights
from ..convert.sources import Source
from .adamw import Recipe
from .batches import Sequence
from .gradient_sides import torch_backward, torch_model
from .optimizer_probe import RUNS, STEPS, Inputs, Outputs
from .optimizer_steps import KINDS, file_of

WHO = "torch.optim.AdamW"


def probe(given: Inputs, recipe: Recipe) -> Outputs:
    """The probe's runs. In float64, because an update is read from what it does to a parameter."""
    import torch

    updates: dict[int, dict] = {1: {}, -1: {}}
    moments: dict[str, list] = {}
    for sign in updates:
        start = {p: sign * torch.from_numpy(x.astype(np.float64)) for p, x in given.parameters.items()}
        for run in RUNS:
            parameters = {p: torch.nn.Parameter(x.clone()) for p, x in start.items()}
            optimizer = _optimizer(parameters, {p: p for p in parameters}, recipe, torch)
            updates[sign][run], moments[run] = [], []
            for gradients in given.gradients[run]:
                for path, parameter in parameters.items():  # the same parameters at every step
                    parameter.data.copy_(start[path])
                    parameter.grad = torch.from_numpy(gradients[path].astype(np.float64))
                _step(optimizer, parameters, recipe, torch)
                updates[sign][run].append({p: (x.detach() - start[p]).numpy() for p, x in parameters.items()})
                moments[run].append(
                    {
                        p: tuple(optimizer.state[x][key].numpy().copy() for key in ("exp_avg", "exp_avg_sq"))
                        for p, x in parameters.items()
                    }
                )
    return Outputs(updates[1], updates[-1], moments)


def steps(
    source: Source, sequences: list[Sequence], folder: Path, recipe: Recipe, round_to: str | None, benign: bool = False
) -> dict:
    """Three steps on the same sequences; writes folder/<kind>/<HF name>.npy, float32, of each kind of optimizer_steps.KINDS.

    benign changes what must not matter: attention sdpa for eager, another thread count, sequences in the other order.
    Returns loss, its two terms and the global norm of each step, and settings.
    """
    import torch

    from .reference import other_thread_count

    for kind in KINDS:
        (folder / kind).mkdir(parents=True)
    model, padding_row = torch_model(source.path, source.config, round_to)
    if benign:
        model.set_attn_implementation("sdpa")
    parameters = dict(model.named_parameters())
    leaves = {w.hf: w.jax for w in weights(source.config)}
    optimizer = _optimizer(parameters, leaves, recipe, torch)
    rows = []
    for t in range(STEPS):
        with other_thread_count(torch) if benign else contextlib.nullcontext():
            nll, z = torch_backward(model, source.config, sequences[::-1] if benign else sequences, recipe.z_loss)
        for name, parameter in parameters.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if t == 0:
                np.save(file_of(folder, "gradient", name), parameter.grad.numpy())
        norm = _step(optimizer, parameters, recipe, torch)
        rows.append({"loss": nll + z, "nll": nll, "z": z, "global_norm": norm})
        optimizer.zero_grad()
    for name, parameter in parameters.items():
        state, stored = optimizer.state[parameter], torch.from_numpy(source.tensors[name].read().astype(np.float32))
        start = stored.to(getattr(torch, round_to)).float() if round_to else stored
        np.save(file_of(folder, "first moment", name), state["exp_avg"].numpy())
        np.save(file_of(folder, "second moment", name), state["exp_avg_sq"].numpy())
        np.save(file_of(folder, "update", name), (parameter.detach() - start).numpy())
    settings = {
        "implementation": f"transformers Olmo3ForCausalLM, {WHO}",
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "weights_rounded_to": round_to,
        "embedding_padding_idx": f"None (transformers sets {padding_row})",
        "benign": benign,
    }
    del model, optimizer, parameters, parameter
    gc.collect()
    return {"steps": rows, "settings": settings}


def _optimizer(parameters: dict, leaves: dict[str, str], recipe: Recipe, torch):
    """AdamW with a group of parameters for each weight decay. leaves: leaf path by the parameter's name."""
    groups: dict[float, list] = {}
    for name, parameter in parameters.items():
        groups.setdefault(recipe.decay_of(leaves[name]), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": members, "weight_decay": decay} for decay, members in groups.items()],
        lr=recipe.learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
    )


def _step(optimizer, parameters: dict, recipe: Recipe, torch) -> float:
    """Clip, step; returns the global norm before clipping."""
    norm = float(torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip or float("inf")))
    optimizer.step()
    return norm
