"""How many threads this machine really has to spare, found by trying."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

ROUNDS = 5
Item, Result = TypeVar("Item"), TypeVar("Result")
GAIN = 1.15  # a second core must pay at least this much to be worth taking


def available_cores() -> int:
    """Return the number of CPU cores this process may run on, no more than OMP_NUM_THREADS where that is set."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, int(os.environ.get("OMP_NUM_THREADS", cores)))


def _burst(left: torch.Tensor, right: torch.Tensor) -> float:
    """Seconds for a short run of matrix products of the size one training step is made of."""
    start = time.perf_counter()
    for _ in range(4):
        left @ right
    return time.perf_counter() - start


def probe(candidates: list[int]) -> dict[int, float]:
    """Return median seconds of a matmul burst by thread count; leaves torch at the last count tried."""
    left, right = torch.randn(512, 576), torch.randn(576, 1536)
    times: dict[int, list[float]] = {count: [] for count in candidates}
    # Interleaved, so that a neighbour's burst of load does not decide against one candidate alone.
    for _ in range(ROUNDS):
        for count in candidates:
            torch.set_num_threads(count)
            _burst(left, right)
            times[count].append(_burst(left, right))
    return {count: statistics.median(taken) for count, taken in times.items()}


def choose(seconds: dict[int, float]) -> int:
    """Return the thread count to take: each larger count must beat the one kept so far by GAIN."""
    counts = sorted(seconds)
    best = counts[0]
    for count in counts[1:]:
        if seconds[best] / seconds[count] >= GAIN:
            best = count
    return best


def set_threads(requested: int | None) -> int:
    """Set torch's thread count, probed when `requested` is None, and return it.

    Two threads on a busy two-core machine can be 40 times slower per operation than one, hence the probe.
    """
    if requested is None:
        cores = available_cores()
        counts = [count for count in (1, 2, 4, 8, 16, 32) if count <= cores]
        seconds = probe(counts)
        requested = choose(seconds)
        shown = ", ".join(f"{count}: {1e3 * taken:.1f} ms" for count, taken in seconds.items())
        log.info("threads: %d (probe by count, %s)", requested, shown)
    torch.set_num_threads(requested)
    return requested


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return work(item) of every item, in order: as many at a time as torch has threads, each computed by one.

    A model's products are small: two threads that share them do 1.5 times one's work, two that have a text each
    twice. A result does not depend on the number of threads.
    """
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=partial(torch.set_num_threads, 1)) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)  # a worker's setting can be this thread's as well
