"""What a faulty module computes instead: a claim is made only where a wrong formula gives what the candidate gave (NumPy alone)."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from .envelopes import Distance
from .wrong_formulas import ROUNDS, Formula, Place, hypotheses, of_any_module, right

AFTER = 64  # tokens kept after the first wrong one
NUMBER = re.compile(r"-?\d[\d.]*(e[-+]?\d+)?")
ROOM = 3  # times the module's limit: the hypothesis is computed in float64, the candidate's output was not
# A claim must leave a quarter of the fault unexplained at most: else a fault just above its limit would prove anything.
LEFT = 0.25
# Where values are rounded, single ones may fall on the other side of a boundary: a token's largest error says nothing then.
LEFT_OF_ROUNDING = 0.1  # of the root mean square


def explain(place: Place) -> list[str]:
    """What the module computes instead, in a sentence of formulas that give the candidate's output on every sequence.

    Formulas that fit equally well stand in one sentence, joined by "or". Empty where no formula fits.
    """
    for index, found in enumerate(place.found):
        wanted = right(place, index)
        if found.size != wanted.size:
            return [f"gives {found.shape[1:]} a token, {wanted.shape[1:]} is wanted"]
    if any(not np.isfinite(found).all() for found in place.found):
        count = sum(int((~np.isfinite(found)).sum()) for found in place.found)
        return [f"gives NaN or infinity in {count} values"]
    place = _shortened(place)
    for guesses in (hypotheses(place), of_any_module(place)):
        claims: dict[str, str] = {}
        for sentence, formula in guesses:
            family = NUMBER.sub("#", sentence)  # of one constant the roundest value that fits, which comes first
            if family not in claims and _holds(place, formula, rounds=sentence.startswith(ROUNDS)):
                claims[family] = sentence
        if claims:
            return [" or ".join(claims.values())]
    return []


def _shortened(place: Place) -> Place:
    """Rows cut some tokens after the first one that is wrong: no output depends on later tokens, and attention costs T squared.

    Packed rows stay whole, and rows whose first token is wrong or none is.
    """
    outputs, inputs, found, sequences = [], [], [], []
    for index, given in enumerate(place.found):
        sequence, distance = place.sequences[index], Distance()
        distance.add(right(place, index), given)
        wrong = np.flatnonzero(~(distance.by_token <= place.limit))
        whole = sequence.documents or not wrong.size or wrong[0] == 0  # position 0 is wrong where later tokens are seen
        stop = len(given) if whole else int(wrong[0]) + AFTER
        outputs.append({name: array[:stop] for name, array in place.part.outputs[index].items()})
        inputs.append(place.part.inputs[index][:stop])
        found.append(given[:stop])
        sequences.append(replace(sequence, tokens=sequence.tokens[:stop]))
    part = replace(place.part, outputs=outputs, inputs=inputs)
    return replace(place, part=part, found=found, sequences=sequences)


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
