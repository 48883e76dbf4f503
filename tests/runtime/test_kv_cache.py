import numpy as np
import pytest
import torch

from runtime.kv_cache import SlotCache, bucket


def make(rows=2, slots=6) -> SlotCache:
    return SlotCache(1, rows, slots)


def test_commit_keeps_the_path_and_frees_the_rest():
    cache = make()
    first = cache.take(0, 4)
    assert first == [0, 1, 2, 3]
    cache.commit(0, first, [0, 2])
    assert cache.length(0) == 2
    assert cache.take(0, 4) == [1, 3, 4, 5]
    assert cache.length(1) == 0


def test_a_full_row_is_an_error_and_loses_nothing():
    cache = make()
    cache.commit(0, cache.take(0, 5), [0, 1, 2, 3, 4])
    with pytest.raises(RuntimeError, match="needs 2 slots and has 1 of 6"):
        cache.take(0, 2)
    assert cache.take(0, 1) == [5]


def test_release_forgets_one_row_only():
    cache = make()
    for row in (0, 1):
        cache.commit(row, cache.take(row, 3), [0, 2])
    cache.release(0)
    assert (cache.length(0), cache.length(1)) == (0, 2)
    assert cache.take(0, 6) == [0, 1, 2, 3, 4, 5]


def test_slots_given_back_are_taken_first_and_none_is_lost_or_held_twice():
    """Against a plain set of free slots, over 300 rounds of every tree size and accept count."""
    draw = np.random.default_rng(0)
    cache, free, held = make(slots=2000), set(range(2000)), set()
    for _ in range(300):
        taken = cache.take(1, int(draw.integers(1, 17)))
        assert taken == sorted(free)[: len(taken)]
        kept = [slot for slot in taken if draw.random() < 0.3]
        cache.commit(1, taken, kept)
        free.difference_update(kept)
        held.update(kept)
        assert cache.free(1) == len(free)
        assert set(cache.committed[1].nonzero()[:, 0].tolist()) == held
        assert len(cache._returned[1]) <= 16  # bookkeeping of a round does not grow with the text


def test_positions_are_kept_per_row_and_slot():
    cache = make()
    cache.take(1, 3)
    cache.place(1, np.array([[0, 2, 1]]), np.array([[7, 8, 8]]))
    assert cache.positions[1, :3].tolist() == [7, 8, 8]
    assert cache.positions[0].sum() == 0


def test_padding_writes_to_the_trash_slot():
    cache = make()
    slots = cache.take(1, 2)
    width = cache.open(0, 2, torch.tensor([[cache.trash, cache.trash], slots]))
    assert width == 6
    keys, values = cache.update(torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2), 0)
    assert keys.shape == (2, 1, 6, 2)
    assert keys[0].abs().sum() == 0
    assert keys[1].sum() == 4
    assert values[1].sum() == 4


def test_a_layer_takes_heads_sizes_and_dtype_from_its_first_states():
    """Quantised targets compute in another dtype than they store, and keys and values may differ in size."""
    cache = make()
    cache.open(0, 1, torch.tensor([cache.take(0, 2)]))
    keys, values = cache.update(torch.ones(1, 3, 2, 4).bfloat16(), torch.ones(1, 3, 2, 8).bfloat16(), 0)
    assert (keys.shape[-1], values.shape[-1], keys.dtype) == (4, 8, torch.bfloat16)


def test_widths_are_few_and_never_too_small():
    widths = [bucket(used, 10_000) for used in range(10_001)]
    assert all(width >= used for used, width in enumerate(widths))
    assert all(width - used < max(64, used / 8 + 1) for used, width in enumerate(widths) if used)
    assert len(set(widths)) <= 45
    assert bucket(70, 100) == 100
