"""Where two answers part, and what counts as a near tie."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from runtime import Engine, SamplingParams
from runtime.forward import TargetRunner
from runtime.identity import Divergence, IdentityCheck

GREEDY = SamplingParams(8)


@pytest.fixture(scope="module")
def answer(tiny_target):
    prompt = [{"role": "user", "content": "hello there"}]
    return Engine.load(tiny_target, "none").generate([prompt], GREEDY)[0]


@pytest.fixture
def check(tiny_target):
    return IdentityCheck(tiny_target)


def changed(answer, position, token):
    return [*answer.token_ids[:position], token, *answer.token_ids[position + 1 :]]


def test_equal_answers_have_no_divergence(check, answer):
    assert check.compare(answer.prompt_ids, list(answer.token_ids), answer.token_ids, GREEDY) is None


def test_margin_is_measured_to_the_worse_of_the_two_tokens(check, answer, tiny_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([answer.prompt_ids + answer.token_ids[:3]])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    assert order[0] == answer.token_ids[3]
    for rank in (1, 2, 511):
        found = check.compare(answer.prompt_ids, changed(answer, 3, order[rank]), answer.token_ids, GREEDY)
        assert (found.position, found.token, found.plain_token) == (3, order[rank], order[0])
        assert found.margin == pytest.approx(float(logits[order[0]] - logits[order[rank]]), abs=1e-4)


def test_margin_counts_a_third_token_that_beats_both(check, answer):
    scores = check._scores(answer.prompt_ids, answer.token_ids[:3], GREEDY)
    second, third = scores.argsort(descending=True).tolist()[1:3]
    found = check.compare(answer.prompt_ids, changed(answer, 3, second), changed(answer, 3, third), GREEDY)
    assert found.margin == pytest.approx(float(scores.max() - scores[third]), abs=1e-4)


def test_an_answer_that_just_ends_is_never_a_near_tie(check, answer):
    check.noise = 1e6
    found = check.compare(answer.prompt_ids, answer.token_ids[:5], answer.token_ids, GREEDY)
    assert (found.position, found.token, found.plain_token) == (5, None, answer.token_ids[5])
    assert not found.near_tie
    longer = [*answer.token_ids, 7]
    assert not check.compare(answer.prompt_ids, longer, answer.token_ids, GREEDY).near_tie


def test_near_tie_means_under_twice_the_noise(check, answer):
    other = changed(answer, 3, (answer.token_ids[3] + 1) % 512)
    check.noise = 0.0
    margin = check.compare(answer.prompt_ids, other, answer.token_ids, GREEDY).margin
    for noise, tie in ((0.49 * margin, False), (0.51 * margin, True)):
        check.noise = noise
        assert check.compare(answer.prompt_ids, other, answer.token_ids, GREEDY).near_tie is tie
    assert not Divergence(0, 1, 2, margin=0.5, limit=0.5).near_tie


def test_at_a_temperature_the_scores_are_those_the_sampler_saw(check, answer, tiny_target):
    params = SamplingParams(8, temperature=0.7, seed=11, repetition_penalty=1.5, top_k=3)
    sampled = Engine.load(tiny_target, "none").generate([answer.prompt_ids], params)[0].token_ids
    assert sampled != answer.token_ids
    for position, token in enumerate(sampled):
        scores = check._scores(answer.prompt_ids, sampled[:position], params)
        assert int(scores.argmax()) == token
    check.noise = 0.7
    assert check.compare(answer.prompt_ids, sampled[:-1] + [0], sampled, params).limit == pytest.approx(2.0)


def test_noise_is_the_gap_between_whole_and_stepwise(check, monkeypatch):
    assert 0.0 <= check.noise < 1e-3
    real = TargetRunner.run

    def shaken(self, first, trees, starts):
        hidden, taps, slots = real(self, first, trees, starts)
        return hidden * (1.01 if starts == [20] else 1.0), taps, slots

    monkeypatch.setattr(TargetRunner, "run", shaken)
    assert IdentityCheck(check.target).noise > 1e-3
