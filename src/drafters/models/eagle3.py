"""EAGLE-3 drafter with the official graph and parameter names (EAGLE: eagle/model/cnets.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from drafters.errors import ConfigError, ContractError
from drafters.models.layers import Attend, DraftHead, Eagle3Layer

INITIALIZER_STD = 0.02


@dataclass(frozen=True)
class Eagle3Shape:
    """Every size and graph flag that fixes an EAGLE-3 drafter; two equal shapes compute the same graph."""

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

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(
                f"drafter.draft_vocab_size is {self.draft_vocab_size}, the target's vocabulary only "
                f"{self.vocab_size}. Set drafter.draft_vocab_size={self.vocab_size} or less."
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"drafter.num_heads is {self.num_heads}, not a multiple of drafter.num_kv_heads "
                f"{self.num_kv_heads}. Set drafter.num_kv_heads to a divisor."
            )

    def llama_config(self) -> LlamaConfig:
        """Return the transformers configuration of the one decoder layer."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            vocab_size=self.vocab_size,
            hidden_act="silu",
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
        )


class Eagle3Drafter(nn.Module):
    """One-layer drafter: tapped target features and the next token in, draft-vocabulary logits out."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.shape = shape
        eps = shape.rms_norm_eps
        self.fc = nn.Linear(shape.num_taps * shape.target_hidden_size, shape.hidden_size, bias=False)
        if shape.fc_norm:
            norms = (LlamaRMSNorm(shape.target_hidden_size, eps=eps) for _ in range(shape.num_taps))
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Eagle3Layer(shape.llama_config())
        self.norm = LlamaRMSNorm(shape.hidden_size, eps=eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(shape.vocab_size, dtype=torch.bool))
        # A plain attribute: the target owns this tensor, so .to() must not copy it nor a save write it.
        self.embedding: Tensor | None = None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)

    def bind_embedding(self, weight: Tensor) -> None:
        """Share the target's frozen input embedding [V, H]; raises ContractError on another shape."""
        expected = (self.shape.vocab_size, self.shape.hidden_size)
        if tuple(weight.shape) != expected:
            raise ContractError(
                f"the target's embedding has shape {tuple(weight.shape)}, the drafter needs {expected}. "
                f"Set drafter.hidden_size={weight.shape[1]} and train it for this target."
            )
        self.embedding = weight.detach()

    def bind_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Copy the draft vocabulary, d2t offsets [Vd] and t2d flags [V]; raises ContractError on a misfit."""
        expected = (self.shape.draft_vocab_size, self.shape.vocab_size)
        if (d2t.numel(), t2d.numel()) != expected:
            raise ContractError(
                f"the draft vocabulary has d2t, t2d of {d2t.numel()}, {t2d.numel()} entries, the drafter "
                f"needs {expected[0]}, {expected[1]}. Set drafter.draft_vocab_size={d2t.numel()}."
            )
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def embed(self, ids: Tensor) -> Tensor:
        """Look ids [..] up in the target's embedding; returns [.., H] in the drafter's dtype."""
        if self.embedding is None:
            raise ContractError("the drafter has no embedding yet. Call bind_embedding(target.embed_weight).")
        return functional.embedding(ids, self.embedding).to(self.norm.weight.dtype)

    def fuse(self, taps: Tensor) -> Tensor:
        """Fuse tapped target features [.., taps*Ht] into drafter features [.., H]."""
        taps = taps.to(self.norm.weight.dtype)
        if self.shape.fc_norm:
            parts = taps.split(self.shape.target_hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def forward_layer(self, ids: Tensor, hidden: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Run ids, position_ids [B, T] and hidden [B, T, H] through the layer; returns pre-norm [B, T, H].

        attend maps roped q [B, nq, T, d], k and v [B, nkv, T, d] to attended values [B, nq, T, d].
        """
        return self.midlayer(self.embed(ids), hidden, position_ids, attend)

    def feedback(self, out: Tensor) -> Tensor:
        """Turn a layer output [.., H] into the hidden input of the next draft step."""
        return self.norm(out) if self.shape.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """Map a layer output [.., H] to draft-vocabulary logits [.., Vd]."""
        return self.lm_head(self.norm(out))

    def draft_to_target(self, ids: Tensor) -> Tensor:
        """Map draft-vocabulary ids to target-vocabulary ids of the same shape."""
        return ids + self.d2t[ids]
