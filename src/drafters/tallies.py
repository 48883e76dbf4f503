"""From summed statistics [4, steps] (loss, right, right so far, supervised) to the numbers that are logged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor


class Clock:
    """Adds up wall and CPU seconds of the blocks it is entered for."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self._start = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._start = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu_seconds += time.process_time() - self._start[1]


class Window(Clock):
    """Sums since the last log line; further: how many further means a training graph tells."""

    def __init__(self, steps: int, device: torch.device, further: int = 0) -> None:
        super().__init__()
        self.stats = torch.zeros(4 + 2 * further, steps, device=device)


def simulated_acceptance_length(stats: Tensor) -> float:
    """1 + sum over depths of P(every draft up to it is the target's choice), from statistics [4, steps]."""
    return 1.0 + float((stats[2] / stats[3].clamp(min=1)).sum())


def means(prefix: str, stats: Tensor, decay: float, further: Sequence[str] = ()) -> dict[str, float]:
    """Turn summed statistics [4, steps] into the loss per position and the accuracy of each depth that occurred.

    further: names of the means whose sum and count stand in column 0 of two more rows each; left out where none was
    counted.
    """
    weights = decay ** torch.arange(stats.shape[1], dtype=stats.dtype)
    counts = stats[3]
    values = {f"{prefix}/loss": float((stats[0] * weights).sum() / (counts * weights).sum().clamp(min=1))}
    depths = {f"{prefix}/acc_{k}": float(stats[1, k] / counts[k]) for k in range(len(counts)) if counts[k]}
    rows = enumerate(further)
    sums = {f"{prefix}/{name}": (float(stats[4 + 2 * i, 0]), float(stats[5 + 2 * i, 0])) for i, name in rows}
    return values | depths | {name: total / count for name, (total, count) in sums.items() if count}


def flatten(result: dict[str, Any]) -> dict[str, float]:
    """Name an evaluation's numbers for the log: eval/x, and eval/x_k for the k-th entry of a list."""
    values: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, (list, tuple)):
            values |= {f"eval/{name}_{k}": float(entry) for k, entry in enumerate(value, 1)}
        else:
            values[f"eval/{name}"] = float(value)
    return values
