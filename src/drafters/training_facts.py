"""What a drafter's training took: training.json in its export, for comparisons at an equal budget."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from drafters.errors import ArtifactError

TRAINING_NAME = "training.json"


@dataclass(frozen=True)
class TrainingFacts:
    """One run. steps: optimiser steps; exported_step: the step whose weights were exported.

    train_tokens: response tokens trained on, one seen in two passes counted twice; distinct_records,
    distinct_tokens: what there was to train on. train_minutes: wall time of the optimiser steps, the target's part
    included, evaluating and saving not; cpu_minutes: CPU time of all processes in them; both without what a kill threw
    away, None where the run began under a version that did not keep them. train_tokens and both times count the run
    whose export init_from named, too. threads: of each of `processes`.
    """

    steps: int
    exported_step: int
    train_tokens: int
    distinct_records: int
    distinct_tokens: int
    train_minutes: float | None
    cpu_minutes: float | None
    threads: int
    processes: int

    def after(self, first: TrainingFacts | None) -> TrainingFacts:
        """These facts of a run that began with what `first` had trained; None: nothing is known of it."""
        if first is None:
            return replace(self, train_minutes=None, cpu_minutes=None)
        return replace(
            self,
            train_tokens=first.train_tokens + self.train_tokens,
            train_minutes=_together(first.train_minutes, self.train_minutes),
            cpu_minutes=_together(first.cpu_minutes, self.cpu_minutes),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def _together(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


def read_training(folder: Path) -> TrainingFacts | None:
    """The facts in an export folder, None in one older than this file; ArtifactError where they are malformed."""
    path = Path(folder) / TRAINING_NAME
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON ({error}). Copy the folder again, or export it again.") from error
    names = {field.name for field in fields(TrainingFacts)}
    if not isinstance(raw, dict) or set(raw) != names:
        found = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        raise ArtifactError(
            f"{path} has {found}, expected the fields {', '.join(sorted(names))}. "
            "Use the Outrider version that wrote it, or export it again."
        )
    return TrainingFacts(**raw)
