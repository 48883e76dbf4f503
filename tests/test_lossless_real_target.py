"""On the real target, in fp32: no proposer, temperature or batch changes a token of seeded plain decoding."""

from __future__ import annotations

import sys

import pytest
import torch

from drafters.config import BuiltinData
from drafters.corpus import load_prompts
from drafters.export import load_drafter
from runtime import Engine, SamplingParams
from tests.test_real_target import KEPT, target  # noqa: F401 (a fixture)

pytestmark = pytest.mark.slow
COUNT, TOKENS = 40, 64
PROPOSERS = ["none", "ngram", "suffix", str(KEPT), f"{KEPT}+suffix", "random"]


@pytest.fixture(scope="module")
def prompts(target):  # noqa: F811
    return [list(prompt.messages) for prompt in load_prompts(BuiltinData(eval_prompts=sys.maxsize), "eval")[:COUNT]]


@pytest.fixture(scope="module")
def plain(target, prompts):  # noqa: F811
    """Plain answers by temperature, one row at a time."""
    engine = Engine.load(target, "none")
    known = {}

    def answers(temperature: float) -> list[list[int]]:
        if temperature not in known:
            known[temperature] = [r.token_ids for r in engine.generate(prompts, settings(temperature))]
        return known[temperature]

    return answers


def settings(temperature: float) -> list[SamplingParams]:
    return [SamplingParams(TOKENS, temperature=temperature, seed=seed) for seed in range(COUNT)]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("proposer", PROPOSERS, ids=lambda path: path.replace(str(KEPT), "eagle3"))
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_text_equals_seeded_plain_decoding(target, prompts, plain, temperature, proposer, batch_size):  # noqa: F811
    engine = Engine.load(target, proposer, batch_size=batch_size, num_draft_tokens=8, depth=4)
    results = engine.generate(prompts, settings(temperature))
    assert [result.token_ids for result in results] == plain(temperature)
    rounds = sum(result.stats.rounds for result in results)
    tau = sum(result.stats.emitted for result in results) / rounds
    assert tau > {"none": 0.99, "random": 0.99, "ngram": 1.05, "suffix": 1.05}.get(proposer, 1.3)


def test_a_drafter_of_random_weights_changes_nothing_on_a_hundred_prompts(target):  # noqa: F811
    kept, contract = load_drafter(KEPT, target)
    drafter = kept.clone()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(std=0.05)
    messages = [list(p.messages) for split in ("eval", "train") for p in load_prompts(BuiltinData(), split)][:100]
    params = SamplingParams(24)
    plain = Engine.load(target, "none", batch_size=4).generate(messages, params)
    engine = Engine.load(target, (drafter, contract.tap_indices), batch_size=4, num_draft_tokens=8)
    results = engine.generate(messages, params)
    assert len(results) == 100
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    rounds = sum(result.stats.rounds for result in results)
    assert sum(result.stats.emitted for result in results) / rounds < 1.1
