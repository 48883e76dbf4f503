"""The official graph: names, residual stream, feature fusion and the fed-back vector."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from drafters.errors import ConfigError, ContractError
from drafters.models import Eagle3Drafter, Eagle3Shape

SHAPE = Eagle3Shape(
    hidden_size=32, target_hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8,
    rms_norm_eps=1e-5, rope_theta=1e4, max_position_embeddings=64, vocab_size=50, draft_vocab_size=20,
)  # fmt: skip
OFFICIAL = {
    "fc.weight": (32, 96),
    "midlayer.hidden_norm.weight": (32,),
    "midlayer.input_layernorm.weight": (32,),
    "midlayer.self_attn.q_proj.weight": (32, 64),
    "midlayer.self_attn.k_proj.weight": (16, 64),
    "midlayer.self_attn.v_proj.weight": (16, 64),
    "midlayer.self_attn.o_proj.weight": (32, 32),
    "midlayer.post_attention_layernorm.weight": (32,),
    "midlayer.mlp.gate_proj.weight": (48, 32),
    "midlayer.mlp.up_proj.weight": (48, 32),
    "midlayer.mlp.down_proj.weight": (32, 48),
    "norm.weight": (32,),
    "lm_head.weight": (20, 32),
    "d2t": (20,),
    "t2d": (50,),
}


def build(shape: Eagle3Shape = SHAPE) -> Eagle3Drafter:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(shape).double()
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind_embedding(torch.randn(shape.vocab_size, shape.hidden_size, dtype=torch.float64))
    return drafter


def causal(q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _rms(x, weight):
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rope(x, positions):
    angles = positions[:, None].double() / 1e4 ** (torch.arange(0, 8, 2).double() / 8)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    return x * cos + turned * sin


def _reference(drafter, ids, taps, positions):
    """The graph of EAGLE: eagle/model/cnets.py for one row, written out; returns the pre-norm output and logits."""
    w = drafter.state_dict()
    hidden = taps @ w["fc.weight"].T
    joined = torch.cat(
        (
            _rms(drafter.embedding[ids], w["midlayer.input_layernorm.weight"]),
            _rms(hidden, w["midlayer.hidden_norm.weight"]),
        ),
        -1,
    )

    def project(name, count):
        return (joined @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(-1, count, 8).transpose(0, 1)

    q, k = _rope(project("q", 4), positions), _rope(project("k", 2), positions).repeat_interleave(2, 0)
    v = project("v", 2).repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
    mixed = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(len(ids), 32)
    hidden = hidden + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    normed = _rms(hidden, w["midlayer.post_attention_layernorm.weight"])
    gate = functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T)
    up = normed @ w["midlayer.mlp.up_proj.weight"].T
    hidden = hidden + (gate * up) @ w["midlayer.mlp.down_proj.weight"].T
    return hidden, _rms(hidden, w["norm.weight"]) @ w["lm_head.weight"].T


def test_names_and_shapes_are_the_official_ones():
    assert {name: tuple(t.shape) for name, t in Eagle3Drafter(SHAPE).state_dict().items()} == OFFICIAL
    normed = Eagle3Drafter(replace(SHAPE, fc_norm=True)).state_dict()
    assert set(normed) - set(OFFICIAL) == {f"fc_norm.{i}.weight" for i in range(3)}


def test_state_has_the_official_types():
    state = Eagle3Drafter(SHAPE).state_dict()
    assert state["d2t"].dtype == torch.int64 and state["t2d"].dtype == torch.bool


def test_graph_equals_the_written_out_reference():
    drafter = build()
    ids, positions = torch.tensor([3, 41, 7, 0, 12]), torch.arange(4, 9)
    taps = torch.randn(5, 96, dtype=torch.float64)
    out = drafter.forward_layer(ids[None], drafter.fuse(taps[None]), positions[None], causal)
    hidden, logits = _reference(drafter, ids, taps, positions)
    # transformers computes norms and rotary tables in fp32 whatever the model's dtype.
    torch.testing.assert_close(out[0], hidden, rtol=0, atol=1e-5)
    torch.testing.assert_close(drafter.logits(out)[0], logits, rtol=0, atol=1e-5)


def test_head_size_need_not_divide_the_hidden_size():
    shape = replace(SHAPE, head_dim=16)
    drafter = build(shape)
    ids = torch.tensor([[1, 2]])
    out = drafter.forward_layer(ids, drafter.fuse(torch.randn(1, 2, 96)), torch.arange(2)[None], causal)
    assert out.shape == (1, 2, 32)
    assert drafter.midlayer.self_attn.o_proj.weight.shape == (32, 64)


def test_fc_norm_normalises_each_tap_with_its_own_weight():
    drafter = build(replace(SHAPE, fc_norm=True))
    taps = torch.randn(2, 96, dtype=torch.float64) * torch.tensor([1e4] * 32 + [1.0] * 64)
    parts = [_rms(taps[:, 32 * i : 32 * i + 32], drafter.fc_norm[i].weight) for i in range(3)]
    expected = torch.cat(parts, -1) @ drafter.fc.weight.T
    torch.testing.assert_close(drafter.fuse(taps), expected, rtol=0, atol=1e-4)


def test_feedback_is_the_pre_norm_vector_unless_norm_output():
    out = torch.randn(3, 32, dtype=torch.float64)
    assert build().feedback(out).equal(out)
    normed = build(replace(SHAPE, norm_output=True))
    assert normed.feedback(out).equal(normed.norm(out))


def test_embedding_is_shared_not_copied_and_never_saved():
    drafter = Eagle3Drafter(SHAPE)
    weight = torch.randn(50, 32)
    drafter.bind_embedding(weight)
    assert drafter.embedding.data_ptr() == weight.data_ptr()
    assert not any("embed" in name for name in drafter.state_dict())
    assert drafter.to(torch.bfloat16).embedding.dtype == torch.float32
    assert drafter.embed(torch.tensor([1])).dtype == torch.bfloat16


def test_draft_ids_map_by_offset():
    drafter = Eagle3Drafter(SHAPE)
    kept = torch.arange(0, 40, 2)
    flags = torch.zeros(50, dtype=torch.bool)
    flags[kept] = True
    drafter.bind_vocab(kept - torch.arange(20), flags)
    assert drafter.draft_to_target(torch.tensor([[0, 5], [19, 1]])).tolist() == [[0, 10], [38, 2]]
    assert drafter.t2d.equal(flags)


def test_misfits_are_refused_by_name():
    with pytest.raises(ContractError, match=r"\(50, 16\).*\(50, 32\).*drafter.hidden_size=16"):
        Eagle3Drafter(SHAPE).bind_embedding(torch.zeros(50, 16))
    with pytest.raises(ContractError, match="7, 50 entries.*20, 50.*draft_vocab_size=7"):
        Eagle3Drafter(SHAPE).bind_vocab(torch.zeros(7, dtype=torch.int64), torch.zeros(50, dtype=torch.bool))
    with pytest.raises(ContractError, match=r"bind\(target\)"):
        Eagle3Drafter(SHAPE).embed(torch.tensor([0]))
    with pytest.raises(ConfigError, match="draft_vocab_size is 51.*only 50"):
        replace(SHAPE, draft_vocab_size=51)
    with pytest.raises(ConfigError, match="num_heads is 4.*num_kv_heads 3"):
        replace(SHAPE, num_kv_heads=3)


def test_a_cast_leaves_rotary_frequencies_alone():
    drafter = Eagle3Drafter(SHAPE)
    exact = drafter.midlayer.rotary.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    assert drafter.midlayer.rotary.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.midlayer.rotary.inv_freq, exact)
