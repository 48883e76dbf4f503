"""A smaller Llama of the target's vocabulary, distilled from it (DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from drafters.batches import Batch, mask4d
from drafters.config_drafter import Objective, SmallConfig
from drafters.errors import ConfigError
from drafters.facts import sizes_for
from drafters.models.base import Drafter, check_draft_vocab, check_heads
from drafters.models.layers import INITIALIZER_STD, DraftHead, DraftRotary, layer_config
from drafters.models.layout import Features, Layout, make_layout
from drafters.models.scoring import score
from drafters.target import Target
from drafters.warm_start import DECODER, LOGIT_STD, copy_layer, decoder_layers


@dataclass(frozen=True)
class SmallShape:
    """Sizes of a small model. Of the target's width it shares the target's embedding and head; else it has one
    embedding of its own, whose rows are its head too."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int

    def __post_init__(self) -> None:
        check_draft_vocab(self)
        check_heads(self)
        if self.own_embedding and self.draft_vocab_size != self.vocab_size:
            raise ConfigError(
                f"drafter.hidden_size={self.hidden_size} is not the target's {self.target_hidden_size}: such a small "
                f"model trains an embedding of the whole vocabulary. Set drafter.draft_vocab_size={self.vocab_size}."
            )

    @property
    def own_embedding(self) -> bool:
        """Whether it has an embedding of its own."""
        return self.hidden_size != self.target_hidden_size

    def llama_config(self) -> LlamaConfig:
        """Return the transformers configuration of the decoder."""
        config = layer_config(self, self.hidden_size)
        config.num_hidden_layers, config.vocab_size = self.num_layers, 1  # of modules exchanged for the real ones
        config._attn_implementation = "sdpa"
        return config


class SmallDrafter(Drafter):
    """Decoder layers and a norm between an embedding and a head; it reads tokens alone and taps nothing."""

    family = "small"
    shape_type = SmallShape
    steps_field = None

    def __init__(self, shape: SmallShape) -> None:
        super().__init__(shape)
        config = shape.llama_config()
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
            nn.init.normal_(self.embed_tokens.weight, std=INITIALIZER_STD)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(shape.num_layers))
        self.norm = LlamaRMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.lm_head = DraftHead(shape.hidden_size, shape.draft_vocab_size)
        self.rotary = DraftRotary(config)
        for module in self.layers.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIALIZER_STD)

    @classmethod
    def shape_for(cls, cfg: SmallConfig, target: Target) -> SmallShape:
        text = target.text_config
        return SmallShape(
            **sizes_for(cfg, target),
            target_hidden_size=target.hidden_size,
            num_layers=cfg.num_layers,
            rms_norm_eps=text.rms_norm_eps,
            rope_theta=text.rope_parameters["rope_theta"],
            max_position_embeddings=target.max_length,
            vocab_size=target.vocab_size,
            draft_vocab_size=cfg.draft_vocab_size,
        )

    @staticmethod
    def usual_taps(num_layers: int) -> tuple[int, ...]:
        return ()

    @classmethod
    def deepest(cls, graph: dict[str, object]) -> None:
        return None  # a language model's own text may go on for ever

    # ---- what it borrows

    @property
    def borrowed(self) -> tuple[str, ...]:
        return ("lm_head.weight",)

    def bind(self, target: Target) -> None:
        if self.shape.own_embedding:
            self.lm_head.weight = self.embed_tokens.weight
        else:
            super().bind(target)
            self.lm_head.borrow(target.head_weight, self.t2d)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids) if self.shape.own_embedding else super().embed(ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    # ---- the graph

    def states(self, ids: Tensor, position_ids: Tensor, mask: Tensor) -> Tensor:
        """Normed states [B, T, H] of ids, position_ids [B, T]; mask bool [B, 1, T, T], True where a query may look."""
        hidden = self.embed(ids)
        rotary = self.rotary(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_ids=position_ids, position_embeddings=rotary)
        return self.norm(hidden)

    def first_logits(self, ids: Tensor, taps: Tensor, position_ids: Tensor) -> Tensor:
        positions = torch.cat((position_ids, position_ids[:, -1:] + 1), 1)
        mask = mask4d(torch.zeros_like(ids))
        return self.lm_head(self.states(ids, positions, mask)[:, 1:])

    def initialise(self, cfg: SmallConfig, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
        if cfg.warm_start:
            self.start_from(target, cfg.layers or range(cfg.num_layers))
            self._soften(batch)

    @torch.no_grad()
    def _soften(self, batch: Batch) -> None:
        """Scale the final norm so that logits have std LOGIT_STD: with layers left out they are far too sure."""
        device = self.norm.weight.device
        ids, positions, documents = (x.to(device) for x in (batch.ids, batch.position_ids, batch.document_ids))
        states = self.states(ids, positions, mask4d(documents))[documents >= 0]
        self.norm.weight.mul_(LOGIT_STD / self.lm_head(states).float().std(-1).mean())

    @torch.no_grad()
    def start_from(self, target: Target, indices: Sequence[int]) -> None:
        """Copy the target's layers of these indices and its final norm; raises ConfigError where they do not fit."""
        theirs = decoder_layers(target)
        if indices[-1] >= len(theirs) or len(indices) != len(self.layers):
            raise ConfigError(
                f"drafter.layers={list(indices)}: target {target.name!r} has layers 0 to {len(theirs) - 1}, and the "
                f"small model {len(self.layers)} of them. Set drafter.layers and drafter.num_layers to fit both."
            )
        for own, index in zip(self.layers, indices, strict=True):
            copy_layer(own, theirs[index], DECODER)
        self.norm.weight.copy_(target.backbone.norm.weight)

    def training_graph(self, cfg: SmallConfig, target: Target) -> nn.Module:
        return SmallTraining(self, cfg.loss)

    @classmethod
    def layout(cls, batch: Batch, steps: int) -> Layout:
        return make_layout(batch, steps, ahead=0)

    def language_model(self) -> LlamaForCausalLM:
        """The same graph as a transformers model, its head on the draft vocabulary; embedding and head are shared."""
        model = LlamaForCausalLM(self.shape.llama_config())
        model.to(self.norm.weight.device, self.dtype)
        model.config.vocab_size = self.shape.vocab_size
        weight = self.embed_tokens.weight if self.shape.own_embedding else self.embedding
        model.set_input_embeddings(nn.Embedding.from_pretrained(weight.detach()))
        model.set_output_embeddings(self.lm_head)
        model.model.layers.load_state_dict(self.layers.state_dict())
        model.model.norm.load_state_dict(self.norm.state_dict())
        return model.eval().requires_grad_(False)


class SmallTraining(nn.Module):
    """The training graph: the loss at every position whose next token is a response token, on the target's text.

    Statistics follow the chain: with every draft before it right, a draft sees the target's own text, so what
    teacher forcing gives for step j is what decoding will see at depth j+1.
    """

    def __init__(self, drafter: SmallDrafter, objective: Objective) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective

    def forward(self, layout: Layout, features: Features) -> tuple[Tensor, Tensor]:
        """Return the loss sum over all positions and the statistics that Drafter.training_graph describes."""
        drafter, device = self.drafter, features.taps.device
        tokens, positions = layout.tokens.to(device)[None], layout.position_ids.to(device)[None]
        if not tokens.numel():  # a row of filler alone: one position gives every weight its gradient of 0
            tokens = positions = torch.zeros(1, 1, dtype=torch.int64, device=device)
        hidden = drafter.states(tokens, positions, mask4d((positions == 0).cumsum(-1)))[0]
        # Everywhere the target has a say: a layout may begin its chains at some of these positions only.
        read = hidden[torch.searchsorted(layout.active, layout.teacher).to(device)]
        index = torch.arange(len(read), device=device)
        loss, right = score(drafter.lm_head, read, features.teacher, index, self.objective)
        stats = torch.zeros(4, len(layout.steps), device=device)
        stats[0, 0] = loss.detach()
        alive = right
        for j, step in enumerate(layout.steps):
            hits = right[step.teacher.to(device)]
            alive = hits if j == 0 else alive[step.kept.to(device)] & hits
            stats[1:, j] = torch.stack((hits.sum(), alive.sum(), alive.new_tensor(len(alive), dtype=torch.int64)))
        return loss, stats
