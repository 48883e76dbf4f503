"""Medusa heads (arXiv 2401.10774): residual blocks on the target's last feature, one group per drafted token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.batches import Batch
from drafters.config_drafter import MedusaConfig
from drafters.models.base import check_draft_vocab
from drafters.models.heads import HeadsDrafter
from drafters.models.layers import DraftHead
from drafters.target import Target


@dataclass(frozen=True)
class MedusaShape:
    """Sizes of Medusa heads. own_heads: each has an output head of its own (v1); else all read the target's (v2)."""

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int
    own_heads: bool

    def __post_init__(self) -> None:
        check_draft_vocab(self)


class ResBlock(nn.Module):
    """x + SiLU(Wx + b), W and b zero at the start: a new head says what the target said one token before."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class MedusaDrafter(HeadsDrafter):
    """K independent heads: each sees the target's feature of token t, none sees what the others drafted."""

    family = "medusa"
    shape_type = MedusaShape

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        size = shape.target_hidden_size
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(size) for _ in range(shape.num_layers))) for _ in range(shape.num_heads)
        )
        count = shape.num_heads if shape.own_heads else 1
        self.lm_heads = nn.ModuleList(DraftHead(size, shape.draft_vocab_size) for _ in range(count))

    @classmethod
    def shape_for(cls, cfg: MedusaConfig, target: Target) -> MedusaShape:
        return MedusaShape(
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
            num_heads=cfg.num_heads,
            num_layers=cfg.num_layers,
            own_heads=cfg.own_heads,
        )

    @property
    def borrowed(self) -> tuple[str, ...]:
        return () if self.shape.own_heads else ("lm_heads.0.weight",)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if not self.shape.own_heads:
            self.lm_heads[0].borrow(target.head_weight, self.t2d)

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks[0][0].linear.weight.dtype

    def read(self, taps: Tensor) -> Tensor:
        return taps.to(self.dtype)

    def extend(self, state: Tensor, embedding: Tensor) -> Tensor:
        return state

    def before_head(self, index: int, state: Tensor) -> Tensor:
        return self.blocks[index](state)

    def output_head(self, index: int) -> DraftHead:
        return self.lm_heads[index if self.shape.own_heads else 0]

    @torch.no_grad()
    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Start own output heads from the target's."""
        if self.shape.own_heads:
            for head in self.lm_heads:
                head.weight.copy_(target.head_weight[self.t2d])
