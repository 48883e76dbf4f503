"""EAGLE-1 and -2 (arXiv 2401.15077, 2406.16858): one layer predicts the target's next feature, read by its own head.

EAGLE-2 is the same weights under a dynamic tree. Trained over several steps it follows HASS (arXiv 2408.15766): later
steps read the drafter's own features and attend to those of the steps before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.batches import Batch, mask4d
from drafters.config_drafter import EagleConfig
from drafters.facts import sizes_for
from drafters.models.base import check_draft_vocab, check_heads, variant
from drafters.models.layers import (
    INITIALIZER_STD,
    DraftAttention,
    DraftHead,
    DraftLayer,
    DraftRotary,
    layer_config,
)
from drafters.models.layout import Features, Layout, Step
from drafters.models.recurrent import RecurrentDrafter
from drafters.models.ttt import TestTimeTraining
from drafters.target import Target
from drafters.warm_start import LOGIT_STD, decoder_layers, start_without_input_norm

NOISE_LENGTH = 512  # tokens of the document whose noise has the width that feature_noise names (EAGLE's trainer)


@dataclass(frozen=True)
class EagleShape:
    """Sizes of an EAGLE drafter; its width is the target's, whose features it predicts.

    fc_bias: of the layer that joins embedding and feature. attention_bias: of q, k, v and o. own_embedding, own_head:
    it has them for itself; else they are the target's. rope_scaling: see SCALED_ROPES.
    """

    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    fc_bias: bool = variant(False)
    attention_bias: bool = variant(False)
    own_embedding: bool = variant(False)
    own_head: bool = variant(False)
    rope_scaling: dict[str, Any] | None = variant(None)

    def __post_init__(self) -> None:
        check_draft_vocab(self)
        check_heads(self)


class EagleLayer(DraftLayer):
    """fc joins embedding and feature; a Llama layer without its first norm follows."""

    def __init__(self, config: LlamaConfig, fc_bias: bool = False, attention_bias: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        if fc_bias:
            self.fc.bias = nn.Parameter(torch.zeros(size))
        self.self_attn = DraftAttention(config, size, attention_bias, attention_bias)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.rotary = DraftRotary(config)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat((embedding, hidden), dim=-1))
        return joined, joined


class EagleDrafter(RecurrentDrafter):
    """The target's last feature and the next token in, its next feature out; embedding and head are the target's."""

    family = "eagle"
    shape_type = EagleShape

    def __init__(self, shape: EagleShape) -> None:
        super().__init__(shape)
        config = layer_config(shape, shape.target_hidden_size, shape.rope_scaling)
        self.block = EagleLayer(config, shape.fc_bias, shape.attention_bias)
        self.lm_head = DraftHead(shape.target_hidden_size, shape.draft_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)
        self.add_embedding(shape.target_hidden_size)

    @classmethod
    def shape_for(cls, cfg: EagleConfig, target: Target) -> EagleShape:
        text, sizes = target.text_config, sizes_for(cfg, target)
        return EagleShape(
            target_hidden_size=sizes.pop("hidden_size"),
            **sizes,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            max_position_embeddings=target.max_length,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
        )

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    @property
    def layer(self) -> EagleLayer:
        return self.block

    @property
    def dtype(self) -> torch.dtype:
        return self.block.post_attention_layernorm.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        return taps.to(self.dtype)

    def feedback(self, out: Tensor) -> Tensor:
        return out

    def before_head(self, out: Tensor) -> Tensor:
        return out

    @torch.no_grad()
    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Start as the target's last layer, run once more over the feature, which fc lets through.

        fc lets it through at the scale at which it gives logits of std LOGIT_STD: at its own the drafter would be sure
        of the token that it has just read, and unlearning that takes longer than learning from nothing.
        """
        block, size = self.block, self.shape.target_hidden_size
        device = block.fc.weight.device
        mask = mask4d(batch.document_ids.to(device))
        inner, feature = target.hidden(
            batch.ids.to(device), batch.position_ids.to(device), mask, (target.num_layers - 1,)
        )
        real = (batch.document_ids >= 0).to(device)
        feature = feature[real]
        scale = LOGIT_STD / self.logits(feature.to(self.dtype)).float().std(-1).mean()
        start_without_input_norm(block, decoder_layers(target)[-1], inner[real], scale * feature)
        block.fc.weight[:, size:] = scale * torch.eye(size, device=device)

    def training_graph(self, cfg: EagleConfig, target: Target) -> nn.Module:
        return EagleTraining(self, cfg)


class EagleTraining(TestTimeTraining):
    """Test-time training with EAGLE's two losses: the true next feature is regressed beside its logits."""

    def __init__(self, drafter: EagleDrafter, cfg: EagleConfig) -> None:
        super().__init__(drafter, cfg.ttt_decay, cfg.loss)
        self.feature_weight, self.logit_weight = cfg.feature_weight, cfg.logit_weight
        self.feature_noise = cfg.feature_noise

    def entry(self, layout: Layout, features: Features) -> Tensor:
        hidden = super().entry(layout, features)
        if not self.training or self.feature_noise == 0:
            return hidden
        width = self.feature_noise * NOISE_LENGTH / document_lengths(layout).to(hidden.device, hidden.dtype)
        # Drawn from the generator that the trainer seeds by step.
        return hidden + (torch.rand_like(hidden) - 0.5) * width[:, None]

    def step_loss(self, j: int, step: Step, out: Tensor, features: Features) -> tuple[Tensor, Tensor]:
        """logit_weight * objective + feature_weight * SmoothL1, the mean over channels, of outputs [S, H].

        As everywhere, a position whose choice lies outside the draft vocabulary has no loss.
        """
        loss_sum, right = super().step_loss(j, step, out, features)
        loss_sum = self.logit_weight * loss_sum
        if self.feature_weight == 0:
            return loss_sum, right
        inside = features.teacher.choice[step.teacher.to(out.device)] >= 0
        # Position t, reading token t+1+j, predicts the feature of token t+1+j; a document's active rows are adjacent.
        truth = features.taps[step.reach.to(out.device) + 1 + j][inside]
        kind = torch.promote_types(out.dtype, torch.float32)
        distance = functional.smooth_l1_loss(out[inside].to(kind), truth.to(kind), reduction="sum") / out.shape[-1]
        return loss_sum + self.feature_weight * distance, right


def document_lengths(layout: Layout) -> Tensor:
    """Tokens of the document that each active position is in, int64 [A]."""
    number = (layout.position_ids == 0).cumsum(0) - 1
    return (number.bincount() + 1)[number]  # a document's last token is not active
