"""Decoders answering the same prompts by turns: drafting engines, plain decoding, transformers; and their reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from drafters.config import LOSSY_RULES, EvalConfig, RuntimeConfig, SamplingConfig
from drafters.corpus import Prompt
from drafters.errors import ConfigError, DataError
from drafters.generation import record_seed
from drafters.models import Drafter
from drafters.target import Target
from runtime import report as reports
from runtime.engine import Engine
from runtime.identity import IdentityCheck
from runtime.loading import tuned_target
from runtime.metrics import Stats
from runtime.peer import TransformersPeer
from runtime.proposers.base import Proposer
from runtime.sampling import SamplingParams

log = logging.getLogger(__name__)

Drafting = str | Path | Drafter | Proposer
Contestant = Callable[[list[list[int]], list[SamplingParams]], list[Any]]
PLAIN, PEER = "plain", "transformers"


@dataclass
class Row:
    """What one prompt gave, by contestant: answer (a Result; ids of transformers), tokens and seconds.

    identical: by drafting contestant, whether its text is plain decoding's; empty where texts were not compared.
    """

    prompt: Prompt
    answers: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    identical: dict[str, bool] = field(default_factory=dict)


class Contest:
    """Drafting engines by name beside the same engine without drafts and transformers, all on one loaded target."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafting],
        prompts: Sequence[Prompt],
        runtime: RuntimeConfig,
        settings: EvalConfig,
        sampling: SamplingConfig,
        verification: str = "coupled",
    ) -> None:
        """Loads all; lays the target's weights out for decoding. Raises ConfigError when a prompt is too long.

        Where a drafter brings an adapter, every contestant decodes the target that it tunes.
        """
        for each in drafters.values():
            target = tuned_target(target, each)
        self.target, self.drafters, self.runtime, self.settings = target, drafters, runtime, settings
        self.sampling, self.verification = sampling, verification
        self.engines = {name: Engine.load(target, each, **asdict(runtime)) for name, each in drafters.items()}
        self.plain = Engine.load(target, "none", **asdict(runtime))
        self.ids = encode(self.plain, prompts, settings.max_new_tokens)
        self.rows = [Row(prompt) for prompt in prompts]
        self.params = self.params_at(sampling.temperature)

    def params_at(self, temperature: float) -> list[SamplingParams]:
        """Each prompt's settings at a temperature; each has noise of its own."""
        # Fields of SamplingConfig are SamplingParams' own.
        own = asdict(self.sampling) | {"temperature": temperature}
        seeds = [record_seed(self.sampling.seed, row.prompt.id) for row in self.rows]
        new = self.settings.max_new_tokens
        return [SamplingParams(new, **own | {"seed": seed}, verification=self.verification) for seed in seeds]

    def run(self, console: Console | None = None) -> None:
        """Has every contestant answer every prompt, one right after the other, and compares texts where promised."""
        engines = {**self.engines, PLAIN: self.plain}
        contestants: dict[str, Contestant] = {name: engine.generate for name, engine in engines.items()}
        if self.settings.compare_transformers:
            contestants[PEER] = TransformersPeer(self.target).generate
        _warm_up(contestants, engines, self.ids, self.params)
        names = list(contestants)
        for number, group in enumerate(_groups(self.rows, self.runtime.batch_size, list(self.engines), console)):
            # Who starts changes from group to group, so that drift of the machine cancels.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                _answer(name, contestants[name], group, self.rows, self.ids, self.params)
        if self.settings.check_identity and self._exact:
            _check_identity(self.target, list(self.engines), self.rows, self.ids, self.params)

    @property
    def _exact(self) -> bool:
        """Whether the rule promises plain decoding's text."""
        lossy = self.verification in LOSSY_RULES
        return not lossy and (self.verification == "coupled" or self.sampling.temperature == 0)

    def report(self, name: str) -> dict[str, Any]:
        """The report (report.KEYS) of one drafting contestant; every rate is a sum over a sum."""
        drafter = self.drafters[name]
        facts = {
            "target": self.target.title,
            "drafter": shown(drafter) if isinstance(drafter, str | Path) else self.engines[name].proposer.name,
            "temperature": self.sampling.temperature,
            "verification": self.verification,
            "lossy": self.verification in LOSSY_RULES,
            **reports.environment(self.target),
        }
        return _report(name, self.rows, facts, self.runtime.depth)


def shown(path: str | Path) -> str:
    """A path as reports name it: relative where it lies under the working folder, so that it holds elsewhere too."""
    full, here = Path(path).absolute(), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else path)


def encode(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
    """Ids of all prompts; too long a one is refused now, not after an hour of measuring."""
    if not prompts:
        raise DataError("there is no prompt to evaluate on. Set eval.prompts to a file, or data.eval_prompts above 0.")
    encoded = [engine.encode(list(prompt.messages)) for prompt in prompts]
    for prompt, ids in zip(prompts, encoded):
        if len(ids) + max_new_tokens > engine.max_length:
            raise ConfigError(
                f"prompt {prompt.id!r} has {len(ids)} tokens and eval.max_new_tokens is {max_new_tokens}, together "
                f"over the limit of {engine.max_length}. Lower eval.max_new_tokens, leave the prompt out, or raise "
                "runtime.max_length up to the target's own limit."
            )
    return encoded


def acceptance_at(stats: Stats, depth: int) -> list[float]:
    """One share per depth the drafter may reach, zeros included; none where nothing was drafted."""
    if not stats.drafted:
        return []
    return stats.acceptance_at + [0.0] * (depth - len(stats.accepted_at))


# ---- answering --------------------------------------------------------------------------------------------------


def _warm_up(
    contestants: dict[str, Contestant], engines: dict[str, Engine], ids: list[list[int]], params: list[SamplingParams]
) -> None:
    """Runs each contestant once, so that no allocation or first-call cost falls into a measured prompt."""
    longest = max(range(len(ids)), key=lambda i: len(ids[i]))
    for engine in engines.values():
        # The whole budget is asked for, which sizes the caches; then the answer is dropped at its first piece.
        answer = engine.stream(ids[longest], params[longest])
        next(answer)
        answer.close()
    short = replace(params[0], max_new_tokens=min(4, params[0].max_new_tokens), min_tokens=0)
    for run in contestants.values():
        run([ids[longest]], [short])


def _groups(rows: list[Row], size: int, names: list[str], console: Console | None) -> Iterator[range]:
    """Row numbers, `size` at a time, with progress told between groups."""
    count = len(rows)
    groups = [range(start, min(start + size, count)) for start in range(0, count, size)]

    def told() -> str:
        return "tau " + " / ".join(f"{_total(name, rows).acceptance_length:.2f}" for name in names)

    if console is None or not console.is_terminal:
        for number, group in enumerate(groups, start=1):
            yield group
            if number % -(-len(groups) // 10) == 0 or number == len(groups):
                log.info("evaluate: %d/%d prompts, %s", group.stop, count, told())
        return
    # A progress bar that redraws itself would take time from what is being measured.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("evaluate", total=count)
        for group in groups:
            yield group
            progress.update(task, completed=group.stop, description=f"evaluate: {told()}", refresh=True)


def _answer(
    name: str, run: Contestant, group: range, rows: list[Row], ids: list[list[int]], params: list[SamplingParams]
) -> None:
    """Lets one contestant answer a group, and times it from ids to the last token."""
    start = perf_counter()
    answers = run([ids[i] for i in group], [params[i] for i in group])
    seconds = (perf_counter() - start) / len(group)
    for i, answer in zip(group, answers):
        rows[i].answers[name] = answer
        rows[i].seconds[name] = seconds
        rows[i].tokens[name] = len(answer if name == PEER else answer.token_ids)


def _check_identity(
    target: Target, names: list[str], rows: list[Row], ids: list[list[int]], params: list[SamplingParams]
) -> None:
    """Marks each row; a difference that rounding does not explain is an error where the text is exact (fp32)."""
    check = IdentityCheck(target)
    for row, prompt_ids, own in zip(rows, ids, params):
        for name in names:
            answer = row.answers[name]
            found = check.compare(prompt_ids, answer.token_ids, row.answers[PLAIN].token_ids, own)
            row.identical[name] = found is None
            if found is None:
                continue
            answer.stats.near_ties = int(found.near_tie)
            exact = target.dtype == torch.float32
            level = logging.INFO if found.near_tie else logging.ERROR if exact else logging.WARNING
            log.log(
                level,
                "prompt %s leaves plain decoding at token %d: %s instead of %s, margin %.3g, rounding up to %.3g (%s)",
                *(row.prompt.id, found.position, found.token, found.plain_token, found.margin, found.limit),
                ("near tie" if found.near_tie else "NOT a near tie") + (f", {name}" if len(names) > 1 else ""),
            )


# ---- reporting --------------------------------------------------------------------------------------------------


def _report(ours: str, rows: list[Row], facts: dict[str, Any], depth: int) -> dict[str, Any]:
    total = _total(ours, rows)
    speed, plain, peer = (_speed(rows, name) for name in (ours, PLAIN, PEER))
    checked = bool(rows[0].identical)
    report = {
        "acceptance_length": total.acceptance_length,
        "acceptance_at": acceptance_at(total, depth),
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "tokens_per_s": speed,
        "plain_tokens_per_s": plain,
        "transformers_tokens_per_s": peer,
        "speedup": speed / plain,
        "speedup_vs_transformers": None if peer is None else speed / peer,
        "identical": sum(row.identical[ours] for row in rows) if checked else None,
        "prompts": len(rows),
        "near_ties": total.near_ties if checked else None,
        "time_share": total.time_share,
        "latency_ms": _milliseconds(total),
        "by_proposer": total.by_proposer,
        "chosen_n": {str(n): total.chosen_n[n] for n in sorted(total.chosen_n)},
        "predicted": {"expected": total.predicted, "got": total.predicted_for} if total.predicted_for else None,
        **facts,
        "per_prompt": [_per_prompt(ours, row) for row in rows],
    }
    return {key: report[key] for key in reports.KEYS}


def _per_prompt(ours: str, row: Row) -> dict[str, Any]:
    answer = row.answers[ours]
    stats = answer.stats
    return {
        "id": row.prompt.id,
        "category": row.prompt.category,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "acceptance_length": stats.acceptance_length,
        "tokens": row.tokens[ours],
        "seconds": row.seconds[ours],
        "plain_seconds": row.seconds[PLAIN],
        "transformers_seconds": row.seconds.get(PEER),
        "identical": row.identical.get(ours),
        "text": answer.text,
    }


def _total(name: str, rows: list[Row]) -> Stats:
    total = Stats()
    for row in rows:
        if name in row.answers:
            total.add(row.answers[name].stats)
    return total


def _milliseconds(total: Stats) -> dict[str, float] | None:
    """Time per token of the rounds by percentile; None where no round was timed."""
    if not total.token_time.counts:
        return None
    return {name: 1e3 * seconds for name, seconds in total.token_time.percentiles().items()}


def _speed(rows: list[Row], name: str) -> float | None:
    if name not in rows[0].seconds:
        return None
    return sum(row.tokens[name] for row in rows) / sum(row.seconds[name] for row in rows)
