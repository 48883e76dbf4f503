"""Measured costs: within the time allowed, filled where unmeasured, kept between runs, honest afterwards."""

from __future__ import annotations

import json
import logging

import pytest

from runtime import cost_table
from runtime.cost_table import MEASURE_SECONDS, CostTable, Measured, batches, cost_key, measure, remembered, widths


class Clock:
    """A device on which verify and draft take what they are scripted to."""

    def __init__(self, verify, draft):
        self.now = 0.0
        self.costs = {"verify": verify, "draft": draft}
        self.calls: list[tuple[str, int, int]] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str):
        def run(rows: int, size: int) -> None:
            self.calls.append((name, rows, size))
            self.now += self.costs[name](rows, size)

        return run

    def measure(self, sizes: tuple[int, int, int]) -> Measured:
        return measure(self.call("verify"), self.call("draft"), sizes, self)


def test_shapes_are_few_and_hold_what_is_asked():
    assert widths(16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert widths(20) == (1, 2, 3, 4, 6, 8, 12, 16, 20) and widths(1) == (1,)
    assert [batches(n) for n in (1, 2, 3, 4, 6)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 6)]
    table = CostTable(Measured({(1, 1): 1.0}, {(1, 3): 1.0}), 6, 16, 3)
    assert [table.width(n) for n in (1, 2, 5, 9, 16)] == [1, 2, 6, 12, 16]
    assert [table.batch(n) for n in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]
    with pytest.raises(ValueError, match="17 nodes, the cost table was made for at most 16"):
        table.width(17)


def test_what_fits_is_measured_exactly():
    clock = Clock(lambda rows, width: 0.010 + 0.0005 * rows * width, lambda rows, depth: 0.001 + 0.002 * depth)
    found = clock.measure((2, 16, 5))
    assert found.verify == {
        (b, w): pytest.approx(0.010 + 0.0005 * b * w) for b in (1, 2) for w in (1, 2, 3, 4, 6, 8, 12, 16)
    }
    assert found.draft == {(b, d): pytest.approx(0.001 + 0.002 * d) for b in (1, 2) for d in (1, 5)}
    table = CostTable(found, 2, 16, 5)
    assert table.verify(5, 1) == pytest.approx(0.013) and table.draft(3, 1) == pytest.approx(0.007)
    assert table.draft(0, 1) == 0.0


@pytest.mark.parametrize("step", [0.001, 0.05, 0.3, 0.6])
@pytest.mark.parametrize("batch", [1, 64])
def test_measuring_stays_within_its_time(step, batch):
    clock = Clock(lambda rows, width: step * (1 + rows * width / 20), lambda rows, depth: step * depth / 25)
    clock.measure((batch, 64, 5))
    assert clock.now <= MEASURE_SECONDS + step * 2
    assert ("verify", 1, 1) in clock.calls and ("draft", 1, 5) in clock.calls


def test_even_a_slow_target_gives_two_widths_and_a_draft():
    clock = Clock(lambda rows, width: 3.0 + width, lambda rows, depth: 1.0)
    found = clock.measure((4, 64, 5))
    assert found == Measured({(1, 1): 4.0, (1, 8): 11.0}, {(1, 5): 1.0})
    table = CostTable(found, 4, 64, 5)
    assert table.verify(3, 1) == pytest.approx(6.0) and table.verify(16, 1) == pytest.approx(19.0)
    assert table.verify(8, 4) == pytest.approx(4.0 + 31)  # by tokens in all
    assert table.draft(5, 1) == 1.0 and table.draft(1, 1) == pytest.approx(0.2)
    assert table.draft(5, 4) == pytest.approx(1.0 * 7 / 4)


def test_a_slow_first_call_is_not_taken_for_the_cost():
    calls = []

    def verify(rows: int, width: int) -> float:
        calls.append((rows, width))
        return 0.1 if calls.count((rows, width)) == 1 else 0.01

    found = Clock(verify, lambda rows, depth: 0.001).measure((1, 8, 1))
    assert list(found.verify.values()) == [pytest.approx(0.01)] * 6


@pytest.mark.parametrize("busy", [0.0, 0.1, 0.2, 0.3])
def test_a_busy_moment_spoils_no_cell(busy):
    """For a tenth of a second everything takes three times as long, whenever that is."""
    clock = Clock(None, None)

    def seconds(usual: float) -> float:
        return usual * (3 if busy <= clock.now < busy + 0.1 else 1)

    clock.costs = {
        "verify": lambda rows, width: seconds(0.02 + 0.001 * width),
        "draft": lambda rows, depth: seconds(0.002 * depth),
    }
    found = clock.measure((1, 16, 5))
    assert found.verify == {(1, w): pytest.approx(0.02 + 0.001 * w) for w in widths(16)}
    assert found.draft == {(1, d): pytest.approx(0.002 * d) for d in (1, 5)}


def test_nothing_costs_more_than_the_same_for_more_tokens():
    """A busy moment at width 1 once made drafts look free: 69 ms where width 2 took 62."""
    table = CostTable(Measured({(1, 1): 69, (1, 2): 62, (1, 3): 70, (1, 4): 66}, {(1, 1): 20, (1, 3): 12}), 1, 4, 3)
    assert [table.verify(n, 1) for n in (1, 2, 3, 4)] == pytest.approx([65.5, 65.5, 68, 68])
    assert table.drafts(3, 1).tolist() == pytest.approx([12] * 3)
    rows = CostTable(Measured({(1, 1): 69, (1, 2): 80, (2, 1): 61, (2, 2): 90}, {}), 2, 2, 0)
    assert [rows.verify(n, b) for b in (1, 2) for n in (1, 2)] == pytest.approx([65, 80, 65, 90])


def test_without_a_drafter_to_time_no_draft_is_timed():
    clock = Clock(lambda rows, width: 0.01, lambda rows, depth: 0.01)
    assert clock.measure((1, 1, 0)) == Measured({(1, 1): pytest.approx(0.01)}, {})


# ---- online -----------------------------------------------------------------------------------------------------

CELLS = {(1, w): 1.0 + 0.1 * w for w in widths(16)}


def table() -> CostTable:
    return CostTable(Measured(CELLS, {(1, 1): 0.1, (1, 5): 0.5}), 1, 16, 5)


def test_observed_costs_replace_measured_ones():
    known = table()
    for _ in range(60):
        known.observe_verify(8, 1, 5.0)
        known.observe_draft(5, 1, 2.0)
    assert known.verify(8, 1) == pytest.approx(5.0, rel=0.01) and known.draft(5, 1) == pytest.approx(2.0, rel=0.01)


def test_the_first_observations_count_like_the_measurement_at_start():
    """Plain rounds are rare once drafts pay: what they cost must not take twenty of them to be found."""
    known = table()
    for _ in range(3):
        known.observe_verify(1, 1, 0.5 * CELLS[1, 1])
        for _ in range(9):
            known.observe_verify(8, 1, CELLS[1, 8])
    assert known.verify(1, 1) / known.verify(8, 1) < 0.65 * CELLS[1, 1] / CELLS[1, 8]


def test_a_machine_that_slows_down_slows_every_width():
    known = table()
    for _ in range(60):
        for width in (1, 8):
            known.observe_verify(width, 1, 2 * CELLS[1, width])
    assert known.verify(1, 1) == pytest.approx(2.2, rel=0.02)
    assert known.verify(4, 1) > 1.3 * CELLS[1, 4]  # not seen, yet dearer by the common part
    assert known.draft(5, 1) == pytest.approx(0.5)


def test_one_busy_moment_moves_an_estimate_little():
    known = table()
    for _ in range(5):
        known.observe_verify(8, 1, CELLS[1, 8])
    known.observe_verify(8, 1, 100.0)
    assert known.verify(8, 1) < 1.4 * CELLS[1, 8]


def test_a_cell_not_seen_for_long_believes_the_next_round_more():
    known = table()
    known.observe_verify(1, 1, CELLS[1, 1])
    for _ in range(200):
        known.observe_verify(8, 1, CELLS[1, 8])
    known.observe_verify(1, 1, 2 * CELLS[1, 1])
    assert known.verify(1, 1) > 1.5 * CELLS[1, 1]


def test_a_clock_too_coarse_is_no_error():
    known = CostTable(Measured({(1, 1): 0.0, (1, 2): 0.0}, {(1, 1): 0.0}), 1, 2, 1)
    known.observe_draft(1, 1, 0.0)
    known.observe_verify(2, 1, 0.0)
    assert 0 < known.verify(1, 1) < 1e-6


# ---- kept between runs ------------------------------------------------------------------------------------------


def test_a_measurement_is_kept_for_its_key_alone(tmp_path, caplog):
    found = Measured({(1, 1): 0.5, (4, 16): 0.75}, {(1, 5): 0.125})
    assert remembered(tmp_path / "costs", {"cpu": "a"}, lambda: found) == found
    assert remembered(tmp_path / "costs", {"cpu": "a"}, lambda: pytest.fail("measured again")) == found
    other = Measured({(1, 1): 9.0}, {})
    assert remembered(tmp_path / "costs", {"cpu": "b"}, lambda: other) == other
    file = next(path for path in (tmp_path / "costs").iterdir() if json.loads(path.read_text())["key"] == {"cpu": "a"})
    file.write_text("{")
    with caplog.at_level(logging.WARNING, "runtime.cost_table"):
        assert remembered(tmp_path / "costs", {"cpu": "a"}, lambda: other) == other
    assert "measuring costs again" in caplog.text
    assert remembered(tmp_path / "costs", {"cpu": "a"}, lambda: pytest.fail("not written again")) == other


def test_the_key_names_machine_target_dtype_threads_drafter_and_sizes(tiny_target, monkeypatch):
    key = cost_key(tiny_target, "eagle3", (1, 16, 5), 8)
    assert key["dtype"] == "float32" and key["drafter"] == "eagle3" and key["sizes"] == [1, 16, 5]
    assert key["device"] == "cpu" and key["cpu"] and len(key["target_config_sha256"]) == 64
    assert cost_key(tiny_target, "eagle3", (1, 16, 5), 4) != key
    assert cost_key(tiny_target, "ngram", (1, 16, 5), 8) != key != cost_key(tiny_target, "eagle3", (4, 16, 5), 8)
    monkeypatch.setattr(cost_table.torch, "get_num_threads", lambda: 7)
    assert cost_key(tiny_target, "eagle3", (1, 16, 5), 8) != key
    json.dumps(key)


def test_the_summary_names_widths_and_depths():
    assert table().summary().startswith("batch 1: verify by width 1: 1100.0, 2: 1200.0,")
    assert table().summary().endswith("draft by depth 1: 100.0, 2: 200.0, 3: 300.0, 4: 400.0, 5: 500.0 ms")


# ---- on a real engine's parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "ngram"])
def test_probes_run_every_cell_and_leave_no_row_behind(tiny_target, name, request, monkeypatch):
    from runtime.cost_probe import probes
    from runtime.forward import TargetRunner
    from runtime.proposers.ngram import NgramProposer

    proposer = request.getfixturevalue("eagle") if name == "eagle" else NgramProposer()
    runner = TargetRunner(tiny_target, 2, 20, proposer.taps)  # room for one tree of 16, no more
    proposer.reserve(2, 20)
    monkeypatch.setattr(cost_table, "MEASURE_SECONDS", 60.0)
    with probes(runner, proposer, 2, 16) as (verify, draft):
        found = measure(verify, draft, (2, 16, 5))
    assert found.verify.keys() == {(b, w) for b in (1, 2) for w in widths(16)}
    assert found.draft.keys() == {(1, 1), (1, 5), (2, 1), (2, 5)}
    assert all(seconds > 0 for seconds in (*found.verify.values(), *found.draft.values()))
    assert [runner.cache.length(row) for row in range(2)] == [0, 0]
    assert runner.cache.take(0, 20) == list(range(20))
    proposer.start(0, [1, 2], 3, None if not proposer.taps else tiny_target.embed_weight[:2, :1].repeat(1, 192))
    proposer.release(0)


def test_probes_give_rows_back_after_a_failure(tiny_target):
    from runtime.cost_probe import probes
    from runtime.forward import TargetRunner
    from runtime.proposers.none import NoneProposer

    runner = TargetRunner(tiny_target, 1, 32, ())
    with pytest.raises(RuntimeError, match="stop"):
        with probes(runner, NoneProposer(), 1, 4):
            raise RuntimeError("stop")
    assert runner.cache.length(0) == 0
