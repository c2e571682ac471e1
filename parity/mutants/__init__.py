"""Planted faults: what they are, how they are planted in the candidate, and whether the gate catches them."""
