"""The thread count is the one that pays."""

from __future__ import annotations

import threading

import pytest
import torch

from drafters import threads


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.5}, 2),
        ({1: 1.0, 2: 40.0}, 1),
        ({1: 1.0, 2: 0.95}, 1),
        ({1: 1.0, 2: 0.9, 4: 0.5}, 4),
        ({1: 1.0, 2: 0.5, 4: 0.48}, 2),
    ],
)
def test_more_threads_only_when_they_pay(seconds, expected):
    assert threads.choose(seconds) == expected


def test_a_requested_count_is_set_without_a_probe(monkeypatch):
    monkeypatch.setattr(threads, "probe", None)
    assert threads.set_threads(1) == 1 and torch.get_num_threads() == 1


def test_the_probe_tries_every_count_up_to_the_cores_and_its_choice_is_set(monkeypatch):
    asked = []

    def probe(counts):
        asked.extend(counts)
        torch.set_num_threads(counts[-1])
        return {count: 40.0 if count > 1 else 1.0 for count in counts}

    monkeypatch.setattr(threads, "available_cores", lambda: 6)
    monkeypatch.setattr(threads, "probe", probe)
    assert threads.set_threads(None) == 1
    assert asked == [1, 2, 4] and torch.get_num_threads() == 1


def test_the_probe_measures():
    assert 0 < threads.probe([1])[1] < 60


def test_work_side_by_side_is_done_at_once_on_one_thread_each_and_comes_back_in_order():
    torch.set_num_threads(2)
    both = threading.Barrier(2, timeout=60)  # broken unless two are at work at the same time

    def work(item):
        both.wait()
        return item, torch.get_num_threads()

    assert threads.side_by_side(work, [3, 1, 4, 1]) == [(3, 1), (1, 1), (4, 1), (1, 1)]
    assert torch.get_num_threads() == 2


def test_a_failure_side_by_side_is_raised_and_leaves_the_threads(monkeypatch):
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError):
        threads.side_by_side(lambda item: 1 / item, [1, 0, 2])
    assert torch.get_num_threads() == 2
