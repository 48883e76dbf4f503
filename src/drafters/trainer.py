"""The training loop: steps by index, one global denominator, evaluation, checkpoints, clean stops."""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from drafters import checkpoint, engine
from drafters.batches import Batch, Batches, collate, pack
from drafters.config import TrainRun
from drafters.corpus import ResponseRecord
from drafters.errors import OutriderError
from drafters.export.native import describe_drafter
from drafters.features import feature_source
from drafters.logger import Logger
from drafters.models.base import Drafter
from drafters.schedule import depth_at, hold_out, learning_rate, seed_of, stop_requests
from drafters.tallies import Clock, Window, flatten, means, simulated_acceptance_length
from drafters.target import DTYPES, Target
from drafters.threads import set_threads
from drafters.training_display import shown
from drafters.training_facts import TrainingFacts

log = logging.getLogger(__name__)

LAST, BEST = "last", "best"
# Settings that change how a run is watched, not what it computes: a resumed run may change them.
CADENCE = frozenset({"eval_every", "save_every", "log_every", "num_threads", "feature_store"})

Evaluate = Callable[[Drafter], dict[str, Any]]
LayOut = Callable[[nn.Module], object]


class TrainingError(OutriderError):
    """Training met a number it cannot go on from."""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: optimiser steps done, whether a signal stopped it, its best evaluation, and what it took."""

    step: int
    total_steps: int
    stopped: bool
    best_value: float | None
    best_step: int | None
    facts: TrainingFacts


class Trainer:
    """One training run; `run` takes it from its checkpoint, or from the start, to the end."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        records: Sequence[ResponseRecord],
        cfg: TrainRun,
        out_dir: Path,
        evaluate: Evaluate | None,
        logger: Logger,
        console: Console,
        lay_out: LayOut | None = None,
    ) -> None:
        self.drafter, self.target, self.cfg, self.lay_out = drafter, target, cfg, lay_out
        self.evaluate, self.logger, self.console = evaluate, logger, console
        self.folder = Path(out_dir) / "checkpoints"
        self.device = target.device
        self.threads = set_threads(cfg.trainer.num_threads)
        self.rank, self.world_size = engine.init_distributed(self.device)
        self.taps = drafter.taps_for(cfg.drafter, target)
        trained, self.held = hold_out(records)
        self.batches = Batches(trained, cfg.trainer, self.rank, self.world_size)
        self.total = cfg.trainer.max_steps or self.batches.steps(cfg.trainer.epochs)
        self.contract = describe_drafter(
            drafter, target, taps=self.taps, steps=cfg.drafter.steps, max_length=cfg.trainer.row_length
        )
        self.features = feature_source(drafter, target, cfg, Path(out_dir), records, self.rank)
        self.settings = self._settings()
        self.step, self.best_value, self.best_step = 0, None, None
        self.window = self._window()
        self.clock = Clock()  # of this process; `before` holds what the checkpoint it started from had taken
        self.before: tuple[float | None, float | None] = (0.0, 0.0)

    # ---- set-up

    def _window(self) -> Window:
        return Window(self.cfg.drafter.steps, self.device, len(self.drafter.further_means))

    def _settings(self) -> dict[str, Any]:
        """Everything the numbers of a step depend on, as a checkpoint records it."""
        digest = hashlib.sha256()
        for record in self.batches.records:
            digest.update(repr((record.id, record.prompt_ids, record.response_ids)).encode())
        trainer = {f"trainer.{k}": v for k, v in asdict(self.cfg.trainer).items() if k not in CADENCE}
        drafter = {f"drafter.{k}": v for k, v in asdict(self.cfg.drafter).items()}
        stage = {"deepspeed.zero_stage": self.cfg.deepspeed.zero_stage}
        return {**trainer, **drafter, **stage, "training records (sha256)": digest.hexdigest()}

    def _start(self) -> None:
        """Make the engine, from the last checkpoint when there is one to resume."""
        cfg, found = self.cfg, None
        if cfg.resume == "auto":
            found = checkpoint.find(self.folder / LAST)
        if found is not None:
            progress = checkpoint.load_progress(found, self.contract, self.settings)
            checkpoint.load_weights(found, self.drafter)
            self.step, self.best_value, self.best_step = progress.step, progress.best_value, progress.best_step
            self.before = progress.seconds, progress.cpu_seconds
        elif cfg.init_from is None:
            sample = collate(self.batches.records, self.batches.rows(0)[:1], cfg.trainer.row_length)
            self.drafter.initialise(cfg.drafter, self.target, sample, self.taps)
        # Trained on a copy: ZeRO-3 scatters the weights of what it trains, the caller's drafter stays whole.
        own = self.drafter.clone().to(self.device, DTYPES[cfg.trainer.dtype])
        own.bind(self.target)
        graph, accumulation = own.training_graph(cfg.drafter, self.target), len(self.batches.step(0))
        if self.lay_out is not None and not self.drafter.runs_target:
            self.lay_out(self.target.model)  # from here on it runs, and lends no more weights
        self.engine = engine.make_engine(graph, cfg, accumulation, own.rate_group)
        if found is not None:
            tensors = checkpoint.load_optimizer(found, self.rank, self.world_size)
            engine.load_optimizer_tensors(self.engine, tensors)
            log.info("resuming at step %d of %d from %s", self.step, self.total, found)
        if self.rank == 0:
            self.logger.rewind(self.step if found is not None else -1)

    # ---- one step

    def _sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def _take_step(self) -> float:
        """Do optimiser step self.step and return the gradient norm before clipping."""
        cfg, batches = self.cfg, self.batches.step(self.step)
        # What a training graph draws (feature noise, dropout) is a function of the step: a resumed run draws the same.
        torch.manual_seed(seed_of(cfg.trainer.seed, self.step, self.rank))
        depth = depth_at(self.step, self.total, cfg.drafter)
        layouts = [self.drafter.layout(batch, depth) for batch in batches]
        counts = torch.tensor([self.drafter.loss_counts(layout) for layout in layouts], dtype=torch.float64).sum(0)
        weights = cfg.drafter.decay ** torch.arange(depth, dtype=torch.float64)
        denominator = float((self._sum(counts.to(self.device)).cpu() * weights).sum())
        # DeepSpeed averages gradients over ranks; the loss is a sum over them all.
        scale = self.world_size / max(denominator, 1.0)
        progress = self.engine.module.progress = self.step / self.total
        rates = self.drafter.rates(cfg.drafter, progress)
        engine.set_learning_rate(self.engine, learning_rate(self.step, self.total, cfg.trainer), rates)
        bad: list[Batch] = []
        norm: Tensor | float | None = None
        for index, (batch, layout) in enumerate(zip(batches, layouts, strict=True)):
            later = itertools.chain(batches[index + 1 :], self._later())
            loss, stats = self.engine(layout, self.features(batch, layout, later))
            self.window.stats[:, :depth] += stats
            if not math.isfinite(loss.item()):
                bad.append(batch)
            self.engine.backward(loss * scale, scale_wrt_gas=False)
            if index == len(batches) - 1:
                norm = engine.gradient_norm(self.engine)
                if norm is not None:
                    self._check_finite(float(norm), bad, batches)
            self.engine.step()
        if norm is None:
            norm = self.engine.get_global_grad_norm()
            self._check_finite(float(norm) if norm is not None else math.nan, bad, batches)
        return float(norm)

    def _later(self) -> Iterator[Batch]:
        """This rank's batches of the steps that follow."""
        return itertools.chain.from_iterable(map(self.batches.step, range(self.step + 1, self.total)))

    def _check_finite(self, norm: float, bad: list[Batch], batches: list[Batch]) -> None:
        if not bad and math.isfinite(norm):
            return
        what = "loss" if bad else "gradient"
        names = [name for batch in bad or batches for row in batch.record_ids for name in row]
        raise TrainingError(
            f"step {self.step + 1}: the {what} is not finite (gradient norm {norm}); records of that part: "
            f"{', '.join(names)}. The last checkpoint is unharmed. Look at these records, or lower "
            f"trainer.learning_rate={self.cfg.trainer.learning_rate}."
        )

    # ---- between steps

    def _log(self, norm: float) -> dict[str, float]:
        stats, window = self._sum(self.window.stats).cpu().double(), self.window
        self.window = self._window()
        values = means("train", stats, self.cfg.drafter.decay, self.drafter.further_means)
        values |= {
            "train/lr": learning_rate(self.step - 1, self.total, self.cfg.trainer),
            "train/grad_norm": norm,
            "train/ttt_steps": depth_at(self.step - 1, self.total, self.cfg.drafter),
            "perf/tokens_per_s": float(stats[3, 0]) / max(window.seconds, 1e-9),
            "perf/tokens_per_cpu_s": float(stats[3, 0]) / self.world_size / max(window.cpu_seconds, 1e-9),
        }
        if self.rank == 0:
            self.logger.log(values, self.step)
        return values

    @torch.no_grad()
    def _teacher_forced(self) -> dict[str, float]:
        """Held-out loss, accuracy and simulated acceptance length at full depth."""
        if not self.held:
            return {}
        steps = self.cfg.drafter.steps
        stats = self._window().stats
        self.engine.eval()
        length = self.cfg.trainer.row_length
        rows = pack(self.held, length, seed=0, epoch=0)
        rows += [()] * (-len(rows) % self.world_size)
        batches = [collate(self.held, [row], length) for row in rows[self.rank :: self.world_size]]
        for index, batch in enumerate(batches):
            layout = self.drafter.layout(batch, steps)
            stats += self.engine(layout, self.features(batch, layout, batches[index + 1 :]))[1]
        self.engine.train()
        stats = self._sum(stats).cpu().double()
        values = means("eval", stats, self.cfg.drafter.decay, self.drafter.further_means)
        return values | {"eval/simulated_acceptance_length": simulated_acceptance_length(stats)}

    def _refresh(self) -> None:
        """Copy the trained weights into the caller's drafter."""
        with engine.whole_weights(self.engine):
            self.drafter.load_state_dict(self.engine.module.drafter.state_dict())

    def _measure(self) -> None:
        """Evaluate, log, and keep the best."""
        values = self._teacher_forced()
        self._refresh()
        if self.rank == 0:
            if self.evaluate is not None:
                values |= flatten(self.evaluate(self.drafter))
            if values:
                self.logger.log(values, self.step)
                log.info("step %d: %s", self.step, ", ".join(f"{k} {v:.4g}" for k, v in values.items()))
        name = "eval/acceptance_length" if self.evaluate is not None else "eval/simulated_acceptance_length"
        value = torch.tensor(values.get(name, math.nan), dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            torch.distributed.broadcast(value, 0)
        if math.isfinite(value) and (self.best_value is None or float(value) > self.best_value):
            self.best_value, self.best_step = float(value), self.step
            self._save(BEST)

    def _save(self, name: str) -> None:
        self._refresh()
        self.features.flush()
        progress = checkpoint.Progress(self.step, self.best_value, self.best_step, self.settings, *self._spent())
        checkpoint.save(
            self.folder / name,
            checkpoint.weights_of(self.drafter),
            progress,
            self.contract,
            engine.optimizer_tensors(self.engine) if name == LAST else None,
            self.rank,
            self.world_size,
            torch.distributed.barrier if self.world_size > 1 else lambda: None,
        )

    def _spent(self) -> tuple[float | None, float | None]:
        """Wall seconds, and CPU seconds of all ranks, that the steps so far took; None where that is not known."""
        cpu = float(self._sum(torch.tensor(self.clock.cpu_seconds, dtype=torch.float64, device=self.device)))
        wall_before, cpu_before = self.before
        known = wall_before is not None and cpu_before is not None
        return (wall_before + self.clock.seconds, cpu_before + cpu) if known else (None, None)

    def _facts(self) -> TrainingFacts:
        minutes = [None if seconds is None else seconds / 60 for seconds in self._spent()]
        return TrainingFacts(
            steps=self.step,
            exported_step=self.step if self.best_step is None else self.best_step,
            train_tokens=self.batches.seen(self.step),
            distinct_records=len(self.batches.fit.usable),
            distinct_tokens=self.batches.supervised_tokens,
            train_minutes=minutes[0],
            cpu_minutes=minutes[1],
            threads=self.threads,
            processes=self.world_size,
        )

    def _agreed(self, asked: bool) -> bool:
        """Whether any rank was asked to stop."""
        return bool(self._sum(torch.tensor(float(asked), device=self.device)))

    def run(self) -> TrainResult:
        """Train to the end, or to the first stop request; leaves the weights in the caller's drafter."""
        self._start()
        cadence, stopped = self.cfg.trainer, False
        with stop_requests() as asked, shown(self.console, self.total, self.step, self.rank) as show:
            while self.step < self.total and not stopped:
                with self.window, self.clock:
                    norm = self._take_step()
                self.step += 1
                done = self.step == self.total
                if self.step % cadence.log_every == 0 or done:
                    show(self.step, self._log(norm))
                stopped = self._agreed(asked())
                if (self.step % cadence.eval_every == 0 or done) and not stopped:
                    self._measure()
                if self.step % cadence.save_every == 0 or done or stopped:
                    self._save(LAST)
        self._refresh()
        stopped = stopped and self.step < self.total
        return TrainResult(self.step, self.total, stopped, self.best_value, self.best_step, self._facts())


def train(
    drafter: Drafter,
    target: Target,
    records: Sequence[ResponseRecord],
    cfg: TrainRun,
    out_dir: Path,
    evaluate: Evaluate | None,
    logger: Logger,
    console: Console,
    lay_out: LayOut | None = None,
) -> TrainResult:
    """Train `drafter` (vocabulary and embedding bound) on response records; checkpoints go to out_dir/checkpoints.

    `evaluate` maps the drafter to numbers for the log (acceptance_length decides which checkpoint is `best`), or
    None. lay_out: makes the target's model faster to run, in place, once the drafter has what it takes from it. Raises
    TrainingError at the first non-finite number, ContractError when a checkpoint is of another run.
    """
    return Trainer(drafter, target, records, cfg, out_dir, evaluate, logger, console, lay_out).run()
