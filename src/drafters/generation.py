"""What collecting asks of a generator of text, and how its rows are seeded, checked and counted."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from rich.progress import Progress

from drafters.errors import DataError

log = logging.getLogger(__name__)

LOG_SECONDS = 30.0

# (prompt ids, seed) rows in; (row index, response ids, finish reason) out, in the order in which rows finish.
Generate = Callable[[Sequence[tuple[list[int], int]]], Iterator[tuple[int, list[int], str]]]


def record_seed(seed: int, record_id: str) -> int:
    """Return a record's own seed in [0, 2**31): from the run's seed and the id, not order or batch."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{record_id}".encode()).digest()[:4], "little") >> 1


class RowReport:
    """Counts rows on a rich progress bar where there is one, else in a log line every LOG_SECONDS."""

    def __init__(self, progress: Progress | None, what: str, done: int, total: int) -> None:
        self.progress, self.what, self.done, self.total, self.tokens = progress, what, done, total, 0
        self.start = self.last = time.monotonic()
        self.task = progress.add_task(what, total=total, completed=done) if progress is not None else None

    def row(self, tokens: int) -> None:
        """Count one finished row of `tokens` new tokens."""
        self.done += 1
        self.tokens += tokens
        now = time.monotonic()
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=self.done)
        elif now - self.last >= LOG_SECONDS or self.done == self.total:
            self.last = now
            rate = self.tokens / max(now - self.start, 1e-9)
            log.info(
                "%s: %d/%d rows, %d tokens, %.0f tokens/s",
                self.what,
                self.done,
                self.total,
                self.tokens,
                rate,
            )


def check_ids(ids: Sequence[int], record_id: str, vocab_size: int) -> None:
    """Raise DataError unless `ids` holds at least one id and all lie in 0..vocab_size-1."""
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise DataError(
            f"record {record_id}: the generator returned {list(ids)[:8]}..., expected at least one id in "
            f"0..{vocab_size - 1}. This is a fault in the generator, not in the data."
        )
