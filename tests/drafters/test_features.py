"""Cached features equal computed ones; the store is keyed, checksummed and resumable."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from drafters import store as store_module
from drafters.batches import Batch, collate
from drafters.errors import ArtifactError
from drafters.features import AHEAD, CachedFeatures, OnlineFeatures, shared_taps
from drafters.models.layout import make_layout
from tests.drafters.training_setup import make_records, new_drafter, run_settings

TAPS = (2, 4, 5)
RECORDS = make_records(4)


@pytest.fixture
def t2d(tiny_target):
    return new_drafter(tiny_target, RECORDS, run_settings(tiny_target)).t2d


def store(tiny_target, t2d, folder, taps=TAPS, rank=0) -> CachedFeatures:
    return CachedFeatures(tiny_target, taps, t2d, torch.float32, folder, rank)


def batch_of(*rows) -> Batch:
    return collate(RECORDS, list(rows), 100)


def shards(folder):
    return sorted(folder.glob("*/*.safetensors"))


def same(one, other) -> bool:
    return (one.taps.equal(other.taps) and one.teacher.choice.equal(other.teacher.choice)
            and one.teacher.probabilities.equal(other.teacher.probabilities))  # fmt: skip


def test_online_features_are_the_targets_own(tiny_target, t2d):
    batch = batch_of((0, 1))
    layout = make_layout(batch, 2)
    found = OnlineFeatures(tiny_target, TAPS, t2d, torch.float32)(batch, layout)
    kept = t2d.nonzero().flatten()
    taps, probabilities, choices = [], [], []
    for record in RECORDS[:2]:
        ids = torch.tensor([record.prompt_ids + record.response_ids])
        out = tiny_target.model(ids, output_hidden_states=True)
        taps.append(torch.cat([out.hidden_states[i][0, :-1] for i in TAPS], -1))
        logits = out.logits[0, len(record.prompt_ids) - 1 : -1]
        probabilities.append(torch.softmax(logits[:, kept], -1))
        choices.append(logits.argmax(-1))
    torch.testing.assert_close(found.taps, torch.cat(taps), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.teacher.probabilities, torch.cat(probabilities), rtol=1e-4, atol=1e-6)
    choice = torch.cat(choices)
    wanted = torch.where(t2d[choice], torch.searchsorted(kept, choice), -1)
    assert found.teacher.choice.equal(wanted)


def test_cached_features_are_the_online_ones_in_bfloat16(tiny_target, t2d, tmp_path):
    batch = batch_of((0, 1), (2, 3))
    layout = make_layout(batch, 2)
    online = OnlineFeatures(tiny_target, TAPS, t2d, torch.float32)(batch, layout)
    cached = store(tiny_target, t2d, tmp_path)(batch, layout)
    torch.testing.assert_close(cached.taps.float(), online.taps, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(cached.teacher.probabilities, online.teacher.probabilities, rtol=2e-2, atol=1e-5)
    assert cached.teacher.choice.equal(online.teacher.choice)


def test_greedy_answers_say_themselves_what_the_target_chose(tiny_target, t2d, tmp_path, monkeypatch):
    batch = batch_of((0, 1), (2, 3))
    layout = make_layout(batch, 2)
    said = torch.tensor([token for record in RECORDS for token in record.response_ids])
    wanted = torch.where(t2d[said], t2d.cumsum(0)[said] - 1, -1)
    computed = OnlineFeatures(tiny_target, TAPS, t2d, torch.float32)(batch, layout).teacher.choice
    assert not computed.equal(wanted)  # these answers are somebody else's
    monkeypatch.delattr("drafters.features.target_choice")
    online = OnlineFeatures(tiny_target, TAPS, t2d, torch.float32, greedy=True)
    cached = CachedFeatures(tiny_target, TAPS, t2d, torch.float32, tmp_path, greedy=True)
    assert online(batch, layout).teacher.choice.equal(wanted)
    assert cached(batch, layout).teacher.choice.equal(wanted)


def test_read_back_equals_computed_whatever_the_neighbours(tiny_target, t2d, tmp_path, monkeypatch):
    first = store(tiny_target, t2d, tmp_path)
    batch, layout = batch_of((0, 1, 2)), make_layout(batch_of((0, 1, 2)), 2)
    fresh = first(batch, layout)
    first.flush()
    assert len(shards(tmp_path)) == 1
    again = store(tiny_target, t2d, tmp_path)
    monkeypatch.setattr(type(tiny_target), "hidden", None)  # any use of the target would raise
    assert same(fresh, again(batch, layout))
    other = batch_of((2, 0))
    order = again(other, make_layout(other, 2)).taps
    sizes = [len(r.prompt_ids) + len(r.response_ids) - 1 for r in RECORDS]
    assert order[: sizes[2]].equal(fresh.taps[sizes[0] + sizes[1] :])


@pytest.fixture
def runs(tiny_target, monkeypatch) -> list[int]:
    """Lengths of the texts the target is run on, in order."""
    found, hidden = [], type(tiny_target).hidden

    def spy(self, ids, *rest):
        found.append(ids.shape[1])
        return hidden(self, ids, *rest)

    monkeypatch.setattr(type(tiny_target), "hidden", spy)
    return found


def lengths(*records) -> list[int]:
    return [len(RECORDS[i].prompt_ids) + len(RECORDS[i].response_ids) for i in records]


def test_what_is_missing_of_a_row_is_computed_as_it_was_beside_its_neighbours(
    tiny_target, t2d, tmp_path, monkeypatch, runs
):
    """As after a kill between two shards: some documents of a row were written, their neighbours were not."""
    batch = batch_of((0, 1, 2))
    layout = make_layout(batch, 2)
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)  # a shard per document
    whole = store(tiny_target, t2d, tmp_path / "whole")(batch, layout)
    store(tiny_target, t2d, tmp_path / "cut")(batch, layout)
    shards(tmp_path / "cut")[1].unlink()
    runs.clear()
    resumed = store(tiny_target, t2d, tmp_path / "cut")
    assert same(whole, resumed(batch, layout))
    assert len(runs) == 1 and runs[0] in lengths(0, 1, 2)  # what was lost, alone, without filler
    assert same(whole, resumed(batch, layout)) and len(runs) == 1


def test_batches_that_come_later_are_computed_together_with_the_one_that_is_missing(tiny_target, t2d, tmp_path, runs):
    source, later = store(tiny_target, t2d, tmp_path), [batch_of((1,)), batch_of((0, 2))]
    rest = iter([*later, *[batch_of((0,))] * 1000])
    fresh = source(batch_of((0,)), make_layout(batch_of((0,)), 2), rest)
    assert sorted(runs) == sorted(lengths(0, 1, 2))  # each once
    assert len(list(rest)) == 1002 - AHEAD * torch.get_num_threads()
    asked = iter([batch_of((3,))])
    again = source(batch_of((0, 1)), make_layout(batch_of((0, 1)), 2), asked)
    assert len(runs) == 3 and list(asked)  # nothing was missing: nobody looked ahead
    assert again.taps[: len(fresh.taps)].equal(fresh.taps)


def test_the_number_of_threads_changes_no_bit(tiny_target, t2d, tmp_path):
    batch, threads, found = batch_of((0, 1), (2, 3)), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(store(tiny_target, t2d, tmp_path / str(count))(batch, make_layout(batch, 2)).taps)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert found[0].equal(found[1]) and found[0].equal(found[2])


def test_a_target_whose_angles_follow_the_length_reads_one_text_at_a_time(tiny_target, t2d, tmp_path, monkeypatch):
    monkeypatch.setattr("drafters.features.side_by_side", None)  # any use would raise
    batch = batch_of((0, 1))
    with pytest.raises(TypeError):
        store(tiny_target, t2d, tmp_path)(batch, make_layout(batch, 2))
    config = copy.deepcopy(tiny_target.text_config)
    config.rope_parameters = {**config.rope_parameters, "rope_type": "dynamic", "factor": 2.0}
    other = replace(tiny_target)
    monkeypatch.setattr(type(other), "text_config", config)
    assert other.follows_length and not tiny_target.follows_length
    found = store(other, t2d, tmp_path)(batch, make_layout(batch, 2))
    assert len(found.taps) == sum(lengths(0, 1)) - 2


def test_all_filler_batch(tiny_target, t2d, tmp_path):
    batch = batch_of(())
    found = store(tiny_target, t2d, tmp_path)(batch, make_layout(batch, 2))
    assert found.taps.shape == (0, 192) and found.teacher.choice.shape == (0,)


def test_shards_are_cut_by_size(tiny_target, t2d, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)
    source = store(tiny_target, t2d, tmp_path)
    source(batch_of((0, 1)), make_layout(batch_of((0, 1)), 2))
    assert len(shards(tmp_path)) == 2


def test_a_shard_is_never_written_over(tiny_target, t2d, tmp_path, monkeypatch):
    """One is deleted as the error about a damaged file says, or another run writes into the same store."""
    monkeypatch.setattr(store_module, "SHARD_BYTES", 1)
    source, other = (store(tiny_target, t2d, tmp_path) for _ in range(2))
    batch, layout = batch_of((0, 1, 2)), make_layout(batch_of((0, 1, 2)), 2)
    source(batch, layout)
    shards(tmp_path)[0].unlink()
    kept = {path.name: path.read_bytes() for path in shards(tmp_path)}
    other(batch_of((3,)), make_layout(batch_of((3,)), 2))
    store(tiny_target, t2d, tmp_path)(batch, layout)
    assert len(shards(tmp_path)) == 4
    assert kept.items() <= {path.name: path.read_bytes() for path in shards(tmp_path)}.items()
    assert len(store(tiny_target, t2d, tmp_path).store._index) == 4


def test_runs_that_open_one_store_at_the_same_time_do_not_disturb_each_other(tiny_target, tmp_path, monkeypatch):
    """Between one run's writing its description and putting it in place another does the same, then both go on."""
    replace_file, opened = store_module.os.replace, []

    def slow(source, target):
        if not opened:
            opened.append(True)
            monkeypatch.setattr(store_module.os, "getpid", lambda: -1)  # as another process
            store_module.FeatureStore(tiny_target, TAPS, tmp_path)
        replace_file(source, target)

    monkeypatch.setattr(store_module.os, "replace", slow)
    made = store_module.FeatureStore(tiny_target, TAPS, tmp_path)
    assert opened and sorted(path.name for path in made.folder.iterdir()) == ["store.json"]


def test_other_taps_get_another_store(tiny_target, t2d, tmp_path):
    one, other = store(tiny_target, t2d, tmp_path), store(tiny_target, t2d, tmp_path, taps=(1, 4, 5))
    assert one.store.folder != other.store.folder
    assert store(tiny_target, t2d, tmp_path, rank=1).store.folder == one.store.folder


def test_a_shared_store_serves_every_family_without_the_target(tiny_target, t2d, tmp_path, monkeypatch):
    wide = shared_taps(tiny_target, TAPS)
    assert wide == (2, 4, 5, 8)  # EAGLE-3's three of eight layers, and the last state
    batch, layout = batch_of((0, 1)), make_layout(batch_of((0, 1)), 2)
    first = CachedFeatures(tiny_target, TAPS, t2d, torch.float32, tmp_path, keep=wide)
    fresh = first(batch, layout)
    first.flush()
    expected = {taps: OnlineFeatures(tiny_target, taps, t2d, torch.float32)(batch, layout) for taps in ((8,), (5, 2))}
    monkeypatch.setattr(type(tiny_target), "hidden", None)  # any use of the target would raise
    assert same(fresh, store(tiny_target, t2d, tmp_path)(batch, layout))
    assert fresh.taps.shape[1] == 3 * 64
    for taps, online in expected.items():
        read = CachedFeatures(tiny_target, taps, t2d, torch.float32, tmp_path / "run", collected=[tmp_path])
        torch.testing.assert_close(read(batch, layout).taps.float(), online.taps, rtol=1e-2, atol=1e-3)
    with pytest.raises(TypeError):  # a state that was not kept needs the target
        store(tiny_target, t2d, tmp_path, taps=(3,))(batch, layout)


def test_a_store_of_another_target_dtype_is_not_read(tiny_target, t2d, tmp_path, monkeypatch):
    source = CachedFeatures(tiny_target, TAPS, t2d, torch.float32, tmp_path, keep=(2, 4, 5, 8))
    source(batch_of((0,)), make_layout(batch_of((0,)), 2))
    source.flush()
    path = source.store.folder / "store.json"
    path.write_text(path.read_text().replace("torch.float32", "torch.bfloat16"))
    assert store(tiny_target, t2d, tmp_path).collected == []


def test_a_flipped_byte_and_a_cut_file_are_named(tiny_target, t2d, tmp_path):
    batch, layout = batch_of((0,)), make_layout(batch_of((0,)), 2)
    source = store(tiny_target, t2d, tmp_path)
    source(batch, layout)
    source.flush()
    path = shards(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{path.name}.*checksum.*Delete the file"):
        store(tiny_target, t2d, tmp_path)(batch, layout)
    path.write_bytes(data[:100])
    with pytest.raises(ArtifactError, match=f"{path.name} is damaged.*Delete it"):
        store(tiny_target, t2d, tmp_path)


def test_a_disk_too_small_is_refused_with_both_sizes(tiny_target, t2d, tmp_path, monkeypatch):
    source = store(tiny_target, t2d, tmp_path)
    assert source.store.bytes_per_token == 2 * 4 * 64
    source.reserve(1000)
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10**6}))
    with pytest.raises(ArtifactError, match=r"5.12 GB more, the disk has 0.00 GB free.*features=online"):
        source.reserve(10**7)
