"""What the doctor knows of a drafter, its data and its serving: plain numbers, which the rules in doctor.py read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Boundaries:
    """Records by where their prompt ends and how: as the target's template ends it, `shifted` by some tokens, or
    foreign to the template. shift: the commonest, > 0 where the prompt holds tokens of the answer."""

    records: int
    shifted: int
    foreign: int
    shift: int | None = None


@dataclass(frozen=True)
class OnPolicy:
    """What the target says to answers whose prompts are right. agreement: share of the tokens of greedy answers that
    are its choice; nll: its negative log-likelihood per token, at each answer's temperature; excess: of sampled
    answers, nll less its entropy. None where there is no answer of that kind."""

    tokens: int
    agreement: float | None
    nll: float
    excess: float | None


@dataclass(frozen=True)
class Coverage:
    """Share in the draft vocabulary: of training answers' tokens, of the target's choices on them and on new text."""

    responses: float
    choices: float
    held_out: float


@dataclass(frozen=True)
class Forced:
    """Teacher-forced: accuracy of each depth; share of roots where every draft so far is right; tau: 1 + its sum."""

    acc: list[float]
    right_so_far: list[float]

    @property
    def tau(self) -> float:
        return 1 + sum(self.right_so_far)


@dataclass(frozen=True)
class Group:
    """Serving of some prompts: tau and rounds."""

    tau: float
    rounds: int


@dataclass(frozen=True)
class Served:
    """Decoding held-out prompts. chain: one draft sequence of the trained depth, in the rounds that had room for it;
    forced: teacher forcing at the tokens where these rounds began, which must come to the same. plain_share: rounds
    without a draft."""

    tau: float
    acceptance_at: list[float]
    chain_tau: float
    chain_at: list[float]
    forced_tau: float
    forced_at: list[float]
    tau_t1: float
    rounds: int
    draft_share: float | None
    plain_share: float
    by_category: dict[str, Group]
    by_length: dict[str, Group]

    @property
    def best(self) -> float:
        """tau the drafter can show: with sizes by cost it may hardly have drafted."""
        return max(self.tau, self.chain_tau)


@dataclass(frozen=True)
class Curve:
    """metric = a + b * ln(tokens seen), fitted to `points` of the log; gain: tau that twice the tokens would give."""

    metric: str
    a: float
    b: float
    points: int
    tokens: float
    gain: float


@dataclass(frozen=True)
class Measures:
    """Everything the rules read. steps: draft steps trained; temperature: of the answers, None where they differ.

    cut_share: of the answers' tokens beyond row_length; mask_share: of the packed tokens that are trained on;
    other_target: the first hash in which the answers' target differs from this one.
    """

    steps: int
    distinct_tokens: int
    temperature: float | None
    boundaries: Boundaries
    on_policy: OnPolicy | None
    coverage: Coverage
    mask_share: float
    cut_share: float
    trained: Forced
    held_out: Forced
    served: Served
    curve: Curve | None = None
    other_target: str | None = None

    @property
    def room(self) -> float:
        """What tau could at most gain: every draft of the trained depth accepted."""
        return max(0.1, 1 + self.steps - self.served.best)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)
