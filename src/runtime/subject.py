"""What train.py doctor=FOLDER examines: the drafter in a run's folder or an export, its target and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from drafters import checkpoint
from drafters.artifacts import MANIFEST_NAME, joined_folders, read_manifest, verify_folder
from drafters.batches import Batches
from drafters.config import FAMILIES, TrainRun
from drafters.config_base import Section
from drafters.config_drafter import DrafterConfig
from drafters.contract import Contract, read_contract
from drafters.corpus import ResponseRecord
from drafters.errors import ConfigError
from drafters.export.native import KIND, build, load_drafter
from drafters.models import Drafter
from drafters.responses import ResponseSet, join, read_responses
from drafters.saved_run import read_run
from drafters.schedule import hold_out
from drafters.target import Target
from drafters.trainer import BEST, LAST
from drafters.training_facts import read_training
from runtime.loading import tuned_target
from runtime.pipeline import given_responses


@dataclass(frozen=True)
class Subject:
    """What is examined. run: the settings it was trained with, where they are known, else the command line's;
    target: as the drafter drafts for it; base: the target without an adapter that the drafter brings."""

    folder: Path
    run: TrainRun
    base: Target
    target: Target
    drafter: Drafter
    contract: Contract
    records: list[ResponseRecord]
    answered_by: dict[str, Any]
    tokens_per_step: float | None

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.contract.tap_indices)

    @property
    def steps(self) -> int:
        """Draft steps it was trained for; a drafter without such a limit is looked at as deep as it is run."""
        return self.drafter.deepest(self.contract.graph) or self.run.runtime.depth

    @property
    def settings(self) -> DrafterConfig:
        """Of its family; those it was trained with where they are known."""
        family = self.contract.family
        return self.run.drafter if self.run.drafter.family == family else FAMILIES["drafter"][family]()


def open_subject(folder: Path, run: TrainRun) -> Subject:
    """The drafter in a training run's folder or an export, with its target and answers.

    A run's own settings hold, but for what the command line says of target, data.responses, runtime and eval. Raises
    ConfigError, ArtifactError, ContractError, TargetError.
    """
    exported = (folder / MANIFEST_NAME).is_file()
    if not exported:
        saved = read_run(folder)
        known = run.target if _typed("target") else saved.target
        given = saved.data if run.data.responses is None else replace(saved.data, responses=run.data.responses)
        how = {name: _said(name, saved, run) for name in ("runtime", "eval")}
        run = replace(saved, target=known, data=given, **how)
    weights = folder if exported else _weights_in(folder)
    base = Target.load(run.target)
    drafter, contract, target = _open(weights, base)
    answers = _answers(folder, run, exported)
    records = answers.records if exported else answers.records[: run.trainer.max_records]
    return Subject(
        folder, run, base, target, drafter, contract, records, answers.meta["settings"],
        _tokens_per_step(weights if exported else folder, run, records, exported),
    )  # fmt: skip


def _typed(group: str) -> list[str]:
    """What the command line says about a group of settings: `group` itself where an option is chosen, group.name."""
    said = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    paths = [text.lstrip("+~").partition("=")[0] for text in said]
    return [path for path in paths if path == group or path.startswith(f"{group}.")]


def _said(group: str, saved: TrainRun, run: TrainRun) -> Section:
    """A group as the run had it, with what the command line says."""
    mine, now, typed = getattr(saved, group), getattr(run, group), _typed(group)
    names = [path.removeprefix(f"{group}.") for path in typed]
    return now if group in typed else replace(mine, **{name: getattr(now, name) for name in names})


def _weights_in(folder: Path) -> Path:
    for name in ("export", f"checkpoints/{BEST}", f"checkpoints/{LAST}"):
        if (folder / name / MANIFEST_NAME).is_file():
            return folder / name
    raise ConfigError(
        f"doctor={folder}: there is neither an export nor a checkpoint in it. Train first; the same train.py command "
        "goes on where it stopped."
    )


def _open(folder: Path, base: Target) -> tuple[Drafter, Contract, Target]:
    if read_manifest(folder).kind == KIND:
        target = tuned_target(base, folder)
        return *load_drafter(folder, target), target
    verify_folder(folder, checkpoint.KIND)
    contract = read_contract(folder)
    contract.check_target(base, str(folder))
    drafter = build(contract)
    checkpoint.load_weights(folder, drafter)
    drafter.to(base.device, base.dtype).eval()
    drafter.bind(base)
    return drafter, contract, drafter.tuned(base)


def _answers(folder: Path, run: TrainRun, exported: bool) -> ResponseSet:
    given = run.data.responses if exported else given_responses(run)
    if given is None and not exported and (folder / "responses" / MANIFEST_NAME).is_file():
        given = str(folder / "responses")
    if given is None:
        raise ConfigError(
            f"doctor={folder} does not say which answers it was trained on. Set data.responses to their folder, made "
            "by distill.py."
        )
    return join([read_responses(part) for part in joined_folders(str(given))])


def _tokens_per_step(folder: Path, run: TrainRun, records: Sequence[ResponseRecord], exported: bool) -> float | None:
    """Answer tokens of an optimiser step on average; None where nothing says so."""
    if exported:
        facts = read_training(folder)
        return None if facts is None else facts.train_tokens / facts.steps
    batches = Batches(hold_out(records)[0], run.trainer)
    total = run.trainer.max_steps or batches.steps(run.trainer.epochs)
    return batches.seen(total) / total
