"""How often drafts are accepted: a proposer's own probabilities, corrected by what the target did with its drafts."""

from __future__ import annotations

import math
from bisect import bisect_left

from runtime.tree import DraftTree

RAW_STEPS = tuple(10.0 ** (-k / 4) for k in range(7, 0, -1))  # 8 log-spaced buckets: up to .018, ..., from .56
DEEPEST = 12  # deeper drafts share the last table
PRIOR = 4.0  # tries the proposer's own number is worth
MEMORY = 512.0  # tries after which a bucket halves its counts, so that it follows the text
UNSAID = 0.5  # taken where a proposer gives no scores
SLACK = 1e-3  # a cumulative score in fp32 may round a child this far above its parent


class Calibration:
    """Acceptance probability of a drafted node given that its parent was accepted, learned online.

    One Beta posterior per (sampled, source, depth, bucket of the proposer's own probability), its mean before any
    try being that probability itself, so an unknown proposer is believed and a wrong one found out. sampled rows
    (temperature above 0) are counted apart from greedy ones.
    """

    def __init__(self) -> None:
        # [tries, accepted] of a bucket; as many entries as there are sources, depths and buckets.
        self._counts: dict[tuple[bool, str, int, int], list[float]] = {}

    def probability(self, source: str, depth: int, raw: float, sampled: bool = False) -> float:
        """Probability that a node is accepted once its parent is: in [0, 1].

        source: who proposed it. depth: 1 for the root's children. raw: the proposer's own conditional probability,
        exp(score of the node - score of its parent). Raises ValueError for a raw that is no probability.
        """
        raw = _checked(raw, source)
        tries, accepted = self._counts.get(_key(source, depth, raw, sampled), (0.0, 0.0))
        return (accepted + PRIOR * raw) / (tries + PRIOR)

    def path_probabilities(self, tree: DraftTree, sampled: bool = False) -> list[float]:
        """For each node the probability that the path to it is accepted: 1.0 at the root, never above its parent's.

        The tree's scores are its proposers' own, a merged tree's too: calibrated ones would be corrected twice. At
        most one child of a node is accepted, so where the children of one add up to more than 1 they share that.
        """
        given = [1.0] * len(tree)
        totals = [0.0] * len(tree)
        for node in range(1, len(tree)):
            given[node] = self.probability(tree.sources[node] if tree.sources else "", *_place(tree, node), sampled)
            totals[tree.parents[node]] += given[node]
        paths = [1.0] * len(tree)
        for node in range(1, len(tree)):
            parent = tree.parents[node]
            paths[node] = paths[parent] * given[node] / max(1.0, totals[parent])
        return paths

    def update(self, tree: DraftTree, path: tuple[int, ...], sampled: bool = False) -> None:
        """Counts one verified tree; path: accepted nodes, the root first (Verification.path).

        Only children of accepted nodes were put to the test; what hung below a rejected node says nothing.
        """
        accepted = set(path)
        for node in range(1, len(tree)):
            if tree.parents[node] not in accepted:
                continue
            source = tree.sources[node] if tree.sources else ""
            depth, raw = _place(tree, node)
            counts = self._counts.setdefault(_key(source, depth, _checked(raw, source), sampled), [0.0, 0.0])
            counts[0] += 1.0
            counts[1] += node in accepted
            if counts[0] >= MEMORY:
                counts[0] /= 2
                counts[1] /= 2


def _place(tree: DraftTree, node: int) -> tuple[int, float]:
    """A node's depth and its proposer's conditional probability."""
    if not tree.scores:
        return tree.depths[node], UNSAID
    return tree.depths[node], math.exp(min(tree.scores[node] - tree.scores[tree.parents[node]], 1.0))


def _checked(raw: float, source: str) -> float:
    if not 0.0 <= raw <= 1.0 + SLACK:  # also true of NaN
        raise ValueError(
            f"proposer {source!r} gives a draft the conditional probability {raw}; scores are log probabilities of "
            "paths, so a child's must not lie above its parent's."
        )
    return min(raw, 1.0)


def _key(source: str, depth: int, raw: float, sampled: bool) -> tuple[bool, str, int, int]:
    return sampled, source, min(depth, DEEPEST), bisect_left(RAW_STEPS, raw)
