"""Drafters that read their own last output: EAGLE and MTP, one layer run once per drafted token."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from drafters.models.base import Drafter
from drafters.models.layers import INITIALIZER_STD, Attend, DraftHead, DraftLayer, causal_attention

if TYPE_CHECKING:
    from drafters.config_drafter import RecurrentConfig
    from drafters.models.ttt import TestTimeTraining
    from drafters.target import Target


class RecurrentDrafter(Drafter):
    """Target features and the next token in, draft-vocabulary logits and the next step's features out."""

    lm_head: DraftHead

    @classmethod
    def deepest(cls, graph: dict[str, Any]) -> int:
        # A step of training-time test sees the steps before it, so one level more than it had steps is still sound.
        return graph["ttt_steps"] + 1

    # ---- what it borrows: embedding and head, where it has none of its own

    @property
    def borrowed(self) -> tuple[str, ...]:
        return () if self.shape.own_head else ("lm_head.weight",)

    def add_embedding(self, width: int) -> None:
        """Make the embedding [V, width] where the shape says that it has one of its own."""
        if self.shape.own_embedding:
            self.embed_tokens = nn.Embedding(self.shape.vocab_size, width)
            nn.init.normal_(self.embed_tokens.weight, std=INITIALIZER_STD)

    def bind(self, target: Target) -> None:
        if not self.shape.own_embedding:
            super().bind(target)
        if not self.shape.own_head:
            self.lm_head.borrow(target.head_weight, self.t2d)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids) if self.shape.own_embedding else super().embed(ids)

    @property
    @abstractmethod
    def layer(self) -> DraftLayer:
        """The one decoder layer."""

    @abstractmethod
    def fuse(self, taps: Tensor) -> Tensor:
        """Turn tapped target features [.., S*Ht] into the layer's hidden input [.., H]."""

    @abstractmethod
    def feedback(self, out: Tensor) -> Tensor:
        """Turn a layer output [.., H] into the hidden input of the next draft step."""

    @abstractmethod
    def before_head(self, out: Tensor) -> Tensor:
        """Turn a layer output [.., H] into what lm_head reads."""

    def logits(self, out: Tensor) -> Tensor:
        """Map a layer output [.., H] to draft-vocabulary logits [.., Vd]."""
        return self.lm_head(self.before_head(out))

    def forward_layer(self, ids: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Run ids, position_ids [B, T] and hidden [B, T, H] through the layer; returns its output [B, T, H].

        attend maps roped q [B, nq, T, d], k and v [B, nkv, T, d] to attended values [B, nq, T, d].
        """
        return self.layer(self.embed(ids), hidden, position_ids, attend)

    def first_logits(self, ids: Tensor, taps: Tensor, position_ids: Tensor) -> Tensor:
        return self.logits(self.forward_layer(ids[:, 1:], self.fuse(taps), position_ids, causal_attention))

    def training_graph(self, cfg: RecurrentConfig, target: Target) -> nn.Module:
        return _training(self, cfg)


def _training(drafter: RecurrentDrafter, cfg: RecurrentConfig) -> TestTimeTraining:
    from drafters.models.ttt import TestTimeTraining  # it needs this module's class

    return TestTimeTraining(drafter, cfg.ttt_decay, cfg.loss)
