"""transformers' own generate does the same work as plain decoding."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from drafters.config import TargetConfig
from drafters.errors import ConfigError
from drafters.target import Target
from runtime import Engine, SamplingParams
from runtime.peer import TransformersPeer
from tests.runtime.oracle import NEW, PROMPTS


@pytest.fixture(scope="module")
def plain_answers(tiny_target):
    engine = Engine.load(tiny_target, "none")
    return engine.generate([list(p.messages) for p in PROMPTS], SamplingParams(NEW))


def test_transformers_gives_plain_decodings_ids(tiny_target, plain_answers):
    peer = TransformersPeer(tiny_target)
    prompts = [answer.prompt_ids for answer in plain_answers]
    assert len({len(ids) for ids in prompts}) == 3  # so that the batch below is padded
    expected = [answer.token_ids for answer in plain_answers]
    assert peer.generate(prompts, [SamplingParams(NEW)] * 3) == expected
    assert peer.generate(prompts[:1], [SamplingParams(4)]) == [expected[0][:4]]


@pytest.mark.parametrize("drafter", ["none", "random"])
def test_processors_make_the_text_transformers_makes_with_them(tiny_target, plain_answers, drafter):
    """Every setting that moves a greedy choice, on trees of random drafts too."""
    first = plain_answers[0]
    banned = ((first.token_ids[0],),)
    bias = {first.token_ids[2]: -3.0}
    settings = SamplingParams(NEW, repetition_penalty=1.7, logit_bias=bias, bad_words=banned, min_tokens=3)
    engine = Engine.load(tiny_target, drafter, num_draft_tokens=8)
    answers = engine.generate([a.prompt_ids for a in plain_answers], settings)
    assert answers[0].token_ids != first.token_ids
    peer = TransformersPeer(tiny_target)
    for answer in answers:
        assert peer.generate([answer.prompt_ids], [settings]) == [answer.token_ids]


def test_what_transformers_cannot_do_is_refused(tiny_target):
    with pytest.raises(ConfigError, match="presence_penalty is 0.5.*compare_transformers=false"):
        TransformersPeer(tiny_target).generate([[3, 4]], [SamplingParams(4, presence_penalty=0.5)])


def test_transformers_ends_at_the_same_ids(tiny_target, plain_answers):
    # An answer with a token that first appears late in it, to end at.
    ends = [(a, i) for a in plain_answers for i in range(2, NEW - 1) if a.token_ids[i] not in a.token_ids[:i]]
    first, end = ends[0]
    second = next(a for a in plain_answers if a is not first)
    ending = dataclasses.replace(tiny_target, eos_ids=(first.token_ids[end],))
    prompts = [first.prompt_ids, second.prompt_ids]
    ours = Engine.load(ending, "none").generate(prompts, SamplingParams(NEW))
    assert (ours[0].finish_reason, len(ours[0].token_ids)) == ("stop", end + 1)
    peer = TransformersPeer(ending)
    assert peer.generate(prompts, [SamplingParams(NEW)] * 2) == [answer.token_ids for answer in ours]
    forwards = []
    peer.model.register_forward_hook(lambda *_: forwards.append(1))
    peer.generate(prompts[:1], [SamplingParams(NEW)])
    assert len(forwards) == end + 1  # cutting the text afterwards would not give the time back


def test_transformers_ignores_the_models_own_defaults(tiny_folder, tmp_path, plain_answers):
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 9.0}))
    cfg = TargetConfig(name="tiny", path=str(folder), dtype="float32", device="cpu")
    peer = TransformersPeer(Target.load(cfg))
    answer = plain_answers[0]
    assert peer.generate([answer.prompt_ids], [SamplingParams(NEW)]) == [answer.token_ids]


def test_transformers_samples_at_a_temperature_and_leaves_the_global_seed_alone(tiny_target, plain_answers):
    peer = TransformersPeer(tiny_target)
    ids = plain_answers[0].prompt_ids
    before = torch.random.get_rng_state()
    one, same, other = (peer.generate([ids], [SamplingParams(NEW, 1.0, seed)]) for seed in (1, 1, 2))
    assert one == same != other
    assert torch.equal(before, torch.random.get_rng_state())
