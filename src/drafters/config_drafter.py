"""Settings of the drafter families: one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from drafters.config_base import Section, option

COUNTED_DEPTHS = 5  # how deep a small model's chain is followed in teacher-forced figures
HEADS_SCHEDULES = ("constant", "linear", "sine")
OBJECTIVES = ("kl", "reverse_kl", "jsd", "tvd", "lk", "lk_alpha")


@dataclass(frozen=True)
class Objective:
    """What a draft step minimises between the target's p and the drafter's q; drafters.objectives has the formulas."""

    name: str = "kl"
    beta: float = 0.5
    decay: float = 3.0


@dataclass
class DrafterConfig(Section):
    """Common base of the drafter families."""

    family: str = MISSING
    draft_vocab_size: int = option(32000, low=1)  # more than the target has is an error, never clipped
    warm_start: bool = True  # initialise from the target's own weights
    objective: str = option("kl", choices=OBJECTIVES)  # tvd, lk and lk_alpha train acceptance itself
    jsd_beta: float = option(0.5, above=0.0, below=1.0)  # objective=jsd: p's share of the mixture
    lk_decay: float = option(3.0, low=0.0)  # objective=lk: the share of KL is exp(-lk_decay * acceptance)

    @property
    def loss(self) -> Objective:
        """The objective with its numbers."""
        return Objective(self.objective, self.jsd_beta, self.lk_decay)

    @property
    def steps(self) -> int:
        """Draft steps a training position may take part in."""
        raise NotImplementedError

    @property
    def decay(self) -> float:
        """The loss of draft step k, counted from 0, has weight decay**k."""
        raise NotImplementedError

    @property
    def marks(self) -> list[float]:
        """Fractions of the run at which the number of steps rises, evenly from 1; [] trains all from the start."""
        return []


@dataclass
class RecurrentConfig(DrafterConfig):
    """Drafters that read their own last output, trained by their own rollout (training-time test)."""

    ttt_steps: int = option(5, low=1)
    ttt_decay: float = option(0.8, above=0.0, high=1.0)  # weight of depth k is ttt_decay**k
    # Fractions of the run at which the depth rises, spread evenly from 1 to ttt_steps; [] trains at full depth.
    curriculum: list[float] = option([0.35, 0.6], above=0.0, below=1.0)

    @property
    def steps(self) -> int:
        return self.ttt_steps

    @property
    def decay(self) -> float:
        return self.ttt_decay

    @property
    def marks(self) -> list[float]:
        return self.curriculum


@dataclass
class InnerSizes(Section):
    """Sizes of a decoder layer whose width is the target's."""

    intermediate_size: int | None = option(None, low=1)  # null: the target's
    num_heads: int | None = option(None, low=1)  # null: the target's
    num_kv_heads: int | None = option(None, low=1)  # null: the target's
    head_dim: int | None = option(None, low=1)  # null: the target's


@dataclass
class LayerSizes(InnerSizes):
    """Sizes of a drafter's decoder layer."""

    hidden_size: int | None = option(None, low=1)  # null: the target's


@dataclass
class EagleConfig(InnerSizes, RecurrentConfig):
    """EAGLE-1 and -2: one decoder layer that predicts the target's next feature; several steps: as HASS trains it."""

    family: str = option("eagle", choices=("eagle",))
    ttt_steps: int = option(3, low=1)  # 1 is EAGLE-1
    feature_weight: float = option(1.0, low=0.0)  # of SmoothL1 between the predicted and the true next feature
    logit_weight: float = option(0.1, low=0.0)  # of drafter.objective
    feature_noise: float = option(0.2, low=0.0)  # width of uniform noise on the features read, at 512 tokens of text


@dataclass
class Eagle3Config(LayerSizes, RecurrentConfig):
    """EAGLE-3: one decoder layer fed by three tapped hidden states, trained by its own rollout (TTT)."""

    family: str = option("eagle3", choices=("eagle3",))
    fc_norm: bool = False  # one RMSNorm per tap before fc (EAGLE-3.1)
    norm_output: bool = False  # feed back the normed output (EAGLE-3.1)
    taps: list[int] | None = option(None, low=0)  # hidden_states indices; null: (2, n//2, n-3)
    train_lm_head: bool = True


@dataclass
class HeadsConfig(DrafterConfig):
    """A head for each drafted token, all reading the target's last feature."""

    num_heads: int = option(4, low=1)
    head_decay: float = option(0.8, above=0.0, high=1.0)  # weight of head k, counted from 0, is head_decay**k

    @property
    def steps(self) -> int:
        return self.num_heads

    @property
    def decay(self) -> float:
        return self.head_decay


@dataclass
class MedusaConfig(HeadsConfig):
    """Medusa-1: independent heads of residual blocks on a frozen target."""

    family: str = option("medusa", choices=("medusa",))
    num_layers: int = option(1, low=1)  # residual blocks per head
    own_heads: bool = False  # true: each head trains an output head of its own (v1); false: all use the target's (v2)


@dataclass
class Medusa2Config(MedusaConfig):
    """Medusa-2: the heads, and a LoRA of the target trained with them; the export changes the target's text."""

    family: str = option("medusa2", choices=("medusa2",))
    lora_rank: int = option(32, low=1)
    lora_alpha: int = option(16, low=1)  # the change of a weight is lora_alpha / lora_rank * B A
    lora_dropout: float = option(0.05, low=0.0, below=1.0)
    # Linear layers to tune, by the last part of their names, e.g. [q_proj,v_proj]; null: all of every decoder layer.
    lora_targets: list[str] | None = option(None)
    kl_weight: float = option(1.0, above=0.0)  # of KL(target without the adapter || with it)
    heads_weight: float = option(0.2, above=0.0)  # of the heads' losses, times the schedule
    heads_schedule: str = option("constant", choices=HEADS_SCHEDULES)  # share of heads_weight, once the adapter trains
    heads_warmup: float = option(0.2, low=0.0, below=1.0)  # fraction of the run in which only the heads train
    heads_lr_multiplier: float = option(4.0, above=0.0)  # the heads' learning rate over the adapter's


@dataclass
class HydraConfig(HeadsConfig):
    """Hydra: heads that also read the tokens drafted before them."""

    family: str = option("hydra", choices=("hydra",))
    num_layers: int = option(4, low=1)  # residual blocks per head; the first joins feature and drafted tokens
    own_heads: bool = False  # true: each head trains an output head of its own; false: all use the target's
    prefix: bool = False  # a layer of attention over the target's features before the heads (Hydra++)


@dataclass
class MtpConfig(RecurrentConfig):
    """Multi-token prediction as DeepSeek-V3 has it: a layer like the target's under the target's own head."""

    family: str = option("mtp", choices=("mtp",))
    ttt_steps: int = option(3, low=1)
    ttt_decay: float = option(0.6, above=0.0, high=1.0)  # weight of depth k is ttt_decay**k
    native: bool = False  # start from the MTP layer in the target's own checkpoint; with trainer.epochs=0 as it is


@dataclass
class SmallConfig(LayerSizes, DrafterConfig):
    """A smaller language model of the target's vocabulary, distilled from it (DistillSpec, arXiv 2310.08461)."""

    family: str = option("small", choices=("small",))
    num_layers: int = option(3, low=1)
    # Target layers it starts as, counted from 0; null: the first num_layers. On a target of 30 layers, 0-1-2 learns
    # faster than 0-14-29 or 0-1-29.
    layers: list[int] | None = option(None, low=0)

    @property
    def steps(self) -> int:
        return COUNTED_DEPTHS

    @property
    def decay(self) -> float:
        return 0.0  # every position has its loss once; what follows a position is only counted
