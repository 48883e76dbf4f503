import random

import pytest
import torch

from drafters.errors import ConfigError
from runtime import SamplingParams
from runtime.engine import EngineConfig
from runtime.metrics import Stats
from runtime.proposers.ngram import NgramProposer
from runtime.proposers.none import NoneProposer
from runtime.request import Request
from runtime.sampling import keyed_gumbel
from tests.runtime.conftest import PROMPTS, RandomTrees, Scripted


@pytest.fixture(scope="module")
def plain(make_engine):
    """Plain decoding's answers, by (temperature, max_new_tokens)."""
    cache = {}

    def answers(temperature=0.0, tokens=40):
        key = (temperature, tokens)
        if key not in cache:
            params = SamplingParams(max_new_tokens=tokens, temperature=temperature, seed=3)
            cache[key] = make_engine(NoneProposer()).generate(PROMPTS, params)
        return cache[key]

    return answers


def test_plain_decoding_equals_transformers(plain, pristine):
    for result in plain():
        ids = torch.tensor([result.prompt_ids])
        theirs = pristine.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
        assert result.token_ids == theirs
        assert result.stats.acceptance_length == 1.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["ngram", "random", "eagle"])
def test_no_proposer_changes_a_token(make_engine, plain, eagle, tiny_target, kind, batch_size, temperature):
    proposer = {"ngram": NgramProposer(), "random": RandomTrees(tiny_target.vocab_size), "eagle": eagle}[kind]
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=3)
    results = make_engine(proposer, batch_size=batch_size).generate(PROMPTS, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain(temperature)]
    assert [r.finish_reason for r in results] == [r.finish_reason for r in plain(temperature)]


def test_an_untrained_drafter_changes_no_token_of_100_answers_and_accepts_next_to_nothing(make_engine, eagle):
    prompts = [f"{i}: what comes after {i * i % 97}?" for i in range(100)]
    params = SamplingParams(max_new_tokens=12)
    drafted = make_engine(eagle, batch_size=8).generate(prompts, params)
    expected = make_engine(NoneProposer(), batch_size=8).generate(prompts, params)
    assert [r.token_ids for r in drafted] == [r.token_ids for r in expected]
    assert len({tuple(r.token_ids) for r in drafted}) > 90  # a target that ignores its prompt would prove nothing
    total = Stats()
    for result in drafted:
        total.add(result.stats)
    assert 1.0 <= total.acceptance_length < 1.1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scripted_accept_counts_are_counted_and_lossless(make_engine, plain, tiny_target, batch_size):
    """Every accept count from 0 to depth, ragged over rows: text equal, counters exact."""
    answers = {tuple(r.prompt_ids): r.token_ids for r in plain()}
    pattern = random.Random(0)
    script = [[pattern.randrange(6) for _ in range(8)] for _ in range(200)]
    proposer = Scripted(answers, lambda r, row: script[r % 200][row], tiny_target.vocab_size, siblings=2)
    engine = make_engine(proposer, batch_size=batch_size)
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=40))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain()]
    for result in results:
        stats = result.stats
        assert stats.emitted == len(result.token_ids) - 1  # the first token comes from the prefill
        # every round adds a token of the target's own, but for one cut short by an accepted end id
        cut = stats.accepted + stats.rounds - stats.emitted
        assert cut == 0 or (cut == 1 and result.finish_reason == "stop")
        assert sum(stats.accepted_at) == stats.accepted
    assert max(len(r.stats.accepted_at) for r in results) == 5


def test_a_perfect_chain_is_accepted_in_full(make_engine, plain, tiny_target):
    answers = {tuple(r.prompt_ids): r.token_ids for r in plain()}
    proposer = Scripted(answers, lambda r, row: 9, tiny_target.vocab_size, siblings=0)
    result = make_engine(proposer, depth=4).generate([PROMPTS[0]], SamplingParams(max_new_tokens=41))[0]
    assert result.stats.rounds == 8  # 40 tokens after the first, 5 a round
    assert result.stats.accepted_at == [8, 8, 8, 8]
    assert result.stats.acceptance_length == 5.0


@pytest.mark.parametrize("tokens", range(1, 14))
def test_max_new_tokens_is_exact(make_engine, plain, tiny_target, tokens):
    answers = {tuple(r.prompt_ids): r.token_ids for r in plain()}
    proposer = Scripted(answers, lambda r, row: 9, tiny_target.vocab_size)
    result = make_engine(proposer).generate([PROMPTS[0]], SamplingParams(max_new_tokens=tokens))[0]
    assert result.token_ids == plain()[0].token_ids[:tokens]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("at", range(1, 12))
def test_an_end_id_inside_an_accepted_path_ends_the_answer_there(make_engine, plain, tiny_target, at, monkeypatch):
    truth = plain()[0].token_ids
    end = truth[at]
    first = truth.index(end)
    monkeypatch.setattr(tiny_target, "eos_ids", (end,))
    proposer = Scripted({tuple(plain()[0].prompt_ids): truth}, lambda r, row: 9, tiny_target.vocab_size)
    result = make_engine(proposer).generate([PROMPTS[0]], SamplingParams(max_new_tokens=40))[0]
    assert result.token_ids == truth[: first + 1]
    assert result.finish_reason == "stop"
    assert result.stats.emitted == first  # nothing after the end id is counted
    assert result.stats.accepted <= result.stats.emitted
    ignoring = make_engine(proposer).generate([PROMPTS[0]], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
    assert ignoring.token_ids == truth


def test_stop_text_cuts_the_same_place_with_and_without_drafts(make_engine, plain, tiny_target):
    truth = plain()[0]
    proposer = Scripted({tuple(truth.prompt_ids): truth.token_ids}, lambda r, row: 9, tiny_target.vocab_size)
    for start in range(1, len(truth.text) - 2, 3):
        stop = truth.text[start : start + 2]
        params = SamplingParams(max_new_tokens=40, stop=(stop,))
        with_drafts = make_engine(proposer).generate([PROMPTS[0]], params)[0]
        without = make_engine(NoneProposer()).generate([PROMPTS[0]], params)[0]
        assert with_drafts.token_ids == without.token_ids
        assert with_drafts.text == without.text == truth.text[: truth.text.index(stop)]
        assert with_drafts.finish_reason == "stop"


def test_caches_equal_a_fresh_run_after_every_round(make_engine, plain, tiny_target, pristine):
    """The committed slots hold, per row, what one forward over the text holds (keys, to 1e-5)."""
    answers = {tuple(r.prompt_ids): r.token_ids for r in plain()}
    pattern = random.Random(1)
    proposer = Scripted(answers, lambda r, row: pattern.randrange(5), tiny_target.vocab_size, siblings=2)
    engine = make_engine(proposer, batch_size=3)
    seen = 0
    params = SamplingParams(max_new_tokens=40)
    requests = [engine._request(i, p, params) for i, p in enumerate(PROMPTS)]
    for _ in engine._run(requests, every_round=True):
        for row, request in enumerate(engine._rows):
            if request is None:
                continue
            ids = [*request.prompt_ids, *request.token_ids][:-1]
            cache = engine._runner.cache
            assert cache.length(row) == len(ids)
            if seen % 7 == 0:
                slots = cache.committed[row].nonzero()[:, 0]
                keys = cache.layers[-1].keys[row, :, slots]
                fresh = pristine(torch.tensor([ids])).past_key_values.layers[-1].keys[0]
                mine, theirs = (x.norm(dim=(0, 2)).sort().values for x in (keys, fresh))
                assert torch.allclose(mine, theirs, atol=1e-5)
        seen += 1
    assert seen > 20


def test_drafter_features_are_the_targets_own(make_engine, eagle, tiny_target, pristine):
    """After each commit the drafter is handed the taps of committed positions, equal to a fresh forward's."""
    heard: list[torch.Tensor] = []
    commit = eagle.commit

    def spy(row, tokens, taps):
        heard.append(taps.clone())
        commit(row, tokens, taps)

    eagle.commit = spy
    result = make_engine(eagle).generate([PROMPTS[3]], SamplingParams(max_new_tokens=30))[0]
    ids = torch.tensor([[*result.prompt_ids, *result.token_ids]])
    hidden = pristine(ids, output_hidden_states=True).hidden_states
    fresh = torch.cat([hidden[i] for i in (2, 4, 5)], -1)[0]
    mine = torch.cat(heard)
    assert len(mine) > len(result.prompt_ids)
    assert torch.allclose(mine, fresh[: len(mine)], atol=1e-4)


def test_streamed_pieces_join_to_the_text_and_a_closed_stream_leaves_a_clean_engine(make_engine, plain):
    engine = make_engine(NgramProposer())
    params = SamplingParams(max_new_tokens=40)
    *pieces, result = engine.stream(PROMPTS[0], params)
    assert "".join(pieces) == result.text == plain()[0].text
    stream = engine.stream(PROMPTS[3], params)
    next(stream)
    stream.close()
    assert engine.generate([PROMPTS[1]], params)[0].token_ids == plain()[1].token_ids


@pytest.mark.parametrize("where", ["prefill", "start"])
def test_an_interrupt_while_a_prompt_is_read_leaves_a_clean_engine(make_engine, plain, monkeypatch, where):
    engine = make_engine(NgramProposer())
    params = SamplingParams(max_new_tokens=40)
    engine.generate([PROMPTS[1]], params)
    owner = engine._runner if where == "prefill" else engine.proposer
    real = getattr(owner, where)

    def interrupted(*args):
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPTS[3]], params)
    assert engine.generate([PROMPTS[0]], params)[0].token_ids == plain()[0].token_ids


def test_two_generations_at_once_are_refused(make_engine):
    engine = make_engine(NoneProposer())
    running = engine.complete(PROMPTS[:2], SamplingParams(max_new_tokens=4))
    next(running)
    with pytest.raises(RuntimeError, match="already running"):
        engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=4))
    running.close()
    assert len(engine.generate([PROMPTS[1]], SamplingParams(max_new_tokens=4))) == 1


def test_requests_that_cannot_run_say_what_to_set(make_engine, tiny_target):
    engine = make_engine(NoneProposer(), max_length=50)
    with pytest.raises(ConfigError, match="over the limit of 50"):
        engine.generate(["x" * 60], SamplingParams())
    with pytest.raises(ValueError, match="empty"):
        engine.generate([[]], SamplingParams())
    with pytest.raises(ValueError, match="2 prompts but 1 SamplingParams"):
        engine.generate(["a", "b"], [SamplingParams()])
    for name in ("num_draft_tokens", "depth", "top_k", "batch_size"):
        with pytest.raises(ConfigError, match=f"runtime.{name} is 0"):
            EngineConfig(**{name: 0})


def test_each_request_keeps_its_own_settings_in_a_batch(make_engine, plain):
    each = [SamplingParams(max_new_tokens=5 + 3 * i, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))]
    together = make_engine(NgramProposer(), batch_size=4).generate(PROMPTS, each)
    for prompt, params, result in zip(PROMPTS, each, together):
        assert make_engine(NoneProposer()).generate([prompt], params)[0].token_ids == result.token_ids


def test_partial_characters_and_partial_stops_are_held_back(tiny_target):
    tokenizer = tiny_target.tokenizer
    request = Request(0, [1], SamplingParams(max_new_tokens=99, stop=("END",)), tokenizer, ())
    shown = ""
    for token in tokenizer("caf\u00e9 EN no E", add_special_tokens=False).input_ids:
        request.push(token)
        assert request.safe_text.startswith(shown)
        shown = request.safe_text
        assert "\ufffd" not in shown
        assert not shown.endswith("E")
    assert shown == "caf\u00e9 EN no "


@pytest.mark.parametrize(
    ("settings", "noise", "drawn"),
    [
        ({}, None, False),
        ({"temperature": 0.7}, "own", False),
        ({"temperature": 0.7, "verification": "rejection"}, "other", True),
        ({"temperature": 0.7, "verification": "typical"}, None, False),
        ({"verification": "rejection"}, None, False),
    ],
)
def test_a_proposer_is_told_the_targets_noise_only_where_the_rule_lets_it(make_engine, settings, noise, drawn):
    """Under rejection a draft that saw the target's chances would bias the text."""
    engine = make_engine(NoneProposer())
    seen = []
    plain = engine.proposer.propose
    engine.proposer.propose = lambda budgets: seen.extend(budgets.values()) or plain(budgets)
    engine.generate([PROMPTS[0]], SamplingParams(6, seed=3, **settings))
    length = len(engine.encode(PROMPTS[0]))
    for round, budget in enumerate(seen):
        assert budget.drawn == drawn
        if noise is None:
            assert budget.noise is None
            continue
        target_noise = keyed_gumbel(3, length + round + 1, 512)  # of the token after the root
        assert torch.equal(budget.noise.at(1), target_noise) == (noise == "own")
