"""What a drafter's training took: training.json in its export, for comparisons at an equal budget."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
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
    away, None where the run began under a version that did not keep them. threads: of each of `processes`.
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

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


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
