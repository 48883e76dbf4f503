"""What the proposers that look continuations up share: a tree grown best first, and chances under known noise."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from runtime.proposers.base import Budget
from runtime.tree import DraftTree

# Paths less likely than this are not worth a node (SuffixDecoding's min_token_prob, arXiv 2411.04975).
FLOOR = 0.1
Expand = Callable[[Any], Iterable[tuple[int, float, Any]]]


def best_first(root: int, state: Any, expand: Expand, budget: Budget, source: str) -> DraftTree:
    """A tree of the likeliest paths, taken one node at a time; no node without its parent, none under FLOOR.

    expand(state of a node) gives (token, chance given the node, state) of each continuation, tokens distinct and
    chances in (0, 1]. With the target's own noise a chance becomes the chance that the token wins under it.
    """
    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    noise = None if budget.drawn else budget.noise
    lowest = math.log(FLOOR)
    heap: list[tuple[float, int, int, int, Any]] = []
    pushed = 0
    while len(tokens) < budget.nodes:
        node = len(tokens) - 1  # the one taken last has not been expanded yet
        if depths[node] < budget.depth:
            candidates = list(expand(state))
            logs = [math.log(chance) for _, chance, _ in candidates]
            if noise is not None and candidates:
                known = noise.at(depths[node] + 1)[[token for token, _, _ in candidates]].tolist()
                logs = [coupled(chance, gumbel) for (_, chance, _), gumbel in zip(candidates, known)]
            for (token, _, child), log_chance in zip(candidates, logs):
                if (score := scores[node] + log_chance) >= lowest:
                    heapq.heappush(heap, (-score, pushed, node, token, child))
                    pushed += 1
        if not heap:
            break
        score, _, parent, token, state = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        scores.append(-score)
    sources = ("", *[source] * (len(tokens) - 1))
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores), sources)


def coupled(chance: float, gumbel: float) -> float:
    """Log of the chance that a token is argmax(log p + g), given its own Gumbel noise g and its probability p.

    The best of all others is Gumbel noise around log(1 - p), whichever they are, so the chance is
    exp(-(1 - p) / (p e^g)); its mean over g is p.
    """
    return -(1.0 - chance) / chance * math.exp(-gumbel)
