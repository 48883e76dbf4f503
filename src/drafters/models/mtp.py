"""Multi-token prediction as DeepSeek-V3 has it (arXiv 2412.19437): one decoder layer under the target's own head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from drafters.batches import Batch, mask4d
from drafters.config_drafter import MtpConfig
from drafters.facts import facts_from
from drafters.models.base import check_draft_vocab, check_heads, variant
from drafters.models.layers import INITIALIZER_STD, DraftAttention, DraftHead, DraftLayer, DraftRotary, layer_config
from drafters.models.native_mtp import load_native
from drafters.models.recurrent import RecurrentDrafter
from drafters.target import Target
from drafters.warm_start import DECODER, LOGIT_STD, copy_layer, last_layer


@dataclass(frozen=True)
class MtpShape:
    """Sizes of an MTP module, all the target's; layer_index: its number in DeepSeek's names, the target's layer count.

    qk_norm: queries and keys pass a norm per head (Qwen3). qkv_bias: their projections have biases (Qwen2).
    own_embedding, own_head: it has them for itself; else they are the target's.
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
    layer_index: int
    qk_norm: bool = False
    qkv_bias: bool = False
    own_embedding: bool = variant(False)
    own_head: bool = variant(False)

    def __post_init__(self) -> None:
        check_draft_vocab(self)
        check_heads(self)


class MtpLayer(DraftLayer):
    """eh_proj joins the normed embedding and the normed hidden state; a decoder layer of the target's kind follows."""

    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        size, eps, config = shape.target_hidden_size, shape.rms_norm_eps, layer_config(shape, shape.target_hidden_size)
        self.enorm = LlamaRMSNorm(size, eps=eps)
        self.hnorm = LlamaRMSNorm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.self_attn = DraftAttention(config, size, bias=shape.qkv_bias, qk_norm=shape.qk_norm)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)
        self.mlp = LlamaMLP(config)
        self.shared_head = nn.ModuleDict({"norm": LlamaRMSNorm(size, eps=eps)})
        self.rotary = DraftRotary(config)

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.enter(self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), dim=-1)))

    def enter(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, and the residual stream itself, of a stream [B, T, H] that enters the decoder layer."""
        return self.input_layernorm(stream), stream


class MtpDrafter(RecurrentDrafter):
    """DeepSeek's MTP module, run depth after depth on its own output; embedding and output head are the target's."""

    family = "mtp"
    shape_type = MtpShape

    def __init__(self, shape: MtpShape) -> None:
        super().__init__(shape)
        # Nested so that every parameter has DeepSeek's name.
        self.model = nn.ModuleDict({"layers": nn.ModuleDict({str(shape.layer_index): MtpLayer(shape)})})
        self.lm_head = DraftHead(shape.target_hidden_size, shape.draft_vocab_size)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)
        self.add_embedding(shape.target_hidden_size)

    @classmethod
    def shape_for(cls, cfg: MtpConfig, target: Target) -> MtpShape:
        text, facts = target.text_config, facts_from(target.text_config.to_dict(), target.config)
        names = dict(last_layer(target).named_parameters())
        norm = names.get("self_attn.q_norm.weight")
        return MtpShape(
            target_hidden_size=target.hidden_size,
            intermediate_size=facts.intermediate_size,
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            max_position_embeddings=target.max_length,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
            layer_index=target.num_layers,
            qk_norm=norm is not None and norm.shape == (facts.head_dim,),
            qkv_bias="self_attn.q_proj.bias" in names,
        )

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return (num_layers,)

    @property
    def layer(self) -> MtpLayer:
        return self.model["layers"][str(self.shape.layer_index)]

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.hnorm.weight.dtype

    def fuse(self, taps: Tensor) -> Tensor:
        return taps.to(self.dtype)

    def feedback(self, out: Tensor) -> Tensor:
        return out

    def before_head(self, out: Tensor) -> Tensor:
        return self.layer.shared_head["norm"](out)

    # ---- where the weights come from

    def initialise(self, cfg: MtpConfig, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        if cfg.native:
            load_native(self.layer, target)
        else:
            super().initialise(cfg, target, batch, taps)

    @torch.no_grad()
    def warm_start(self, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        """Start as the target's last layer over its last state, which eh_proj lets through at a layer input's scale.

        The final norm is scaled so that logits have std LOGIT_STD, as for EAGLE-3.
        """
        layer = self.layer
        copy_layer(layer, last_layer(target), DECODER)
        layer.shared_head["norm"].weight.copy_(target.backbone.norm.weight)
        device, size = layer.eh_proj.weight.device, self.shape.target_hidden_size
        ids, positions = batch.ids.to(device), batch.position_ids.to(device)
        mask = mask4d(batch.document_ids.to(device))
        inner, last = target.hidden(ids, positions, mask, (target.num_layers - 1,))
        real = (batch.document_ids >= 0).to(device)
        real[:, -1] = False  # the last position of a row has no next token to read
        # Medians, because the first position of a text can be a hundred times larger than the rest.
        typical = inner[real].float().pow(2).mean(-1).sqrt().median()
        layer.hnorm.weight.copy_(typical.expand(size))
        layer.eh_proj.weight[:, size:] = torch.eye(size, device=device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        out = self.forward_layer(ids.roll(-1, 1), self.fuse(last), positions, attend)
        spread = self.logits(out[real]).float().std(-1).mean()
        layer.shared_head["norm"].weight.mul_(LOGIT_STD / spread)
