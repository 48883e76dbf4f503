"""What a target forward and a draft cost here: measured once at start, kept honest by every round."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from drafters.artifacts import atomic_write_json
from drafters.contract import code_version, hash_config
from drafters.target import Target

log = logging.getLogger(__name__)

Cell = tuple[int, int]  # (rows, width of the widest tree) or (rows, depth of the draft)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SECOND_WIDTH = 8  # measured right after 1: past the step from matrix-vector to matrix-matrix kernels
MEASURE_SECONDS = 2.0
DRIFT, FRESH = 0.13, 0.1  # least exponents of the moving (geometric) averages: plain ones of the first observations
STALE_AFTER = 100  # observations of its kind after which a cell's own number weighs no more than one
WIDEST_RATIO = 3.0  # one observation never says more than this factor: a busy moment is not a cost
LEAST = 1e-9  # seconds; keeps ratios finite where a clock is too coarse


def machine(device: torch.device) -> dict[str, str | int]:
    """What the speed of a run depends on: CPU, threads, and the device's name."""
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else "cpu"
    return {"cpu": _cpu_name(), "threads": torch.get_num_threads(), "device": name}


def widths(largest: int) -> tuple[int, ...]:
    """The tree sizes (root included) that are ever run: few shapes, `largest` itself among them."""
    return (*(width for width in WIDTHS if width < largest), largest)


def batches(largest: int) -> tuple[int, ...]:
    """The row counts told apart: powers of two and `largest`."""
    return (*(1 << k for k in range((largest - 1).bit_length())), largest)


@dataclass(frozen=True)
class Measured:
    """Seconds at start: verify by (rows, width), draft by (rows, depth); cells that did not fit the time are absent."""

    verify: dict[Cell, float]
    draft: dict[Cell, float]


def measure(
    verify: Callable[[int, int], object],
    draft: Callable[[int, int], object],
    sizes: tuple[int, int, int],
    clock: Callable[[], float] = perf_counter,
) -> Measured:
    """Times verify(rows, width) and draft(rows, depth) for at most MEASURE_SECONDS, cheap cells first.

    sizes: largest batch, width and depth. Both calls must return only when the device is done. Cells that would not
    fit, judged by those measured so far, are left out; then all are timed once more while the time lasts, and the
    faster call counts: a moment in which the machine is busy with something else then spoils no run of neighbours.
    Width 1, one larger width and the deepest draft are measured whatever they take.
    """
    rows, width, depth = sizes
    found = Measured({}, {})
    start = clock()

    def take(table: dict[Cell, float], call: Callable[[int, int], object], cell: Cell) -> None:
        before = clock()
        call(*cell)
        seconds = clock() - before
        table[cell] = min(seconds, table.get(cell, seconds))

    def fits(seconds: float) -> bool:
        return clock() - start + seconds <= MEASURE_SECONDS

    must = [(1, 1)] + ([(1, min(SECOND_WIDTH, width))] if width > 1 else [])
    first = [(found.verify, verify, cell) for cell in must] + ([(found.draft, draft, (1, depth))] if depth else [])
    for table, call, cell in first:
        take(table, call, cell)
        if fits(table[cell]):  # the first call of all may have been a cold one, and the others are judged by these
            take(table, call, cell)
    rest = {(b, w) for b in {1, rows} for w in widths(width)}.difference(must)
    drafts = [cell for cell in ((1, 1), (rows, depth), (rows, 1)) if depth and cell not in found.draft]
    for b, d in dict.fromkeys(drafts):
        if fits(max(found.draft.values()) * (_by_total(found.verify, b) / _by_total(found.verify, 1))):
            take(found.draft, draft, (b, d))
    for cell in sorted(rest, key=lambda cell: (cell[0] * cell[1], cell)):
        if fits(_by_total(found.verify, cell[0] * cell[1])):
            take(found.verify, verify, cell)
    again = [(table, call, cell) for table, call in ((found.draft, draft), (found.verify, verify)) for cell in table]
    for table, call, cell in sorted(again, key=lambda each: each[0][each[2]]):
        if fits(table[cell]):
            take(table, call, cell)
    return found


def _by_total(measured: dict[Cell, float], total: int) -> float:
    """Seconds of a forward over `total` tokens: linear between the measured totals, the last slope beyond them."""
    points: dict[int, list[float]] = {}
    for (rows, width), seconds in measured.items():
        points.setdefault(rows * width, []).append(seconds)
    known = sorted((n, sum(seconds) / len(seconds)) for n, seconds in points.items())
    if len(known) == 1:
        return known[0][1] * max(1.0, total / known[0][0])
    if total >= known[-1][0]:
        (n0, t0), (n1, t1) = known[0], known[-1]
        return t1 + (total - n1) * max(0.0, (t1 - t0) / (n1 - n0))
    upper = next(i for i, (n, _) in enumerate(known) if n >= total)
    if upper == 0:
        return known[0][1]
    (n0, t0), (n1, t1) = known[upper - 1], known[upper]
    return t0 + (t1 - t0) * (total - n0) / (n1 - n0)


class _Estimates:
    """Seconds by cell: what each cell said last, times a drift common to all (longer texts, a busier machine)."""

    def __init__(self, cells: np.ndarray):
        """cells: [batches, sizes]."""
        self._cells = np.maximum(cells, LEAST)
        self._seen = np.full(cells.shape, -STALE_AFTER)  # when, counted in observations of all cells
        self._times = np.ones(cells.shape, dtype=int)  # how often, what it was made with included
        self._count = 0
        self._drift = 1.0

    def row(self, batch: int) -> np.ndarray:
        """Seconds of all sizes [sizes] at one batch."""
        return self._cells[batch] * self._drift

    def seconds(self, cell: Cell) -> float:
        return float(self._cells[cell]) * self._drift

    def observe(self, cell: Cell, seconds: float) -> None:
        ratio = max(seconds, LEAST) / self.seconds(cell)
        ratio = min(max(ratio, 1 / WIDEST_RATIO), WIDEST_RATIO)
        self._count += 1
        if self._count - self._seen[cell] > STALE_AFTER:
            self._times[cell] = 1
        self._seen[cell] = self._count
        self._times[cell] += 1
        self._cells[cell] *= ratio ** max(FRESH, 1 / self._times[cell])
        self._drift *= ratio**DRIFT


class CostTable:
    """c_verify(width, rows) and c_draft(depth, rows) in seconds, for any size up to those it was made for."""

    def __init__(self, measured: Measured, batch_size: int, largest: int, depth: int):
        self.widths = np.array(widths(largest))
        self._batches = np.array(batches(batch_size))
        # Where a size of 0, 1, 2, ... is found: rounds ask many times.
        self._width_at = np.searchsorted(self.widths, np.arange(largest + 1)).tolist()
        self._batch_at = np.searchsorted(self._batches, np.arange(batch_size + 1)).tolist()
        known, counts = measured.verify, self._batches.tolist()
        fill = np.array([[known.get((b, w), _by_total(known, b * w)) for w in self.widths.tolist()] for b in counts])
        for axis in (0, 1):  # no check costs more than a larger one: where one seems to, the truth lies between
            lower = np.flip(np.minimum.accumulate(np.flip(fill, axis), axis), axis)
            fill = (lower + np.maximum.accumulate(fill, axis)) / 2
        self._verify = _Estimates(fill)
        drafts = np.zeros((len(counts), depth))
        for index, b in enumerate(counts):
            growth = float(fill[index, 0]) / max(float(fill[0, 0]), LEAST)
            for d in range(1, depth + 1):
                drafts[index, d - 1] = _draft_at(measured.draft, b, d, depth, growth, batch_size)
        self._draft = _Estimates(drafts)

    def width(self, nodes: int) -> int:
        """The smallest size that is run and holds a tree of so many nodes; ValueError past the largest."""
        return int(self.widths[self._place(nodes)])

    def batch(self, rows: int) -> int:
        """The smallest row count told apart that holds so many rows."""
        return int(self._batches[self._batch_at[rows]])

    def verify(self, nodes: int, rows: int) -> float:
        """Seconds of a round without its draft, the widest of its trees having so many nodes."""
        return self._verify.seconds((self._batch_at[rows], self._place(nodes)))

    def forwards(self, nodes: int, rows: int) -> np.ndarray:
        """The same for every width that is run, up to the one that holds so many nodes."""
        return self._verify.row(self._batch_at[rows])[: self._place(nodes) + 1]

    def draft(self, depth: int, rows: int) -> float:
        """Seconds of a draft of this depth; none for depth 0."""
        return self._draft.seconds((self._batch_at[rows], depth - 1)) if depth else 0.0

    def draft_between(self, levels: float, rows: int) -> float:
        """Seconds of drafts of so many levels on average, 1 or more."""
        known = self._draft.row(self._batch_at[rows])
        return float(np.interp(levels, np.arange(1, len(known) + 1), known))

    def drafts(self, depth: int, rows: int) -> np.ndarray:
        """The same for depths 1 to `depth`."""
        return self._draft.row(self._batch_at[rows])[:depth]

    def observe_verify(self, nodes: int, rows: int, seconds: float) -> None:
        """What such a round really took."""
        self._verify.observe((self._batch_at[rows], self._place(nodes)), seconds)

    def observe_draft(self, depth: int, rows: int, seconds: float) -> None:
        """What such a draft really took."""
        self._draft.observe((self._batch_at[rows], depth - 1), seconds)

    def _place(self, nodes: int) -> int:
        if nodes >= len(self._width_at):
            raise ValueError(f"a tree has {nodes} nodes, the cost table was made for at most {self.widths[-1]}")
        return self._width_at[nodes]

    def summary(self) -> str:
        """One line for the log, milliseconds."""
        verify = ", ".join(f"{w}: {1e3 * s:.1f}" for w, s in zip(self.widths, self._verify.row(-1)))
        drafts = ", ".join(f"{d}: {1e3 * s:.1f}" for d, s in enumerate(self._draft.row(-1), start=1))
        return f"batch {self._batches[-1]}: verify by width {verify} ms; draft by depth {drafts or 'none'} ms"


def _draft_at(measured: dict[Cell, float], rows: int, depth: int, deepest: int, growth: float, most: int) -> float:
    """A draft's seconds: linear in its depth, and in its rows as plain steps grow where only one row was measured."""
    many = (most, deepest) in measured and rows == most
    base = most if many else 1
    top = measured[base, deepest] * (1.0 if many else growth)
    if (base, 1) not in measured or deepest == 1:
        return top * depth / deepest
    low = min(top, measured[base, 1] * (1.0 if many else growth))
    return low + (top - low) * (depth - 1) / (deepest - 1)


# ---- kept between runs ------------------------------------------------------------------------------------------


def cost_key(target: Target, drafter: str, sizes: tuple[int, int, int], top_k: int) -> dict[str, object]:
    """What a measurement depends on; another key means measuring anew. sizes: batch, width, depth."""
    return {
        **machine(target.device),
        "target_config_sha256": hash_config(json.loads((target.folder / "config.json").read_text())),
        "dtype": str(target.dtype).removeprefix("torch."),
        "drafter": drafter,
        "sizes": list(sizes),
        "top_k": top_k,
        # Merged weights are no longer those of a half-precision checkpoint, which a CPU reads in half the time.
        **({} if target.adapter is None else {"tuned": True}),
        "versions": [torch.__version__, code_version()],
    }


def remembered(folder: Path, key: dict[str, object], measuring: Callable[[], Measured]) -> Measured:
    """The measurement kept under `folder` for this key, or a new one, which is then kept."""
    path = folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    if path.is_file():
        try:
            raw = json.loads(path.read_text())
            return Measured(_cells(raw["verify"]), _cells(raw["draft"]))
        except (ValueError, KeyError, TypeError) as error:
            log.warning("measuring costs again: %s cannot be read (%r)", path, error)
    found = measuring()
    folder.mkdir(parents=True, exist_ok=True)
    lists = {name: [[*cell, s] for cell, s in getattr(found, name).items()] for name in ("verify", "draft")}
    atomic_write_json(path, {"key": key, **lists})
    return found


def _cells(rows: Iterable[list]) -> dict[Cell, float]:
    return {(int(b), int(n)): float(seconds) for b, n, seconds in rows}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
