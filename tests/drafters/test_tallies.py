"""Logged numbers are sums over sums, worked out by hand here."""

from __future__ import annotations

import pytest
import torch

from drafters.tallies import Window, flatten, means, simulated_acceptance_length

# Rows: loss sum, right, right so far, supervised; the third depth never occurred.
STATS = torch.tensor([[20.0, 27.0, 0.0], [8.0, 6.0, 0.0], [8.0, 5.0, 0.0], [10.0, 9.0, 0.0]], dtype=torch.float64)


def test_simulated_acceptance_length_counts_whole_prefixes_only():
    assert simulated_acceptance_length(STATS) == pytest.approx(1 + 8 / 10 + 5 / 9)


def test_loss_is_the_weighted_mean_over_positions_and_accuracy_per_depth():
    values = means("train", STATS, decay=0.5)
    assert values == {
        "train/loss": pytest.approx((20 + 0.5 * 27) / (10 + 0.5 * 9)),
        "train/acc_0": pytest.approx(0.8),
        "train/acc_1": pytest.approx(6 / 9),
    }


def test_lists_are_numbered_from_the_first_draft():
    flat = flatten({"acceptance_length": 2.0, "acceptance_at": [0.5, 0.25]})
    assert flat == {"eval/acceptance_length": 2.0, "eval/acceptance_at_1": 0.5, "eval/acceptance_at_2": 0.25}


def test_further_means_are_sums_over_counts():
    rows = torch.tensor([[6.0, 0.0, 0.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    values = means("train", torch.cat((STATS, rows)), 0.5, ("kl", "agreement"))
    assert values.pop("train/kl") == 1.5 and values == means("train", STATS, 0.5)


def test_window_times_only_what_is_inside():
    assert Window(2, torch.device("cpu"), 3).stats.shape == (10, 2)
    window = Window(2, torch.device("cpu"))
    with window:
        sum(range(1000))
    first = window.seconds
    assert first > 0 and window.stats.shape == (4, 2)
    with window:
        sum(range(1000))
    assert window.seconds > first
