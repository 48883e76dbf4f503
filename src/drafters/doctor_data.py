"""What the doctor measures of training answers and of a drafter on them, without decoding anything."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import linear_regression
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from drafters.batches import collate, fit
from drafters.chat import render_prompt
from drafters.config_drafter import DrafterConfig
from drafters.corpus import ResponseRecord
from drafters.errors import DataError
from drafters.features import LOGIT_ELEMENTS, BatchInputs, OnlineFeatures
from drafters.logger import FILE_NAME
from drafters.measures import Boundaries, Curve, Forced, OnPolicy
from drafters.models.base import Drafter
from drafters.models.layout import Layout, Step
from drafters.target import Target

SAMPLE = 16  # training answers the target reads again
SAID = ("alpha", "Zebra 9", "(7)")  # contents that share neither first nor last token
NEAR = 4  # tokens beyond the template's own end within which a shifted boundary is looked for
WARMING = 0.2  # of a run: its first steps say nothing about how learning goes on


def spread(records: Sequence[ResponseRecord], count: int) -> list[ResponseRecord]:
    """At most `count` of the records, evenly spaced."""
    count = min(count, len(records))
    return [records[index * len(records) // count] for index in range(count)]


# ---- prompts and answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edges:
    """Ids that every prompt of a template begins with (any of `starts`) and ends with."""

    starts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]


def edges(tokenizer: PreTrainedTokenizerBase) -> Edges:
    """The edges of a tokenizer's template, with and without a system turn."""
    alone = [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in SAID]
    starts = [_shared(alone)]
    try:
        led = [
            render_prompt(tokenizer, [{"role": "system", "content": text}, {"role": "user", "content": text}])
            for text in SAID
        ]
        starts.append(_shared(led))
    except DataError:
        pass  # a template without system turns has one start
    return Edges(tuple(starts), _shared([ids[::-1] for ids in alone])[::-1])


def _shared(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The longest beginning that all rows have."""
    size = next((i for i, tokens in enumerate(zip(*rows)) if len(set(tokens)) > 1), min(map(len, rows)))
    return tuple(rows[0][:size])


def shift_of(record: ResponseRecord, found: Edges) -> int | None:
    """Tokens by which the prompt's end lies behind the template's (before it: < 0); None: not of this template."""
    ids, at, size = (*record.prompt_ids, *record.response_ids), len(record.prompt_ids), len(found.end)
    if not any(ids[: len(start)] == start for start in found.starts):
        return None
    for shift in sorted(range(-size - NEAR, size + NEAR + 1), key=abs):
        stop = at - shift
        if size <= stop <= len(ids) and ids[stop - size : stop] == found.end:
            return shift
    return None


def boundaries(records: Sequence[ResponseRecord], found: Edges) -> tuple[Boundaries, list[ResponseRecord]]:
    """Records counted by their boundary, and those where it is right."""
    shifts = [shift_of(record, found) for record in records]
    counts = Counter(shift for shift in shifts if shift)
    shift = counts.most_common(1)[0][0] if counts else None
    right = [record for record, shift in zip(records, shifts) if shift == 0]
    return Boundaries(len(records), counts.total(), shifts.count(None), shift), right


def mask_shares(records: Sequence[ResponseRecord], row_length: int) -> tuple[float, float]:
    """(share of the packed tokens that are trained on, share of the answers' tokens beyond row_length)."""
    usable = [records[index] for index in fit(records, row_length).usable]
    kept = sum(min(len(r.response_ids), row_length - len(r.prompt_ids)) for r in usable)
    prompts = sum(len(record.prompt_ids) for record in usable)
    return kept / (kept + prompts), 1 - kept / sum(len(record.response_ids) for record in records)


# ---- what the target says to them -------------------------------------------------------------------------------


class Reading:
    """Sums over answers that the target has read: of greedy and of sampled ones, and of its choices."""

    def __init__(self, target: Target, t2d: Tensor) -> None:
        """t2d bool [V]: the draft vocabulary."""
        self.target, self.t2d = target, t2d.to(target.device)
        self.greedy = self.agreed = self.sampled = self.tokens = 0
        self.nll = self.excess = 0.0
        self.inside = self.choices_inside = 0

    def read(self, records: Iterable[ResponseRecord]) -> Self:
        """Let the target read answers; raises DataError on an id outside its vocabulary."""
        for record in records:
            self._read(record)
        return self

    @torch.no_grad()
    def _read(self, record: ResponseRecord) -> None:
        ids = torch.tensor([record.prompt_ids + record.response_ids], device=self.target.device)
        if int(ids.max()) >= self.target.vocab_size:
            raise DataError(
                f"record {record.id}: token id {int(ids.max())} is outside the target's vocabulary of "
                f"{self.target.vocab_size}. Collect the answers with this target."
            )
        length = ids.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).tril()
        _, last = self.target.hidden(ids, torch.arange(length, device=ids.device)[None], mask, ())
        start = len(record.prompt_ids)
        rows = max(1, LOGIT_ELEMENTS // self.target.vocab_size)
        for hidden, said in zip(last[0, start - 1 : -1].split(rows), ids[0, start:].split(rows)):
            self._count(self.target.logits(hidden), said, record.temperature)

    def _count(self, logits: Tensor, said: Tensor, temperature: float) -> None:
        choice = logits.argmax(-1)
        logs = torch.log_softmax(logits / (temperature or 1.0), -1)
        nll = -logs.gather(1, said[:, None]).sum()
        self.tokens += len(said)
        self.nll += float(nll)
        if temperature == 0:
            self.greedy += len(said)
            self.agreed += int((choice == said).sum())
        else:
            self.sampled += len(said)
            self.excess += float(nll + torch.special.entr(logs.exp()).neg().sum())
        self.inside += int(self.t2d[said].sum())
        self.choices_inside += int(self.t2d[choice].sum())

    def on_policy(self) -> OnPolicy | None:
        """Scores of what was read; None where nothing was."""
        if not self.tokens:
            return None
        return OnPolicy(
            self.tokens,
            self.agreed / self.greedy if self.greedy else None,
            self.nll / self.tokens,
            self.excess / self.sampled if self.sampled else None,
        )


# ---- what the drafter says to them ------------------------------------------------------------------------------


@torch.no_grad()
def teacher_forced(
    drafter: Drafter,
    target: Target,
    taps: tuple[int, ...],
    records: Sequence[ResponseRecord],
    cfg: DrafterConfig,
    steps: int,
    roots: Mapping[str, Sequence[int]] | None = None,
) -> Forced:
    """Accuracy of a trained drafter on answers, `steps` deep.

    target: the one that was trained against, without an adapter the drafter brings. roots: by record id, the tokens
    whose successors are drafted; None: all that have one in the answer.
    """
    own = drafter.clone()
    graph = own.training_graph(cfg, target).eval()
    source = BatchInputs(target.device) if own.runs_target else OnlineFeatures(target, taps, own.t2d, own.dtype)
    total = torch.zeros(4, steps, dtype=torch.float64)
    for record in records:
        batch = collate([record], [(0,)], len(record.prompt_ids) + len(record.response_ids))
        layout = own.layout(batch, steps)
        if roots is not None:
            layout = restricted(layout, roots[record.id])
        total += graph(layout, source(batch, layout))[1][:4].cpu().double()
    right, so_far, asked = total[1], total[2], total[3].clamp(min=1)
    return Forced((right / asked).tolist(), (so_far / asked).tolist())


def restricted(layout: Layout, roots: Sequence[int]) -> Layout:
    """A layout of one row that drafts after these tokens alone; the rest is context."""
    first = layout.steps[0]
    drafted = layout.teacher[first.teacher] + 1  # the token that a position drafts first
    keeps = torch.isin(drafted, torch.tensor(roots, dtype=torch.int64) + 1)
    steps: list[Step] = []
    before = None
    for step in layout.steps:
        if before is not None:
            keeps = before[step.kept]
        kept = step.kept[keeps] if before is None else (before.cumsum(0) - 1)[step.kept[keeps]]
        count = torch.cat((torch.zeros(1, dtype=torch.int64), keeps.cumsum(0)))
        segments = [
            replace(each, q_start=int(count[each.q_start]), q_end=int(count[each.q_end])) for each in step.segments
        ]
        steps.append(
            Step(
                kept=kept,
                reach=step.reach[keeps],
                position_ids=step.position_ids[keeps],
                tokens=step.tokens[keeps],
                teacher=step.teacher[keeps],
                segments=[each for each in segments if each.q_end > each.q_start],
            )
        )
        before = keeps
    return replace(layout, steps=steps)


# ---- how learning went ------------------------------------------------------------------------------------------


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl but for one cut short by a kill; none where it kept none."""
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def learning_curve(rows: Sequence[dict[str, Any]], tokens_per_step: float, tau: float) -> Curve | None:
    """Fit the best-founded metric of a log against the logarithm of tokens seen; None where there are too few points.

    Held-out tau where it was measured four times, held-out accuracy likewise, else accuracy in training at full depth.
    A gain of accuracy is taken to raise tau - 1 in proportion.
    """
    last = max((row["step"] for row in rows), default=0)
    depth = max((row["train/ttt_steps"] for row in rows if "train/ttt_steps" in row), default=0)
    full = [row for row in rows if "train/acc_0" not in row or row["train/ttt_steps"] == depth]
    for metric, enough in (("eval/acceptance_length", 4), ("eval/acc_0", 4), ("train/acc_0", 8)):
        points = {
            row["step"] * tokens_per_step: row[metric]
            for row in full
            if row.get(metric) is not None and row["step"] > WARMING * last
        }
        if len(points) < enough:
            continue
        b, a = linear_regression([math.log(tokens) for tokens in points], list(points.values()))
        tokens = last * tokens_per_step
        rise = b * math.log(2)
        if metric != "eval/acceptance_length":
            now = min(1.0, max(1e-6, a + b * math.log(tokens)))
            rise = min(rise, 1 - now) * (tau - 1) / now
        return Curve(metric, a, b, len(points), tokens, rise)
    return None
