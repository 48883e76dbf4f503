"""Drafters that read one target feature: a head per drafted token (Medusa, Hydra)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.config_drafter import HeadsConfig, Objective
from drafters.errors import ArtifactError
from drafters.models.attention import block_diagonal_attention
from drafters.models.base import Drafter, DrafterShape
from drafters.models.layers import Attend, AttentionLayer, DraftHead, causal_attention
from drafters.models.layout import Features, Layout
from drafters.models.scoring import score

if TYPE_CHECKING:
    from drafters.target import Target

RANKS = 10  # of each head's guesses, for measure(): as many as Medusa's trees use
ROWS = 512  # positions whose logits measure() holds at once


class HeadsDrafter(Drafter):
    """Head i, counted from 0, drafts token t+2+i from the target's last feature of token t and the drafts before."""

    steps_field = None  # the number of heads is the number of steps
    reads_drafts: ClassVar[bool]  # whether a head sees the drafts before it; else one distribution serves a whole level

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__(shape)
        # Of the layers' dtype: a layer laid out for decoding would unpack its whole weight to tell.
        self.register_buffer("sample", torch.empty(0), persistent=False)

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    @property
    def dtype(self) -> torch.dtype:
        return self.sample.dtype

    @property
    def context(self) -> ContextLayer | None:
        """Attention over the target's last features, whose output the heads read in their place; None: none."""
        return None

    def look_back(self, taps: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """What read() takes of taps [B, T, Ht] at position_ids [B, T]: themselves, or the context's output."""
        if self.context is None:
            return taps
        return self.context(taps.to(self.dtype), position_ids, attend)

    @abstractmethod
    def read(self, taps: Tensor) -> Tensor:
        """Turn the target's last feature, or the context's output, [.., Ht] into a state [.., D]."""

    @abstractmethod
    def extend(self, state: Tensor, embedding: Tensor) -> Tensor:
        """The state [.., D'] after one more token, embedding [.., Ht]; Medusa's stays as it is."""

    @abstractmethod
    def before_head(self, index: int, state: Tensor) -> Tensor:
        """What the output head of draft head `index` reads, of a state extended index + 1 times."""

    @abstractmethod
    def output_head(self, index: int) -> DraftHead:
        """The output head of draft head `index`."""

    def logits(self, index: int, state: Tensor) -> Tensor:
        """Draft-vocabulary logits [.., Vd] of head `index` for a state extended index + 1 times."""
        return self.output_head(index)(self.before_head(index, state))

    def first_logits(self, ids: Tensor, taps: Tensor, position_ids: Tensor) -> Tensor:
        seen = self.look_back(taps, position_ids, causal_attention)
        return self.logits(0, self.extend(self.read(seen), self.embed(ids[:, 1:])))

    @classmethod
    def deepest(cls, graph: dict[str, Any]) -> int:
        return graph["num_heads"]

    def training_graph(self, cfg: HeadsConfig, target: Target) -> nn.Module:
        return HeadsTraining(self, cfg.head_decay, cfg.loss)

    def forced(self, layout: Layout, taps: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Head by head, as when all drafts before were accepted: which rows of the one before take part, [S], and
        what its output head reads, [S, D]; taps [A, Ht]."""
        kept = layout.steps[0].kept.to(taps.device)
        state = self.read(self._looked_back(layout, taps, kept))
        for index, step in enumerate(layout.steps):
            if index:
                kept = step.kept.to(taps.device)
                state = state[kept]
            state = self.extend(state, self.embed(step.tokens.to(taps.device)))
            yield kept, self.before_head(index, state)

    def _looked_back(self, layout: Layout, taps: Tensor, rows: Tensor) -> Tensor:
        """look_back() of packed documents at the first step's rows [S]: only they need queries."""
        if self.context is None:
            return taps[rows]
        layer, hidden = self.context, taps[None].to(self.dtype)
        positions = layout.position_ids.to(taps.device)[None]
        joined = layer.inputs(hidden)
        keys, values = layer.keys_values(joined, positions)
        queries = layer.queries(joined[:, rows], positions[:, rows])[0]
        first = layout.steps[0]
        mixed = block_diagonal_attention(queries, keys[0], values[0], [], first.segments, first.reach.to(taps.device))
        return layer.finish(hidden[:, rows], mixed[None])[0]

    # ---- what is measured of it once it is trained

    @torch.no_grad()
    def measure(self, batches: Iterable[tuple[Layout, Features]]) -> None:
        """How often each head's guess of each rank is the target's choice (Medusa, arXiv 2401.10774, 2.3.3)."""
        ranks = min(RANKS, self.shape.draft_vocab_size)
        hits = torch.zeros(self.shape.num_heads, ranks, dtype=torch.float64)
        counts = torch.zeros(self.shape.num_heads, 1, dtype=torch.int64)
        for layout, features in batches:
            for index, (_, read) in enumerate(self.forced(layout, features.taps)):
                choice = features.teacher.choice[layout.steps[index].teacher.to(features.taps.device)]
                for part, wanted in zip(read.split(ROWS), choice.split(ROWS), strict=True):
                    guesses = self.output_head(index)(part).topk(ranks, dim=-1).indices
                    hits[index] += (guesses == wanted[:, None]).sum(0).cpu()
                counts[index] += len(choice)
        known = bool((counts > 0).all())
        self.measured = {"positions": counts[:, 0].tolist(), "accuracies": (hits / counts).tolist()} if known else {}

    @property
    def accuracies(self) -> list[list[float]] | None:
        """Share of held-out positions by head and rank at which that guess was the target's choice; None: unknown."""
        return self.measured["accuracies"] if self.measured else None

    def check_measured(self, where: str) -> None:
        if not self.measured:
            return
        heads, table = self.shape.num_heads, self.measured.get("accuracies")
        fits = set(self.measured) == {"positions", "accuracies"} and isinstance(table, list) and len(table) == heads
        if not fits or not all(row and all(0.0 <= share <= 1.0 for share in row) for row in table):
            raise ArtifactError(
                f"{where}: expected positions and, for each of {heads} heads, accuracies from 0 to 1 by rank; found "
                f"{str(self.measured)[:200]}. Export it again."
            )


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), W and b zero at the start: a new head says what the target said one token before.

    joins: tokens whose embeddings follow the feature in x [.., (1 + joins) * size]; the skip is then a linear layer
    too, which at the start passes the feature alone.
    """

    def __init__(self, size: int, joins: int = 0) -> None:
        super().__init__()
        width = (1 + joins) * size
        self.linear = nn.Linear(width, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection = nn.Linear(width, size) if joins else nn.Identity()
        if joins:
            nn.init.eye_(self.res_connection.weight)
            nn.init.zeros_(self.res_connection.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.res_connection(x) + functional.silu(self.linear(x))


class ContextLayer(AttentionLayer):
    """A decoder layer over the target's features alone; a subclass has a norm for inputs() too."""

    def inputs(self, hidden: Tensor) -> Tensor:
        """What attention reads of hidden [B, T, H], which itself is the residual stream."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Run the layer on hidden [B, T, H]; attend maps (q, k, v) to [B, nq, T, d]."""
        joined = self.inputs(hidden)
        keys, values = self.keys_values(joined, position_ids)
        return self.finish(hidden, attend(self.queries(joined, position_ids), keys, values))


class HeadsTraining(nn.Module):
    """The training graph around a HeadsDrafter: heads see true tokens, as when all drafts before were accepted."""

    def __init__(self, drafter: HeadsDrafter, decay: float, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.decay = decay
        self.objective = objective

    def forward(self, layout: Layout, features: Features) -> tuple[Tensor, Tensor]:
        """Return the decayed loss sum over all heads and the statistics that Drafter.training_graph describes."""
        drafter, device = self.drafter, features.taps.device
        loss = torch.zeros((), dtype=torch.promote_types(drafter.dtype, torch.float32), device=device)
        stats = torch.zeros(4, len(layout.steps), device=device)
        alive = torch.ones(len(layout.active), dtype=torch.bool, device=device)
        for j, (kept, read) in enumerate(drafter.forced(layout, features.taps)):
            index = layout.steps[j].teacher.to(device)
            loss_sum, right = score(drafter.output_head(j), read, features.teacher, index, self.objective)
            alive = alive[kept] & right
            loss = loss + self.decay**j * loss_sum
            counts = torch.stack((right.sum(), alive.sum(), alive.new_tensor(len(alive), dtype=torch.int64)))
            stats[0, j], stats[1:, j] = loss_sum.detach(), counts
        return loss, stats
