"""Hidden states kept while collecting are the ones training would compute."""

import io

import pytest
import torch
from rich.console import Console

from drafters.batches import collate
from drafters.config import BuiltinData
from drafters.features import CachedFeatures
from drafters.models.layout import make_layout
from drafters.store import FOLDER
from runtime import pipeline
from runtime.engine import Engine
from runtime.proposers.recorder import Recorder
from runtime.sampling import SamplingParams


@pytest.mark.parametrize(("temperature", "taps"), [(0.0, (2, 4, 5)), (1.0, (8,))])
def test_training_reads_what_collecting_kept(tiny_target, tmp_path, monkeypatch, temperature, taps):
    data = BuiltinData(num_prompts=5, max_new_tokens=9, temperature=temperature, batch_size=3, max_prompt_tokens=200)
    found = pipeline.collect_responses(data, tiny_target, tmp_path, Console(file=io.StringIO()), features=True)
    records = [record for record in found.records if len(record.response_ids) > 1]
    assert len(records) >= 3
    t2d = torch.ones(tiny_target.vocab_size, dtype=torch.bool)
    batch = collate(records, [(i,) for i in range(len(records))], 400)
    layout = make_layout(batch, 2)
    computed = CachedFeatures(tiny_target, taps, t2d, torch.float32, tmp_path / "fresh")(batch, layout)
    collected = {"folder": tmp_path / "run", "collected": [tmp_path / FOLDER]}
    monkeypatch.setattr(type(tiny_target), "hidden", None)  # any use of the target would raise
    read = CachedFeatures(tiny_target, taps, t2d, torch.float32, **collected)(batch, layout)
    torch.testing.assert_close(read.taps.float(), computed.taps.float(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(read.teacher.probabilities, computed.teacher.probabilities, rtol=2e-2, atol=1e-5)
    assert read.teacher.choice.equal(computed.teacher.choice)


def test_rows_keep_their_own_states_and_an_abandoned_one_keeps_none_of_the_next(tiny_target):
    recorder = Recorder((2, 3))
    engine = Engine.load(tiny_target, recorder, batch_size=2)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [3, 4]]
    stream = engine.stream(prompts[0], SamplingParams(6, ignore_eos=True))
    next(stream, None)
    stream.close()
    results = engine.generate(prompts, [SamplingParams(n, ignore_eos=True) for n in (4, 7, 5)])
    for prompt, result in zip(prompts, results):
        ids = prompt + result.token_ids
        taps = recorder.take(ids)
        positions = torch.arange(len(ids) - 1)[None]
        mask = torch.ones(len(ids) - 1, len(ids) - 1, dtype=torch.bool).tril()[None, None]
        expected, _ = tiny_target.hidden(torch.tensor([ids[:-1]]), positions, mask, (2, 3))
        torch.testing.assert_close(taps, expected[0], rtol=1e-4, atol=1e-4)
        assert recorder.take(ids) is None
