"""Target forwards and drafts on rows of nothing, for the cost table to time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime.forward import TargetRunner
from runtime.proposers.base import Budget, Proposer
from runtime.tree import DraftTree

Probe = Callable[[int, int], None]
TOKEN = 0  # any id the target has


@contextmanager
def probes(runner: TargetRunner, proposer: Proposer, rows: int, nodes: int) -> Iterator[tuple[Probe, Probe]]:
    """verify(rows, width) and draft(rows, depth) as cost_table.measure calls them; no row may be running.

    runner and proposer must hold `rows` rows; nodes: most nodes of a drafted tree. Rows are given back at the end.
    """
    runs = [DraftTree.root(TOKEN)] * rows
    try:
        _, taps, slots = runner.run(0, runs, [0] * rows)
        of_row = [None if taps is None else taps[row] for row in range(rows)]
        for row in range(rows):
            runner.cache.commit(row, slots[row], slots[row])
            proposer.start(row, [TOKEN], TOKEN, of_row[row])

        def verify(count: int, width: int) -> None:
            tree = DraftTree.chain(TOKEN, [TOKEN] * (width - 1))
            hidden, _, taken = runner.run(0, [tree] * count, [1] * count)
            runner.logits(hidden).argmax(-1).tolist()  # waits for the device
            for row in range(count):
                runner.cache.commit(row, taken[row], [])

        def draft(count: int, depth: int) -> None:
            proposer.propose({row: Budget(nodes, depth) for row in range(count)})
            for row in range(count):
                proposer.commit(row, [TOKEN], of_row[row])

        yield verify, draft
        for row in range(rows):
            proposer.release(row)
    finally:
        for row in range(rows):
            runner.cache.release(row)
