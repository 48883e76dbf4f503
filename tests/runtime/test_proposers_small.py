"""Drafting with a smaller model; here the target drafts for itself, so every draft must be right."""

import logging

import pytest
import torch

from drafters.config import TargetConfig
from drafters.errors import ConfigError, ContractError
from drafters.target import Target
from runtime import SamplingParams
from runtime.engine import Engine
from runtime.proposers import small
from runtime.proposers.base import Budget
from runtime.proposers.small import SmallProposer, load_small
from runtime.sampling import DraftNoise, Noise
from tests.runtime.conftest import PROMPTS

VOCAB = 512


@pytest.fixture(scope="module")
def own(tiny_folder):
    """The target once more, as a small model."""
    return Target.load(TargetConfig(name="tiny", path=str(tiny_folder), dtype="float32", device="cpu"))


@pytest.fixture
def proposer(own):
    made = SmallProposer(own, VOCAB, top_k=3)
    made.reserve(4, 128)
    return made


def greedy(pristine, ids, count):
    found = list(ids)
    for _ in range(count):
        found.append(int(pristine(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


def chain_of(tree):
    """The path along first children."""
    tokens, node = [], 0
    while node in tree.parents:
        node = tree.parents.index(node)
        tokens.append(tree.tokens[node])
    return tokens


def test_the_chain_is_the_models_own_text_whatever_was_committed(proposer, pristine):
    """Three rows of their own lengths; the drafts of each are those of a from-scratch pass over its committed ids."""
    rows = {0: [5, 6, 7], 1: [9], 3: list(range(20, 40))}
    for row, ids in rows.items():
        proposer.start(row, ids, 11 + row, None)
        ids.append(11 + row)
    for extra in ([[3], [8, 9, 10], [1, 2]], [[], [], [4]], [[7, 7, 7, 7], [5], []]):
        budgets = {0: Budget(4, 3), 1: Budget(16, 5), 3: Budget(2, 8)}
        trees = proposer.propose(budgets)
        for row, budget in budgets.items():
            depth = min(budget.depth, budget.nodes - 1)
            assert trees[row].tokens[0] == rows[row][-1]
            assert chain_of(trees[row]) == greedy(pristine, rows[row], depth)
            assert len(trees[row]) <= budget.nodes and max(trees[row].depths) == depth
            # keys of drafts are gone: what is kept is the committed text before the root
            assert proposer._runner.cache.length(row) == len(rows[row]) - 1 == proposer._rows[row].length
            assert proposer.propose({row: budget})[row].tokens == trees[row].tokens
        for (row, ids), tokens in zip(rows.items(), extra):
            if tokens:
                proposer.commit(row, tokens, None)
                ids += tokens
            else:  # a round of nothing but the root's own successor
                proposer.commit(row, [1], None)
                ids.append(1)
    proposer.release(1)
    proposer.start(1, [9, 9], 4, None)
    assert chain_of(proposer.propose({1: Budget(4, 3)})[1]) == greedy(pristine, [9, 9, 4], 3)


def test_rows_without_room_keep_their_text_for_later(proposer, pristine):
    proposer.start(0, [5], 6, None)
    assert proposer.propose({0: Budget(1, 0)})[0].tokens == (6,)
    proposer.commit(0, [7, 8], None)
    assert chain_of(proposer.propose({0: Budget(3, 2)})[0]) == greedy(pristine, [5, 6, 7, 8], 2)


def test_children_are_the_models_best_with_their_chances(proposer, pristine):
    proposer.start(0, [5, 6], 7, None)
    tree = proposer.propose({0: Budget(7, 3)})[0]
    # six drafts, three deep: one each down the chain, the three left go to the top
    assert tree.depths == (0, 1, 1, 1, 2, 2, 3) and tree.parents == (-1, 0, 0, 0, 1, 1, 4)
    logp = torch.log_softmax(pristine(torch.tensor([[5, 6, 7]])).logits[0, -1].double(), -1)
    values, ids = logp.topk(3)
    assert tree.tokens[1:4] == tuple(ids.tolist())
    assert tree.scores[1:4] == pytest.approx(values.tolist(), abs=1e-5)
    logp = torch.log_softmax(pristine(torch.tensor([[5, 6, 7, int(ids[0])]])).logits[0, -1].double(), -1)
    assert tree.scores[4] == pytest.approx(float((values[0] + logp.max()).detach()), abs=1e-5)
    assert set(tree.sources[1:]) == {"small"} and tree.draft_probs is None


def test_known_noise_and_temperature_rank_the_drafts(proposer, pristine):
    """With the target's noise the chain is what the target itself will say."""
    ids, temperature = [5, 6, 7], 1.7
    noise = DraftNoise(Noise(3, VOCAB), root=len(ids) - 1, temperature=temperature)
    proposer.start(0, ids[:-1], ids[-1], None)
    tree = proposer.propose({0: Budget(9, 4, noise)})[0]
    for depth in range(1, 5):
        logq = torch.log_softmax(pristine(torch.tensor([ids])).logits[0, -1].double() / temperature, -1)
        ids.append(int((logq + noise.at(depth)).argmax()))
    assert chain_of(tree) == ids[3:]
    assert all(tree.scores[n] <= tree.scores[tree.parents[n]] for n in range(1, len(tree)))


def test_drawn_children_come_with_what_they_were_drawn_from(proposer, pristine):
    ids, temperature = [5, 6, 7], 0.8
    noise = DraftNoise(Noise(9, VOCAB), root=2, temperature=temperature)
    proposer.start(0, ids[:-1], ids[-1], None)
    tree = proposer.propose({0: Budget(6, 3, noise, drawn=True)})[0]
    assert tree.parents == (-1, 0, 0, 0, 1, 4) and tree.draft_probs.shape == (6, VOCAB)
    for depth, node in enumerate((0, 1, 4), start=1):
        q = torch.softmax(pristine(torch.tensor([ids])).logits[0, -1].double() / temperature, -1)
        assert torch.allclose(tree.draft_probs[node], q, atol=1e-6)
        children = [tree.tokens[n] for n in range(len(tree)) if tree.parents[n] == node]
        drawn = (q.log() + noise.at(depth)).topk(len(children)).indices
        assert children == drawn.tolist()  # in the order they were drawn
        first = tree.parents.index(node)
        assert tree.scores[first] - tree.scores[node] == pytest.approx(float(q[children[0]].log().detach()), abs=1e-5)
        ids.append(children[0])


def test_the_shape_of_a_drawn_tree_does_not_depend_on_the_draws(proposer):
    proposer.start(0, [5], 6, None)
    shapes = {
        proposer.propose({0: Budget(8, 4, DraftNoise(Noise(seed, VOCAB), 1, 1.0), drawn=True)})[0].parents
        for seed in range(8)
    }
    assert len(shapes) == 1


def test_a_head_of_another_size_than_the_targets(own, pristine):
    for size in (500, 600):
        made = SmallProposer(own, size, top_k=2)
        made.reserve(1, 64)
        made.start(0, [5], 6, None)
        noise = DraftNoise(Noise(1, size), 1, 1.0)
        tree = made.propose({0: Budget(8, 4, noise, drawn=True)})[0]
        assert tree.draft_probs.shape[1] == size and max(tree.tokens) < min(size, VOCAB)
        assert tree.draft_probs[0].sum() == pytest.approx(1.0)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_target_as_its_own_drafter_is_always_right(tiny_target, tiny_folder, batch_size):
    plain = Engine.load(tiny_target, "none").generate(PROMPTS[:4], SamplingParams(17, ignore_eos=True))
    engine = Engine.load(tiny_target, f"small:{tiny_folder}", batch_size=batch_size, num_draft_tokens=4, depth=3)
    answers = engine.generate(PROMPTS[:4], SamplingParams(17, ignore_eos=True))
    assert [a.token_ids for a in answers] == [p.token_ids for p in plain]
    assert [a.stats.rounds for a in answers] == [4] * 4  # the prompt gives one, each round four


# ---- loading


def test_another_token_map_is_refused_naming_the_first_id(tiny_target, tiny_folder, tmp_path, own):
    own_ids = {index: token for token, index in own.tokenizer.get_vocab().items()}
    index = max(own_ids)
    vocab = own.tokenizer.get_vocab()
    vocab["other"] = vocab.pop(own_ids[index])

    class Renamed:
        def get_vocab(self):
            return vocab

    other = Target(own.model, Renamed(), own.config, own.folder)
    with pytest.raises(ContractError, match=f"id {index} is 'other' in its tokenizer and '.*' in that of target"):
        small.check_tokenizer(other, tiny_target)
    del vocab["other"]
    with pytest.raises(ContractError, match=f"id {index} is None in its tokenizer"):
        small.check_tokenizer(other, tiny_target)
    with pytest.raises(ContractError, match=f"id {index} is '.*' in its tokenizer and None in that of target"):
        load_small(tiny_folder, other, 4)


def test_a_slow_drafter_is_warned_of(tiny_target, tiny_folder, monkeypatch, caplog):
    for own, theirs, warned in ((0.034, 0.1, True), (0.033, 0.1, False)):
        monkeypatch.setattr(small, "step_seconds", lambda t, a=own, b=theirs: b if t is tiny_target else a)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            load_small(tiny_folder, tiny_target, 4)
        assert ("one step takes 34.0 ms, 34% of the target's 100.0 ms" in caplog.text) == warned


def test_a_step_is_timed_without_its_first_run(own, monkeypatch):
    ticks = iter([0, 0, *(t for i in range(small.TIMED) for t in (1000 * i, 1000 * i + 2 + i))])
    monkeypatch.setattr(small, "perf_counter", lambda: next(ticks))
    assert small.step_seconds(own) == 4


def test_a_drafter_that_reads_less_than_asked_is_refused(tiny_target, tiny_folder, monkeypatch):
    monkeypatch.setattr(small, "step_seconds", lambda target: 1.0)
    real = Target.max_length
    monkeypatch.setattr(Target, "max_length", property(lambda t: real.fget(t) if t is tiny_target else 100))
    with pytest.raises(ConfigError, match="reads at most 100 tokens, but runtime.max_length is 101"):
        Engine.load(tiny_target, f"small:{tiny_folder}", max_length=101)
    assert Engine.load(tiny_target, f"small:{tiny_folder}", max_length=100).proposer.name == "small"
