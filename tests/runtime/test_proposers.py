import pytest
import torch

from runtime import SamplingParams
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
