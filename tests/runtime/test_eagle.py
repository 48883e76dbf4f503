"""EAGLE trees at a temperature: drafted with the target's noise, or drawn for the rejection rule."""

import pytest
import torch

from runtime.proposers.base import Budget
from runtime.proposers.growth import NOISE_SCALE, fixed_shape, rank
from runtime.sampling import DraftNoise, Noise, SamplingParams, drawing_noise
from tests.runtime.conftest import PROMPTS
from tests.runtime.test_proposers import _path


@torch.no_grad()
def _dense_logits(drafter, taps, ids, path):
    """Draft logits [Vd] after a drafted path, from a pass over everything: no cache, no tree."""
    tokens, hidden = [*ids, *path], drafter.fuse(taps)[None]
    for _ in range(len(path) + 1):
        count = hidden.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool).tril()

        def attend(q, k, v, mask=mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        out = drafter.forward_layer(torch.tensor([tokens[1 : count + 1]]), hidden, torch.arange(count)[None], attend)
        hidden = torch.cat([hidden, drafter.feedback(out[:, -1:])], 1)
    return drafter.logits(out[0, -1])


def _trees(engine, eagle, pristine, params, every):
    """(tree, budget, taps, ids) of every so many rounds of the engine."""
    found, propose, count = [], eagle.propose, 0

    def spy(budgets):
        nonlocal count
        trees = propose(budgets)
        for row, tree in trees.items():
            request = engine._rows[row]
            ids = [*request.prompt_ids, *request.token_ids]
            if count % every == 0 and budgets[row].depth == 3:
                hidden = pristine(torch.tensor([ids]), output_hidden_states=True).hidden_states
                found.append((tree, budgets[row], torch.cat([hidden[i] for i in (2, 4, 5)], -1)[0, :-1].detach(), ids))
            count += 1
        return trees

    eagle.propose = spy
    engine.generate(PROMPTS, params)
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sampling_row_is_drafted_with_the_targets_own_noise(make_engine, eagle, pristine, batch_size):
    engine = make_engine(eagle, batch_size=batch_size, depth=3, num_draft_tokens=1000)
    params = [SamplingParams(20, temperature=0.8 if i % 2 else 0.0, seed=i, ignore_eos=True) for i in range(6)]
    target_ids = eagle.target_ids
    mixed = set()
    for tree, budget, taps, ids in _trees(engine, eagle, pristine, params, every=7):
        mixed.add(budget.noise is None)
        path, score = [], 0.0
        for depth in (1, 2, 3):
            logits = _dense_logits(eagle.drafter, taps, ids, path)
            if budget.noise is None:
                ranked = torch.log_softmax(logits, -1)
            else:
                log_q = torch.log_softmax(logits / 0.8, -1)
                ranked = torch.log_softmax((log_q + budget.noise.at(depth)[target_ids].float()) / NOISE_SCALE, -1)
            path.append(int(target_ids[ranked.argmax()]))
            score += float(ranked.max())
            node = [n for n in range(len(tree)) if _path(tree, n) == path]
            assert node, (tree, path)
            assert abs(tree.scores[node[0]] - score) < 1e-3
        assert set(tree.sources[1:]) == {"eagle3"}
    assert mixed == {True, False}


def test_noise_below_a_rows_depth_is_not_asked_for():
    """A row near its end shares the levels of longer ones; positions past its end have no noise to wait for."""
    noise = Noise(1, 8)
    budgets = [Budget(4, 1, DraftNoise(noise, 10, 1.0)), Budget(4, 2, None)]
    log_probs = torch.log_softmax(torch.randn(2, 1, 8), -1)
    deep = rank(log_probs, budgets, 2, torch.arange(8))
    assert torch.allclose(deep[0], torch.log_softmax(log_probs[0] / NOISE_SCALE, -1))
    assert torch.allclose(deep[1], log_probs[1], atol=1e-6)
    assert noise._known == {}


@pytest.mark.parametrize(("nodes", "depth", "top_k"), [(6, 5, 1), (9, 3, 3)])
def test_a_row_under_rejection_gets_a_drawn_tree_and_the_law_it_was_drawn_from(
    make_engine, eagle, pristine, nodes, depth, top_k
):
    eagle.top_k = top_k
    engine = make_engine(eagle, batch_size=2, depth=depth, num_draft_tokens=nodes, top_k=top_k)
    params = [SamplingParams(20, 0.7, seed, verification="rejection", ignore_eos=True) for seed in range(6)]
    shape, checked, propose = fixed_shape(nodes, depth, top_k), 0, eagle.propose

    def spy(budgets):
        nonlocal checked
        trees = propose(budgets)
        for row, tree in trees.items():
            request, budget = engine._rows[row], budgets[row]
            assert budget.drawn
            if budget.depth < depth or checked > 3:
                continue
            checked += 1
            ids = [*request.prompt_ids, *request.token_ids]
            hidden = pristine(torch.tensor([ids]), output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i] for i in (2, 4, 5)], -1)[0, :-1].detach()
            counts = [tree.parents.count(node) for node in range(len(tree))]
            assert counts[: sum(map(len, shape))] == sum(shape, [])
            own = drawing_noise(request.params.seed, 512, request.length - 1, 0.7)
            for node in range(len(tree)):
                if not counts[node]:
                    continue
                q = torch.softmax(_dense_logits(eagle.drafter, taps, ids, _path(tree, node)).double() / 0.7, -1)
                assert torch.allclose(tree.draft_probs[node, eagle.target_ids], q, atol=1e-5)
                assert abs(float(tree.draft_probs[node].sum()) - 1) < 1e-12
                noisy = q.log() + own.at(tree.depths[node] + 1)[eagle.target_ids]
                drawn = [tree.tokens[child] for child in range(len(tree)) if tree.parents[child] == node]
                assert drawn == eagle.target_ids[noisy.topk(counts[node]).indices].tolist()
        return trees

    eagle.propose = spy
    engine.generate(PROMPTS, params)
    assert checked > 3


def test_the_shape_of_a_drawn_tree_is_its_budget():
    assert fixed_shape(4, 5, 1) == [[1], [1], [1]]
    assert fixed_shape(16, 2, 1) == [[1], [1]]
    assert fixed_shape(4, 1, 4) == [[3]]
    shape = fixed_shape(16, 5, 4)
    assert sum(map(sum, shape)) == 15 and len(shape) <= 5
    assert all(len(below) == sum(level) for level, below in zip(shape, shape[1:]))
