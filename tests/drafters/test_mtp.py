"""MTP: its graph against transformers' own layers, its rollout, its start, its export, its settings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from drafters.batches import collate
from drafters.config_check import check
from drafters.config_drafter import MtpConfig
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.facts import known_facts
from drafters.models import MtpDrafter, MtpShape
from drafters.plan import drafter_parameters
from drafters.warm_start import LOGIT_STD
from tests.drafters.export_setup import edit_json, edit_tensors, put
from tests.drafters.test_eagle3 import _rms, causal
from tests.drafters.test_ttt import DOCUMENTS, LENGTH, Labels, dense, gradients, pack, run, tokens_of
from tests.drafters.training_setup import make_records, new_drafter, run_settings, run_training
from tests.helpers import complaint, settings

SHAPE = MtpShape(
    target_hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5,
    rope_theta=1e4, max_position_embeddings=64, vocab_size=50, draft_vocab_size=20, layer_index=6,
)  # fmt: skip
OFFICIAL = {
    "enorm.weight": (64,),
    "hnorm.weight": (64,),
    "eh_proj.weight": (64, 128),
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
    "shared_head.norm.weight": (64,),
}
KINDS = {
    "llama": (LlamaConfig, LlamaDecoderLayer, {}),
    "qwen2": (Qwen2Config, Qwen2DecoderLayer, {"qkv_bias": True}),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer, {"qk_norm": True}),
}


def build(**flags: bool) -> MtpDrafter:
    torch.manual_seed(0)
    shape = replace(SHAPE, **flags)
    drafter = MtpDrafter(shape).double()
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.3)
    drafter.bind_embedding(torch.randn(shape.vocab_size, shape.target_hidden_size, dtype=torch.float64))
    return drafter


# ---- the graph


@pytest.mark.parametrize("kind", KINDS)
def test_graph_is_the_join_and_a_decoder_layer_of_the_targets_kind(kind):
    config_type, layer_type, flags = KINDS[kind]
    drafter = build(**flags)
    config = config_type(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, vocab_size=50, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    layer = layer_type(config, 0).double()
    weights = drafter.layer.state_dict()
    layer.load_state_dict({name: weights[name] for name in layer.state_dict()})
    ids, positions = torch.tensor([[3, 41, 7, 0, 12]]), torch.arange(4, 9)[None]
    taps = torch.randn(1, 5, 32, dtype=torch.float64)
    joined = torch.cat((_rms(drafter.embedding[ids], weights["enorm.weight"]), _rms(taps, weights["hnorm.weight"])), -1)
    stream = joined @ weights["eh_proj.weight"].T
    mask = torch.zeros(5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)[None, None]
    rotary = LlamaRotaryEmbedding(config)(stream, positions)
    wanted = layer(stream, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    out = drafter.forward_layer(ids, drafter.fuse(taps), positions, causal)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)
    logits = _rms(wanted, weights["shared_head.norm.weight"]) @ drafter.lm_head.weight.T
    torch.testing.assert_close(drafter.logits(out), logits, rtol=0, atol=1e-5)
    assert drafter.feedback(out) is out  # before the norm


@pytest.mark.parametrize("flags", [{}, {"qkv_bias": True, "qk_norm": True}])
def test_rollout_equals_a_dense_reference_forward_and_gradient(flags):
    drafter, batch, labels = build(**flags), pack(DOCUMENTS, LENGTH, tokens_of(DOCUMENTS)), Labels(LENGTH, width=32)
    loss, stats = run(drafter, batch, labels, 3)
    wanted, wanted_stats = dense(drafter, batch, labels, 3)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats, wanted_stats, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(drafter, loss), gradients(drafter, wanted), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


# ---- training


def _settings(target, **options):
    drafter = MtpConfig(**{"draft_vocab_size": 300, "ttt_steps": 2, "curriculum": []} | options)
    return run_settings(target, drafter=drafter)


def test_it_takes_sizes_embedding_and_head_from_the_target(tiny_target):
    drafter = new_drafter(tiny_target, make_records(2), _settings(tiny_target))
    assert drafter.shape == replace(
        SHAPE, target_hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=512, draft_vocab_size=300,
        max_position_embeddings=2048, layer_index=8, rms_norm_eps=1e-6,
    )  # fmt: skip
    assert drafter.lm_head.weight.equal(tiny_target.head_weight[drafter.t2d])
    assert drafter.embedding.data_ptr() == tiny_target.embed_weight.data_ptr()
    assert drafter.usual_taps(8) == (8,)
    assert set(drafter.state_dict()) - set(drafter.own_state()) == {"lm_head.weight"}


def test_only_its_own_weights_learn(tiny_target, tmp_path):
    records, cfg = make_records(6), _settings(tiny_target, warm_start=False)
    before = new_drafter(tiny_target, records, cfg).state_dict()
    embedding, head = tiny_target.embed_weight.clone(), tiny_target.head_weight.clone()
    drafter, _ = run_training(tiny_target, records, cfg, tmp_path)
    for name, weight in drafter.named_parameters():
        assert weight.equal(before[name]) is (name == "lm_head.weight"), name
    assert tiny_target.embed_weight.equal(embedding) and tiny_target.head_weight.equal(head)


def test_it_starts_as_the_targets_last_layer_over_its_last_state(tiny_target):
    records = make_records(2)
    drafter = new_drafter(tiny_target, records, _settings(tiny_target))
    drafter.warm_start(tiny_target, collate(records, [(0, 1)], 64), (8,))
    mine, theirs = drafter.layer, tiny_target.backbone.layers[-1]
    for name, weight in theirs.named_parameters():
        assert mine.get_parameter(name).equal(weight), name
    assert mine.eh_proj.weight[:, 64:].equal(torch.eye(64)) and 0 < mine.eh_proj.weight[:, :64].abs().max() < 0.2
    inner = tiny_target.model(torch.tensor([records[0].response_ids]), output_hidden_states=True).hidden_states[-2]
    typical = inner.pow(2).mean(-1).sqrt().median()
    torch.testing.assert_close(mine.hnorm.weight, typical.detach().expand(64), rtol=0.1, atol=0)
    ratio = mine.shared_head["norm"].weight / tiny_target.backbone.norm.weight
    torch.testing.assert_close(ratio, ratio[:1].expand(64))
    ids = torch.tensor(records[0].prompt_ids + records[0].response_ids)[None]
    last = tiny_target.backbone(ids).last_hidden_state[:, :-1]
    spread = drafter.first_logits(ids, last, torch.arange(ids.shape[1] - 1)[None]).std(-1).mean()
    assert spread.item() == pytest.approx(LOGIT_STD, rel=0.1)


def test_a_start_from_another_kind_of_layer_is_refused(tiny_target):
    records = make_records(2)
    batch = collate(records, [(0, 1)], 64)
    shape = new_drafter(tiny_target, records, _settings(tiny_target)).shape
    for change, named in (
        ({"qk_norm": True}, "target's layer has no self_attn.k_norm.weight"),
        ({"intermediate_size": 96}, r"mlp.down_proj.weight is \(64, 96\) in the drafter, \(64, 128\) in the target"),
    ):
        with pytest.raises(ConfigError, match=f"{named}.*drafter.warm_start=false"):
            MtpDrafter(replace(shape, **change)).warm_start(tiny_target, batch, (8,))


# ---- the export


@pytest.fixture(scope="module")
def trained(tiny_target):
    drafter = new_drafter(tiny_target, make_records(6), _settings(tiny_target))
    for parameter in (p for p in drafter.parameters() if p.requires_grad and p.dim() > 1):
        nn.init.normal_(parameter, std=0.2)
    return drafter


@pytest.fixture
def folder(tiny_target, trained, tmp_path):
    contract = describe_drafter(trained, tiny_target, taps=(8,), steps=2, max_length=64)
    return export_drafter(trained, tiny_target, contract, tmp_path / "export", command="python train.py drafter=mtp")


def test_an_export_has_deepseeks_names_and_loads_bit_for_bit(tiny_target, trained, folder):
    tensors = load_file(folder / "model.safetensors")
    names = {f"model.layers.8.{name}": size for name, size in OFFICIAL.items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == names
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


def test_config_and_card_say_what_the_folder_is(folder):
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (8, 1)
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMNextN"], "llama")
    assert (config["hidden_size"], config["draft_vocab_size"], config["attention_bias"]) == (64, 300, False)
    card = (folder / "README.md").read_text()
    assert "# MTP drafter for" in card and "`model.layers.N.eh_proj`" in card


@pytest.mark.parametrize("name", [name for name in OFFICIAL if "norm" not in name])
def test_the_probe_sees_a_change_in_every_weight(tiny_target, folder, name):
    edit_tensors(folder, put(f"model.layers.8.{name}", lambda tensor: tensor.flip(0)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)


def test_halves_exchanged_another_tap_or_tensor_are_refused(tiny_target, folder):
    prefix = "model.layers.8."
    edit_json(folder, "contract.json", taps=["output of block 6 before norm"], tap_indices=[7])
    with pytest.raises(ContractError, match="tap 0 .output of block 6 before norm. differs"):
        load_drafter(folder, tiny_target)
    edit_json(folder, "contract.json", taps=["output of block 7 after the final norm"], tap_indices=[8])
    load_drafter(folder, tiny_target)
    edit_tensors(folder, put(f"{prefix}eh_proj.weight", lambda tensor: tensor.roll(64, 1)))
    with pytest.raises(ContractError, match="probe text 0: drafter logits differ by "):
        load_drafter(folder, tiny_target)
    edit_tensors(folder, lambda tensors: tensors.pop(f"{prefix}hnorm.weight"))
    with pytest.raises(ArtifactError, match="tensor model.layers.8.hnorm.weight is missing"):
        load_drafter(folder, tiny_target)


# ---- settings and plan


def test_settings_are_checked(tiny_target):
    def refused(message: str, init_from: str | None = None, **options: object) -> None:
        cfg = _settings(tiny_target, **options)
        trainer = replace(cfg.trainer, max_steps=None, epochs=0.0)
        with pytest.raises(ConfigError, match=message):
            check(replace(cfg, trainer=trainer, init_from=init_from))

    refused("drafter.ttt_steps=0", ttt_steps=0)
    refused("trainer.epochs=0 trains nothing.*drafter.native=true, or init_from=FOLDER, or trainer.epochs above 0")
    refused("drafter.warm_start=false says otherwise", native=True, warm_start=False)
    refused("init_from=src says otherwise", "src", native=True)
    assert "hidden_size" in complaint("train", "drafter=mtp", "drafter.hidden_size=64")
    run = settings("train", "drafter=mtp", "drafter.native=true", "trainer.epochs=0")
    assert (run.drafter.native, run.trainer.epochs) == (True, 0)
    assert (run.drafter.steps, run.drafter.decay, run.drafter.draft_vocab_size) == (3, 0.6, 12288)


def test_parameters_match_the_real_module():
    run = settings("train", "target=tiny-random", "drafter=mtp", "drafter.draft_vocab_size=100")
    facts = known_facts(run.target)
    with torch.device("meta"):
        drafter = MtpDrafter(
            MtpShape(facts.hidden_size, facts.intermediate_size, facts.num_heads, facts.num_kv_heads, facts.head_dim,
                     1e-5, 1e4, 64, facts.vocab_size, 100, facts.num_layers)
        )  # fmt: skip
    counted, trained = drafter_parameters(run.drafter, facts)
    assert counted == sum(weight.numel() for weight in drafter.parameters())
    assert trained == counted - drafter.lm_head.weight.numel()
