"""MTP layers read from a target's own checkpoint: three ways of naming them, and what is refused."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Glm4Config, Qwen2Config, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from drafters.config import TargetConfig
from drafters.config_drafter import MtpConfig
from drafters.errors import TargetError
from drafters.export import describe_drafter, export_drafter, load_drafter
from drafters.logger import Logger
from drafters.models.native_mtp import load_native
from drafters.target import Target
from drafters.trainer import train
from tests.drafters.training_setup import make_records, new_drafter, run_settings

LAYERS = 2
DEEPSEEK = f"model.layers.{LAYERS}."
CONFIGS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "glm4": Glm4Config}
QWEN = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
MIMO = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm",
        "shared_head.norm": "final_layernorm"}  # fmt: skip


def save_target(folder: Path, tokens: Path, kind: str, **changes: object) -> None:
    """A random model of a kind, with the tiny target's tokenizer."""
    config = CONFIGS[kind](
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False, pad_token_id=None,
        eos_token_id=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tokens / name).exists():
            shutil.copy(tokens / name, folder / name)


def mtp_tensors(folder: Path) -> dict[str, Tensor]:
    """A random MTP layer like the model's last one, under DeepSeek's names."""
    generator = torch.Generator().manual_seed(5)
    last = f"model.layers.{LAYERS - 1}."
    sizes = {n.removeprefix(last): t.shape for n, t in load_file(folder / "model.safetensors").items() if last in n}
    sizes |= {f"{name}.weight": (32,) for name in ("enorm", "hnorm", "shared_head.norm")} | {"eh_proj.weight": (32, 64)}
    drawn = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {DEEPSEEK + name: t.abs() + 0.5 if "norm" in name else 0.2 * t for name, t in drawn.items()}


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> Target:
    """Put more tensors into a model's file, and load it as a target."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: t.contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    return Target.load(TargetConfig(name="native", path=str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def plain(tiny_folder, tmp_path_factory):
    """Saved models without MTP tensors, one per kind."""
    base = tmp_path_factory.mktemp("plain")
    for kind in CONFIGS:
        save_target(base / kind, tiny_folder, kind)
    return base


@pytest.fixture
def folder(plain, tmp_path, request):
    return Path(shutil.copytree(plain / getattr(request, "param", "qwen3"), tmp_path / "target"))


def drafter_for(target: Target):
    cfg = run_settings(target, drafter=MtpConfig(draft_vocab_size=300, native=True))
    return new_drafter(target, make_records(4), cfg), cfg


def renamed(tensors: dict[str, Tensor], prefix: str, names: dict[str, str], inner: str = "") -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        own = name.removeprefix(DEEPSEEK).removesuffix(".weight")
        rest = name.removeprefix(DEEPSEEK)
        found[prefix + (f"{names[own]}.weight" if own in names else inner + rest)] = tensor
    return found


# ---- what is read


@pytest.mark.parametrize("folder", ["qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize("naming", ["deepseek", "qwen", "mimo"])
def test_every_tensor_lands_in_its_place(folder, naming):
    tensors = mtp_tensors(folder)
    saved = dict(tensors)
    if naming == "qwen":
        saved = renamed(tensors, "mtp.", QWEN, "layers.0.")
    if naming == "mimo":
        swapped = {DEEPSEEK + "eh_proj.weight": tensors[DEEPSEEK + "eh_proj.weight"].roll(32, 1)}
        saved = renamed(tensors | swapped, "model.mtp_layers.0.", MIMO)
    target = add_tensors(folder, saved)
    drafter, _ = drafter_for(target)
    load_native(drafter.layer, target)
    own = {name: tensor for name, tensor in drafter.own_state().items() if name not in ("d2t", "t2d")}
    assert own.keys() == tensors.keys()
    for name, tensor in own.items():
        assert tensor.equal(tensors[name]), name


def test_copies_of_the_targets_embedding_and_head_are_passed_over_and_others_refused(folder):
    before = load_file(folder / "model.safetensors")
    shared = {
        DEEPSEEK + "embed_tokens.weight": before["model.embed_tokens.weight"].clone(),
        DEEPSEEK + "shared_head.head.weight": before["lm_head.weight"].clone(),
    }
    target = add_tensors(folder, mtp_tensors(folder) | shared)
    load_native(drafter_for(target)[0].layer, target)
    for name in shared:
        target = add_tensors(folder, shared | {name: shared[name] + 1})
        with pytest.raises(TargetError, match=f"{name.removeprefix(DEEPSEEK)} of its MTP layer is another than"):
            load_native(drafter_for(target)[0].layer, target)


def test_without_training_it_is_exported_as_it_is(folder, tmp_path):
    """trainer.epochs=0 leaves the checkpoint's own weights, which the export then holds and the engine runs."""
    from runtime.engine import Engine
    from runtime.sampling import SamplingParams

    target = add_tensors(folder, {n: t.bfloat16().float() for n, t in mtp_tensors(folder).items()})
    drafter, cfg = drafter_for(target)
    cfg = replace(cfg, trainer=replace(cfg.trainer, max_steps=None, epochs=0.0))
    logger = Logger(tmp_path, cfg.logger)
    result = train(drafter, target, make_records(4), cfg, tmp_path, None, logger, Console(file=io.StringIO()))
    assert (result.step, result.total_steps, result.best_step) == (0, 0, None)
    tensors = mtp_tensors(folder.parent / "target")
    for name, tensor in tensors.items():
        assert drafter.get_parameter(name).equal(tensor.bfloat16().float()), name
    contract = describe_drafter(drafter, target, taps=(LAYERS,), steps=3, max_length=64)
    export = export_drafter(drafter, target, contract, tmp_path / "export", command="python train.py")
    loaded, _ = load_drafter(export, target)
    assert loaded.own_state().keys() == drafter.own_state().keys()
    assert all(loaded.own_state()[name].equal(tensor) for name, tensor in drafter.own_state().items())
    params = [SamplingParams(12, ignore_eos=True), SamplingParams(12, temperature=0.8, seed=1, ignore_eos=True)]
    plain_text = Engine.load(target, "none").generate(["hello", "a"], params)
    served = Engine.load(target, export, num_draft_tokens=6, depth=3, top_k=2).generate(["hello", "a"], params)
    assert [a.token_ids for a in served] == [p.token_ids for p in plain_text]


def test_native_weights_are_trained_from(folder, tmp_path):
    target = add_tensors(folder, mtp_tensors(folder))
    drafter, cfg = drafter_for(target)
    cfg = replace(cfg, trainer=replace(cfg.trainer, max_steps=1, learning_rate=1e-6))
    train(drafter, target, make_records(4), cfg, tmp_path, None, Logger(tmp_path, cfg.logger),
          Console(file=io.StringIO()))  # fmt: skip
    for name, tensor in mtp_tensors(folder).items():
        moved = (drafter.get_parameter(name) - tensor).abs().max()
        assert 0 < moved < 1e-5, name


# ---- what is refused


def test_none_several_or_two_ways_of_naming_are_refused(folder):
    target = add_tensors(folder, {})
    with pytest.raises(TargetError, match=r"Qwen3ForCausalLM\): its checkpoint holds no tensors of the names model."):
        load_native(drafter_for(target)[0].layer, target)
    tensors = mtp_tensors(folder)
    for name in ("model.layers.3.enorm.weight", "mtp.layers.1.mlp.up_proj.weight", "model.mtp_layers.1.enorm.weight"):
        target = add_tensors(folder, {name: torch.ones(32)})
        with pytest.raises(TargetError, match=rf"more than one MTP layer \({name}\)"):
            load_native(drafter_for(target)[0].layer, target)
        kept = {n: t for n, t in load_file(folder / "model.safetensors").items() if n != name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    target = add_tensors(folder, tensors | {"mtp.norm.weight": torch.ones(32)})
    with pytest.raises(TargetError, match="holds tensors under more than one of the names"):
        load_native(drafter_for(target)[0].layer, target)


def test_a_missing_tensor_is_named(folder):
    tensors = mtp_tensors(folder)
    for name in ("enorm.weight", "self_attn.q_norm.weight"):
        del tensors[DEEPSEEK + name]
    target = add_tensors(folder, tensors)
    with pytest.raises(TargetError, match="lacks enorm.weight, self_attn.q_norm.weight of its MTP layer.*native=false"):
        load_native(drafter_for(target)[0].layer, target)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("mlp.experts.0.up_proj.weight", (48, 32), "a mixture of experts"),
        ("mlp.gate.weight", (4, 32), "a mixture of experts"),
        ("self_attn.kv_a_proj_with_mqa.weight", (8, 32), "multi-head latent attention"),
        ("linear_attn.in_proj.weight", (8, 32), "linear attention"),
        ("self_attn.q_proj.weight", (64, 32), "gated attention"),
        ("self_attn.q_proj.weight", (16, 32), r"q_proj.weight of its MTP layer is \(16, 32\), .* would be \(32, 32\)"),
        ("self_attn.o_proj.bias", (32,), "has self_attn.o_proj.bias, for which this code has no place"),
    ],
)
def test_a_layer_of_another_kind_is_refused_by_name(folder, name, size, message):
    target = add_tensors(folder, mtp_tensors(folder) | {DEEPSEEK + name: torch.ones(size)})
    with pytest.raises(TargetError, match=message):
        load_native(drafter_for(target)[0].layer, target)


def test_a_target_whose_layers_compute_otherwise_is_refused(folder, plain, tiny_folder, tmp_path):
    target = add_tensors(folder, mtp_tensors(folder))
    drafter, _ = drafter_for(target)
    target.backbone.layers[-1].self_attn.scaling *= 2  # as an architecture with another attention would have it
    with pytest.raises(TargetError, match="its decoder layers compute otherwise than this code's MTP layer, by 0"):
        load_native(drafter.layer, target)
    glm = Path(shutil.copytree(plain / "glm4", tmp_path / "glm4"))
    extra = {n: t for n, t in mtp_tensors(glm).items() if "post_self_attn" not in n and "post_mlp" not in n}
    gate_up = extra.pop(f"{DEEPSEEK}mlp.gate_up_proj.weight")
    extra |= {f"{DEEPSEEK}mlp.{name}_proj.weight": half for name, half in zip(("gate", "up"), gate_up.chunk(2))}
    target = add_tensors(glm, extra)
    with pytest.raises(TargetError, match=r"Glm4ForCausalLM\): its decoder layers are of another kind.*gate_proj"):
        load_native(drafter_for(target)[0].layer, target)


def test_scaled_rotary_positions_are_refused(tiny_folder, tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    save_target(tmp_path / "target", tiny_folder, "qwen3", rope_parameters=rope)
    target = add_tensors(tmp_path / "target", mtp_tensors(tmp_path / "target"))
    with pytest.raises(TargetError, match="its rope_type is linear"):
        load_native(drafter_for(target)[0].layer, target)
