"""Public EAGLE-3 drafters in every variant compute what their files say; leaving a variant out would show."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drafters.contract import read_contract
from drafters.errors import ArtifactError, ContractError
from drafters.export.native import shape_of
from drafters.models.eagle3 import Eagle3Drafter
from drafters.public.load import assemble, read_public
from tests.drafters.export_setup import SHAPE
from tests.drafters.public_setup import IDS, eagle3, eagle3_logits, rms, states, write
from tests.helpers import ROOT

TAPS = (2, 4, 5)


def logits(folder: Path, target) -> Tensor:
    """First-draft logits [T - 1, Vd] of the likeliest reading."""
    public = read_public(folder, target)
    drafter = assemble(public, public.readings[0], target)
    positions = torch.arange(IDS.shape[1] - 1)[None]
    with torch.no_grad():
        return drafter.first_logits(IDS, states(target, public.readings[0].taps), positions)[0]


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def layers_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "flag",
    ["norm_before_residual", "norm_before_fc", "fc_norm", "attention_bias", "bias"],
)
def test_each_flag_decides_the_graph(tiny_target, tmp_path, flag):
    config, tensors = eagle3(**{flag: True})
    taps = states(tiny_target, TAPS)
    expected = eagle3_logits(tensors, config, tiny_target, IDS, taps)
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    assert far(eagle3_logits(tensors, config | {flag: False}, tiny_target, IDS, taps), expected) > 0.1


def test_head_dim_and_a_norm_per_head_are_the_files(tiny_target, tmp_path):
    config, tensors = eagle3(head_dim=24, qk_norm=True)
    taps = states(tiny_target, TAPS)
    expected = eagle3_logits(tensors, config, tiny_target, IDS, taps)
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    without = {name: tensor for name, tensor in tensors.items() if "q_norm" not in name and "k_norm" not in name}
    assert far(eagle3_logits(without, config, tiny_target, IDS, taps), expected) > 0.1
    with pytest.raises(ArtifactError, match=r"k_proj.weight has shape \[48, 128\].* \[32, 128\]"):
        other = {key: value for key, value in config.items() if key != "head_dim"}
        logits(write(tmp_path / "b", other, without), tiny_target)


def test_norm_output_feeds_the_next_step(tiny_target, tmp_path):
    config, tensors = eagle3(norm_output=True)
    public = read_public(write(tmp_path / "a", config, tensors), tiny_target)
    drafter, out = assemble(public, public.readings[0], tiny_target), torch.randn(5, 64)
    assert far(drafter.feedback(out), rms(out, tensors["norm.weight"])) < 1e-5
    config, tensors = eagle3()
    public = read_public(write(tmp_path / "b", config, tensors), tiny_target)
    assert assemble(public, public.readings[0], tiny_target).feedback(out) is out


def test_a_drafter_of_another_width_than_the_targets(tiny_target, tmp_path):
    config, tensors = eagle3(hidden_size=32, target_hidden_size=64, embed=True)
    expected = eagle3_logits(tensors, config, tiny_target, IDS, states(tiny_target, TAPS))
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    del config["target_hidden_size"]
    with pytest.raises(ContractError, match="hidden_size is 32, target 'tiny-random' has hidden states of 64"):
        read_public(write(tmp_path / "b", config, tensors), tiny_target)


def test_its_own_embedding_is_used_and_the_targets_is_shared(tiny_target, tmp_path):
    config, tensors = eagle3(embed=True)
    taps = states(tiny_target, TAPS)
    expected = eagle3_logits(tensors, config, tiny_target, IDS, taps)
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    borrowed = tensors | {"embed_tokens.weight": tiny_target.embed_weight}
    assert far(eagle3_logits(borrowed, config, tiny_target, IDS, taps), expected) > 0.1
    public = read_public(write(tmp_path / "b", config, borrowed), tiny_target)
    assert not public.shape.own_embedding and "embed_tokens.weight" not in public.tensors
    halved = borrowed | {"embed_tokens.weight": tiny_target.embed_weight.half()}
    assert not read_public(write(tmp_path / "c", config, halved), tiny_target).shape.own_embedding
    narrow = eagle3(hidden_size=32, target_hidden_size=64)
    with pytest.raises(ContractError, match="embed_tokens.weight is missing: the drafter reads embeddings of 32"):
        read_public(write(tmp_path / "d", *narrow), tiny_target)


def test_a_missing_head_is_the_targets(tiny_target, tmp_path):
    config, tensors = eagle3(head=False)
    kept, taps = torch.arange(128) + tensors["d2t"], states(tiny_target, TAPS)
    expected = eagle3_logits(tensors, config, tiny_target, IDS, taps, kept)
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    own = eagle3_logits(tensors | eagle3()[1], config, tiny_target, IDS, taps)
    assert far(own, expected) > 0.1
    narrow = eagle3(hidden_size=32, target_hidden_size=64, embed=True, head=False)
    with pytest.raises(ArtifactError, match="lm_head.weight is missing, and the target's is of 64"):
        read_public(write(tmp_path / "b", *narrow), tiny_target)


def test_the_layers_name_is_free(tiny_target, tmp_path):
    config, tensors = eagle3()
    official = logits(write(tmp_path / "a", config, tensors), tiny_target)
    assert logits(write(tmp_path / "b", config, layers_named(tensors)), tiny_target).equal(official)
    prefixed = {name if name in ("d2t", "t2d") else f"model.{name}": tensor for name, tensor in tensors.items()}
    assert logits(write(tmp_path / "c", config, prefixed), tiny_target).equal(official)
    with pytest.raises(ArtifactError, match="layers.0.hidden_norm.weight and midlayer.hidden_norm.weight are the same"):
        read_public(write(tmp_path / "d", config, tensors | layers_named(tensors)), tiny_target)


# ---- the draft vocabulary


def drafted(folder: Path, target) -> Tensor:
    """Target ids in the order of first-draft logits, best first."""
    public = read_public(folder, target)
    drafter = assemble(public, public.readings[0], target)
    return drafter.draft_to_target(logits(folder, target).argsort(-1, descending=True))


@pytest.mark.parametrize("left_out", ["", "d2t", "t2d"])
def test_either_map_is_enough_and_both_say_the_same(tiny_target, tmp_path, left_out):
    config, tensors = eagle3()
    kept = torch.arange(128) + tensors["d2t"]
    rows = eagle3_logits(tensors, config, tiny_target, IDS, states(tiny_target, TAPS))
    tensors.pop(left_out, None)
    found = drafted(write(tmp_path / "a", config, tensors), tiny_target)
    assert found.equal(kept[rows.argsort(-1, descending=True)])
    assert not found.equal(rows.argsort(-1, descending=True))  # as without a map


def test_a_whole_vocabulary_needs_no_map(tiny_target, tmp_path):
    config, tensors = eagle3(draft_ids=None)
    rows = eagle3_logits(tensors, config, tiny_target, IDS, states(tiny_target, TAPS))
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), rows) < 1e-4
    config, tensors = eagle3()
    del tensors["d2t"], tensors["t2d"]
    with pytest.raises(ContractError, match="d2t and t2d are missing, but it has 128 draft ids of 512"):
        read_public(write(tmp_path / "b", config, tensors), tiny_target)


def test_rows_out_of_order_and_absolute_ids_mean_the_same_tokens(tiny_target, tmp_path):
    config, tensors = eagle3()
    kept = torch.arange(128) + tensors["d2t"]
    expected = drafted(write(tmp_path / "a", config, tensors), tiny_target)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    mixed = tensors | {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": kept[order] - torch.arange(128)}
    assert drafted(write(tmp_path / "b", config, mixed), tiny_target).equal(expected)
    assert drafted(write(tmp_path / "c", config, tensors | {"d2t": kept}), tiny_target).equal(expected)


@pytest.mark.parametrize(
    ("name", "change", "wrong"),
    [
        ("d2t", lambda d2t: d2t + 600, "d2t cannot be a map.*row 0 is id"),
        ("d2t", lambda d2t: d2t - torch.arange(128), "d2t cannot be a map.*has more than one row|row 0"),
        ("d2t", lambda d2t: d2t[:100], "number of draft ids is 128 by config.json: draft_vocab_size, .* 100 by d2t"),
        ("t2d", lambda t2d: t2d[:500], r"t2d is torch.bool \[500\], 512 whole numbers"),
        ("d2t", lambda d2t: d2t.float(), r"d2t is torch.float32"),
    ],
)
def test_a_map_that_cannot_be_is_named(tiny_target, tmp_path, name, change, wrong):
    config, tensors = eagle3()
    with pytest.raises((ContractError, ArtifactError), match=wrong):
        read_public(write(tmp_path / "a", config, tensors | {name: change(tensors[name])}), tiny_target)


# ---- speculators, and rotary positions


def speculators(config: dict, tensors: dict[str, Tensor], **flags: object) -> tuple[dict, dict[str, Tensor]]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}], "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": config,
        "draft_vocab_size": 128,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        **flags,
    }, layers_named(tensors)


def test_speculators_is_the_same_graph_under_another_config(tiny_target, tmp_path):
    config, tensors = eagle3(norm_before_residual=True, norm_before_fc=True)
    config.pop("draft_vocab_size")
    expected = eagle3_logits(tensors, config, tiny_target, IDS, states(tiny_target, TAPS))
    named = {key: config.pop(key) for key in ("norm_before_residual", "norm_before_fc")}
    public = read_public(write(tmp_path / "a", *speculators(config, tensors, **named)), tiny_target)
    assert (public.dialect, public.steps, public.taps[0]) == ("speculators", 5, TAPS)
    assert len(public.readings) == len(public.taps)
    assert far(logits(public.folder, tiny_target), expected) < 1e-4


def test_an_absent_norm_before_residual_is_left_open_in_speculators(tiny_target, tmp_path):
    config, tensors = eagle3()
    public = read_public(write(tmp_path / "a", *speculators(config, tensors)), tiny_target)
    assert {reading.shape.norm_before_residual for reading in public.readings} == {False, True}
    public = read_public(write(tmp_path / "b", *speculators(config, tensors, norm_before_residual=True)), tiny_target)
    assert {reading.shape.norm_before_residual for reading in public.readings} == {True}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_scaled_rotary_positions(tiny_target, tmp_path, spelling):
    scaling = {"rope_type": "linear", "factor": 4.0}
    config, tensors = eagle3()
    plain = eagle3_logits(tensors, config, tiny_target, IDS, states(tiny_target, TAPS))
    expected = eagle3_logits(tensors, config | {"rope_scaling": scaling}, tiny_target, IDS, states(tiny_target, TAPS))
    said = {"rope_parameters": scaling | {"rope_theta": 1000.0}, "rope_scaling": {"type": "linear", "factor": 4.0}}
    folder = write(tmp_path / "a", config | {spelling: said[spelling]}, tensors)
    assert far(logits(folder, tiny_target), expected) < 1e-4 and far(plain, expected) > 1e-2


# ---- what cannot be run is named


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, this code runs drafters with 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', this code runs drafters with 'silu'"),
        ({"vocab_size": 500}, "vocab_size is 500, target 'tiny-random' has 512"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, a number is needed"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', this code runs default"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 1000.0 and in .* 5.0"),
        ({"sliding_window": 64}, "sliding_window is 64"),
        ({"fc_norm": True}, "fc_norm is true, but tensor fc_norm.0.weight is missing"),
        ({"norm_before_fc": True}, "norm_before_fc is true, but tensor input_norm.weight is missing"),
        ({"bias": True}, "bias is true, but tensor fc.bias is missing"),
        ({"attention_bias": True}, "attention_bias is true, but tensor .*q_proj.bias is missing"),
        ({"norm_output": "yes"}, "norm_output is .*, one true or false is needed"),
        ({"draft_vocab_size": 100}, "number of draft ids is 100 by config.json"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 46, 91]}, r"\[2, 46, 91\], fc reads 3 of the 9 hidden states"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm is True, this code runs False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
    ],
)
def test_a_field_this_code_cannot_run_is_named(tiny_target, tmp_path, change, wrong):
    config, tensors = eagle3()
    with pytest.raises((ArtifactError, ContractError), match=wrong):
        read_public(write(tmp_path / "a", config | change, tensors), tiny_target)


def test_every_tensor_left_out_added_or_damaged_is_named(tiny_target, tmp_path):
    config, tensors = eagle3(fc_norm=True)
    del tensors["t2d"]
    damaged = {
        "missing": lambda name: {key: tensor for key, tensor in tensors.items() if key != name},
        "shape": lambda name: tensors | {name: torch.cat((tensors[name], tensors[name][:1]))},
        "NaN": lambda name: tensors | {name: tensors[name] * float("nan")},
        "not part": lambda name: tensors | {f"{name}.more": tensors[name]},
    }
    caught = 0
    for name in sorted(set(tensors) - {"lm_head.weight", "d2t"}):
        for change in damaged.values():
            folder = write(tmp_path / "a", config, change(name))
            with pytest.raises((ArtifactError, ContractError), match=name.removesuffix(".weight").replace(".", r"\.")):
                public = read_public(folder, tiny_target)
                assemble(public, public.readings[0], tiny_target)
            caught += 1
    assert caught == 4 * 15


# ---- contracts of drafters trained here say nothing of variants


def test_a_graph_without_variants_is_recorded_as_before():
    graph = Eagle3Drafter.graph(SHAPE, 3)
    assert set(graph) == {
        "hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "num_taps", "fc_norm",
        "norm_output", "ttt_steps",
    }  # fmt: skip
    assert Eagle3Drafter.shape_from(graph, Eagle3Drafter.rope(SHAPE), "here") == SHAPE
    old = json.loads((ROOT / "artifacts" / "smollm2-135m-eagle3" / "contract.json").read_text())
    shape = shape_of(read_contract(ROOT / "artifacts" / "smollm2-135m-eagle3"))
    assert Eagle3Drafter.graph(shape, old["graph"]["ttt_steps"]) == old["graph"]
    assert Eagle3Drafter.rope(shape) == old["rope"]


@pytest.mark.parametrize(
    "change",
    [{"norm_before_residual": True}, {"own_head": False}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
)
def test_a_variant_is_recorded_and_read_back(change):
    shape = dataclasses.replace(SHAPE, **change)
    graph, rope = Eagle3Drafter.graph(shape, 3), Eagle3Drafter.rope(shape)
    assert Eagle3Drafter.shape_from(json.loads(json.dumps(graph)), rope, "here") == shape
    assert (graph, rope) != (Eagle3Drafter.graph(SHAPE, 3), Eagle3Drafter.rope(SHAPE))
    with pytest.raises(ContractError, match="graph.unheard_of is unknown"):
        Eagle3Drafter.shape_from(graph | {"unheard_of": True}, rope, "here")
    with pytest.raises(ContractError, match="rope is .*dynamic"):
        Eagle3Drafter.shape_from(graph, rope | {"rope_type": "dynamic"}, "here")
