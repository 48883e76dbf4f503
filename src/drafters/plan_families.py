"""What a plan needs to know of each drafter family: parameters and what training keeps, from settings alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drafters.config import TargetFacts
from drafters.config_drafter import (
    DrafterConfig,
    Eagle3Config,
    EagleConfig,
    HydraConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    SmallConfig,
)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a drafter's decoder layer after the nulls of its settings are filled from the target."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def saved(self) -> int:
        """Numbers kept for backward per position and draft step."""
        return 12 * self.hidden + 3 * self.intermediate + (2 * self.heads + 2 * self.kv_heads) * self.head_dim

    def parameters(self, width: int, norms: int) -> int:
        """Of a layer whose attention reads `width` numbers, with so many norms."""
        attention = self.head_dim * (width * (self.heads + 2 * self.kv_heads) + self.heads * self.hidden)
        return attention + 3 * self.hidden * self.intermediate + norms * self.hidden


def layer_shape(cfg: DrafterConfig, facts: TargetFacts) -> LayerShape:
    """Fill the sizes left null, or that the family does not let one choose, from the target's."""
    names = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    own = {name: getattr(cfg, name) for name in names if name in cfg.__dataclass_fields__}
    return LayerShape(*(getattr(facts, name) if own.get(name) is None else own[name] for name in names))


def mean_depth(cfg: DrafterConfig) -> float:
    """Draft steps averaged over the run: rises evenly from 1 to all of them at the curriculum's fractions."""
    edges = [0.0, *cfg.marks, 1.0]
    count = len(edges) - 1
    if count == 1:
        return float(cfg.steps)
    depths = [round(1 + (cfg.steps - 1) * stage / (count - 1)) for stage in range(count)]
    return sum(depth * (edges[i + 1] - edges[i]) for i, depth in enumerate(depths))


def _mean_passes(cfg: DrafterConfig, facts: TargetFacts) -> float:
    return mean_depth(cfg)


def _all_steps(cfg: DrafterConfig) -> int:
    return cfg.steps


def _once(cfg: DrafterConfig) -> int:
    return 1


@dataclass(frozen=True)
class Formula:
    """taps: tapped hidden states; None: nothing the target says can be kept. parameters: (all, trained), the borrowed
    embedding not among them. saved: numbers kept for backward per position and draft step, logits apart. passes: how
    often a row token meets a parameter. depth: draft steps that are kept for backward at most. target_passes: how often
    a row token meets a parameter of the target, a backward pass to its inputs counted as one more."""

    taps: int | None
    parameters: Callable[[DrafterConfig, TargetFacts], tuple[int, int]]
    saved: Callable[[DrafterConfig, TargetFacts], int]
    passes: Callable[[DrafterConfig, TargetFacts], float] = _mean_passes
    depth: Callable[[DrafterConfig], int] = _all_steps
    target_passes: Callable[[DrafterConfig], float] = _once

    @property
    def states(self) -> int:
        """Hidden states that a store keeps for a token: the taps and the last."""
        return 0 if self.taps is None else self.taps + 1


def _layer_saved(cfg: DrafterConfig, facts: TargetFacts) -> int:
    return layer_shape(cfg, facts).saved


def _eagle3(cfg: Eagle3Config, facts: TargetFacts) -> tuple[int, int]:
    shape = layer_shape(cfg, facts)
    fuse = 3 * facts.hidden_size * shape.hidden + (3 * facts.hidden_size if cfg.fc_norm else 0)
    body = fuse + shape.parameters(2 * shape.hidden, norms=4)  # hidden, input, post-attention, final
    head = shape.hidden * cfg.draft_vocab_size
    return body + head, body + (head if cfg.train_lm_head else 0)


def _eagle(cfg: EagleConfig, facts: TargetFacts) -> tuple[int, int]:
    shape = layer_shape(cfg, facts)
    body = 2 * shape.hidden * shape.hidden + shape.parameters(shape.hidden, norms=1)
    return body + shape.hidden * cfg.draft_vocab_size, body


def _mtp(cfg: MtpConfig, facts: TargetFacts) -> tuple[int, int]:
    shape = layer_shape(cfg, facts)
    # enorm, hnorm, input, post-attention and the head's; biases and norms of some targets' q and k are left out.
    body = 2 * shape.hidden * shape.hidden + shape.parameters(shape.hidden, norms=5)
    return body + shape.hidden * cfg.draft_vocab_size, body


def _small(cfg: SmallConfig, facts: TargetFacts) -> tuple[int, int]:
    shape = layer_shape(cfg, facts)
    body = cfg.num_layers * shape.parameters(shape.hidden, norms=2) + shape.hidden
    head = shape.hidden * cfg.draft_vocab_size
    return body + head, body + (head if shape.hidden != facts.hidden_size else 0)


def _small_saved(cfg: SmallConfig, facts: TargetFacts) -> int:
    return cfg.num_layers * layer_shape(cfg, facts).saved


def _medusa(cfg: MedusaConfig, facts: TargetFacts) -> tuple[int, int]:
    size = facts.hidden_size
    body = cfg.num_heads * cfg.num_layers * (size * size + size)
    return _with_heads(cfg, facts, body)


def lora_parameters(cfg: Medusa2Config, facts: TargetFacts) -> tuple[int, int]:
    """(parameters of the LoRA, numbers read by the layers it tunes per position) of a Llama-like target."""
    size, queries, keys = facts.hidden_size, facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim
    layers = {
        "q_proj": (size, queries), "k_proj": (size, keys), "v_proj": (size, keys), "o_proj": (queries, size),
        "gate_proj": (size, facts.intermediate_size), "up_proj": (size, facts.intermediate_size),
        "down_proj": (facts.intermediate_size, size),
    }  # fmt: skip
    # A name that this table lacks is refused, or found, once the target is loaded.
    tuned = [layers[name] for name in (layers if cfg.lora_targets is None else cfg.lora_targets) if name in layers]
    weights = cfg.lora_rank * sum(size_in + size_out for size_in, size_out in tuned)
    return facts.num_layers * weights, facts.num_layers * sum(size_in + cfg.lora_rank for size_in, _ in tuned)


def _medusa2(cfg: Medusa2Config, facts: TargetFacts) -> tuple[int, int]:
    everything, trained = _medusa(cfg, facts)
    lora, _ = lora_parameters(cfg, facts)
    return everything + lora, trained + lora


def _medusa2_saved(cfg: Medusa2Config, facts: TargetFacts) -> int:
    target = facts.num_layers * _targets_layer(facts).saved + lora_parameters(cfg, facts)[1]
    return _medusa_saved(cfg, facts) + round(target / cfg.num_heads)  # run once, not once per head


def _tuned_passes(cfg: Medusa2Config) -> float:
    """With the adapter, and once it trains, without it and backward too."""
    return 1 + 2 * (1 - cfg.heads_warmup)


def _hydra(cfg: HydraConfig, facts: TargetFacts) -> tuple[int, int]:
    size = facts.hidden_size
    # A head's first block reads the feature and 1, 2, .. embeddings, in its linear layer and in its skip.
    joined = sum(2 * (size * size * (index + 2) + size) for index in range(cfg.num_heads))
    body = joined + cfg.num_heads * (cfg.num_layers - 1) * (size * size + size)
    if cfg.prefix:
        body += _targets_layer(facts).parameters(size, norms=3)  # input, post-attention, final
    return _with_heads(cfg, facts, body)


def _with_heads(cfg: MedusaConfig | HydraConfig, facts: TargetFacts, body: int) -> tuple[int, int]:
    head = facts.hidden_size * cfg.draft_vocab_size
    own = body + cfg.num_heads * head
    return (own, own) if cfg.own_heads else (body + head, body)


def _targets_layer(facts: TargetFacts) -> LayerShape:
    return LayerShape(
        facts.hidden_size, facts.intermediate_size, facts.num_heads, facts.num_kv_heads, facts.head_dim
    )


def _medusa_saved(cfg: MedusaConfig, facts: TargetFacts) -> int:
    return 3 * cfg.num_layers * facts.hidden_size  # a block's input, its product and the SiLU of it


def _hydra_saved(cfg: HydraConfig, facts: TargetFacts) -> int:
    joined = (cfg.num_heads + 3) / 2 * facts.hidden_size  # on average over the heads
    prefix = _targets_layer(facts).saved / cfg.num_heads if cfg.prefix else 0  # run once, not once per head
    return round(3 * cfg.num_layers * facts.hidden_size + joined + prefix)


def _heads_passes(cfg: MedusaConfig | HydraConfig, facts: TargetFacts) -> float:
    """Each head's own parameters once, the output head they share once per head, over the parameters there are."""
    everything = FORMULAS[cfg.family].parameters(cfg, facts)[0]
    shared = 0 if cfg.own_heads else facts.hidden_size * cfg.draft_vocab_size
    return (everything + (cfg.num_heads - 1) * shared) / everything


FORMULAS = {
    "eagle": Formula(1, _eagle, _layer_saved),
    "eagle3": Formula(3, _eagle3, _layer_saved),
    "hydra": Formula(1, _hydra, _hydra_saved, passes=_heads_passes),
    "medusa": Formula(1, _medusa, _medusa_saved, passes=_heads_passes),
    "medusa2": Formula(None, _medusa2, _medusa2_saved, passes=_heads_passes, target_passes=_tuned_passes),
    "mtp": Formula(1, _mtp, _layer_saved),
    "small": Formula(0, _small, _small_saved, passes=lambda cfg, facts: 1.0, depth=_once),
}
