"""How far a training run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

log = logging.getLogger(__name__)


@contextmanager
def shown(console: Console, total: int, step: int, rank: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield a function that shows the log values of a step; only rank 0 says anything."""
    if rank != 0:
        yield lambda step, values: None
        return
    if not console.is_terminal:
        yield lambda step, values: log.info("step %d/%d: %s", step, total, summary(values))
        return
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[text]}"))  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=total, completed=step, text="")
        yield lambda step, values: bar.update(task, completed=step, text=summary(values))


def summary(values: dict[str, float]) -> str:
    """One line for people: loss, first-draft accuracy, speed."""
    return (
        f"loss {values['train/loss']:.3f}  acc_0 {values.get('train/acc_0', 0.0):.3f}  "
        f"depth {values['train/ttt_steps']}  lr {values['train/lr']:.2e}  "
        f"{values['perf/tokens_per_s']:.0f} tokens/s"
    )
