"""EAGLE-1: its graph written out, its two losses against a dense reference, its start, its export."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoConfig

from drafters.batches import collate
from drafters.config_check import check
from drafters.config_drafter import EagleConfig
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.models import EagleDrafter, EagleShape
from drafters.models.eagle import EagleTraining, document_lengths
from drafters.models.layout import make_layout
from drafters.plan import drafter_parameters
from drafters.warm_start import LOGIT_STD
from tests.drafters.export_setup import edit_json, edit_tensors, put
from tests.drafters.test_eagle3 import _rms, _rope, causal
from tests.drafters.test_trainer import Killed, assert_same_weights, cfg_like
from tests.drafters.test_ttt import DOCUMENTS, LENGTH, Labels, dense, gradients, pack, tokens_of
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.helpers import complaint, settings

SHAPE = EagleShape(
    target_hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope_theta=1e4, max_position_embeddings=64, vocab_size=50, draft_vocab_size=20,
)  # fmt: skip
OFFICIAL = {
    "fc.weight": (64, 128),
    "layers.0.self_attn.q_proj.weight": (64, 64),
    "layers.0.self_attn.k_proj.weight": (32, 64),
    "layers.0.self_attn.v_proj.weight": (32, 64),
    "layers.0.self_attn.o_proj.weight": (64, 64),
    "layers.0.post_attention_layernorm.weight": (64,),
    "layers.0.mlp.gate_proj.weight": (128, 64),
    "layers.0.mlp.up_proj.weight": (128, 64),
    "layers.0.mlp.down_proj.weight": (64, 128),
}
QUIET = {"feature_noise": 0.0}


def build(shape: EagleShape = SHAPE) -> EagleDrafter:
    torch.manual_seed(0)
    drafter = EagleDrafter(shape).double()
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind_embedding(torch.randn(shape.vocab_size, shape.target_hidden_size, dtype=torch.float64))
    return drafter


def _reference(drafter, ids, hidden, positions):
    """The graph of EAGLE: eagle/model/cnets1.py for one row, written out; returns the predicted features."""
    w = {name.removeprefix("block."): t for name, t in drafter.state_dict().items()}
    stream = torch.cat((drafter.embedding[ids], hidden), -1) @ w["fc.weight"].T

    def project(name, count):
        return (stream @ w[f"self_attn.{name}_proj.weight"].T).view(-1, count, 8).transpose(0, 1)

    q, k = _rope(project("q", 4), positions), _rope(project("k", 2), positions).repeat_interleave(2, 0)
    v = project("v", 2).repeat_interleave(2, 0)
    scores = q @ k.transpose(1, 2) / 8**0.5
    scores = scores.masked_fill(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
    mixed = (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(len(ids), 32)
    stream = stream + mixed @ w["self_attn.o_proj.weight"].T
    normed = _rms(stream, w["post_attention_layernorm.weight"])
    gate = functional.silu(normed @ w["mlp.gate_proj.weight"].T)
    return stream + (gate * (normed @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T


# ---- the graph


def test_graph_equals_the_written_out_reference():
    drafter = build()
    ids, positions = torch.tensor([3, 41, 7, 0, 12]), torch.arange(4, 9)
    taps = torch.randn(5, 32, dtype=torch.float64)
    out = drafter.forward_layer(ids[None], drafter.fuse(taps[None]), positions[None], causal)
    wanted = _reference(drafter, ids, taps, positions)
    # transformers computes norms and rotary tables in fp32 whatever the model's dtype.
    torch.testing.assert_close(out[0], wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(drafter.logits(out)[0], wanted @ drafter.lm_head.weight.T, rtol=0, atol=1e-5)
    assert drafter.feedback(out) is out


def test_the_head_is_the_targets_rows_of_the_draft_vocabulary(tiny_target):
    drafter = new_drafter(tiny_target, make_records(2), _settings(tiny_target, draft_vocab_size=99))
    assert drafter.lm_head.weight.equal(tiny_target.head_weight[drafter.t2d])
    assert drafter.embedding.data_ptr() == tiny_target.embed_weight.data_ptr()
    assert drafter.usual_taps(8) == (8,)
    assert set(drafter.state_dict()) - set(drafter.own_state()) == {"lm_head.weight"}
    assert drafter.shape == replace(
        SHAPE, target_hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=512, draft_vocab_size=99,
        max_position_embeddings=2048, rms_norm_eps=1e-6,
    )  # fmt: skip


def test_misfits_are_refused_by_name():
    with pytest.raises(ConfigError, match="draft_vocab_size is 51.*only 50"):
        replace(SHAPE, draft_vocab_size=51)
    with pytest.raises(ConfigError, match="num_heads is 4.*num_kv_heads 3"):
        replace(SHAPE, num_kv_heads=3)


# ---- the losses


def _run(drafter, batch, labels, steps, **options):
    layout = make_layout(batch, steps)
    return EagleTraining(drafter, EagleConfig(**options))(layout, labels.features(layout))


@pytest.mark.parametrize("weights", [(1.0, 0.1), (0.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("steps", [1, 3])
def test_losses_equal_a_dense_reference_forward_and_gradient(steps, weights):
    drafter, batch = build(), pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS))
    labels = Labels(LENGTH, width=32)
    feature, logit = weights

    def add(at, loss, out):  # the true feature of the position that the draft speaks of
        return logit * loss + feature * functional.smooth_l1_loss(out, labels.taps[at])

    loss, stats = _run(drafter, batch, labels, steps, feature_weight=feature, logit_weight=logit, **QUIET)
    wanted, wanted_stats = dense(drafter, batch, labels, steps, add)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-5, atol=1e-5)
    reached = [name for name, _ in drafter.named_parameters() if logit or name != "lm_head.weight"]
    for name, mine, theirs in zip(
        reached, *(torch.autograd.grad(x, [drafter.get_parameter(n) for n in reached]) for x in (loss, wanted))
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5, msg=name)


def test_predictions_outside_the_draft_vocabulary_have_neither_loss():
    drafter, batch = build(), pack([(2, 6)], 8, tokens_of([(2, 6)]))
    labels = Labels(8, width=32)
    labels.choice[:] = -1
    loss, stats = _run(drafter, batch, labels, 2, **QUIET)
    assert loss.item() == 0.0
    assert stats.tolist() == [[0, 0], [0, 0], [0, 0], [6, 5]]
    assert all(g.abs().sum() == 0 for g in gradients(drafter, loss))


def test_document_lengths_of_active_positions():
    layout = make_layout(pack([(3, 4), (1, 0), (2, 2)], 14, tokens_of([(3, 4), (1, 0), (2, 2)])), 1)
    assert document_lengths(layout).tolist() == [7] * 6 + [4] * 3  # a document of one token has no active position


def test_noise_is_uniform_by_document_length_drawn_anew_and_for_training_alone():
    drafter, batch = build(), pack([(100, 28), (40, 24)], 192, tokens_of([(100, 28), (40, 24)]))
    labels, layout = Labels(192, width=32), make_layout(batch, 1)
    graph = EagleTraining(drafter, EagleConfig(feature_noise=0.2))
    features = labels.features(layout)
    noise = graph.entry(layout, features) - features.taps
    for rows, width in ((noise[:127], 0.2 * 512 / 128), (noise[127:], 0.2 * 512 / 64)):
        assert 0.98 * width / 2 < rows.abs().max() <= width / 2
        assert abs(rows.mean()) < 0.02 * width and abs(rows.std() - width / 12**0.5) < 0.02 * width
    assert not (graph.entry(layout, features) - features.taps).equal(noise)
    torch.manual_seed(3)
    one = graph(layout, features)[0]
    torch.manual_seed(3)
    assert graph(layout, features)[0].equal(one)
    assert not graph(layout, features)[0].equal(one)
    graph.eval()
    assert graph.entry(layout, features).equal(features.taps)


# ---- training


def _settings(target, **options):
    drafter = EagleConfig(**{"draft_vocab_size": 300, "ttt_steps": 2, "curriculum": []} | options)
    return run_settings(target, drafter=drafter, max_steps=4, save_every=2)


def test_only_its_own_weights_learn(tiny_target, tmp_path):
    records = make_records(6)
    cfg = _settings(tiny_target, warm_start=False)
    before = new_drafter(tiny_target, records, cfg).state_dict()
    embedding, head = tiny_target.embed_weight.clone(), tiny_target.head_weight.clone()
    drafter, _ = run_training(tiny_target, records, cfg, tmp_path)
    for name, weight in drafter.named_parameters():
        assert weight.equal(before[name]) is (name == "lm_head.weight"), name
    assert tiny_target.embed_weight.equal(embedding) and tiny_target.head_weight.equal(head)


def test_with_noise_a_resumed_run_repeats_bit_for_bit_whatever_evaluation_draws(tiny_target, tmp_path):
    def draw(_):
        return {"acceptance_length": float(torch.rand(1))}

    def kill(_):
        raise Killed

    records, cfg = make_records(6), _settings(tiny_target)
    whole, _ = run_training(tiny_target, records, cfg_like(cfg, 1), tmp_path / "whole", draw)
    with pytest.raises(Killed):
        run_training(tiny_target, records, cfg_like(cfg, 3), tmp_path / "halves", kill)
    resumed, result = run_training(tiny_target, records, cfg, tmp_path / "halves")
    assert result.step == 4
    assert_same_weights(whole, resumed)


@pytest.fixture
def uneven_norms(tiny_target):
    """The random target's norms are all ones; for a while two of them are not."""
    pairs = [(tiny_target.backbone.layers[-1].input_layernorm, 0.5), (tiny_target.backbone.norm, 4.0)]
    for norm, scale in pairs:
        norm.weight.data.mul_(scale)
    yield
    for norm, scale in pairs:
        norm.weight.data.div_(scale)


def test_it_starts_as_the_targets_last_layer_over_the_feature(tiny_target, uneven_norms):
    records = make_records(2)
    drafter = new_drafter(tiny_target, records, _settings(tiny_target))
    drafter.warm_start(tiny_target, collate(records, [(0, 1)], 64), (8,))
    theirs, mine = tiny_target.backbone.layers[-1], drafter.block
    through = float(mine.fc.weight[0, 64])
    assert mine.fc.weight[:, 64:].equal(through * torch.eye(64)) and 0 < mine.fc.weight[:, :64].abs().max() < 0.2
    for name in ("mlp.gate_proj", "mlp.up_proj", "post_attention_layernorm"):
        assert mine.get_parameter(f"{name}.weight").equal(theirs.get_parameter(f"{name}.weight"))
    ids = torch.tensor(records[0].prompt_ids + records[0].response_ids)[None]
    inner = tiny_target.model(ids, output_hidden_states=True).hidden_states
    # Where the final norm is even, what attention reads is what the target's would read of the same state.
    size = inner[-1].pow(2).mean(-1).sqrt().median()
    read, stream = theirs.input_layernorm.weight * inner[-1] / size, through * inner[-1]
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted = read @ getattr(theirs.self_attn, name).weight.T
        torch.testing.assert_close(getattr(mine.self_attn, name)(stream), wanted, rtol=0.05, atol=0.02)
    before = size / inner[-2].pow(2).mean(-1).sqrt().median()
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        ratio = mine.get_parameter(name).detach() / theirs.get_parameter(name)
        torch.testing.assert_close(ratio, (through * before).expand(ratio.shape), rtol=0.1, atol=0)
    spread = drafter.logits(stream).std(-1).mean()
    assert float(spread) == pytest.approx(LOGIT_STD, rel=0.1)


def test_a_start_from_another_shape_is_refused(tiny_target):
    records = make_records(2)
    drafter = new_drafter(tiny_target, records, _settings(tiny_target, intermediate_size=100))
    with pytest.raises(ConfigError, match="gate_proj is .100, 64. in the drafter.*warm_start=false"):
        drafter.warm_start(tiny_target, collate(records, [(0, 1)], 64), (8,))


# ---- the export


@pytest.fixture(scope="module")
def trained(tiny_target):
    drafter = new_drafter(tiny_target, make_records(6), _settings(tiny_target))
    for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
        torch.nn.init.normal_(parameter, std=0.2)
    return drafter


@pytest.fixture
def folder(tiny_target, trained, tmp_path):
    contract = describe_drafter(trained, tiny_target, taps=(8,), steps=2, max_length=64)
    return export_drafter(trained, tiny_target, contract, tmp_path / "export", command="python train.py drafter=eagle")


def test_an_export_has_the_official_names_and_loads_bit_for_bit(tiny_target, trained, folder):
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == OFFICIAL
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    vocab = load_file(folder / "draft_vocab.safetensors")
    assert vocab["d2t"].equal(trained.d2t) and vocab["t2d"].equal(trained.t2d)
    drafter, contract = load_drafter(folder, tiny_target)
    assert drafter.shape == trained.shape and contract.taps == ("output of block 7 after the final norm",)
    assert drafter.deepest(contract.graph) == 3
    for name, tensor in trained.own_state().items():
        loaded = drafter.state_dict()[name]
        assert loaded.equal(tensor.to(torch.bfloat16).to(loaded.dtype) if tensor.is_floating_point() else tensor), name
    assert drafter.lm_head.weight.equal(tiny_target.head_weight[trained.t2d])


def test_config_is_what_vllm_reads(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["bias"] is False
    assert "draft_vocab_size" not in config
    read = AutoConfig.from_pretrained(folder)
    assert (read.num_hidden_layers, read.hidden_size, read.intermediate_size, read.vocab_size) == (1, 64, 128, 512)
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim, read.rms_norm_eps) == (4, 2, 16, 1e-6)
    card = (folder / "README.md").read_text()
    assert "# EAGLE drafter for" in card and "`method: eagle`" in card and "`fc.bias`" in card


@pytest.mark.parametrize("name", [name for name in OFFICIAL if "norm" not in name])
def test_the_probe_sees_a_change_in_every_weight(tiny_target, folder, name):
    edit_tensors(folder, put(name, lambda tensor: tensor.flip(0)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)


def test_embedding_and_feature_exchanged_are_refused(tiny_target, folder):
    edit_tensors(folder, put("fc.weight", lambda tensor: tensor.roll(64, 1)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)


def test_another_tap_or_tensor_or_config_is_refused(tiny_target, folder):
    contract = json.loads((folder / "contract.json").read_text())
    edit_json(folder, "contract.json", taps=["output of block 6 before norm"], tap_indices=[7])
    with pytest.raises(ContractError, match="tap 0 .output of block 6 before norm. differs"):
        load_drafter(folder, tiny_target)
    edit_json(folder, "contract.json", **contract)
    edit_json(folder, "config.json", bias=True)
    with pytest.raises(ContractError, match="bias is True.*False"):
        load_drafter(folder, tiny_target)
    edit_json(folder, "config.json", bias=False)
    edit_tensors(folder, lambda tensors: tensors.update({"fc.bias": torch.zeros(64, dtype=torch.bfloat16)}))
    with pytest.raises(ArtifactError, match="tensor fc.bias is not part of this graph"):
        load_drafter(folder, tiny_target)


# ---- settings


def test_settings_are_checked():
    run = settings("train", "drafter=eagle", "drafter.objective=lk", "drafter.lk_decay=1")
    assert (run.drafter.loss.name, run.drafter.loss.decay) == ("lk", 1.0)
    assert (run.drafter.steps, run.drafter.draft_vocab_size, run.output_dir) == (3, 12288, "outputs/eagle-smollm2-135m")
    for wrong, answer in [
        ({"feature_weight": -1.0}, "drafter.feature_weight=-1.0: must be a number >= 0"),
        ({"logit_weight": -1.0}, "drafter.logit_weight=-1.0: must be a number >= 0"),
        ({"feature_noise": -1.0}, "drafter.feature_noise=-1.0: must be a number >= 0"),
        ({"objective": "mse"}, "must be one of kl, reverse_kl, jsd, tvd, lk, lk_alpha"),
        ({"objective": "jsd", "jsd_beta": 1.0}, "drafter.jsd_beta=1.0: must be a number > 0 and < 1"),
        ({"objective": "lk", "lk_decay": -1.0}, "drafter.lk_decay=-1.0: must be a number >= 0"),
        ({"feature_weight": 0.0, "logit_weight": 0.0}, "both 0"),
        ({"jsd_beta": 0.3}, "drafter.jsd_beta=0.3 is read by drafter.objective=jsd only"),
        ({"objective": "jsd", "lk_decay": 1.0}, "read by drafter.objective=lk only, but drafter.objective is jsd"),
        ({"num_heads": 4, "num_kv_heads": 3}, "drafter.num_heads=4 is no multiple"),
        ({"curriculum": [0.6, 0.3]}, "the fractions must rise"),
    ]:
        with pytest.raises(ConfigError, match=answer):
            check(replace(run, drafter=EagleConfig(**wrong)))
    assert "hidden_size" in complaint("train", "drafter=eagle", "drafter.hidden_size=64")


@pytest.mark.parametrize("changes", [{}, {"intermediate_size": 40, "num_heads": 8, "num_kv_heads": 2, "head_dim": 12}])
def test_planned_parameters_match_the_real_module(changes):
    facts = settings("train", "target=llama3-8b").target.facts
    cfg = EagleConfig(draft_vocab_size=100, **changes)
    sizes = {name: getattr(cfg, name) or getattr(facts, name) for name in
             ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")}  # fmt: skip
    sizes |= {"target_hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size}
    shape = replace(SHAPE, draft_vocab_size=100, **sizes)
    with torch.device("meta"):
        drafter = EagleDrafter(shape)
    counted = sum(weight.numel() for weight in drafter.parameters())
    assert drafter_parameters(cfg, facts) == (counted, counted - drafter.lm_head.weight.numel())
