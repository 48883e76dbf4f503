"""Draft trees: node 0 is the last committed token, every other node continues its parent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Candidate continuations of one row, parents before children.

    tokens[0] is the root (committed, not yet in the target's cache); parents[0] is -1; depths[0] is 0.
    scores: the proposer's own log probability of the path down to each node, 0 at the root, never above the
    parent's; empty where a proposer has none. sources: who proposed each node, "" at the root.
    draft_probs: only for the rejection rule, fp64 [N, V]: the distribution each node's children were drawn from
    without replacement, in the order of their numbers; None: the children were not drawn, any rule may use them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    draft_probs: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or len(self.tokens) != len(self.depths):
            raise ValueError(f"a tree needs equally many tokens, parents and depths, at least one: {self}")
        if self.parents[0] != -1 or self.depths[0] != 0:
            raise ValueError("node 0 must be the root: parent -1, depth 0")
        for name in ("scores", "sources"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.tokens):
                raise ValueError(f"a tree of {len(self.tokens)} nodes has {len(getattr(self, name))} {name}")
        seen: set[tuple[int, int]] = set()
        for node in range(1, len(self.tokens)):
            parent = self.parents[node]
            if not 0 <= parent < node or self.depths[node] != self.depths[parent] + 1:
                raise ValueError(f"node {node} (parent {parent}, depth {self.depths[node]}) does not follow its parent")
            if (parent, self.tokens[node]) in seen:
                raise ValueError(f"node {parent} has token {self.tokens[node]} as a child twice")
            seen.add((parent, self.tokens[node]))

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def root(cls, token: int) -> DraftTree:
        """The empty draft: verifying it is one step of plain decoding."""
        return cls((token,), (-1,), (0,))

    @classmethod
    def chain(cls, token: int, continuation: list[int]) -> DraftTree:
        """One path: each token follows the one before it."""
        size = len(continuation) + 1
        return cls((token, *continuation), tuple(range(-1, size - 1)), tuple(range(size)))

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to this one."""
        found = [node]
        while self.parents[found[-1]] >= 0:
            found.append(self.parents[found[-1]])
        return found[::-1]

    def part(self, nodes: list[int]) -> DraftTree:
        """The tree of these nodes, ascending and closed under parents; not for drawn trees, which stay whole."""
        number = {node: index for index, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            (-1, *(number[self.parents[node]] for node in nodes[1:])),
            tuple(self.depths[node] for node in nodes),
            tuple(self.scores[node] for node in nodes) if self.scores else (),
            tuple(self.sources[node] for node in nodes) if self.sources else (),
        )

    def ancestors(self) -> Tensor:
        """bool [N, N]: row i is True at node i and at each node above it."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask


def best_nodes(scores: Tensor, keep: int) -> Tensor:
    """Indices [B, keep] of the best candidates in ascending order, closed under parents.

    scores: [B, M] cumulative log probabilities with parents before children. A child never scores above its
    parent, and a stable sort lets the earlier of two equals win, so no node is kept without its parent (an
    unstable top-k loses parents at ties, runtime notes on EAGLE-2).
    """
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=-1).values
