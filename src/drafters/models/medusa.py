"""Medusa heads (arXiv 2401.10774): residual blocks on the target's last feature, one group per drafted token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafters.batches import Batch
from drafters.config_drafter import MedusaConfig
from drafters.models.base import check_draft_vocab
from drafters.models.heads import HeadsDrafter, ResBlock
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


class MedusaDrafter(HeadsDrafter):
    """K independent heads: each sees the target's feature of token t, none sees what the others drafted."""

    family = "medusa"
    shape_type = MedusaShape
    reads_drafts = False

    def __init__(self, shape: MedusaShape) -> None:
        super().__init__(shape)
        size = shape.target_hidden_size
        # Numbered as in Medusa's files: head i holds its blocks 0..n-1 and, where it has one, its output head n.
        self.heads = nn.ModuleList(
            nn.ModuleList(ResBlock(size) for _ in range(shape.num_layers)) for _ in range(shape.num_heads)
        )
        if shape.own_heads:
            for head in self.heads:
                head.append(DraftHead(size, shape.draft_vocab_size))
        else:
            self.lm_head = DraftHead(size, shape.draft_vocab_size)

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
        return () if self.shape.own_heads else ("lm_head.weight",)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if not self.shape.own_heads:
            self.lm_head.borrow(target.head_weight, self.t2d)

    def read(self, taps: Tensor) -> Tensor:
        return taps.to(self.dtype)

    def extend(self, state: Tensor, embedding: Tensor) -> Tensor:
        return state

    def before_head(self, index: int, state: Tensor) -> Tensor:
        for layer in range(self.shape.num_layers):
            state = self.heads[index][layer](state)
        return state

    def output_head(self, index: int) -> DraftHead:
        return self.heads[index][self.shape.num_layers] if self.shape.own_heads else self.lm_head

    @torch.no_grad()
    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Start own output heads from the target's."""
        if self.shape.own_heads:
            for index in range(self.shape.num_heads):
                self.output_head(index).weight.copy_(target.head_weight[self.t2d])
