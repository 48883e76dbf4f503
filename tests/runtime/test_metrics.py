"""Statistics against numbers worked out by hand; sums of sums; memory that does not grow."""

from __future__ import annotations

import random
import sys

import pytest

from runtime.metrics import FINE, RoundTime, Stats, Times
from runtime.tree import DraftTree

#       root -> 1 (a), 2 (b); 1 -> 3 (a), 4 (b); 3 -> 5 (b)
TREE = DraftTree((9, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 3), (0, 1, 1, 2, 2, 3), (), ("", "a", "b", "a", "b", "b"))


def test_a_round_is_counted_as_worked_out_by_hand():
    stats = Stats()
    stats.verified(TREE, (0, 1, 4), 3, predicted=2.5)
    assert (stats.rounds, stats.drafted, stats.accepted, stats.emitted) == (1, 5, 2, 3)
    assert stats.accepted_at == [1, 1] and stats.chosen_n == {5: 1}
    assert stats.drafted_rank == [3, 2] and stats.accepted_rank == [1, 1]
    assert stats.by_proposer == {"a": {"drafted": 2, "accepted": 1}, "b": {"drafted": 3, "accepted": 1}}
    assert (stats.predicted, stats.predicted_for) == (2.5, 3)


def test_what_a_stop_cut_off_is_not_accepted():
    stats = Stats()
    stats.verified(TREE, (0, 1, 3, 5), 2)  # of three accepted drafts the second ended the text
    assert (stats.accepted, stats.emitted, stats.accepted_at) == (2, 2, [1, 1])
    assert stats.accepted_by == {"a": 2} and stats.accepted_rank == [2]
    assert (stats.predicted, stats.predicted_for) == (0.0, 0)


def test_rounds_of_every_size_are_told_apart():
    stats = Stats()
    for size in (0, 0, 3, 0, 3, 7):
        stats.verified(DraftTree.chain(1, list(range(size))), (0,), 1)
    assert stats.chosen_n == {0: 3, 3: 2, 7: 1} and stats.by_proposer == {}
    assert stats.acceptance_length == 1.0 and stats.acceptance_rate == 0.0


def test_rates_are_of_sums():
    stats = Stats()
    stats.verified(TREE, (0, 1, 3, 5), 4)
    stats.verified(TREE, (0,), 1)
    assert stats.acceptance_length == 2.5 and stats.acceptance_rate == 0.3
    assert stats.acceptance_at == [0.5, 0.5, 0.5]
    assert Stats().acceptance_at == [] and Stats().time_share is None and Stats().acceptance_length == 0.0


def randomly(seed: int, rounds: int) -> Stats:
    rng = random.Random(seed)
    stats = Stats(near_ties=rng.randrange(3))
    for _ in range(rounds):
        path = rng.choice([(0,), (0, 1), (0, 2), (0, 1, 4), (0, 1, 3, 5)])
        stats.verified(TREE, path, rng.randint(1, len(path)), rng.choice([None, 1.5]))
        stats.time(RoundTime(*(rng.uniform(0.001, 0.1) for _ in range(4))), rng.randint(0, 4), rng.randint(1, 4))
    return stats


def test_adding_requests_is_counting_all_their_rounds():
    total = Stats()
    for seed in range(5):
        total.add(randomly(seed, 20))
    for name in ("rounds", "drafted", "accepted", "emitted", "predicted", "predicted_for", "near_ties"):
        assert getattr(total, name) == pytest.approx(sum(getattr(randomly(seed, 20), name) for seed in range(5)))
    for name in ("chosen_n", "drafted_by", "accepted_by", "seconds"):
        for key in getattr(total, name):
            parts = sum(getattr(randomly(seed, 20), name)[key] for seed in range(5))
            assert getattr(total, name)[key] == pytest.approx(parts)
    for name in ("accepted_at", "drafted_rank", "accepted_rank"):
        columns = [getattr(randomly(seed, 20), name) for seed in range(5)]
        depth = max(map(len, columns))
        assert getattr(total, name) == [sum(c[k] for c in columns if k < len(c)) for k in range(depth)]
    assert total.round_time["verify"].counts.total() == 100
    assert total.token_time.counts.total() == sum(randomly(seed, 20).token_time.counts.total() for seed in range(5))


def test_adding_leaves_the_other_alone():
    one, two = randomly(1, 5), randomly(1, 5)
    total = Stats()
    total.add(one)
    total.add(one)
    assert one == two


def test_shares_of_time_sum_to_one_and_seconds_to_the_clock():
    stats = Stats()
    stats.time(RoundTime(1.0, 2.0, 0.5, 0.5), 2, 1)
    assert stats.time_share == {"draft": 0.25, "verify": 0.5, "sample": 0.125, "rest": 0.125}
    # Four rows of one round: together they took the round once, each of them saw all of it.
    rows = [Stats() for _ in range(4)]
    total = Stats()
    for row in rows:
        row.time(RoundTime(1.0, 2.0, 0.5, 0.5), 2, 4)
        total.add(row)
    assert total.seconds.total() == pytest.approx(4.0)
    assert rows[0].round_time["round"].quantile(0.5) == pytest.approx(4.0, rel=FINE)
    assert rows[0].token_time.quantile(0.5) == pytest.approx(2.0, rel=FINE)
    assert rows[0].token_time.counts.total() == 2


def test_a_round_that_emitted_nothing_has_no_time_per_token():
    stats = Stats()
    stats.time(RoundTime(verify=1.0), 0, 1)
    assert not stats.token_time.counts and stats.round_time["round"].counts.total() == 1


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_sorted_times(seed):
    rng = random.Random(seed)
    seconds = [rng.lognormvariate(-3, 1) for _ in range(1000)]
    times = Times()
    for each in seconds:
        times.record(each)
    exact = sorted(seconds)
    for share, place in ((0.5, 499), (0.95, 949), (0.99, 989), (1.0, 999)):
        assert times.quantile(share) == pytest.approx(exact[place], rel=FINE / 2 + 1e-4)
    assert list(times.percentiles()) == ["p50", "p95", "p99"]
    assert times.percentiles()["p95"] == times.quantile(0.95)
    assert Times().quantile(0.5) == 0.0


def test_events_count_as_often_as_they_are_said_to():
    times = Times()
    times.record(1.0, 98)
    times.record(10.0, 2)
    assert times.quantile(0.98) == pytest.approx(1.0, rel=FINE) and times.quantile(0.99) == pytest.approx(10, rel=FINE)
    times.record(0.0)
    assert times.quantile(0.0) < 1e-8


def test_memory_does_not_grow_with_requests():
    rng = random.Random(0)

    def size(total: Stats) -> int:
        parts = [total.chosen_n, total.drafted_by, total.accepted_at, total.token_time.counts, total.seconds]
        parts += [times.counts for times in total.round_time.values()]
        return sum(map(sys.getsizeof, parts)) + sum(map(len, parts))

    total, sizes = Stats(), []
    for number in range(2000):
        stats = Stats()
        stats.verified(TREE, (0, 1), 2, 1.5)
        stats.time(RoundTime(*(rng.uniform(0.01, 0.1) for _ in range(4))), 2, 1)
        total.add(stats)
        if number in (999, 1999):
            sizes.append(size(total))
    assert sizes[1] <= 1.02 * sizes[0]
    assert (total.rounds, total.emitted) == (2000, 4000)
