import pytest
import torch

from runtime import SamplingParams
from runtime.proposers import eagle as proposers_eagle
from runtime.proposers.base import Budget
from runtime.proposers.growth import Candidates
from tests.runtime.conftest import PROMPTS


def _dense_rollout(drafter, taps, ids, depth):
    """Greedy chain from a from-scratch drafter pass over all committed entries: no cache, no tree."""
    tokens, out_ids = list(ids), []
    hidden = drafter.fuse(taps)[None]
    for _ in range(depth):
        count = hidden.shape[1]
        mask = torch.ones(count, count, dtype=torch.bool).tril()

        def attend(q, k, v, mask=mask):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        inputs = torch.tensor([tokens[1 : count + 1]])
        out = drafter.forward_layer(inputs, hidden, torch.arange(count)[None], attend)
        token = int(drafter.draft_to_target(drafter.logits(out[:, -1]).argmax(-1))[0])
        out_ids.append(token)
        tokens.append(token)
        hidden = torch.cat([hidden, drafter.feedback(out[:, -1:])], 1)
    return out_ids


def _path(tree, node):
    path = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_eagle_tree_holds_the_drafters_greedy_chain(make_engine, eagle, tiny_target, pristine, batch_size):
    """Each round's tree contains the chain a cache-free drafter pass predicts, whatever was accepted before."""
    engine = make_engine(eagle, batch_size=batch_size, depth=3, num_draft_tokens=1000)
    checked = 0
    propose = eagle.propose

    def spy(budgets):
        nonlocal checked
        trees = propose(budgets)
        for row, tree in trees.items():
            request = engine._rows[row]
            ids = [*request.prompt_ids, *request.token_ids]
            if checked % 11 == 0 and budgets[row].depth == 3:
                hidden = pristine(torch.tensor([ids]), output_hidden_states=True).hidden_states
                taps = torch.cat([hidden[i] for i in (2, 4, 5)], -1)[0, :-1]
                with torch.no_grad():
                    chain = _dense_rollout(eagle.drafter, taps, ids, 3)
                assert chain in [_path(tree, node) for node in range(len(tree))]
                assert tree.tokens[0] == ids[-1]
            checked += 1
        return trees

    eagle.propose = spy
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert checked > 60


@pytest.mark.parametrize("nodes", [2, 3, 5, 6, 9, 16])
def test_nodes_without_room_for_a_child_are_not_drafted_from(make_engine, eagle, monkeypatch, nodes):
    """The trees are those that following every node would give, and no level is wider than could matter."""
    engine = make_engine(eagle, batch_size=2, depth=4, num_draft_tokens=nodes)
    grow, layer, widths, grown = eagle._grow, eagle._layer, [], 0

    def spy(rows, out, budgets):
        nonlocal grown
        with monkeypatch.context() as patch:
            patch.setattr(proposers_eagle, "Candidates", lambda rows, _, device: Candidates(rows, 10**6, device))
            every = grow(rows, out, budgets)
        widths.clear()
        trees = grow(rows, out, budgets)
        allowed = [nodes - 1 - level for level in range(1, max(budget.depth for budget in budgets))]
        assert all(width <= min(eagle.top_k, most) for width, most in zip(widths, allowed, strict=False))
        assert len(widths) <= min(3, nodes - 2)
        assert [(tree.tokens, tree.parents) for tree in trees] == [(tree.tokens, tree.parents) for tree in every]
        grown += len(trees)
        return trees

    def counted(rows, ids, *rest):
        widths.append(ids.shape[1])
        return layer(rows, ids, *rest)

    monkeypatch.setattr(eagle, "_grow", spy)
    monkeypatch.setattr(eagle, "_layer", counted)
    params = [SamplingParams(16, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(len(PROMPTS))]
    engine.generate(PROMPTS, params)
    assert grown > 40


@pytest.mark.parametrize(("nodes", "going"), [(9, 4), (6, 4), (5, 3), (4, 2), (3, 1)])
def test_the_last_node_with_room_for_a_child_is_drafted_from(nodes, going):
    found = Candidates(1, nodes, torch.device("cpu"))
    tokens, _ = found.add(torch.arange(4)[None, None], -torch.tensor([[[0.1, 0.2, 0.3, 0.4]]]))
    assert tokens.tolist() == [list(range(going))]
    # Only the last of them has a child worth a draft: as good as itself, better than its next sibling.
    scores = torch.full((1, going, 4), -9.0)
    scores[0, -1, 0] = 0.0
    found.add(10 * torch.arange(1, going + 1)[None, :, None] + torch.arange(4), scores)
    [tree] = found.trees("test", [99], [Budget(going + 2, 2)])
    assert tree.tokens == (99, *range(going), 10 * going) and tree.parents[-1] == going


def test_eagle_respects_nodes_and_depth(eagle, make_engine):
    sizes = []
    propose = eagle.propose

    def spy(budgets):
        trees = propose(budgets)
        for row, tree in trees.items():
            assert len(tree) <= budgets[row].nodes
            assert max(tree.depths) <= budgets[row].depth
            sizes.append(len(tree))
        return trees

    eagle.propose = spy
    make_engine(eagle, num_draft_tokens=7, depth=2).generate(PROMPTS[:2], SamplingParams(max_new_tokens=12))
    assert max(sizes) == 7
    assert min(sizes) == 1  # the last token leaves no room for a draft
