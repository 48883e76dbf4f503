"""Measures a drafter: acceptance, speed against plain decoding and transformers, equality with plain decoding."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from drafters.config import LOSSY_RULES, BuiltinData, EvalConfig, RuntimeConfig, SamplingConfig, ServeRun
from drafters.corpus import Prompt, load_prompts, read_prompt_file
from drafters.errors import ConfigError, DataError
from drafters.generation import record_seed
from drafters.models import Drafter
from drafters.target import Target
from runtime import report as reports
from runtime.discover import choose_drafter
from runtime.engine import Engine
from runtime.identity import IdentityCheck
from runtime.metrics import Stats
from runtime.peer import TransformersPeer
from runtime.proposers.base import Proposer
from runtime.request import Result
from runtime.sampling import SamplingParams

log = logging.getLogger(__name__)

Contestant = Callable[[list[list[int]], list[SamplingParams]], list[Any]]
OURS, PLAIN, PEER = "ours", "plain", "transformers"
QUICK_NODES = 16


def evaluate(cfg: ServeRun, console: Console) -> dict[str, Any]:
    """serve.py mode=eval: measures, leaves report.json and report.png in output_dir, prints the table.

    Returns the report; raises LosslessError, after writing, when fp32 text differs from plain decoding's.
    """
    target = Target.load(cfg.target)
    drafter = choose_drafter(cfg.drafter.path, target)
    report = measure(
        target, drafter, eval_prompts(cfg.eval), cfg.runtime, cfg.eval, cfg.sampling, console, cfg.verification
    )
    reports.write(report, Path(cfg.output_dir), console)
    reports.check_lossless(report)
    return report


def eval_prompts(cfg: EvalConfig) -> list[Prompt]:
    """Prompts of the file eval.prompts, or the built-in eval split; the first eval.num_prompts of them."""
    if cfg.prompts is None:
        prompts = load_prompts(BuiltinData(eval_prompts=sys.maxsize), "eval")
    else:
        prompts = read_prompt_file(Path(cfg.prompts).expanduser())
    if cfg.num_prompts is not None and cfg.num_prompts > len(prompts):
        log.warning("eval.num_prompts is %d, there are only %d prompts: taking all", cfg.num_prompts, len(prompts))
    return prompts[: cfg.num_prompts]


def measure(
    target: Target,
    drafter: str | Path | Drafter | Proposer,
    prompts: Sequence[Prompt],
    runtime: RuntimeConfig,
    settings: EvalConfig,
    sampling: SamplingConfig,
    console: Console | None = None,
    verification: str = "coupled",
) -> dict[str, Any]:
    """The report (report.KEYS) of a drafter on prompts; every rate is a sum over a sum.

    Each prompt is answered by the drafting engine, by the same engine without drafts, and by transformers, one right
    after the other. Lays the target's weights out for decoding. Raises ConfigError when a prompt is too long.
    """
    engines = {name: Engine.load(target, d, **asdict(runtime)) for name, d in ((OURS, drafter), (PLAIN, "none"))}
    ids = _encode(engines[OURS], prompts, settings.max_new_tokens)
    params = [
        # Fields of SamplingConfig are SamplingParams' own; each prompt has noise of its own.
        SamplingParams(settings.max_new_tokens, **asdict(sampling) | {"seed": seed}, verification=verification)
        for seed in (record_seed(sampling.seed, prompt.id) for prompt in prompts)
    ]
    contestants: dict[str, Contestant] = {name: engine.generate for name, engine in engines.items()}
    if settings.compare_transformers:
        contestants[PEER] = TransformersPeer(target).generate
    _warm_up(contestants, engines, ids, params)
    rows = [_Row(prompt) for prompt in prompts]
    names = list(contestants)
    for number, group in enumerate(_groups(len(rows), runtime.batch_size, rows, console)):
        # Who starts changes from group to group, so that drift of the machine cancels.
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            _answer(name, contestants[name], group, rows, ids, params)
    lossy = verification in LOSSY_RULES
    if settings.check_identity and not lossy and (verification == "coupled" or sampling.temperature == 0):
        _check_identity(target, rows, ids, params)
    name = _shown(drafter) if isinstance(drafter, str | Path) else engines[OURS].proposer.name
    facts = {"target": target.name, "drafter": name, "temperature": sampling.temperature, "verification": verification}
    facts["lossy"] = lossy
    return _report(rows, facts | reports.environment(target), runtime.depth)


def quick_acceptance(
    drafter: Drafter | tuple[Drafter, tuple[int, ...]],
    target: Target,
    prompts: Sequence[Prompt],
    runtime: RuntimeConfig,
    max_new_tokens: int,
) -> dict[str, Any]:
    """Acceptance of a drafter still in training, by the runtime's own verify at T=0, without timing.

    Under num_draft_tokens=auto trees have QUICK_NODES nodes: sizes chosen by time would make acceptance a matter of
    the machine's load. The drafter is copied; the shared target gets its own modules back, so what training computes
    next does not depend on whether this ran.
    """
    with _borrowed(target):
        sizes = {"num_draft_tokens": QUICK_NODES} if runtime.num_draft_tokens == "auto" else {}
        engine = Engine.load(target, drafter, **asdict(runtime) | sizes)
        ids = _encode(engine, prompts, max_new_tokens)
        total = Stats()
        for result in engine.generate(ids, SamplingParams(max_new_tokens)):
            total.add(result.stats)
    return {
        "acceptance_length": total.acceptance_length,
        "acceptance_at": _acceptance_at(total, runtime.depth),
        "rounds": total.rounds,
        "emitted": total.emitted,
    }


@dataclass
class _Row:
    """What one prompt gave: our answer and plain decoding's, and per contestant tokens and seconds."""

    prompt: Prompt
    ours: Result | None = None
    plain: Result | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    identical: bool | None = None


def _shown(path: str | Path) -> str:
    """A path as reports name it: relative where it lies under the working folder, so that it holds elsewhere too."""
    full, here = Path(path).absolute(), Path.cwd()
    return str(full.relative_to(here) if full.is_relative_to(here) else path)


def _encode(engine: Engine, prompts: Sequence[Prompt], max_new_tokens: int) -> list[list[int]]:
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


def _groups(count: int, size: int, rows: list[_Row], console: Console | None) -> Iterator[range]:
    """Row numbers, runtime.batch_size at a time, with progress told between groups."""
    groups = [range(start, min(start + size, count)) for start in range(0, count, size)]
    if console is None or not console.is_terminal:
        for number, group in enumerate(groups, start=1):
            yield group
            if number % -(-len(groups) // 10) == 0 or number == len(groups):
                log.info("evaluate: %d/%d prompts, tau %.2f", group.stop, count, _total(rows).acceptance_length)
        return
    # A progress bar that redraws itself would take time from what is being measured.
    with Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("evaluate", total=count)
        for group in groups:
            yield group
            text = f"evaluate: tau {_total(rows).acceptance_length:.2f}"
            progress.update(task, completed=group.stop, description=text, refresh=True)


def _answer(
    name: str, run: Contestant, group: range, rows: list[_Row], ids: list[list[int]], params: list[SamplingParams]
) -> None:
    """Lets one contestant answer a group, and times it from ids to the last token."""
    start = perf_counter()
    answers = run([ids[i] for i in group], [params[i] for i in group])
    seconds = (perf_counter() - start) / len(group)
    for i, answer in zip(group, answers):
        row = rows[i]
        row.seconds[name] = seconds
        row.tokens[name] = len(answer if name == PEER else answer.token_ids)
        if name == OURS:
            row.ours = answer
        elif name == PLAIN:
            row.plain = answer


def _check_identity(target: Target, rows: list[_Row], ids: list[list[int]], params: list[SamplingParams]) -> None:
    """Marks each row; a difference that rounding does not explain is an error where the text is exact (fp32)."""
    check = IdentityCheck(target)
    for row, prompt_ids, own in zip(rows, ids, params):
        found = check.compare(prompt_ids, row.ours.token_ids, row.plain.token_ids, own)
        row.identical = found is None
        if found is None:
            continue
        row.ours.stats.near_ties = int(found.near_tie)
        exact = target.dtype == torch.float32
        level = logging.INFO if found.near_tie else logging.ERROR if exact else logging.WARNING
        log.log(
            level,
            "prompt %s leaves plain decoding at token %d: %s instead of %s, margin %.3g, rounding up to %.3g (%s)",
            *(row.prompt.id, found.position, found.token, found.plain_token, found.margin, found.limit),
            "near tie" if found.near_tie else "NOT a near tie",
        )


def _report(rows: list[_Row], facts: dict[str, Any], depth: int) -> dict[str, Any]:
    total = _total(rows)
    speed = {name: _speed(rows, name) for name in (OURS, PLAIN, PEER)}
    checked = rows[0].identical is not None
    report = {
        "acceptance_length": total.acceptance_length,
        "acceptance_at": _acceptance_at(total, depth),
        "rounds": total.rounds,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "tokens_per_s": speed[OURS],
        "plain_tokens_per_s": speed[PLAIN],
        "transformers_tokens_per_s": speed[PEER],
        "speedup": speed[OURS] / speed[PLAIN],
        "speedup_vs_transformers": None if speed[PEER] is None else speed[OURS] / speed[PEER],
        "identical": sum(row.identical for row in rows) if checked else None,
        "prompts": len(rows),
        "near_ties": total.near_ties if checked else None,
        "time_share": total.time_share,
        "latency_ms": _milliseconds(total),
        "by_proposer": total.by_proposer,
        "chosen_n": {str(n): total.chosen_n[n] for n in sorted(total.chosen_n)},
        "predicted": {"expected": total.predicted, "got": total.predicted_for} if total.predicted_for else None,
        **facts,
        "per_prompt": [_per_prompt(row) for row in rows],
    }
    return {key: report[key] for key in reports.KEYS}


def _per_prompt(row: _Row) -> dict[str, Any]:
    stats = row.ours.stats
    return {
        "id": row.prompt.id,
        "category": row.prompt.category,
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "emitted": stats.emitted,
        "acceptance_length": stats.acceptance_length,
        "tokens": row.tokens[OURS],
        "seconds": row.seconds[OURS],
        "plain_seconds": row.seconds[PLAIN],
        "transformers_seconds": row.seconds.get(PEER),
        "identical": row.identical,
        "text": row.ours.text,
    }


def _total(rows: list[_Row]) -> Stats:
    total = Stats()
    for row in rows:
        if row.ours is not None:
            total.add(row.ours.stats)
    return total


def _milliseconds(total: Stats) -> dict[str, float] | None:
    """Time per token of the rounds by percentile; None where no round was timed."""
    if not total.token_time.counts:
        return None
    return {name: 1e3 * seconds for name, seconds in total.token_time.percentiles().items()}


def _speed(rows: list[_Row], name: str) -> float | None:
    if name not in rows[0].seconds:
        return None
    return sum(row.tokens[name] for row in rows) / sum(row.seconds[name] for row in rows)


def _acceptance_at(stats: Stats, depth: int) -> list[float]:
    """One share per depth the drafter may reach, zeros included; none where nothing was drafted."""
    if not stats.drafted:
        return []
    return stats.acceptance_at + [0.0] * (depth - len(stats.accepted_at))


@contextmanager
def _borrowed(target: Target) -> Iterator[None]:
    """Gives the target its own layers and attention back at the end."""
    model = target.model
    modules = dict(model.named_modules())
    attention = model.config._attn_implementation
    try:
        yield
    finally:
        for name, module in modules.items():
            if name and model.get_submodule(name) is not module:
                model.set_submodule(name, module)
        model.set_attn_implementation(attention)
