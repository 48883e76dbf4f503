import pytest
import torch

from runtime.kv_cache import SlotCache


def make(rows=2, slots=6) -> SlotCache:
    return SlotCache(1, rows, slots, 1, 2, torch.float32, torch.device("cpu"))


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
        cache.commit(row, cache.take(row, 3), [0, 1, 2])
    cache.release(0)
    assert (cache.length(0), cache.length(1)) == (0, 3)
    assert cache.take(0, 6) == [0, 1, 2, 3, 4, 5]


def test_mask_shows_committed_ancestors_and_self_only():
    cache = make()
    cache.commit(0, cache.take(0, 3), [0, 2])
    slots = cache.take(0, 3)
    assert slots == [1, 3, 4]
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    table = torch.tensor([slots, [cache.trash] * 3])
    width = cache.open(0, 2, table)
    mask = cache.mask(0, 2, [slots, []], [ancestors, torch.zeros(0, 0, dtype=torch.bool)], width)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0, 0, 0]] * 3  # an idle row sees slot 0, or softmax would be NaN


def test_padding_writes_to_the_trash_slot():
    cache = make()
    slots = cache.take(1, 2)
    cache.open(0, 2, torch.tensor([[cache.trash, cache.trash], slots]))
    keys, values = cache.update(torch.ones(2, 1, 2, 2), torch.ones(2, 1, 2, 2), 0)
    assert keys.shape == (2, 1, 2, 2)
    assert keys[0].abs().sum() == 0
    assert keys[1].sum() == 4
    assert values[1].sum() == 4
