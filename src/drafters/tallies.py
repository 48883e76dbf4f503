"""From summed statistics [4, steps] (loss, right, right so far, supervised) to the numbers that are logged."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Window:
    """Sums since the last log line."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.stats = torch.zeros(4, steps, device=device)
        self.seconds = self.cpu_seconds = 0.0
        self._start = (0.0, 0.0)

    def __enter__(self) -> Window:
        self._start = (time.perf_counter(), time.process_time())
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.cpu_seconds += time.process_time() - self._start[1]


def simulated_acceptance_length(stats: Tensor) -> float:
    """1 + sum over depths of P(every draft up to it is the target's choice), from statistics [4, steps]."""
    return 1.0 + float((stats[2] / stats[3].clamp(min=1)).sum())


def means(prefix: str, stats: Tensor, decay: float) -> dict[str, float]:
    """Turn summed statistics [4, steps] into the loss per position and the accuracy of each depth that occurred."""
    weights = decay ** torch.arange(stats.shape[1], dtype=stats.dtype)
    counts = stats[3]
    values = {f"{prefix}/loss": float((stats[0] * weights).sum() / (counts * weights).sum().clamp(min=1))}
    depths = {f"{prefix}/acc_{k}": float(stats[1, k] / counts[k]) for k in range(len(counts)) if counts[k]}
    return values | depths


def flatten(result: dict[str, Any]) -> dict[str, float]:
    """Name an evaluation's numbers for the log: eval/x, and eval/x_k for the k-th entry of a list."""
    values: dict[str, float] = {}
    for name, value in result.items():
        if isinstance(value, (list, tuple)):
            values |= {f"eval/{name}_{k}": float(entry) for k, entry in enumerate(value, 1)}
        else:
            values[f"eval/{name}"] = float(value)
    return values


def summary(values: dict[str, float]) -> str:
    """One line for people: loss, first-draft accuracy, speed."""
    return (
        f"loss {values['train/loss']:.3f}  acc_0 {values.get('train/acc_0', 0.0):.3f}  "
        f"depth {values['train/ttt_steps']}  lr {values['train/lr']:.2e}  "
        f"{values['perf/tokens_per_s']:.0f} tokens/s"
    )
