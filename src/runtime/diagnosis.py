"""train.py doctor=FOLDER: measures a trained drafter, its data and its serving, and says why its tau is low."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from drafters import doctor_data as data
from drafters.artifacts import atomic_write_json
from drafters.config import RuntimeConfig, TrainRun
from drafters.contract import TARGET_HASHES
from drafters.corpus import Prompt, ResponseRecord
from drafters.doctor import Finding, diagnose
from drafters.generation import record_seed
from drafters.measures import Coverage, Forced, Group, Measures, Served
from drafters.saved_run import NAME as SETTINGS_NAME
from drafters.schedule import hold_out
from drafters.threads import set_threads
from runtime.contest import acceptance_at, encode, shown
from runtime.engine import Engine, EngineConfig
from runtime.evaluate import borrowed
from runtime.loading import load_proposer
from runtime.metrics import Stats
from runtime.pipeline import held_out_prompts
from runtime.proposers.watch import Watched
from runtime.request import Result
from runtime.sampling import SamplingParams
from runtime.subject import Subject, open_subject

log = logging.getLogger(__name__)

JSON_NAME = "doctor.json"
PROMPTS = 12  # held-out prompts decoded, four times each
HELD = 8  # records held out of training that are enough to see how it does on new text
LENGTHS = (32, 64, 128)  # upper ends of the buckets of answer lengths


def run_doctor(run: TrainRun, console: Console) -> list[Finding]:
    """Leaves doctor.json in the run's folder (of an export: in output_dir) and prints the findings, costliest first.

    Raises ConfigError when the folder says too little and the command line does not say the rest.
    """
    set_threads(None)
    folder = Path(run.doctor).expanduser()
    subject = open_subject(folder, run)
    found = measures(subject)
    findings = diagnose(found)
    out_dir = folder if (folder / SETTINGS_NAME).is_file() else Path(run.output_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    report = {
        "folder": shown(run.doctor),
        "findings": [asdict(finding) for finding in findings],
        "measures": found.to_json(),
    }
    atomic_write_json(out_dir / JSON_NAME, report)
    show(found, findings, console)
    console.print(Text(f"doctor: {out_dir / JSON_NAME}", style="dim"), soft_wrap=True)
    return findings


# ---- measuring --------------------------------------------------------------------------------------------------


def measures(subject: Subject) -> Measures:
    """Everything the rules read."""
    run, records = subject.run, subject.records
    trained, held = hold_out(records)
    bounds, right = data.boundaries(records, data.edges(subject.base.tokenizer))
    log.info("doctor: %d answers, %d of them with the template's own boundary", len(records), len(right))
    prompts = held_out_prompts(run)[:PROMPTS]
    served, plain = serve(subject, prompts)
    log.info("doctor: tau %.2f on %d held-out prompts", served.tau, len(prompts))
    sample, sound = data.spread(trained, data.SAMPLE), {record.id for record in right}
    vocabulary = subject.drafter.t2d
    judged = data.Reading(subject.base, vocabulary).read(record for record in sample if record.id in sound)
    others = data.Reading(subject.base, vocabulary).read(record for record in sample if record.id not in sound)
    new = data.Reading(subject.target, vocabulary).read(plain)
    tokens = judged.tokens + others.tokens
    coverage = Coverage(
        (judged.inside + others.inside) / tokens,
        (judged.choices_inside + others.choices_inside) / tokens,
        new.choices_inside / new.tokens,
    )
    mask_share, cut_share = data.mask_shares(records, subject.contract.max_length)
    temperatures = {record.temperature for record in records}
    forced = [
        data.teacher_forced(subject.drafter, subject.base, subject.taps, texts, subject.settings, subject.steps)
        for texts in _alike(sample, held, plain, run.eval.max_new_tokens)
    ]
    curve = None
    if subject.tokens_per_step is not None:
        rows = data.read_metrics(subject.folder)
        curve = data.learning_curve(rows, subject.tokens_per_step, served.best)
    return Measures(
        steps=subject.steps,
        distinct_tokens=sum(len(record.response_ids) for record in trained),
        temperature=temperatures.pop() if len(temperatures) == 1 else None,
        boundaries=bounds,
        on_policy=judged.on_policy(),
        coverage=coverage,
        mask_share=mask_share,
        cut_share=cut_share,
        trained=forced[0],
        held_out=forced[1],
        served=served,
        curve=curve,
        other_target=_other_target(subject),
    )


def _alike(
    trained: list[ResponseRecord], held: list[ResponseRecord], plain: list[ResponseRecord], longest: int
) -> tuple[list[ResponseRecord], list[ResponseRecord]]:
    """Training answers and new ones to compare: records held out of training, or, where they are too few, plain
    decoding's answers to other prompts and as much of the training answers, for an answer's first tokens are hard."""
    if len(held) >= HELD:
        return trained, data.spread(held, data.SAMPLE)
    return [replace(record, response_ids=record.response_ids[:longest]) for record in trained], plain


def _other_target(subject: Subject) -> str | None:
    """The first hash in which the target that answered differs from this one."""
    mine = subject.base.fingerprint
    return next((name for name in TARGET_HASHES if subject.answered_by.get(name) != mine[name]), None)


def serve(subject: Subject, prompts: Sequence[Prompt]) -> tuple[Served, list[ResponseRecord]]:
    """How the drafter serves prompts, and plain decoding's answers to them; the target gets its own layers back."""
    run, drafting = subject.run, (subject.drafter, subject.taps)
    new = run.eval.max_new_tokens
    one_sequence = {"num_draft_tokens": subject.steps + 1, "depth": subject.steps, "top_k": 1}
    with borrowed(subject.target):
        plain = _engine(subject, "none", run.runtime)
        ids = encode(plain, prompts, new)
        answers = plain.generate(ids, SamplingParams(new))
        usual = _engine(subject, drafting, run.runtime)
        usual.generate(ids[:1], SamplingParams(2))  # first calls cost more
        cold = usual.generate(ids, SamplingParams(new))
        seeds = [record_seed(0, prompt.id) for prompt in prompts]
        warm = usual.generate(ids, [SamplingParams(new, temperature=1.0, seed=seed) for seed in seeds])
        runtime = replace(run.runtime, **one_sequence)
        inner = load_proposer(drafting, subject.target, EngineConfig(**asdict(runtime)))
        watched = Watched(inner)
        _engine(subject, watched, runtime).generate(ids, SamplingParams(new))
    texts = [
        ResponseRecord(prompt.id, prompt.category, own, list(answer.token_ids), answer.finish_reason, 0.0, 0)
        for prompt, own, answer in zip(prompts, ids, answers)
    ]
    chain_at, forced_at = _parity(subject, texts, watched)
    total = _sum(cold)
    categories = [prompt.category for prompt in prompts]
    served = Served(
        tau=total.acceptance_length,
        acceptance_at=acceptance_at(total, run.runtime.depth),
        chain_tau=1 + sum(chain_at),
        chain_at=chain_at,
        forced_tau=1 + sum(forced_at),
        forced_at=forced_at,
        tau_t1=_sum(warm).acceptance_length,
        rounds=total.rounds,
        draft_share=None if total.time_share is None else total.time_share["draft"],
        plain_share=total.chosen_n[0] / max(1, total.rounds),
        by_category=_groups(cold, categories.__getitem__),
        by_length=_groups(cold, lambda index: _bucket(len(cold[index].token_ids))),
    )
    return served, texts


def _parity(subject: Subject, texts: Sequence[ResponseRecord], watched: Watched) -> tuple[list[float], list[float]]:
    """Accepted by depth, as served and as teacher forcing has it, in the rounds that had room for every depth."""
    roots: dict[str, list[int]] = {}
    accepted = []
    for text in texts:
        at, end = len(text.prompt_ids), len(text.prompt_ids) + len(text.response_ids)
        roots[text.id] = []
        for emitted in watched.rounds.get(tuple(text.prompt_ids), []):
            if at + subject.steps + 1 < end:
                roots[text.id].append(at)
                accepted.append(emitted - 1)
            at += emitted
    count = max(1, len(accepted))
    served = [sum(each >= depth for each in accepted) / count for depth in range(1, subject.steps + 1)]
    forced = data.teacher_forced(
        subject.drafter, subject.base, subject.taps, texts, subject.settings, subject.steps, roots
    )
    return served, forced.right_so_far


def _engine(subject: Subject, drafter: object, runtime: RuntimeConfig) -> Engine:
    return Engine.load(subject.target, drafter, **asdict(runtime))


def _sum(results: Sequence[Result]) -> Stats:
    total = Stats()
    for result in results:
        total.add(result.stats)
    return total


def _groups(results: Sequence[Result], name: Callable[[int], str]) -> dict[str, Group]:
    """tau by group; name: of the group of the result at an index."""
    members: dict[str, list[Result]] = {}
    for index, result in enumerate(results):
        members.setdefault(name(index), []).append(result)
    sums = {key: _sum(found) for key, found in sorted(members.items())}
    return {key: Group(total.acceptance_length, total.rounds) for key, total in sums.items()}


def _bucket(tokens: int) -> str:
    top = next((size for size in LENGTHS if tokens <= size), None)
    return f"over {LENGTHS[-1]} tokens" if top is None else f"up to {top} tokens"


# ---- telling ----------------------------------------------------------------------------------------------------


def show(found: Measures, findings: Sequence[Finding], console: Console) -> None:
    """Prints what was measured in a few lines, then the findings."""
    served = found.served
    lines = [
        f"served     tau {served.tau:.2f} at temperature 0, {served.tau_t1:.2f} at 1; one draft sequence "
        f"{served.chain_tau:.2f} ({served.rounds} rounds, {served.plain_share:.0%} of them without a draft)",
        f"forced     {_forced(found.trained)} on training answers, {_forced(found.held_out)} on new ones",
        f"data       {found.boundaries.records:,} answers, {found.distinct_tokens:,} tokens trained on; "
        f"{found.mask_share:.0%} of the packed tokens",
        f"coverage   {found.coverage.choices:.1%} of the target's choices on training answers, "
        f"{found.coverage.held_out:.1%} on new ones",
    ]
    shares = ", ".join(f"{share:.1%}" for share in served.acceptance_at)
    lines.append(f"{'depth':<10} {shares or 'nothing accepted'}")
    for what, groups in (("category", served.by_category), ("length", served.by_length)):
        lines.append(f"{what:<10} " + ", ".join(f"{name} {group.tau:.2f}" for name, group in groups.items()))
    console.print(Text("\n".join(lines)), soft_wrap=True)
    if not findings:
        console.print(Text("nothing found that costs tau", "bold green"))
    for number, finding in enumerate(findings, start=1):
        console.print(Text(f"\n{number}. {finding.cause}  (about {finding.effect:.2f} of tau)", "bold"))
        console.print(Text(f"   {finding.evidence}"), soft_wrap=True)
        console.print(Text(f"   -> {finding.advice}", "green"), soft_wrap=True)


def _forced(forced: Forced) -> str:
    return f"tau {forced.tau:.2f} (first draft right {forced.acc[0]:.0%})"
