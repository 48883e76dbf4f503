"""Metrics to metrics.jsonl always, to Weights & Biases where asked; logging never stops a run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from drafters.config import LoggerConfig

log = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class Logger:
    """Appends one JSON line per call to out_dir/metrics.jsonl and mirrors it to W&B.

    A resumed run continues the file: `rewind` drops the lines it will write again.
    """

    def __init__(self, out_dir: Path, cfg: LoggerConfig, config: dict[str, Any] | None = None) -> None:
        """Remember where to write; nothing starts before the first `log`. `config` is stored with the W&B run."""
        self.path = Path(out_dir) / FILE_NAME
        self._cfg, self._config = cfg, config or {}
        self._run: Any = None
        self._wanted = cfg.wandb

    def log(self, values: dict[str, float | int], step: int) -> None:
        """Record named numbers at an optimiser step; NaN and infinity become null in the file."""
        clean = {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps({"step": step, "time": round(time.time(), 3), **clean}, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if not self._wanted:
            return
        try:
            self._started().log(values, step=step)
        except Exception as error:  # whatever W&B raises, the run matters more
            log.warning("W&B does not take metrics (%s: %s); %s goes on", type(error).__name__, error, self.path)
            self._wanted = False

    def artifact(self, folder: Path, name: str, about: dict[str, Any]) -> None:
        """Hand an export folder to W&B as an artifact of type model; about: what W&B keeps beside it."""
        if not self._wanted:
            return
        try:
            import wandb

            run = self._started()
            artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name), type="model", metadata=about)
            # The files are sealed: W&B need not copy them before it sends them.
            artifact.add_dir(str(folder), policy="immutable")
            run.log_artifact(artifact)
        except Exception as error:  # as above
            log.warning("W&B does not take %s (%s: %s)", folder, type(error).__name__, error)

    def _started(self) -> Any:
        """The W&B run, started late: only the process that logs has one, and collecting data needs none."""
        if self._run is None:
            self._run = _start_wandb(self.path.parent, self._cfg, self._config)
        return self._run

    def rewind(self, step: int) -> None:
        """Drop lines after `step`: a resumed run writes those again. A line cut short by a kill goes too."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if entry["step"] <= step:
                kept.append(line + "\n")
        temp = self.path.with_suffix(".tmp")
        temp.write_text("".join(kept), encoding="utf-8")
        os.replace(temp, self.path)

    def close(self) -> None:
        """Finish the W&B run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            log.warning("W&B did not finish cleanly (%s: %s)", type(error).__name__, error)
        self._run = None


def _start_wandb(out_dir: Path, cfg: LoggerConfig, config: dict[str, Any]) -> Any:
    """Start a W&B run in out_dir; WANDB_MODE decides its mode, offline by default."""
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    return wandb.init(project=cfg.project, name=cfg.run_name or out_dir.name, dir=str(out_dir), config=config)
