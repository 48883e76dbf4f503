"""EAGLE drafting: extend over committed tokens with the target's true features, then grow a tree level by level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from drafters.models.recurrent import RecurrentDrafter
from runtime.attention import grouped_attention
from runtime.proposers.base import Budget, Held, Proposer
from runtime.proposers.cache import DraftCache, padded
from runtime.proposers.growth import (
    Candidates,
    ShapedTree,
    draft_log_probs,
    fixed_shape,
    goes_deeper,
    noise_at,
    rank,
)
from runtime.tree import DraftTree


@dataclass
class _Row:
    """Committed draft entries of a row and the tokens not yet run through the drafter."""

    length: int = 0  # entries whose keys are in the cache; entry t pairs token t+1 with the features of token t
    root: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class EagleProposer(Proposer):
    """Draws a dynamic tree (EAGLE-2) from a one-layer drafter, for all rows at once.

    Rows that sample are drafted with the target's own noise (coupled drafting); rows verified by rejection get a tree
    drawn from the draft distribution.
    """

    asks = True

    def __init__(
        self, drafter: RecurrentDrafter, taps: tuple[int, ...], top_k: int, depth: int, trained_depth: int | None = None
    ):
        self.drafter = drafter
        self.name = drafter.family
        self.taps = taps
        self.top_k = min(top_k, drafter.shape.draft_vocab_size)
        self.depth = depth
        self.trained_depth = trained_depth
        self.device = drafter.d2t.device
        draft_ids = torch.arange(drafter.shape.draft_vocab_size, device=self.device)
        self.target_ids = drafter.draft_to_target(draft_ids)
        self._rows: dict[int, _Row] = {}

    def models(self) -> tuple[nn.Module, ...]:
        return (self.drafter,)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        slots = num_slots + self.top_k * self.depth
        self.cache = DraftCache(self.drafter.layer, self.drafter.dtype, self.device, num_rows, slots)

    def start(self, row: int, prompt: list[int], token: int, taps: Tensor | None) -> None:
        self._rows[row] = _Row()
        self.commit(row, [*prompt[1:], token], taps)

    def commit(self, row: int, tokens: list[int], taps: Tensor | None) -> None:
        state = self._rows[row]
        state.tokens += tokens
        state.features.append(taps)
        state.root = tokens[-1]

    def release(self, row: int) -> None:
        del self._rows[row]

    @torch.inference_mode()
    def audit(self, row: int, ids: list[int], taps: Tensor | None) -> Iterator[Held]:
        state = self._rows[row]
        done = state.length
        yield "root", state.root, ids[-1]
        yield "tokens not yet run", state.tokens, ids[done + 1 :]
        yield "features not yet run", torch.cat([*state.features, taps[:0]]), taps[done:]
        if done == 0:
            return
        kept: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.extend((k[0], v[0]))
            return grouped_attention(q, k, v, None, self.cache.scale)

        tokens = torch.tensor([ids[1 : done + 1]], device=self.device)
        positions = torch.arange(done, device=self.device)[None]
        self.drafter.forward_layer(tokens, self.drafter.fuse(taps[None, :done]), positions, attend)
        yield "draft keys", self.cache.keys[row, :, :done], kept[0]
        yield "draft values", self.cache.values[row, :, :done], kept[1]

    @torch.inference_mode()
    def propose(self, budgets: dict[int, Budget]) -> dict[int, DraftTree]:
        """Trees for the rows; rows without room for a draft get their root alone."""
        trees = {row: DraftTree.root(self._rows[row].root) for row in budgets}
        rows = [row for row, limit in budgets.items() if limit.nodes > 1 and limit.depth > 0]
        if not rows:
            return trees
        out = self._extend(rows)
        for b, row in enumerate(rows):
            if budgets[row].drawn:
                trees[row] = self._draw(row, out[b], budgets[row])
        grown = [b for b, row in enumerate(rows) if not budgets[row].drawn]
        if grown:
            rows = [rows[b] for b in grown]
            trees |= zip(rows, self._grow(rows, out[grown], [budgets[row] for row in rows]))
        return trees

    def _extend(self, rows: list[int]) -> Tensor:
        """Runs each row's pending entries; returns the layer's output at the last of them, [B, H]."""
        states = [self._rows[row] for row in rows]
        counts = [len(state.tokens) for state in states]
        slots, positions, visible = self.cache.entries([state.length for state in states], counts)
        ids = torch.zeros_like(slots)
        for b, (state, count) in enumerate(zip(states, counts)):
            ids[b, :count] = torch.tensor(state.tokens)
        hidden = self.drafter.fuse(padded([state.features for state in states]))
        for state, count in zip(states, counts):
            state.length += count
            state.tokens, state.features = [], []
        out = self._layer(rows, ids, hidden, positions, slots, visible)
        return out[torch.arange(len(rows)), torch.tensor(counts) - 1]

    def _grow(self, rows: list[int], out: Tensor, budgets: list[Budget]) -> list[DraftTree]:
        """Trees of the best continuations, found level by level; out: [B, H]."""
        batch, k, device = len(rows), self.top_k, self.device
        depth = max(budget.reach for budget in budgets)
        lengths = torch.tensor([self._rows[row].length for row in rows], device=device)
        width = max(self._rows[row].length for row in rows) + k * depth
        base = torch.arange(width, device=device) < lengths[:, None]  # [B, width]
        found = Candidates(batch, max(budget.nodes for budget in budgets), device)
        tokens, _ = found.add(*self._children(out[:, None], budgets, 1))  # [B, m], m <= k
        hidden = self.drafter.feedback(out)[:, None].expand(*tokens.shape, -1)
        seen = base[:, None].expand(*tokens.shape, width).clone()
        for level in range(1, depth):
            if not goes_deeper(self.name, dict(zip(rows, budgets)), level, found.best):
                break
            slots = lengths[:, None] + (level - 1) * k + torch.arange(tokens.shape[1], device=device)
            seen = seen.scatter(2, slots[:, :, None], True)
            positions = (lengths + level - 1)[:, None].expand_as(tokens)
            out = self._layer(rows, tokens, hidden, positions, slots, seen[:, None])
            tokens, parent = found.add(*self._children(out, budgets, level + 1))
            hidden = self.drafter.feedback(out).gather(1, parent[..., None].expand(-1, -1, out.shape[-1]))
            seen = seen.gather(1, parent[..., None].expand(-1, -1, width))
        return found.trees(self.name, [self._rows[row].root for row in rows], budgets)

    def _children(self, out: Tensor, budgets: list[Budget], depth: int) -> tuple[Tensor, Tensor]:
        """Target ids and conditional log scores of the top_k continuations of [B, n, H], at a depth: [B, n, k]."""
        log_probs = draft_log_probs(self.drafter.logits(out), budgets)
        scores, ids = rank(log_probs, budgets, depth, self.target_ids).topk(self.top_k, dim=-1)
        return self.target_ids[ids], scores

    def _draw(self, row: int, out: Tensor, budget: Budget) -> DraftTree:
        """A tree of a fixed shape for one row, children drawn without replacement (Gumbel top-k), out: [H]."""
        length = self._rows[row].length
        shape = fixed_shape(budget.nodes, budget.depth, self.top_k)
        drawn = ShapedTree(self._rows[row].root, shape, self.target_ids)
        hidden, outs = self.drafter.feedback(out)[None], out[None, None]
        while True:
            log_probs = draft_log_probs(self.drafter.logits(outs), [budget])[0]
            above = drawn.add(log_probs, log_probs + noise_at([budget], drawn.depth, self.target_ids)[0])
            if drawn.whole:
                return drawn.tree(self.name, self.drafter.shape.vocab_size)
            nodes, hidden = drawn.level, hidden[above]
            ids = torch.tensor([[drawn.tokens[node] for node in nodes]])
            slots = torch.tensor([nodes]) + length
            positions = torch.full((1, len(nodes)), length + drawn.depth - 2)
            visible = torch.cat((torch.ones(len(nodes), length, dtype=torch.bool), drawn.ancestors[nodes]), 1)
            outs = self._layer([row], ids, hidden[None], positions, slots, visible[None, None])
            hidden = self.drafter.feedback(outs)[0]

    def _layer(
        self, rows: list[int], ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, visible: Tensor
    ) -> Tensor:
        attend = self.cache.attend(rows, slots, visible)
        return self.drafter.forward_layer(ids.to(self.device), hidden, positions.to(self.device), attend)
