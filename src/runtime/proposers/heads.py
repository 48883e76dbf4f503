"""Drafting with a head per token (Medusa, Hydra): from the last target feature and the root, level by level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from drafters.models.heads import HeadsDrafter
from runtime.attention import grouped_attention
from runtime.proposers.base import Budget, Held, Proposer
from runtime.proposers.cache import DraftCache, padded
from runtime.proposers.growth import (
    Candidates,
    ShapedTree,
    best_shape,
    draft_log_probs,
    fixed_shape,
    goes_deeper,
    noise_at,
    rank,
)
from runtime.tree import DraftTree


@dataclass
class _Row:
    """The next root, and the target's features that the context has not run yet; without one, the last alone."""

    root: int
    features: list[Tensor] = field(default_factory=list)
    length: int = 0  # features whose keys are in the cache


class HeadsProposer(Proposer):
    """Draws a tree from heads of which head i drafts depth i + 1; no tree is deeper than there are heads.

    Rows that sample are drafted with the target's own noise (coupled drafting); rows verified by rejection get a tree
    drawn from the heads' distributions. Greedy rows get the best candidates by the heads' own probabilities, or, with
    accuracies, the shape that is best by these whatever the heads say (Medusa, arXiv 2401.10774, 2.3.3).
    """

    asks = True

    def __init__(
        self,
        drafter: HeadsDrafter,
        taps: tuple[int, ...],
        top_k: int,
        depth: int,
        accuracies: list[list[float]] | None = None,
    ):
        """accuracies: by head and rank, at least top_k ranks; None: greedy rows' trees are dynamic too."""
        self.drafter = drafter
        self.name = drafter.family
        self.taps = taps
        self.top_k = min(top_k, drafter.shape.draft_vocab_size)
        self.trained_depth = drafter.shape.num_heads
        self.depth = min(depth, self.trained_depth)
        self.device = drafter.d2t.device
        self.target_ids = drafter.draft_to_target(torch.arange(drafter.shape.draft_vocab_size, device=self.device))
        # By chance a rank may have been measured above the one before; a node's children are its first ranks.
        table = accuracies or []
        self.chances = [list(accumulate(row[: self.top_k], min)) for row in table]
        self._shapes: dict[tuple[int, int], list[list[int]]] = {}
        self._rows: dict[int, _Row] = {}

    def models(self) -> tuple[nn.Module, ...]:
        return (self.drafter,)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        if self.drafter.context is not None:
            self.cache = DraftCache(self.drafter.context, self.drafter.dtype, self.device, num_rows, num_slots)

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._rows[row] = _Row(token)
        self.commit(row, [token], taps)

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        state = self._rows[row]
        state.root = tokens[-1]
        state.features = [taps[-1:]] if self.drafter.context is None else [*state.features, taps]

    def release(self, row: int) -> None:
        del self._rows[row]

    @torch.inference_mode()
    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterator[Held]:
        state = self._rows[row]
        yield "root", state.root, ids[-1]
        if self.drafter.context is None:
            yield "last feature", state.features[-1], taps[-1:]
            return
        done = state.length
        yield "features not yet run", torch.cat([*state.features, taps[:0]]), taps[done:]
        if done == 0:
            return
        kept: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.extend((k[0], v[0]))
            return grouped_attention(q, k, v, None, self.cache.scale)

        self.drafter.look_back(taps[None, :done], torch.arange(done, device=self.device)[None], attend)
        yield "prefix keys", self.cache.keys[row, :, :done], kept[0]
        yield "prefix values", self.cache.values[row, :, :done], kept[1]

    @torch.inference_mode()
    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        """Trees for the rows; rows without room for a draft get their root alone."""
        trees = {row: DraftTree.root(self._rows[row].root) for row in budgets}
        rows = [row for row, limit in budgets.items() if limit.nodes > 1 and limit.depth > 0]
        if not rows:
            return trees
        states = self._states(rows)
        dynamic = []
        for b, row in enumerate(rows):
            shape = self._shape(budgets[row])
            if shape is None:
                dynamic.append(b)
            else:
                trees[row] = self._fill(self._rows[row].root, states[b], shape, budgets[row])
        if dynamic:
            rows = [rows[b] for b in dynamic]
            trees |= zip(rows, self._grow(rows, states[dynamic], [budgets[row] for row in rows]))
        return trees

    def _states(self, rows: list[int]) -> Tensor:
        """What head 0 reads for each row: [B, D], the root's token included."""
        states = [self._rows[row] for row in rows]
        if self.drafter.context is None:
            seen = torch.cat([state.features[-1] for state in states])
        else:
            counts = [sum(map(len, state.features)) for state in states]
            slots, positions, visible = self.cache.entries([state.length for state in states], counts)
            features = padded([state.features for state in states])
            for state, count in zip(states, counts):
                state.length += count
                state.features = []
            attend = self.cache.attend(rows, slots, visible)
            out = self.drafter.look_back(features, positions.to(self.device), attend)
            seen = out[torch.arange(len(rows)), torch.tensor(counts) - 1]
        roots = torch.tensor([state.root for state in states], device=self.device)
        return self.drafter.extend(self.drafter.read(seen), self.drafter.embed(roots))

    def _shape(self, budget: Budget) -> list[list[int]] | None:
        """Of a row's tree, where it is settled before its tokens; None: the likeliest nodes whatever their shape."""
        depth = min(budget.depth, self.depth)
        if budget.drawn:
            return fixed_shape(budget.nodes, depth, self.top_k)
        if not self.chances or budget.noise is not None:
            return None
        key = budget.nodes, depth
        if key not in self._shapes:
            self._shapes[key] = best_shape(self.chances[:depth], budget.nodes)
        return self._shapes[key]

    def _grow(self, rows: list[int], states: Tensor, budgets: list[Budget]) -> list[DraftTree]:
        """Trees of the best continuations, found level by level; states: [B, D]."""
        found = Candidates(len(rows), max(budget.nodes for budget in budgets), self.device)
        depth = min(self.depth, max(budget.reach for budget in budgets))
        state = states[:, None]
        for level in range(1, depth + 1):
            if level > 1 and not goes_deeper(self.name, dict(zip(rows, budgets)), level - 1, found.best):
                break
            log_probs = draft_log_probs(self.drafter.logits(level - 1, state), budgets)
            scores, ids = rank(log_probs, budgets, level, self.target_ids).topk(self.top_k, dim=-1)
            tokens, parent = found.add(self.target_ids[ids], scores)
            if self.drafter.reads_drafts and level < depth:
                above = state.gather(1, parent[..., None].expand(-1, -1, state.shape[-1]))
                state = self.drafter.extend(above, self.drafter.embed(tokens))
        return found.trees(self.name, [self._rows[row].root for row in rows], budgets)

    def _fill(self, root: int, state: Tensor, shape: list[list[int]], budget: Budget) -> DraftTree:
        """One row's tree of a settled shape: children drawn without replacement (Gumbel top-k) or the likeliest."""
        tree = ShapedTree(root, shape, self.target_ids)
        state = state[None]
        while True:
            log_probs = draft_log_probs(self.drafter.logits(tree.depth - 1, state)[None], [budget])[0]
            noise = noise_at([budget], tree.depth, self.target_ids)[0] if budget.drawn else 0.0
            above = tree.add(log_probs, log_probs + noise)
            if tree.whole:
                return tree.tree(self.name, self.drafter.shape.vocab_size if budget.drawn else None)
            if self.drafter.reads_drafts:
                tokens = torch.tensor([tree.tokens[node] for node in tree.level], device=self.device)
                state = self.drafter.extend(state[above], self.drafter.embed(tokens))
