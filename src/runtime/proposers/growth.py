"""How draft trees grow: which continuations rank first, candidates level by level, and trees of a settled shape."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from runtime.proposers.base import Budget
from runtime.tree import DraftTree, best_nodes

# Coupled drafting ranks by log_softmax((log q + g) / s): sums of log q + g themselves do not penalise depth, as the
# largest of the noise has a positive mean. Flat between 1 and 2.
NOISE_SCALE = 1.5
# Chances by rank that shape a drawn tree; any numbers are lossless as long as they do not depend on the draws.
RANK_CHANCE, RANK_DECAY = 0.55, 0.4


def draft_log_probs(logits: Tensor, budgets: Sequence[Budget]) -> Tensor:
    """log q [B, n, V] of draft logits at each row's temperature (1 for greedy rows: q is then the ranking alone)."""
    if all(budget.noise is None for budget in budgets):
        return torch.log_softmax(logits.float(), -1)
    heat = torch.tensor([1.0 if b.noise is None else b.noise.temperature for b in budgets], device=logits.device)
    return torch.log_softmax(logits.float() / heat[:, None, None], -1)


def noise_at(budgets: Sequence[Budget], depth: int, target_ids: Tensor) -> Tensor:
    """The target's noise fp32 [B, 1, Vd] for tokens at a depth, 0 in greedy rows and below a row's depth.

    target_ids: int64 [Vd], what each draft id means to the target.
    """
    rows = torch.zeros(len(budgets), 1, len(target_ids), device=target_ids.device)
    for b, budget in enumerate(budgets):
        if budget.noise is not None and depth <= budget.depth:
            rows[b, 0] = budget.noise.at(depth).to(target_ids.device)[target_ids].float()
    return rows


def rank(log_probs: Tensor, budgets: Sequence[Budget], depth: int, target_ids: Tensor) -> Tensor:
    """Log scores [B, n, Vd] of continuations at a depth: log q, or its coupled form in rows that sample.

    A token wins in the target when log p + g is largest, so a drafter that knows g ranks by log q + g.
    """
    if all(budget.noise is None for budget in budgets):
        return log_probs
    noisy = log_probs + noise_at(budgets, depth, target_ids)
    scale = torch.tensor([1.0 if b.noise is None else NOISE_SCALE for b in budgets], device=log_probs.device)
    return torch.log_softmax(noisy / scale[:, None, None], -1)


def goes_deeper(source: str, budgets: Mapping[int, Budget], level: int, best: Callable[[], list[float]]) -> bool:
    """Whether drafting goes on below a level of rows with these budgets.

    best: each row's best path probability in the level, worked out only if it is asked for.
    """
    deeper = next(iter(budgets.values())).deeper
    if deeper is None:
        return True
    chances = zip(budgets.items(), best())
    return deeper(source, level, {row: chance for (row, budget), chance in chances if level < budget.reach})


def fixed_shape(nodes: int, depth: int, top_k: int) -> list[list[int]]:
    """best_shape() of a tree that is drawn for the rejection rule.

    Depends on the budget alone, as that rule asks: pruning by what was drawn would not be lossless.
    """
    return best_shape([[RANK_CHANCE * RANK_DECAY**rank for rank in range(top_k)]] * depth, nodes)


def best_shape(chances: Sequence[Sequence[float]], nodes: int) -> list[list[int]]:
    """Children counts, level by level, of the likeliest tree: shape[l][i] is the count of the i-th node at depth l.

    chances[l][r]: chance of the child of rank r below a node at depth l, falling with r. The tree has `nodes` nodes,
    the root included, or as many as there are; each is the best one left (greedy, Medusa, arXiv 2401.10774, 2.3.3).
    """
    taken: list[tuple[int, ...]] = []  # a node is its path of ranks
    heap = [(-chances[0][0], 1.0, (0,))] if chances else []  # chance of the path, that of its parent, the path
    while heap and len(taken) < nodes - 1:
        below, above, path = heapq.heappop(heap)
        taken.append(path)
        level, rank = len(path), path[-1] + 1
        if level < len(chances):
            heapq.heappush(heap, (below * chances[level][0], -below, (*path, 0)))
        if rank < len(chances[level - 1]):
            heapq.heappush(heap, (-above * chances[level - 1][rank], above, (*path[:-1], rank)))
    levels: list[list[tuple[int, ...]]] = [[()]]
    while levels[-1]:
        levels.append(sorted(path for path in taken if len(path) == len(levels)))
    pairs = zip(levels, levels[1:-1])
    return [[sum(child[:-1] == path for child in below) for path in level] for level, below in pairs]


class Candidates:
    """Continuations found level by level for all rows at once, the best of which become trees (EAGLE-2)."""

    def __init__(self, rows: int, nodes: int, device: torch.device) -> None:
        """nodes: those of the largest tree, the root included."""
        self.nodes = nodes
        self.scores = torch.zeros(rows, 1, device=device)  # log probability of the nodes that go on
        self._numbers = torch.zeros(rows, 1, dtype=torch.long, device=device)  # theirs, the root being 0
        self._count = 1
        self._levels: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tokens: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """A level: target ids [B, n, k] and conditional log scores [B, n, k] below the n nodes that go on.

        n = 1 with more nodes going on: all continue alike. Returns the ids [B, m] of the nodes that go on now, and
        which of those before [B, m] each hangs below; m <= k. A node's child is in a tree only together with the
        nodes above it and with every better node of its level, so of the m-th best node on there is no room for one.
        """
        width = scores.shape[-1]
        going = max(1, min(width, self.nodes - 1 - (len(self._levels) + 1)))
        total = (scores + self.scores[..., None]).flatten(1)
        tokens = tokens.expand(-1, self.scores.shape[1], -1).flatten(1)
        self._levels.append((tokens, self._numbers.repeat_interleave(width, 1), total))
        self.scores, best = total.topk(going, dim=-1)
        self._numbers = best + self._count
        self._count += total.shape[1]
        return tokens.gather(1, best), best // width

    def best(self) -> list[float]:
        """Of the nodes that go on, each row's best path probability."""
        return self.scores.amax(-1).exp().tolist()

    def trees(self, source: str, roots: Sequence[int], budgets: Sequence[Budget]) -> list[DraftTree]:
        """The best candidates of each row within its budget."""
        tokens, parents, scores = (torch.cat(parts, 1).cpu() for parts in zip(*self._levels))
        sizes = [level[0].shape[1] for level in self._levels]
        depths = torch.tensor([depth for depth, size in enumerate(sizes, start=1) for _ in range(size)])
        return [
            _select(source, root, tokens[b], parents[b], depths, scores[b], budget)
            for b, (root, budget) in enumerate(zip(roots, budgets))
        ]


def _select(
    source: str, root: int, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: Budget
) -> DraftTree:
    """The best candidates [M] of one row, as a tree."""
    allowed = int((depths <= budget.depth).sum())  # levels are appended in order: a prefix
    kept = best_nodes(scores[None, :allowed], min(budget.nodes - 1, allowed))[0]
    number = {0: 0} | {int(node) + 1: index + 1 for index, node in enumerate(kept)}
    return DraftTree(
        (root, *tokens[kept].tolist()),
        (-1, *(number[parent] for parent in parents[kept].tolist())),
        (0, *depths[kept].tolist()),
        (0.0, *scores[kept].tolist()),
        ("", *[source] * len(kept)),
    )


class ShapedTree:
    """One row's tree of a shape settled beforehand, children filled in level by level."""

    def __init__(self, root: int, shape: list[list[int]], target_ids: Tensor) -> None:
        """shape: see best_shape. target_ids: int64 [Vd], what each draft id means to the target."""
        self.shape, self.target_ids = shape, target_ids
        self.tokens, self.parents, self.depths, self.scores = [root], [-1], [0], [0.0]
        self.level = [0]  # the nodes whose children come next
        self._laws: list[tuple[list[int], Tensor]] = []
        size = sum(map(sum, shape)) + 1
        self.ancestors = torch.eye(size, dtype=torch.bool)  # [N, N]: each node's own path

    @property
    def depth(self) -> int:
        """Depth of the nodes that add() will add."""
        return self.depths[-1] + 1

    @property
    def whole(self) -> bool:
        """Whether every level of the shape is there."""
        return self.depths[-1] == len(self.shape)

    def add(self, log_probs: Tensor, ranking: Tensor) -> list[int]:
        """Gives each node of `level` its children, the first of its ranking; both [n, Vd], n = 1 serving all nodes.

        log_probs: log q, which the scores are made of. Returns for each new node, which are `level` now, the place of
        its parent in the level before.
        """
        counts = self.shape[self.depths[-1]]
        order = ranking.topk(max(counts), dim=-1).indices
        logs, tokens = log_probs.gather(-1, order).tolist(), self.target_ids[order].tolist()
        self._laws.append((self.level, log_probs))
        depth, above, children = self.depth, [], []
        for place, (node, count) in enumerate(zip(self.level, counts)):
            row = place if len(tokens) > 1 else 0
            for token, log_chance in zip(tokens[row][:count], logs[row]):
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                self.scores.append(self.scores[node] + log_chance)
                self.ancestors[child] |= self.ancestors[node]
                children.append(child)
                above.append(place)
        self.level = children
        return above

    def tree(self, source: str, vocab_size: int | None = None) -> DraftTree:
        """The tree; vocab_size: the target's, of a tree whose children were drawn: with the laws they came from."""
        probs = None
        if vocab_size is not None:
            probs = torch.zeros(len(self.tokens), vocab_size, dtype=torch.float64)
            for nodes, log_probs in self._laws:
                probs[torch.tensor(nodes)[:, None], self.target_ids.cpu()] = log_probs.double().exp().cpu()
            probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-300)
        sources = ("", *[source] * (len(self.tokens) - 1))
        return DraftTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.depths), tuple(self.scores), sources, probs
        )
