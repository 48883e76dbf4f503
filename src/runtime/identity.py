"""Equality with plain decoding: where two texts part, and whether the target itself was undecided there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from drafters.errors import OutriderError
from drafters.target import Target
from runtime.forward import TargetRunner
from runtime.processors import Processors
from runtime.sampling import SamplingParams, keyed_gumbel
from runtime.tree import DraftTree

PROBE_TEXT = (
    "A lighthouse keeper counts the ships that pass. On Monday there are 12, on Tuesday 7, and on Wednesday only 3. "
    "How many ships passed in these three days, and which day was the busiest?"
)
PROBE_TOKENS = 64


class LosslessError(OutriderError):
    """Text differed from plain decoding where it must not; scripts leave with exit_code."""

    exit_code = 3


@dataclass(frozen=True)
class Divergence:
    """The first place where an answer leaves plain decoding.

    position: index in the answer; token, plain_token: what each emitted there (None: it had ended). margin: how far
    below the best score the worse of the two lies; limit: margins under it are rounding.
    """

    position: int
    token: int | None
    plain_token: int | None
    margin: float
    limit: float

    @property
    def near_tie(self) -> bool:
        """True when rounding alone explains the difference."""
        return self.margin < self.limit


class IdentityCheck:
    """Compares answers with plain decoding's; the target's rounding noise is measured once, when first needed."""

    def __init__(self, target: Target):
        self.target = target

    def compare(
        self, prompt_ids: list[int], answer: list[int], plain: list[int], params: SamplingParams
    ) -> Divergence | None:
        """None where both answers hold the same ids, else the first difference."""
        if answer == plain:
            return None
        shared = min(len(answer), len(plain))
        position = next((i for i in range(shared) if answer[i] != plain[i]), shared)
        pair = [ids[position] if position < len(ids) else None for ids in (answer, plain)]
        # One text ending where the other goes on, without another token before, is never rounding.
        margin = float("inf") if None in pair else self._margin(prompt_ids, plain[:position], pair, params)
        return Divergence(position, pair[0], pair[1], margin, 2 * self.noise / (params.temperature or 1.0))

    @cached_property
    def noise(self) -> float:
        """Largest logit difference between one forward over a text and the same text token by token."""
        ids = self.target.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"][:PROBE_TOKENS]
        runner = TargetRunner(self.target, 1, len(ids), ())
        whole = runner.logits(runner.prefill(0, ids)[0][0])
        runner.cache.release(0)
        rows = [runner.prefill(0, ids[:1])[0]]
        for position, token in enumerate(ids[1:], start=1):
            hidden, _, slots = runner.run(0, [DraftTree.root(token)], [position])
            runner.cache.commit(0, slots[0], slots[0])
            rows.append(hidden)
        return float((runner.logits(torch.cat(rows, 1)[0]) - whole).abs().max())

    def _margin(self, prompt_ids: list[int], shared: list[int], pair: list[int], params: SamplingParams) -> float:
        scores = self._scores(prompt_ids, shared, params)
        return float(scores.max() - scores[pair].min())

    def _scores(self, prompt_ids: list[int], answer: list[int], params: SamplingParams) -> Tensor:
        """What sampling.choose takes the largest of, after the prompt and the answer so far: [V], from one forward."""
        ids = [*prompt_ids, *answer]
        runner = TargetRunner(self.target, 1, len(ids), ())
        logits = runner.logits(runner.prefill(0, ids)[0][0, -1:])  # packed layers take rows, not a vector
        processors = Processors.build(params, len(prompt_ids), self.target.eos_ids, logits.device)
        if processors is not None:
            logits = processors.apply(logits, DraftTree.root(ids[-1]), ids)
        logits = logits[0]
        if params.temperature == 0.0:
            return logits
        noise = keyed_gumbel(params.seed, len(ids), logits.shape[-1]).to(logits.device)
        return logits.double() / params.temperature + noise
