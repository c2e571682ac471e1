"""The one exception a user is meant to read: bad input, with every fault that was found."""

from __future__ import annotations


class BadInput(ValueError):
    """Input that cannot be used. The command line prints it without a traceback and exits with 2.

    Each fault says where, what was found, what was wanted and what to do. All faults that
    could be found at once are in one exception, so that a user mends them in one go.
    """

    def __init__(self, headline: str, faults: list[str] | tuple[str, ...] = ()):
        self.headline = headline
        self.faults = tuple(faults)
        lines = [headline]
        if len(self.faults) > 1:
            lines[0] = f"{headline} ({len(self.faults)} faults)"
        lines += [f"  - {fault}" for fault in self.faults]
        super().__init__("\n".join(lines))
