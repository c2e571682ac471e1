"""AdamW in NumPy float64, from the published formula: what every optimizer here is held against, and how else it could go.

Loshchilov & Hutter, Decoupled Weight Decay Regularization (2019), Algorithm 2, as torch.optim.AdamW has it: the decay is
multiplied by the learning rate, epsilon stands outside the root and after the bias correction. Gradients are first scaled
by min(1, clip / global norm), as torch.nn.utils.clip_grad_norm_ does (which adds 1e-6 to the norm).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Arrays = Mapping[str, np.ndarray]  # by leaf path, 'layers/0/mlp/up_proj/kernel'


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run. The defaults are OLMo 3's: OLMo-core's SkipStepAdamW, which is AdamW until it
    skips a step, at the peak learning rate of the 7B (at warmup's first rates nothing but the gradient would be visible)."""

    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("embed_tokens",)  # parts of leaf paths; norms and head decay
    clip: float = 1.0  # largest global norm of the gradients; 0: not clipped
    z_loss: float = 1e-5

    def decay_of(self, path: str) -> float:
        """The weight decay of one leaf."""
        return 0.0 if set(path.split("/")) & set(self.no_decay) else self.weight_decay


@dataclass(frozen=True)
class Form:
    """How a step is computed. Each field but the default is a mistake that is made."""

    name: str = "AdamW as published"
    bias_correction: bool = True
    epsilon: str = "outside"  # or "added to v" (under the root), "squared" (e^2 under the root), "before correction"
    nesterov: bool = False
    clipping: str = "global"  # or "none", "leaf", "value", "always" (scaled up too)


PUBLISHED = Form()
FORMS = (
    PUBLISHED,
    Form("there is no bias correction", bias_correction=False),
    Form("epsilon is added to v, under the root", epsilon="added to v"),
    Form("epsilon is squared and stands under the root", epsilon="squared"),
    Form("epsilon is added before the bias correction", epsilon="before correction"),
    Form("the momentum is Nesterov's", nesterov=True),
    Form("gradients are not clipped", clipping="none"),
    Form("gradients are clipped leaf by leaf", clipping="leaf"),
    Form("gradients are clipped value by value", clipping="value"),
    Form("gradients are scaled to the norm, small ones too", clipping="always"),
)


def global_norm(gradients: Arrays) -> float:
    """The L2 norm over all values of all leaves."""
    return math.sqrt(sum(float(np.square(g.astype(np.float64)).sum()) for g in gradients.values()))


def clipped(gradient: np.ndarray, norm, limit: float, how: str = "global") -> np.ndarray:
    """A gradient as it enters the moments. norm: of all leaves together; an array of the gradient's shape where each value has
    a norm of its own."""
    if not limit or how == "none":
        return gradient
    if how == "value":
        return np.clip(gradient, -limit, limit)
    factor = limit / np.maximum(norm, np.finfo(np.float64).tiny)
    return gradient * (factor if how == "always" else np.minimum(1.0, factor))


def directions(
    gradients: list[np.ndarray], norms: list, recipe: Recipe, form: Form = PUBLISHED
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """One leaf over some steps, without its decay: (update, first moment, second moment) after each, float64.

    gradients: one a step, any shape; norms: what each step is clipped by, as `clipped` takes it. The update is -learning rate x m / (sqrt(v) + e).
    """
    b1, b2, e = recipe.beta1, recipe.beta2, recipe.epsilon
    m = v = np.zeros(gradients[0].shape)
    found = []
    for t, (raw, norm) in enumerate(zip(gradients, norms, strict=True), 1):
        g = clipped(raw.astype(np.float64), norm, recipe.clip, form.clipping)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        c1, c2 = (1 - b1**t, 1 - b2**t) if form.bias_correction else (1.0, 1.0)
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / c1 if form.nesterov else m / c1
        if form.epsilon == "before correction":
            below = (np.sqrt(v) + e) / math.sqrt(c2)
        elif form.epsilon == "outside":
            below = np.sqrt(v / c2) + e
        else:
            below = np.sqrt(v / c2 + (e if form.epsilon == "added to v" else e * e))
        update = -recipe.learning_rate * np.divide(ahead, below, out=np.zeros_like(ahead), where=below > 0)
        found.append((update, m, v))
    return found
