import random

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager

from drafters.attention_kinds import within
from runtime.attention import (
    _for_transformers,
    additive,
    ancestors_of,
    explicit_attention,
    grouped_attention,
    tree_mask,
)
from runtime.tree import DraftTree


class Layer(torch.nn.Module):
    """What transformers' eager functions read of the layer."""

    num_key_value_groups = 3

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(6))


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return torch.randn(2, 6, 5, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 8)


@pytest.fixture
def allowed():
    torch.manual_seed(1)
    return (torch.rand(2, 5, 40) > 0.5).index_fill(2, torch.tensor([0]), True)


def plainly(q, k, v, allowed, softcap=None, sinks=None):
    """Attention head by head in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        keys, values = k[:, head // 3].double(), v[:, head // 3].double()
        scores = q[:, head].double() @ keys.mT * 0.3
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~allowed, float("-inf")).exp()
        total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].double().exp())
        out[:, head] = weights / total @ values
    return out.float()


@pytest.mark.parametrize("form", ["bool", "tiled", "additive"])
def test_grouped_attention_equals_head_by_head(qkv, allowed, form):
    mask = {"bool": allowed[:, None], "tiled": allowed[:, None].repeat(1, 1, 3, 1)}.get(form)
    mask = additive(allowed, 3, torch.float32) if mask is None else mask
    assert torch.allclose(grouped_attention(*qkv, mask, 0.3), plainly(*qkv, allowed), atol=1e-5)


def test_no_mask_means_causal(qkv):
    q, k, v = qkv
    causal = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    short = k[:, :, :5], v[:, :, :5]
    for attend in (
        lambda: grouped_attention(q, *short, None, 0.3),
        lambda: explicit_attention(q, *short, None, 0.3, None, None),
    ):
        assert torch.allclose(attend(), plainly(q, *short, causal), atol=1e-5)


@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_softcapping_and_sinks_are_honoured(qkv, allowed, form, softcap, with_sinks):
    sinks = torch.randn(6) if with_sinks else None
    mask = allowed[:, None] if form == "bool" else additive(allowed, 3, torch.float32)
    out = explicit_attention(*qkv, mask, 0.3, softcap, sinks)
    assert torch.allclose(out, plainly(*qkv, allowed, softcap, sinks), atol=1e-5)


@pytest.mark.parametrize("kind", ["softcap", "s_aux"])
def test_the_registered_function_equals_the_models_own(qkv, allowed, kind):
    layer = Layer()
    theirs = {"softcap": gemma2_eager, "s_aux": gpt_oss_eager}[kind]
    given = {"softcap": {"softcap": 0.7}, "s_aux": {"s_aux": layer.sinks}}[kind]
    mask = torch.zeros(2, 1, 5, 40).masked_fill(~allowed[:, None], -1e30)
    with torch.no_grad():
        expected = theirs(layer, *qkv, mask, scaling=0.3, **given)[0]
        found = _for_transformers(layer, *qkv, additive(allowed, 3, torch.float32), scaling=0.3, **given)[0]
    assert torch.allclose(found, expected, atol=1e-5)


def test_what_the_function_does_not_know_is_refused_by_name(qkv, allowed):
    with pytest.raises(ValueError, match="Layer asks attention for position_bias"):
        _for_transformers(Layer(), *qkv, allowed[:, None], position_bias=torch.zeros(1), dropout=0.0)
    _for_transformers(Layer(), *qkv, allowed[:, None], position_bias=None, output_attentions=False)


def test_a_missing_mask_is_an_error_unless_the_pass_is_plainly_causal(qkv):
    q, k, v = qkv
    with pytest.raises(ValueError, match="needs the 4-D mask"):
        _for_transformers(Layer(), q, k, v, None)
    with pytest.raises(ValueError, match="needs the 4-D mask"):
        _for_transformers(Layer(), q, k[:, :, :5], v[:, :, :5], None, sliding_window=4)
    _for_transformers(Layer(), q, k[:, :, :5], v[:, :, :5], None, sliding_window=5)


def test_ancestors_equal_the_trees_own():
    rng = random.Random(0)
    for _ in range(20):
        trees = []
        for _ in range(3):
            parents, depths = [-1], [0]
            for node in range(1, rng.randrange(2, 12)):
                parents.append(rng.randrange(node))
                depths.append(depths[parents[-1]] + 1)
            trees.append(DraftTree(tuple(range(len(parents))), tuple(parents), tuple(depths)))
        nodes = max(map(len, trees))
        table = torch.tensor([[0, *tree.parents[1:], *range(len(tree), nodes)] for tree in trees])
        found = ancestors_of(table, max(max(tree.depths) for tree in trees))
        for row, tree in zip(found, trees):
            size = len(tree)
            assert torch.equal(row[:size, :size], tree.ancestors())
            assert torch.equal(row[size:], torch.eye(nodes, dtype=torch.bool)[size:])


def test_mask_shows_committed_ancestors_and_self_only():
    seen = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    slots = torch.tensor([[1, 3, 4], [9, 9, 9]])  # the second row idles: padding nodes write to slot 9
    above = ancestors_of(torch.tensor([[0, 0, 0], [0, 1, 2]]), 1)
    mask = tree_mask(seen, slots, above)
    assert mask[0].int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    assert mask[1].int().tolist() == [[1, 0, 0, 0, 0]] * 3  # an idle row sees slot 0, or softmax would be NaN


def test_a_window_counts_positions_not_slots():
    seen = torch.tensor([[1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    keys = torch.tensor([[2, 0, 1, 3, 4, 5, 5]])  # positions in slot order: the text is shuffled over its slots
    slots, positions = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[4, 5, 5, 4]])
    above = ancestors_of(torch.tensor([[0, 0, 0, 3]]), 1)
    mask = tree_mask(seen, slots, above, within(positions, keys, 3))
    assert mask[0].int().tolist() == [
        [1, 0, 0, 1, 1, 0, 0],  # position 4 sees 2, 3 and itself
        [0, 0, 0, 1, 1, 1, 0],  # position 5 sees 3, the root and itself, not its sibling
        [0, 0, 0, 1, 1, 0, 1],
        [1, 0, 0, 1, 0, 0, 0],  # padding: slot 0 whatever the window
    ]
