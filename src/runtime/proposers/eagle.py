"""EAGLE drafting: extend over committed tokens with the target's true features, then grow a tree level by level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.models.recurrent import RecurrentDrafter
from runtime.attention import grouped_attention
from runtime.proposers.base import Budget, Held, Proposer
from runtime.proposers.growth import draft_log_probs, fixed_shape, noise_at, rank
from runtime.tree import DraftTree, best_nodes


@dataclass
class _Row:
    """Committed draft entries of a row and the tokens not yet run through the drafter."""

    length: int = 0  # entries whose keys are in the cache; entry t pairs token t+1 with the features of token t
    root: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class EagleProposer(Proposer):
    """Draws a dynamic tree (EAGLE-2) from a one-layer drafter, for all rows at once.

    Draft keys live at slot = position, tree nodes behind them; starting the next round overwrites those, so keys
    made from drafted features never survive a round. Rows that sample are drafted with the target's own noise
    (coupled drafting); rows verified by rejection get a tree drawn from the draft distribution.
    """

    def __init__(
        self, drafter: RecurrentDrafter, taps: tuple[int, ...], top_k: int, depth: int, trained_depth: int | None = None
    ):
        self.drafter = drafter
        self.name = drafter.family
        self.taps = taps
        self.top_k = min(top_k, drafter.shape.draft_vocab_size)
        self.depth = depth
        self.trained_depth = trained_depth
        self.scale = drafter.shape.head_dim**-0.5
        self.device = drafter.d2t.device
        draft_ids = torch.arange(drafter.shape.draft_vocab_size, device=self.device)
        self.target_ids = drafter.draft_to_target(draft_ids)
        self._rows: dict[int, _Row] = {}

    def reserve(self, num_rows: int, num_slots: int) -> None:
        shape = self.drafter.shape
        self.slots = num_slots + self.top_k * self.depth
        # One slot more than is read takes the padding entries of shorter rows.
        size = (num_rows, shape.num_kv_heads, self.slots + 1, shape.head_dim)
        self.keys = torch.zeros(size, dtype=self.drafter.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)

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
            return grouped_attention(q, k, v, None, self.scale)

        tokens = torch.tensor([ids[1 : done + 1]], device=self.device)
        positions = torch.arange(done, device=self.device)[None]
        self.drafter.forward_layer(tokens, self.drafter.fuse(taps[None, :done]), positions, attend)
        yield "draft keys", self.keys[row, :, :done], kept[0]
        yield "draft values", self.values[row, :, :done], kept[1]

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
            tokens, parents, depths, scores = self._grow(rows, out[grown], [budgets[row] for row in rows])
            for b, row in enumerate(rows):
                trees[row] = self._select(self._rows[row].root, tokens[b], parents[b], depths, scores[b], budgets[row])
        return trees

    def _extend(self, rows: list[int]) -> Tensor:
        """Runs each row's pending entries; returns the layer's output at the last of them, [B, H]."""
        states = [self._rows[row] for row in rows]
        counts = [len(state.tokens) for state in states]
        longest = max(counts)
        width = max(state.length + count for state, count in zip(states, counts))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        slots = torch.full((len(rows), longest), self.slots)
        visible = torch.zeros(len(rows), 1, longest, width, dtype=torch.bool)
        features = []
        for b, (state, count) in enumerate(zip(states, counts)):
            ids[b, :count] = torch.tensor(state.tokens)
            slots[b, :count] = torch.arange(state.length, state.length + count)
            visible[b, 0, :count] = torch.ones(count, width, dtype=torch.bool).tril(state.length)
            visible[b, 0, count:, 0] = True
            joined = torch.cat(state.features)
            features.append(torch.nn.functional.pad(joined, (0, 0, 0, longest - count)))
            state.length += count
            state.tokens, state.features = [], []
        hidden = self.drafter.fuse(torch.stack(features))
        positions = slots.clamp(max=self.slots - 1)
        out = self._layer(rows, ids, hidden, positions, slots, visible)
        return out[torch.arange(len(rows)), torch.tensor(counts) - 1]

    def _grow(
        self, rows: list[int], out: Tensor, budgets: list[Budget]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Candidates level by level, on the CPU: tokens, parents (0 is the root) [B, M], depths [M], scores [B, M]."""
        batch, k, device = len(rows), self.top_k, self.device
        depth = max(budget.depth for budget in budgets)
        lengths = torch.tensor([self._rows[row].length for row in rows], device=device)
        width = max(self._rows[row].length for row in rows) + k * depth
        base = torch.arange(width, device=device) < lengths[:, None]  # [B, width]
        seen = base[:, None].expand(batch, k, width).clone()
        tokens, scores = (x[:, 0] for x in self._children(out[:, None], budgets, 1))  # [B, k]
        all_tokens, all_scores = [tokens], [scores]
        frontier = torch.arange(1, k + 1, device=device).expand(batch, k)  # node numbers, the root being 0
        all_parents, count = [torch.zeros_like(frontier)], k
        hidden = self.drafter.feedback(out)[:, None].expand(batch, k, -1)
        for level in range(1, depth):
            slots = lengths[:, None] + (level - 1) * k + torch.arange(k, device=device)
            seen = seen.scatter(2, slots[:, :, None], True)
            positions = (lengths + level - 1)[:, None].expand(batch, k)
            out = self._layer(rows, tokens, hidden, positions, slots, seen[:, None])
            child_tokens, child_scores = self._children(out, budgets, level + 1)  # [B, k, k]
            child_scores = (child_scores + scores[..., None]).flatten(1)
            child_tokens = child_tokens.flatten(1)
            all_tokens.append(child_tokens)
            all_scores.append(child_scores)
            all_parents.append(frontier.repeat_interleave(k, 1))
            scores, best = child_scores.topk(k, dim=-1)
            tokens = child_tokens.gather(1, best)
            parent = best // k
            hidden = self.drafter.feedback(out).gather(1, parent[..., None].expand(-1, -1, out.shape[-1]))
            seen = seen.gather(1, parent[..., None].expand(-1, -1, width))
            frontier = best + count + 1
            count += k * k
        depths = torch.tensor([1] * k + [level + 1 for level in range(1, depth) for _ in range(k * k)])
        return torch.cat(all_tokens, 1).cpu(), torch.cat(all_parents, 1).cpu(), depths, torch.cat(all_scores, 1).cpu()

    def _children(self, out: Tensor, budgets: list[Budget], depth: int) -> tuple[Tensor, Tensor]:
        """Target ids and conditional log scores of the top_k continuations of [B, n, H], at a depth: [B, n, k]."""
        log_probs = draft_log_probs(self.drafter.logits(out), budgets)
        scores, ids = rank(log_probs, budgets, depth, self.target_ids).topk(self.top_k, dim=-1)
        return self.target_ids[ids], scores

    def _draw(self, row: int, out: Tensor, budget: Budget) -> DraftTree:
        """A tree of a fixed shape for one row, children drawn without replacement (Gumbel top-k), out: [H]."""
        length = self._rows[row].length
        tokens, parents, depths, scores = [self._rows[row].root], [-1], [0], [0.0]
        shape = fixed_shape(budget.nodes, budget.depth, self.top_k)
        probs = torch.zeros(sum(map(sum, shape)) + 1, self.drafter.shape.vocab_size, dtype=torch.float64)
        visible = torch.zeros(len(probs), length + len(probs), dtype=torch.bool)
        visible[:, :length] = True
        hidden, level_nodes = self.drafter.feedback(out)[None], [0]
        outs = out[None, None]
        for depth, counts in enumerate(shape, start=1):
            log_probs = draft_log_probs(self.drafter.logits(outs), [budget])[0]
            order = (log_probs + noise_at([budget], depth, self.target_ids)[0]).topk(max(counts), dim=-1).indices
            children, above = [], []
            for i, (node, count) in enumerate(zip(level_nodes, counts)):
                probs[node, self.target_ids.cpu()] = log_probs[i].double().exp().cpu()
                for drafted in order[i, :count].tolist():
                    child = len(tokens)
                    tokens.append(int(self.target_ids[drafted]))
                    parents.append(node)
                    depths.append(depth)
                    scores.append(scores[node] + float(log_probs[i, drafted]))
                    visible[child] |= visible[node]
                    visible[child, length + child] = True
                    children.append(child)
                    above.append(i)
            if depth == len(shape):
                break
            hidden = hidden[above]
            ids = torch.tensor([[tokens[child] for child in children]])
            slots = torch.tensor([children]) + length
            positions = torch.full((1, len(children)), length + depth - 1)
            outs = self._layer([row], ids, hidden[None], positions, slots, visible[children][None, None])
            hidden, level_nodes = self.drafter.feedback(outs)[0], children
        sources = ("", *[self.name] * (len(tokens) - 1))
        probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-300)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(scores), sources, probs)

    def _layer(
        self, rows: list[int], ids: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, visible: Tensor
    ) -> Tensor:
        table = torch.tensor(rows, device=self.device)
        where = slots.to(self.device)
        mask = visible.to(self.device)
        width = visible.shape[-1]
        whole = rows == list(range(rows[0], rows[0] + len(rows)))
        pick = slice(rows[0], rows[0] + len(rows)) if whole else table  # a slice reads without copying

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[table[:, None], :, where] = k.transpose(1, 2)
            self.values[table[:, None], :, where] = v.transpose(1, 2)
            return grouped_attention(q, self.keys[pick, :, :width], self.values[pick, :, :width], mask, self.scale)

        return self.drafter.forward_layer(ids.to(self.device), hidden, positions.to(self.device), attend)

    def _select(
        self, root: int, tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: Budget
    ) -> DraftTree:
        """The best candidates [M] of one row within its budget, as a tree."""
        allowed = int((depths <= budget.depth).sum())  # levels are appended in order: a prefix
        keep = min(budget.nodes - 1, allowed)
        kept = best_nodes(scores[None, :allowed], keep)[0]
        number = {0: 0} | {int(node) + 1: index + 1 for index, node in enumerate(kept)}
        return DraftTree(
            (root, *tokens[kept].tolist()),
            (-1, *(number[parent] for parent in parents[kept].tolist())),
            (0, *depths[kept].tolist()),
            (0.0, *scores[kept].tolist()),
            ("", *[self.name] * len(kept)),
        )
