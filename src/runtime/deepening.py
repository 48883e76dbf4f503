"""What one more level of drafts gives, learned from how sure the drafter was of what it had."""

from __future__ import annotations

HOPE, PRIOR = 0.6, 4.0  # taken for the worth of a level before any try, and the chances it counts for
KEPT = 0.995  # of a level's counts per round: after some hundred rounds a level that gave nothing is tried again


class Deepening:
    """By level and kind of row: drafts accepted in the next level per unit of the best path probability in this one.

    A level costs the same whatever it is grown from, so it pays below a path that will probably be accepted and not
    below another. Path probabilities are the drafter's own; what they are worth is found here.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[bool, int], list[float]] = {}  # [chances, accepted]

    def worth(self, level: int, sampled: bool) -> float:
        """Drafts accepted at `level` + 1 per unit of path probability at `level`."""
        chances, accepted = self._counts.get((sampled, level), (0.0, 0.0))
        return (accepted + HOPE * PRIOR) / (chances + PRIOR)

    def round(self) -> None:
        """A round went by."""
        for counts in self._counts.values():
            counts[0] *= KEPT
            counts[1] *= KEPT

    def update(self, level: int, sampled: bool, chance: float, accepted: bool) -> None:
        """A row went deeper from `level`, where its best path had this probability; was a draft accepted there?"""
        counts = self._counts.setdefault((sampled, level), [0.0, 0.0])
        counts[0] += chance
        counts[1] += accepted
