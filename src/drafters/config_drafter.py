"""Settings of the drafter families: one dataclass each."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from drafters.config_base import Section, option


@dataclass
class DrafterConfig(Section):
    """Common base of the drafter families."""

    family: str = MISSING
    draft_vocab_size: int = option(32000, low=1)  # more than the target has is an error, never clipped
    warm_start: bool = True  # initialise from the target's own weights

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
class LayerSizes(Section):
    """Sizes of a drafter's decoder layer."""

    hidden_size: int | None = option(None, low=1)  # null: the target's
    intermediate_size: int | None = option(None, low=1)  # null: the target's
    num_heads: int | None = option(None, low=1)  # null: the target's
    num_kv_heads: int | None = option(None, low=1)  # null: the target's
    head_dim: int | None = option(None, low=1)  # null: the target's


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
