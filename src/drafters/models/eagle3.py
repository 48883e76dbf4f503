"""EAGLE-3 drafter with the official graph and parameter names (EAGLE: eagle/model/cnets.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.batches import Batch
from drafters.config_drafter import Eagle3Config
from drafters.facts import sizes_for
from drafters.models.base import check_draft_vocab, check_heads, variant
from drafters.models.layers import INITIALIZER_STD, DraftHead, Eagle3Layer, layer_config
from drafters.models.recurrent import RecurrentDrafter
from drafters.target import Target, default_taps
from drafters.warm_start import warm_start


@dataclass(frozen=True)
class Eagle3Shape:
    """Every size and graph flag that fixes an EAGLE-3 drafter; two equal shapes compute the same graph.

    norm_before_residual: the residual stream is the normed hidden branch. norm_before_fc: one norm over all taps before
    fc. fc_bias: of fc. attention_bias: of q, k, v and o. qk_norm: queries and keys pass a norm per head. own_embedding,
    own_head: it has them for itself; else they are the target's. rope_scaling: see SCALED_ROPES.
    """

    hidden_size: int
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
    num_taps: int = 3
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = variant(False)
    norm_before_fc: bool = variant(False)
    fc_bias: bool = variant(False)
    attention_bias: bool = variant(False)
    qk_norm: bool = variant(False)
    own_embedding: bool = variant(False)
    own_head: bool = variant(True)
    rope_scaling: dict[str, Any] | None = variant(None)

    def __post_init__(self) -> None:
        check_draft_vocab(self)
        check_heads(self)


class Eagle3Drafter(RecurrentDrafter):
    """One-layer drafter: tapped target features and the next token in, draft-vocabulary logits out."""

    family = "eagle3"
    shape_type = Eagle3Shape

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__(shape)
        eps = shape.rms_norm_eps
        self.fc = nn.Linear(shape.num_taps * shape.target_hidden_size, shape.hidden_size, bias=False)
        if shape.fc_bias:
            self.fc.bias = nn.Parameter(torch.zeros(shape.hidden_size))
        if shape.norm_before_fc:
            self.input_norm = LlamaRMSNorm(shape.num_taps * shape.target_hidden_size, eps=eps)
        if shape.fc_norm:
            norms = (LlamaRMSNorm(shape.target_hidden_size, eps=eps) for _ in range(shape.num_taps))
            self.fc_norm = nn.ModuleList(norms)
        config = layer_config(shape, shape.hidden_size, shape.rope_scaling)
        self.midlayer = Eagle3Layer(config, shape.norm_before_residual, shape.attention_bias, shape.qk_norm)
        self.norm = LlamaRMSNorm(shape.hidden_size, eps=eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)
        self.add_embedding(shape.hidden_size)

    @classmethod
    def shape_for(cls, cfg: Eagle3Config, target: Target) -> Eagle3Shape:
        text = target.text_config
        return Eagle3Shape(
            **sizes_for(cfg, target),
            target_hidden_size=target.hidden_size,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            max_position_embeddings=target.max_length,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
            fc_norm=cfg.fc_norm,
            norm_output=cfg.norm_output,
        )

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return default_taps(num_layers)

    @classmethod
    def taps_for(cls, cfg: Eagle3Config, target: Target) -> tuple[int, ...]:
        return tuple(cfg.taps or cls.usual_taps(target.num_layers))

    @property
    def embedding_size(self) -> int:
        return self.shape.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def layer(self) -> Eagle3Layer:
        return self.midlayer

    def fuse(self, taps: Tensor) -> Tensor:
        taps = taps.to(self.dtype)
        if self.shape.norm_before_fc:
            taps = self.input_norm(taps)
        if self.shape.fc_norm:
            parts = taps.split(self.shape.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def feedback(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.shape.norm_output else out

    def before_head(self, out: Tensor) -> Tensor:
        return self.norm(out)

    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        warm_start(self, target, batch, taps)

    def training_graph(self, cfg: Eagle3Config, target: Target) -> nn.Module:
        self.lm_head.weight.requires_grad_(cfg.train_lm_head)
        return super().training_graph(cfg, target)
