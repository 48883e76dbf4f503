"""The three scripts' work, step by step: collect, train, export, measure."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from drafters import chat as chat_templates
from drafters import checkpoint
from drafters.artifacts import MANIFEST_NAME, joined_folders, verify_folder, write_folder
from drafters.config import (
    BuiltinData,
    DataConfig,
    DistillRun,
    MagpieData,
    SamplingConfig,
    ServeRun,
    TrainRun,
)
from drafters.config_check import to_dict
from drafters.contract import Contract
from drafters.corpus import Prompt, load_prompts
from drafters.drift import DRIFT_NAME, measure_drift
from drafters.errors import ConfigError
from drafters.export.card import DataSummary, model_card
from drafters.export.native import KIND, describe_drafter, export_drafter
from drafters.features import shared_taps
from drafters.held_out import held_out_batches
from drafters.logger import Logger
from drafters.models import FAMILIES, Drafter
from drafters.responses import (
    RECORDS_NAME,
    ResponseSet,
    collect,
    join,
    read_responses,
    regenerate_slice,
)
from drafters.schedule import hold_out
from drafters.store import FOLDER, FeatureStore
from drafters.target import Target
from drafters.threads import set_threads
from drafters.trainer import BEST, TrainResult, train
from drafters.training_facts import TRAINING_NAME, TrainingFacts, read_training
from runtime import report as reports
from runtime.beginning import make_drafter
from runtime.collecting import generator, recording
from runtime.compare import compare
from runtime.engine import Engine
from runtime.evaluate import borrowed, eval_prompts, evaluate, measure, quick_acceptance
from runtime.importing import import_drafter
from runtime.packing import prepare
from runtime.terminal import chat, generate_once

log = logging.getLogger(__name__)

REGENERATED = 4  # kept responses answered again, to see that they are this target's
REGENERATED_TOKENS = 64  # of each: another target, or the same in another form, parts from them sooner
QUICK_PROMPTS = 8  # held-out prompts for acceptance while training
POLL_SECONDS = 1.0


def command_line() -> str:
    """The command as typed, the script by its name alone."""
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


# ---- serve


def run_serve(run: ServeRun, console: Console) -> None:
    """serve.py: measure, compare, generate once, chat, or import a drafter made elsewhere."""
    set_threads(None)
    modes = {"eval": evaluate, "compare": compare, "generate": generate_once, "chat": chat}
    if run.mode == "import":
        import_drafter(run, console, command_line())
    else:
        modes[run.mode](run, console)


# ---- collect


def run_distill(run: DistillRun, console: Console) -> ResponseSet:
    """distill.py: leave output_dir/responses.jsonl and its manifest; inspect=N shows N rows."""
    set_threads(None)
    target = Target.load(run.target)
    found = collect_responses(run.data, target, Path(run.output_dir), console, run.features)
    counts = found.meta["counts"]
    console.print(
        f"{found.folder / RECORDS_NAME}: {counts['records']} records, {counts['response_tokens']} response tokens",
        soft_wrap=True,
        highlight=False,
    )
    rows = [
        (record.prompt_ids + record.response_ids, [False] * len(record.prompt_ids) + [True] * len(record.response_ids))
        for record in found.records[: run.inspect]
    ]
    for view in chat_templates.colour_rows(target.tokenizer, rows):
        console.print(view)
    return found


def collect_responses(
    data: DataConfig, target: Target, folder: Path, console: Console, features: bool = False
) -> ResponseSet:
    """Have the target answer the source's training prompts into `folder`; goes on where a killed run stopped.

    features: also keep the hidden states that drafters tap by default, in folder/features.
    """
    engine = Engine.load(target, "none", batch_size=data.batch_size)
    answers = generator(engine, data.temperature, data.max_new_tokens)
    store = FeatureStore(target, shared_taps(target), folder / FOLDER) if features else None
    if store is not None:
        answers = recording(target, store, data)
    turns = None
    if isinstance(data, MagpieData):
        turns = generator(engine, data.user_temperature, data.max_prompt_tokens)
    prompts = load_prompts(data)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        found = collect(
            prompts,
            target,
            answers,
            data,
            folder,
            generate_user_turn=turns,
            progress=progress if console.is_terminal else None,
            command=command_line(),
        )
    if store is not None:
        store.flush()
        log.info("%s: %.2f GB of hidden states", store.folder, store.size() / 1e9)
    return found


def find_responses(run: TrainRun, console: Console) -> ResponseSet:
    """The records to train on: those of data.responses, or collected now into output_dir/responses by rank 0.

    Uses a target of its own and drops it: decoding lays weights out in another way, and what training computes must
    not depend on whether this process collected anything.
    """
    given = given_responses(run)
    if given != run.data.responses:
        log.info("training on the answers kept in %s; with any data.* setting the target answers anew", given)
    if given is None:
        folder = Path(run.output_dir) / "responses"
        if int(os.environ.get("RANK", "0")) == 0:
            return collect_responses(run.data, Target.load(run.target), folder, console)
        while not (folder / MANIFEST_NAME).exists():
            time.sleep(POLL_SECONDS)
        return read_responses(folder)
    sets = [read_responses(folder) for folder in joined_folders(str(given))]
    if int(os.environ.get("RANK", "0")) == 0:
        target = Target.load(run.target)
        for found in sets:
            check_responses(found, target)
    return join(sets)


def given_responses(run: TrainRun) -> str | None:
    """The folders of answers to train on: data.responses, or the target's kept ones where no data.* is set."""
    kept = run.target.kept_responses
    return kept if run.data == BuiltinData() and kept is not None else run.data.responses


def check_responses(found: ResponseSet, target: Target) -> tuple[int, int]:
    """Refuse responses of another target, answer a few again and log how many are token-equal: (equal, compared)."""
    found.require_target(target)
    settings = found.meta["settings"]
    engine = Engine.load(target, "none", batch_size=REGENERATED)
    tokens = min(REGENERATED_TOKENS, settings["data.max_new_tokens"])
    again = generator(engine, settings["data.temperature"], tokens)
    equal, compared = regenerate_slice(found.records, again, REGENERATED, tokens)
    log.info(
        "%s: %d of %d responses generated again are token-equal (up to %d tokens of each)",
        found.folder, equal, compared, tokens,
    )  # fmt: skip
    return equal, compared


# ---- train


def run_train(run: TrainRun, console: Console) -> dict[str, Any] | None:
    """train.py: leave output_dir/export and output_dir/report.json; returns the report on rank 0, None elsewhere.

    Raises KeyboardInterrupt when a signal stopped the training, which is then saved and goes on with the same command.
    """
    out_dir = Path(run.output_dir)
    held_out = held_out_prompts(run)
    responses = find_responses(run, console)
    target = Target.load(run.target)
    records = responses.records[: run.trainer.max_records]
    drafter = make_drafter(run, target, responses.records)  # counting tokens costs nothing: all answers have a say
    logger = Logger(out_dir, run.logger, to_dict(run))

    taps = taps_of(run, target)
    quick = held_out[:QUICK_PROMPTS]

    def acceptance(model: Drafter) -> dict[str, Any]:
        return quick_acceptance((model, taps), target, quick, run.runtime, run.eval.max_new_tokens)

    try:
        with borrowed(target):
            result = train(drafter, target, records, run, out_dir, acceptance, logger, console, prepare)
        return _finish(run, drafter, target, responses, held_out, result, console, logger)
    finally:
        logger.close()


def _finish(
    run: TrainRun,
    drafter: Drafter,
    target: Target,
    responses: ResponseSet,
    held_out: Sequence[Prompt],
    result: TrainResult,
    console: Console,
    logger: Logger,
) -> dict[str, Any] | None:
    """What follows the last step: the best weights, what is measured of them, the export and its report."""
    out_dir, records = Path(run.output_dir), responses.records[: run.trainer.max_records]
    if result.stopped:
        log.warning("stopped and saved at step %d of %d; the same command goes on", result.step, result.total_steps)
        raise KeyboardInterrupt
    if int(os.environ.get("RANK", "0")) != 0:
        return None
    best = checkpoint.find(out_dir / "checkpoints" / BEST)
    if best is not None:
        checkpoint.load_weights(best, drafter)
    tuned, held = drafter.tuned(target), hold_out(records)[1]
    drift = None if tuned is target else measure_drift(target, tuned, held, run.trainer.row_length)
    drafter.measure(held_out_batches(drafter, tuned, records, run))
    tokens = sum(len(record.response_ids) for record in records)
    data = DataSummary(responses.meta["settings"]["data.source"], len(records), tokens, self_generated=True)
    facts = result.facts
    if run.init_from is not None:
        facts = facts.after(read_training(Path(run.init_from).expanduser()))
    return export_and_measure(run, drafter, tuned, data, held_out, facts, console, logger, drift)


def export_and_measure(
    run: TrainRun,
    drafter: Drafter,
    target: Target,
    data: DataSummary,
    held_out: Sequence[Prompt],
    training: TrainingFacts,
    console: Console,
    logger: Logger,
    drift: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Export the drafter, measure what was exported, and put the figures into report.json and the export's card.

    target: as the drafter drafts for it; drift: how far it is from the target that was given, where it was tuned.
    """
    out_dir = Path(run.output_dir)
    contract = describe_drafter(
        drafter, target, taps=taps_of(run, target), steps=run.drafter.steps, max_length=run.trainer.row_length
    )
    export = export_drafter(
        drafter,
        target,
        contract,
        out_dir / "export",
        command=command_line(),
        data=data,
        beside={TRAINING_NAME: training.to_json()} | ({} if drift is None else {DRIFT_NAME: drift}),
    )
    console.print(f"exported to {export}", soft_wrap=True, highlight=False)
    report = measure(target, export, held_out, run.runtime, run.eval, SamplingConfig(), console)
    reports.write(report, out_dir, console)
    add_report(export, target, contract, data, report)
    about = {"family": contract.family, "target": contract.target, "acceptance_length": report["acceptance_length"]}
    logger.artifact(export, f"{out_dir.name}-{export.name}", about)
    reports.check_lossless(report)
    return report


def taps_of(run: TrainRun, target: Target) -> tuple[int, ...]:
    """The `hidden_states` indices the drafter reads."""
    return FAMILIES[run.drafter.family].taps_for(run.drafter, target)


def held_out_prompts(run: TrainRun) -> list[Prompt]:
    """Prompts never trained on: the file eval.prompts, or the source's own held-out split; ConfigError if none."""
    if run.eval.prompts is not None:
        return eval_prompts(run.eval)
    prompts = load_prompts(run.data, "eval")[: run.eval.num_prompts]
    if not prompts:
        raise ConfigError(
            f"data.eval_prompts={run.data.eval_prompts} holds no prompt back to measure on. "
            f"Set data.eval_prompts above 0, or eval.prompts=FILE."
        )
    return prompts


def add_report(export: Path, target: Target, contract: Contract, summary: DataSummary, report: dict[str, Any]) -> None:
    """Write the export's card again, now with what was measured on it; the other files stay byte for byte."""
    names = [name for name in verify_folder(export, KIND).files if name != "README.md"]
    drift = json.loads((export / DRIFT_NAME).read_text(encoding="utf-8")) if DRIFT_NAME in names else None
    card = model_card(contract, target.config.license, command_line(), summary, report, drift)

    def write(folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(export / name, folder / name)
        (folder / "README.md").write_text(card, encoding="utf-8")

    write_folder(export, write, KIND, {"family": contract.family})
