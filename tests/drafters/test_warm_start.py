"""The drafter starts as the target's last layer, at a scale that trains."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from drafters.batches import collate, mask4d
from drafters.errors import ConfigError
from drafters.models import Eagle3Drafter
from drafters.warm_start import LOGIT_STD, warm_start
from tests.drafters.training_setup import make_records, new_drafter, run_settings

TAPS = (2, 4, 5)
RECORDS = make_records(2)


@pytest.fixture(params=[True, False], ids=["fc_norm", "plain"])
def started(tiny_target, request):
    cfg = run_settings(tiny_target, drafter={"fc_norm": request.param})
    drafter = new_drafter(tiny_target, RECORDS, cfg)
    warm_start(drafter, tiny_target, collate(RECORDS, [(0, 1)], 64), TAPS)
    return drafter


def test_layer_is_the_targets_last(started, tiny_target):
    layer, mine = tiny_target.backbone.layers[-1], started.midlayer
    for name in ("q_proj", "k_proj", "v_proj"):
        assert getattr(mine.self_attn, name).weight[:, 64:].equal(getattr(layer.self_attn, name).weight)
        assert getattr(mine.self_attn, name).weight[:, :64].abs().sum() > 0
    assert mine.self_attn.o_proj.weight.equal(layer.self_attn.o_proj.weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert getattr(mine.mlp, name).weight.equal(getattr(layer.mlp, name).weight)
    assert started.lm_head.weight.equal(tiny_target.head_weight[started.t2d])


def features(tiny_target):
    batch = collate(RECORDS, [(0, 1)], 64)
    taps, _ = tiny_target.hidden(batch.ids, batch.position_ids, mask4d(batch.document_ids), TAPS)
    return batch, taps


def test_fused_feature_is_the_highest_tap_at_its_own_scale(started, tiny_target):
    batch, taps = features(tiny_target)
    real = batch.document_ids >= 0
    highest, fused = taps[real][:, -64:], started.fuse(taps[real])
    assert torch.nn.functional.cosine_similarity(fused, highest).mean() > 0.4
    block = started.fc.weight[:, -64:]
    assert block.equal(torch.diag(block.diagonal())) and block[0, 0] > 0


def test_logits_have_the_spread_that_trains(started, tiny_target):
    batch, taps = features(tiny_target)
    mask = mask4d(batch.document_ids)
    real = batch.document_ids >= 0
    real[:, -1] = False

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    out = started.forward_layer(batch.ids.roll(-1, 1), started.fuse(taps), batch.position_ids, attend)
    assert started.logits(out[real]).std(-1).mean().item() == pytest.approx(LOGIT_STD, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"intermediate_size": 96}, "gate_proj"), ({"num_kv_heads": 4}, "k_proj"), ({"head_dim": 32}, "q_proj")],
)
def test_other_shapes_are_refused(tiny_target, change, named):
    drafter = new_drafter(tiny_target, RECORDS, run_settings(tiny_target))
    other = Eagle3Drafter(dataclasses.replace(drafter.shape, **change))
    other.bind_embedding(tiny_target.embed_weight)
    with pytest.raises(ConfigError, match=f"{named} is .*drafter.warm_start=false"):
        warm_start(other, tiny_target, collate(RECORDS, [(0,)], 64), TAPS)
