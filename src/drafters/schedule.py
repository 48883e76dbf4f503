"""What happens when: learning rate, draft depth, held-out records, stop requests."""

from __future__ import annotations

import hashlib
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from drafters.config import TrainerConfig
from drafters.config_drafter import DrafterConfig
from drafters.corpus import ResponseRecord

log = logging.getLogger(__name__)

HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 32  # of the records, for the teacher-forced estimate


def learning_rate(step: int, total: int, cfg: TrainerConfig) -> float:
    """Learning rate of optimiser step `step` of `total`, counted from 0: linear warm-up, then cosine."""
    warmup = round(cfg.warmup_ratio * total)
    if step < warmup:
        return cfg.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    share = cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.learning_rate * share


def depth_at(step: int, total: int, cfg: DrafterConfig) -> int:
    """Draft steps trained at optimiser step `step`: rises evenly from 1 to cfg.steps at the marks of the settings."""
    marks = cfg.marks
    if not marks:
        return cfg.steps
    passed = sum(step >= mark * total for mark in marks)
    return round(1 + (cfg.steps - 1) * passed / len(marks))


def seed_of(seed: int, step: int, rank: int) -> int:
    """The seed of what optimiser step `step` draws on one rank."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def hold_out(records: Sequence[ResponseRecord]) -> tuple[list[ResponseRecord], list[ResponseRecord]]:
    """Split records into (trained on, held out): those with the smallest hash of their id are held out."""
    count = min(HELD_OUT_MOST, int(HELD_OUT_SHARE * len(records)))
    order = sorted(records, key=lambda record: hashlib.sha256(record.id.encode()).digest())
    held = {record.id for record in order[:count]}
    return [r for r in records if r.id not in held], [r for r in records if r.id in held]


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether SIGINT or SIGTERM asked to stop; a second one raises KeyboardInterrupt."""
    asked = threading.Event()

    def handle(number: int, _: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        log.warning("%s: saving, then stopping; once more stops at once", signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set  # Python allows handlers in the main thread only
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
