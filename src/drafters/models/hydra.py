"""Hydra heads (arXiv 2402.05109): each also reads the drafts before it; Hydra++ adds attention over the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.batches import Batch, mask4d
from drafters.config_drafter import HydraConfig
from drafters.facts import facts_from
from drafters.models.base import check_draft_vocab
from drafters.models.heads import ContextLayer, HeadsDrafter, ResBlock
from drafters.models.layers import INITIALIZER_STD, DraftAttention, DraftHead, DraftRotary, layer_config
from drafters.target import Target


@dataclass(frozen=True)
class HydraShape:
    """Sizes of Hydra heads. prefix: attention over the target's features comes first (Hydra++), in the target's own
    sizes, which are recorded only then. own_heads: each head has an output head of its own."""

    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int
    num_layers: int
    own_heads: bool
    prefix: bool
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None

    def __post_init__(self) -> None:
        check_draft_vocab(self)

    def prefix_config(self) -> LlamaConfig:
        """The transformers configuration of the prefix layer, whose heads are attention's, not drafts'."""
        return layer_config(replace(self, num_heads=self.num_attention_heads), self.target_hidden_size)


class PrefixLayer(ContextLayer):
    """A Llama decoder layer over the target's last features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = DraftAttention(config, size)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.rotary = DraftRotary(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)

    def inputs(self, hidden: Tensor) -> Tensor:
        return self.input_layernorm(hidden)


class HydraDrafter(HeadsDrafter):
    """Head i reads cat(h_t, emb(x_{t+1}), .., emb(x_{t+1+i})): sequentially dependent heads."""

    family = "hydra"
    shape_type = HydraShape
    reads_drafts = True

    def __init__(self, shape: HydraShape) -> None:
        super().__init__(shape)
        size = shape.target_hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(ResBlock(size, joins=0 if layer else index + 1) for layer in range(shape.num_layers))
            for index in range(shape.num_heads)
        )
        count = shape.num_heads if shape.own_heads else 1
        self.lm_heads = nn.ModuleList(DraftHead(size, shape.draft_vocab_size) for _ in range(count))
        if shape.prefix:
            self.prefix_layer = PrefixLayer(shape.prefix_config())
            self.prefix_norm = LlamaRMSNorm(size, eps=shape.rms_norm_eps)

    @classmethod
    def shape_for(cls, cfg: HydraConfig, target: Target) -> HydraShape:
        sizes: dict[str, Any] = {}
        if cfg.prefix:
            facts, text = facts_from(target.text_config.to_dict(), target.config), target.text_config
            sizes = {
                "intermediate_size": facts.intermediate_size,
                "num_attention_heads": facts.num_heads,
                "num_kv_heads": facts.num_kv_heads,
                "head_dim": facts.head_dim,
                "rms_norm_eps": text.rms_norm_eps,
                "max_position_embeddings": target.max_length,
                "rope_theta": text.rope_parameters["rope_theta"],
            }
        return HydraShape(
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
            num_heads=cfg.num_heads,
            num_layers=cfg.num_layers,
            own_heads=cfg.own_heads,
            prefix=cfg.prefix,
            **sizes,
        )

    @classmethod
    def rotates(cls, graph: dict[str, Any]) -> bool:
        return graph["prefix"]

    @property
    def context(self) -> PrefixLayer | None:
        return self.prefix_layer if self.shape.prefix else None

    @property
    def borrowed(self) -> tuple[str, ...]:
        return () if self.shape.own_heads else ("lm_heads.0.weight",)

    def bind(self, target: Target) -> None:
        super().bind(target)
        if not self.shape.own_heads:
            self.lm_heads[0].borrow(target.head_weight, self.t2d)

    def read(self, taps: Tensor) -> Tensor:
        return self.prefix_norm(taps) if self.shape.prefix else taps.to(self.dtype)

    def extend(self, state: Tensor, embedding: Tensor) -> Tensor:
        return torch.cat((state, embedding), dim=-1)

    def before_head(self, index: int, state: Tensor) -> Tensor:
        for block in self.blocks[index]:
            state = block(state)
        return state

    def output_head(self, index: int) -> DraftHead:
        return self.lm_heads[index if self.shape.own_heads else 0]

    @torch.no_grad()
    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Start own output heads from the target's, and give the prefix layer's output the features' size.

        Medians, because the first position of a text can be far larger than the rest.
        """
        if self.shape.own_heads:
            for head in self.lm_heads:
                head.weight.copy_(target.head_weight[self.t2d])
        if self.shape.prefix:
            device = self.prefix_norm.weight.device
            mask = mask4d(batch.document_ids.to(device))
            features, _ = target.hidden(batch.ids.to(device), batch.position_ids.to(device), mask, taps)
            real = features[(batch.document_ids >= 0).to(device)]
            self.prefix_norm.weight.fill_(real.float().pow(2).mean(-1).sqrt().median())
