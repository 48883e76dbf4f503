"""Layers shared by drafters: the two-branch attention block and the draft head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

INITIALIZER_STD = 0.02

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of whole texts: position i sees keys 0 to i."""
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)


class LayerShape(Protocol):
    """The sizes of a one-layer drafter's shape that its decoder layer needs."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int


def layer_config(shape: LayerShape, hidden_size: int, rope_scaling: dict[str, Any] | None = None) -> LlamaConfig:
    """The transformers configuration of one decoder layer; rope_scaling: see SCALED_ROPES in base."""
    return LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        vocab_size=shape.vocab_size,
        hidden_act="silu",
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta} | (rope_scaling or {}),
    )


class DraftHead(nn.Linear):
    """Bias-free projection onto the draft vocabulary, whose weight a fused loss may read in place."""

    def __init__(self, hidden_size: int, draft_vocab_size: int) -> None:
        super().__init__(hidden_size, draft_vocab_size, bias=False)

    @torch.no_grad()
    def borrow(self, weight: Tensor, t2d: Tensor) -> None:
        """Hold the rows of the target's head [V, H] that the draft vocabulary t2d [V] keeps, frozen."""
        self.weight.copy_(weight[t2d.to(weight.device)])
        self.weight.requires_grad_(False)

    def forward(self, hidden: Tensor, loss: Callable[[Tensor, Tensor], tuple] | None = None) -> Tensor | tuple:
        """Map hidden [.., H] to logits [.., Vd], or return loss(hidden, weight) without keeping the logits.

        The loss runs inside forward because ZeRO-3 holds the whole weight only there.
        """
        if loss is not None:
            return loss(hidden, self.weight)
        return functional.linear(hidden, self.weight)


class DraftRotary(LlamaRotaryEmbedding):
    """Rotary positions whose frequencies stay fp32 when the drafter is cast: rounded ones send far positions astray."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DraftRotary:
        kept = self.inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = kept.to(self.inv_freq.device)
        return self


class AttentionLayer(nn.Module):
    """A decoder layer whose caller supplies the attention itself; a subclass has the modules named here."""

    self_attn: DraftAttention
    post_attention_layernorm: nn.Module
    mlp: nn.Module
    rotary: DraftRotary

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Add attended [B, nq, T, d] and the MLP to residual [B, T, H]; returns the layer's output."""
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:-1], count, self.self_attn.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor, position_ids: Tensor) -> Tensor:
        cos, sin = self.rotary(x, position_ids)
        return x * cos.unsqueeze(1) + rotate_half(x) * sin.unsqueeze(1)

    def queries(self, joined: Tensor, position_ids: Tensor) -> Tensor:
        """Return roped queries [B, nq, T, d] of attention inputs [B, T, ..] at position_ids [B, T]."""
        attention = self.self_attn
        heads = self._heads(attention.q_proj(joined), attention.num_heads)
        return self._rotate(attention.q_norm(heads), position_ids)

    def keys_values(self, joined: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return roped keys and plain values, both [B, nkv, T, d], of attention inputs [B, T, ..]."""
        attention = self.self_attn
        keys = attention.k_norm(self._heads(attention.k_proj(joined), attention.num_kv_heads))
        return self._rotate(keys, position_ids), self._heads(attention.v_proj(joined), attention.num_kv_heads)


class DraftLayer(AttentionLayer):
    """A decoder layer that joins embedding and hidden in a way of its own."""

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream, of embedding and hidden [B, T, H]."""
        raise NotImplementedError

    def forward(self, embedding: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Run the layer on embedding and hidden [B, T, H]; attend maps (q, k, v) to [B, nq, T, d]."""
        joined, residual = self.inputs(embedding, hidden)
        keys, values = self.keys_values(joined, position_ids)
        return self.finish(residual, attend(self.queries(joined, position_ids), keys, values))


class DraftAttention(nn.Module):
    """Projections of grouped-query attention over inputs of some width; the caller supplies the attention itself.

    bias: of q, k and v (Qwen2); output_bias: of o; qk_norm: queries and keys pass a norm per head (Qwen3).
    """

    def __init__(
        self, config: LlamaConfig, width: int, bias: bool = False, output_bias: bool = False, qk_norm: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        biased = [self.q_proj, self.k_proj, self.v_proj] * bias + [self.o_proj] * output_bias
        for projection in biased:
            projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        eps = config.rms_norm_eps
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=eps) if qk_norm else nn.Identity()


class Eagle3Layer(DraftLayer):
    """The one decoder layer of EAGLE-3; its residual stream is the hidden branch, un-normed.

    norm_before_residual: the residual stream is the normed hidden branch. attention_bias: of q, k, v and o. qk_norm:
    see DraftAttention.
    """

    def __init__(
        self,
        config: LlamaConfig,
        norm_before_residual: bool = False,
        attention_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = DraftAttention(config, 2 * size, attention_bias, attention_bias, qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.rotary = DraftRotary(config)
        self.norm_before_residual = norm_before_residual

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedding), normed), dim=-1)
        return joined, normed if self.norm_before_residual else hidden
