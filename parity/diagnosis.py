"""What a faulty module computes instead: a claim is made only where a wrong formula gives what the candidate gave (NumPy alone)."""

from __future__ import annotations

import numpy as np

from .envelopes import Distance
from .wrong_formulas import ROUNDS, Formula, Place, hypotheses, right

ROOM = 3  # times the module's limit: the hypothesis is computed in float64, the candidate's output was not
# A claim must leave a quarter of the fault unexplained at most: else a fault just above its limit would prove anything.
LEFT = 0.25
# Where values are rounded, single ones may fall on the other side of a boundary: a token's largest error says nothing then.
LEFT_OF_ROUNDING = 0.1  # of the root mean square


def explain(place: Place) -> list[str]:
    """Sentences, each a formula that gives the candidate's output on every sequence; none where no formula does."""
    for index, found in enumerate(place.found):
        wanted = right(place, index)
        if found.size != wanted.size:
            return [f"gives {found.shape[1:]} a token, {wanted.shape[1:]} is wanted"]
    if any(not np.isfinite(found).all() for found in place.found):
        count = sum(int((~np.isfinite(found)).sum()) for found in place.found)
        return [f"gives NaN or infinity in {count} values"]
    claims: dict[str, None] = {}
    for sentence, formula in hypotheses(place):
        if sentence not in claims and _holds(place, formula, rounds=sentence.startswith(ROUNDS)):
            claims[sentence] = None
    return list(claims)


def _holds(place: Place, formula: Formula, rounds: bool) -> bool:
    """Is it what the candidate gave, on every sequence?"""
    fault, left = Distance(), Distance()
    for index, found in enumerate(place.found):
        with np.errstate(all="ignore"):
            guess = np.asarray(formula(index))
        if guess.size != found.size:
            return False
        left.add(found, guess.reshape(found.shape))
        fault.add(found, right(place, index))
        if not rounds and not left.largest <= ROOM * place.limit:
            return False
    if rounds:
        return left.rms <= LEFT_OF_ROUNDING * fault.rms
    return left.largest <= LEFT * fault.largest
