"""Drafters that read one target feature: a head per drafted token (Medusa, Hydra)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from drafters.config_drafter import HeadsConfig
from drafters.models.base import Drafter
from drafters.models.layers import DraftHead
from drafters.models.layout import Features, Layout
from drafters.models.scoring import score


class HeadsDrafter(Drafter):
    """Head i, counted from 0, drafts token t+2+i from the target's last feature of token t and the drafts before."""

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    @abstractmethod
    def read(self, taps: Tensor) -> Tensor:
        """Turn the target's last feature [.., Ht] into a state [.., D]."""

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
        return self.logits(0, self.extend(self.read(taps), self.embed(ids[:, 1:])))

    @classmethod
    def graph(cls, shape: Any, steps: int) -> dict[str, Any]:
        # The number of heads is the number of steps.
        recorded = super().graph(shape, steps)
        del recorded["ttt_steps"]
        return recorded

    @classmethod
    def deepest(cls, graph: dict[str, Any]) -> int:
        return graph["num_heads"]

    def training_graph(self, cfg: HeadsConfig) -> nn.Module:
        return HeadsTraining(self, cfg.head_decay)


class HeadsTraining(nn.Module):
    """The training graph around a HeadsDrafter: heads see true tokens, as when all drafts before were accepted."""

    def __init__(self, drafter: HeadsDrafter, decay: float) -> None:
        super().__init__()
        self.drafter = drafter
        self.decay = decay

    def forward(self, layout: Layout, features: Features) -> tuple[Tensor, Tensor]:
        """Return the decayed loss sum over all heads and the statistics that Drafter.training_graph describes."""
        drafter, device = self.drafter, features.taps.device
        state = drafter.read(features.taps)
        loss = torch.zeros((), dtype=torch.promote_types(state.dtype, torch.float32), device=device)
        stats = torch.zeros(4, len(layout.steps), device=device)
        alive = torch.ones(len(state), dtype=torch.bool, device=device)
        for j, step in enumerate(layout.steps):
            kept = step.kept.to(device)
            state = drafter.extend(state[kept], drafter.embed(step.tokens.to(device)))
            read = drafter.before_head(j, state)
            loss_sum, right = score(drafter.output_head(j), read, features.teacher, step.teacher.to(device))
            alive = alive[kept] & right
            loss = loss + self.decay**j * loss_sum
            counts = torch.stack((right.sum(), alive.sum(), alive.new_tensor(len(alive), dtype=torch.int64)))
            stats[0, j], stats[1:, j] = loss_sum.detach(), counts
        return loss, stats
