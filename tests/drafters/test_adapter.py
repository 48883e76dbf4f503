"""LoRA adapters of a target: in its graph, on disk as peft reads them, merged; and the refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

from drafters.adapter import CONFIG, WEIGHTS, Adapter, LoraShape, TunedTarget, attach, layer_sizes, merge, share
from drafters.config import TargetConfig
from drafters.errors import ArtifactError, ConfigError, TargetError
from drafters.target import Target

IDS = torch.randint(3, 500, (1, 12), generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(12)[None]
MASK = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
SHAPE = LoraShape(rank=4, alpha=8, dropout=0.5, targets=("down_proj", "q_proj"))


@pytest.fixture(scope="module")
def fresh(tiny_target, tiny_config):
    """A target that no engine has touched, in the same cache."""
    return Target.load(tiny_config)


@pytest.fixture(scope="module")
def adapter(fresh):
    return make_adapter(fresh)


def make_adapter(target: Target, shape: LoraShape = SHAPE, seed: int = 1) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in target.model.named_modules():
        if name.rpartition(".")[2] in shape.targets:
            sizes = {"lora_A": (shape.rank, module.in_features), "lora_B": (module.out_features, shape.rank)}
            for kind, size in sizes.items():
                tensors[f"base_model.model.{name}.{kind}.weight"] = 0.05 * torch.randn(size, generator=generator)
    return Adapter(shape, tensors)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


# ---- one adapter, three ways


def test_saved_merged_and_in_the_graph_it_is_what_peft_reads(fresh, adapter, tmp_path):
    adapter.save(tmp_path / "adapter", "a label")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [CONFIG, WEIGHTS]
    theirs = PeftModel.from_pretrained(share(fresh.model), str(tmp_path / "adapter")).eval()
    wanted, plain = logits(theirs), logits(fresh.model)
    assert (wanted - plain).abs().max() > 0.02
    tuned = fresh.with_adapter(Adapter.read(tmp_path / "adapter"))
    # In double precision the merged weights' own rounding is all that is left.
    exact = [logits(copy.deepcopy(model).double()) for model in (tuned.model, theirs)]
    torch.testing.assert_close(*exact, rtol=0, atol=1e-5)
    close = {"rtol": 0, "atol": 1e-5 * float(wanted.abs().max())}
    torch.testing.assert_close(logits(tuned.model), wanted, **close)
    graph = TunedTarget(fresh.model, SHAPE, adapter.tensors)
    torch.testing.assert_close(fresh.logits(graph.last_hidden(IDS, POSITIONS, MASK)), wanted, **close)
    assert json.loads((tmp_path / "adapter" / CONFIG).read_text())["base_model_name_or_path"] == "a label"


def test_switched_off_it_leaves_the_target_to_the_bit(fresh, adapter):
    graph = TunedTarget(fresh.model, SHAPE, adapter.tensors)
    for training in (True, False):
        graph.train(training)
        _, wanted = fresh.hidden(IDS, POSITIONS, MASK, ())
        assert graph.original(IDS, POSITIONS, MASK).equal(wanted)
        assert not graph.last_hidden(IDS, POSITIONS, MASK).equal(wanted)


def test_it_sees_no_further_than_the_target_where_a_window_slides():
    config = MistralConfig(
        vocab_size=600, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, sliding_window=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    graph = TunedTarget(model, SHAPE, make_adapter(Target(model, None, TargetConfig(), Path())).tensors)
    with torch.no_grad():
        wanted = model.base_model(IDS, use_cache=False).last_hidden_state
    torch.testing.assert_close(graph.original(IDS, POSITIONS, MASK), wanted, rtol=0, atol=1e-5)


def test_dropout_is_drawn_in_training_only(fresh, adapter):
    graph = TunedTarget(fresh.model, SHAPE, adapter.tensors)
    graph.train(True)
    assert not graph.last_hidden(IDS, POSITIONS, MASK).equal(graph.last_hidden(IDS, POSITIONS, MASK))
    assert not any(module.training for module in graph.model.modules() if isinstance(module, nn.Linear))
    graph.train(False)
    assert graph.last_hidden(IDS, POSITIONS, MASK).equal(graph.last_hidden(IDS, POSITIONS, MASK))


def test_the_given_target_shares_what_is_not_tuned_and_stays_as_it_is(fresh, adapter):
    before = {name: (weight, weight.clone()) for name, weight in fresh.model.named_parameters()}
    random = torch.get_rng_state()
    tuned = fresh.with_adapter(adapter)
    TunedTarget(fresh.model, SHAPE, adapter.tensors).original(IDS, POSITIONS, MASK)
    assert torch.get_rng_state().equal(random)  # a resumed run must not depend on it
    after = dict(fresh.model.named_parameters())
    assert after.keys() == before.keys() and fresh.adapter is None
    for name, (weight, value) in before.items():
        assert after[name] is weight and weight.equal(value), name
        mine = tuned.model.get_parameter(name)
        assert (mine is weight) is not any(target in name for target in SHAPE.targets), name
        assert not mine.requires_grad


def test_half_precision_weights_are_summed_in_fp32(fresh, adapter):
    model = share(fresh.model)
    layer = model.model.layers[3].mlp
    layer.down_proj.weight = nn.Parameter(layer.down_proj.weight.bfloat16(), requires_grad=False)
    merged = merge(model, adapter).model.layers[3].mlp.down_proj.weight
    name = "base_model.model.model.layers.3.mlp.down_proj.lora_{}.weight"
    a, b = (adapter.tensors[name.format(kind)] for kind in "AB")
    assert merged.equal((fresh.model.model.layers[3].mlp.down_proj.weight.bfloat16().float() + 2 * (b @ a)).bfloat16())


# ---- targets


def test_a_tuned_target_says_so_and_takes_no_second_adapter(fresh, adapter):
    tuned = fresh.with_adapter(adapter)
    assert tuned.title == f"tiny-random tuned by adapter {adapter.sha256[:12]}" and fresh.title == "tiny-random"
    assert tuned.fingerprint == fresh.fingerprint | {"adapter_sha256": adapter.sha256}
    del tuned.__dict__["fingerprint"]
    assert tuned.fingerprint == fresh.fingerprint | {"adapter_sha256": adapter.sha256}
    assert tuned.with_adapter(make_adapter(fresh)) is tuned
    other = make_adapter(fresh, seed=2)
    with pytest.raises(TargetError, match=f"{adapter.sha256[:12]}' is to be tuned by adapter {other.sha256[:12]} too"):
        tuned.with_adapter(other)


def test_its_own_model_is_tuned_too_and_shares_nothing(fresh, adapter):
    tuned = fresh.with_adapter(adapter)
    own = tuned.own_model()
    assert logits(own).equal(logits(tuned.model))
    assert own.model.embed_tokens.weight.data_ptr() != tuned.embed_weight.data_ptr()


def test_the_hash_is_of_all_that_changes_a_number(fresh, adapter):
    assert make_adapter(fresh).sha256 == adapter.sha256
    name = next(iter(adapter.tensors))
    changed = [
        Adapter(LoraShape(4, 9, 0.5, SHAPE.targets), adapter.tensors),
        Adapter(SHAPE, adapter.tensors | {name: adapter.tensors[name] + 1e-6}),
        Adapter(SHAPE, {k: v for k, v in adapter.tensors.items() if k != name}),
    ]
    assert len({adapter.sha256, *(other.sha256 for other in changed)}) == 4
    assert Adapter(LoraShape(4, 8, 0.0, SHAPE.targets), adapter.tensors).sha256 == adapter.sha256


# ---- refusals


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"use_dora": True}, "use_dora is True, this code applies False"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is {'q_proj': 8}"),
        ({"use_rslora": True}, "use_rslora is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"target_modules": None}, "is no LoRA of linear layers"),
        ({"from_the_future": 1}, "is no LoRA of linear layers"),
    ],
)
def test_settings_that_would_not_be_applied_are_refused(fresh, adapter, tmp_path, change, complaint):
    adapter.save(tmp_path / "adapter", "label")
    path = tmp_path / "adapter" / CONFIG
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"unknown_but_off": None}))
    assert Adapter.read(tmp_path / "adapter").sha256 == adapter.sha256
    path.write_text(json.dumps(raw | change))
    with pytest.raises(ArtifactError) as caught:
        Adapter.read(tmp_path / "adapter")
    assert complaint in str(caught.value) and str(path) in str(caught.value)


def test_missing_and_damaged_files_are_named(fresh, adapter, tmp_path):
    adapter.save(tmp_path / "adapter", "label")
    weights = tmp_path / "adapter" / WEIGHTS
    data = weights.read_bytes()
    weights.write_bytes(data[:100])
    with pytest.raises(ArtifactError, match="adapter_model.safetensors is not a safetensors file"):
        Adapter.read(tmp_path / "adapter")
    weights.unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"pickle")  # peft would unpickle it
    with pytest.raises(ArtifactError, match="adapter_model.safetensors is missing"):
        Adapter.read(tmp_path / "adapter")
    (tmp_path / "adapter" / CONFIG).unlink()
    with pytest.raises(ArtifactError, match="adapter_config.json is missing"):
        Adapter.read(tmp_path / "adapter")


def test_factors_that_do_not_fit_are_named(fresh, adapter):
    name = "base_model.model.model.layers.2.self_attn.q_proj.lora_B.weight"
    cases = [
        ({k: v for k, v in adapter.tensors.items() if k != name}, f"{name} is missing, the target needs [64, 4]"),
        (adapter.tensors | {name: torch.zeros(64, 5)}, f"{name} is [64, 5], the target needs [64, 4]"),
        (adapter.tensors | {"strange": torch.zeros(1)}, "strange belongs to no layer"),
    ]
    for tensors, complaint in cases:
        with pytest.raises(TargetError) as caught:
            attach(share(fresh.model), SHAPE, tensors)
        assert complaint in str(caught.value)


def test_layers_to_tune_are_found_by_name(fresh):
    count, sizes = layer_sizes(fresh.model, None)
    assert count == 8 and sizes == {
        "self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
        "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64], "mlp.down_proj": [64, 128],
    }  # fmt: skip
    assert list(layer_sizes(fresh.model, ["v_proj", "q_proj"])[1]) == ["self_attn.q_proj", "self_attn.v_proj"]
    with pytest.raises(ConfigError, match="drafter.lora_targets names 'qproj', the target's .* down_proj, gate_proj"):
        layer_sizes(fresh.model, ["q_proj", "qproj"])


def test_targets_that_cannot_be_tuned_are_refused(fresh):
    model = share(fresh.model)
    model.model.layers[5].mlp.up_proj = nn.Linear(64, 96, bias=False)
    with pytest.raises(TargetError, match="decoder layer 5 of the target .* layers are alike"):
        layer_sizes(model, None)
    for layer in model.model.layers:
        for name, child in list(layer.named_modules()):
            if isinstance(child, nn.Linear):
                layer.set_submodule(name, nn.Identity())
    with pytest.raises(TargetError, match="no plain linear layer to tune: it is quantised, or an engine has laid"):
        layer_sizes(model, None)
    del model.model.layers
    with pytest.raises(TargetError, match="'llama' target has no list of decoder layers"):
        layer_sizes(model, None)


def test_a_file_of_other_names_is_refused(fresh, adapter, tmp_path):
    adapter.save(tmp_path / "adapter", "label")
    path = tmp_path / "adapter" / WEIGHTS
    save_file({f"x.{name}": tensor for name, tensor in load_file(path).items()}, path)
    with pytest.raises(TargetError, match="q_proj.lora_A.weight is missing"):
        fresh.with_adapter(Adapter.read(tmp_path / "adapter"))
