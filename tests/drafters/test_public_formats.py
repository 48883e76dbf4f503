"""EAGLE-1, Medusa, MTP and small-model folders as others write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from drafters.config import TargetConfig
from drafters.errors import ArtifactError, ConfigError, ContractError
from drafters.public.folder import open_folder
from drafters.public.load import assemble, is_public, read_public
from drafters.public.recognise import recognise
from drafters.target import Target
from tests.drafters.public_setup import (
    IDS,
    SIZES,
    decoded,
    drawn,
    eagle3,
    eagle3_logits,
    layer_sizes,
    rms,
    states,
    under,
    vocab,
    write,
)

LAST = (8,)


def logits(folder: Path, target: Target, reading: int = 0) -> Tensor:
    public = read_public(folder, target)
    drafter = assemble(public, public.readings[reading], target)
    positions = torch.arange(IDS.shape[1] - 1)[None]
    with torch.no_grad():
        return drafter.first_logits(IDS, states(target, public.readings[reading].taps), positions)[0]


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


# ---- EAGLE-1


def eagle(fc_bias: bool = False, head: bool = False, embed: bool = True, **config: object) -> tuple[dict, dict]:
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | config
    sizes = {f"layers.0.{k}": v for k, v in layer_sizes(config, 64, config.get("attention_bias", False)).items()}
    sizes |= {"fc.weight": (64, 128)} | ({"fc.bias": (64,)} if fc_bias else {})
    sizes |= ({"embed_tokens.weight": (512, 64)} if embed else {}) | ({"lm_head.weight": (512, 64)} if head else {})
    return config, drawn(sizes)


def eagle_logits(t: dict[str, Tensor], c: dict, target: Target) -> Tensor:
    embed = t.get("embed_tokens.weight", target.embed_weight)[IDS[0, 1:]]
    x = functional.linear(torch.cat((embed, states(target, LAST)[0]), -1), t["fc.weight"], t.get("fc.bias"))
    return decoded(under(t, "layers.0."), c, x, x)[0] @ t.get("lm_head.weight", target.head_weight).T


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"fc_bias": True}, "fc.bias"),
        ({"attention_bias": True}, "layers.0.self_attn.q_proj.bias"),
        ({"head": True}, "lm_head.weight"),
        ({"embed": True}, "embed_tokens.weight"),
    ],
)
def test_each_part_of_an_eagle_drafter_counts(tiny_target, tmp_path, flags, part):
    config, tensors = eagle(**({"embed": False} | flags))
    expected = eagle_logits(tensors, config, tiny_target)
    assert far(logits(write(tmp_path / "a", config, tensors), tiny_target), expected) < 1e-4
    without = {name: tensor for name, tensor in tensors.items() if name != part}
    assert far(eagle_logits(without, config, tiny_target), expected) > 0.1


def test_sglangs_zero_bias_and_copies_of_the_target_are_dropped(tiny_target, tmp_path):
    config, tensors = eagle(fc_bias=True)
    tensors["fc.bias"].zero_()
    tensors |= {"embed_tokens.weight": tiny_target.embed_weight, "lm_head.weight": tiny_target.head_weight}
    config["architectures"] = ["LlamaForCausalLMEagle"]
    expected = eagle_logits(tensors, config, tiny_target)
    public = read_public(write(tmp_path / "a", config, tensors), tiny_target)
    shape = public.shape
    assert (public.family, shape.fc_bias, shape.own_embedding, shape.own_head) == ("eagle", False, False, False)
    assert far(logits(public.folder, tiny_target), expected) < 1e-4


def test_an_eagle_drafter_with_a_reduced_vocabulary(tiny_target, tmp_path):
    config, tensors = eagle()
    whole = eagle_logits(tensors, config, tiny_target)
    kept = torch.arange(5, 205)
    found = logits(write(tmp_path / "a", config, tensors | vocab(kept)), tiny_target)
    assert far(found, whole[:, kept]) < 1e-4


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"bias": True}, "bias is true, but tensor fc.bias is missing"),
        ({"hidden_size": 32}, "hidden_size is 32, target 'tiny-random' has hidden states of 64"),
    ],
)
def test_an_eagle_config_that_does_not_fit_is_named(tiny_target, tmp_path, change, wrong):
    config, tensors = eagle()
    with pytest.raises((ArtifactError, ContractError), match=wrong):
        read_public(write(tmp_path / "a", config | change, tensors), tiny_target)


def test_a_norm_that_eagle_has_not_is_named(tiny_target, tmp_path):
    config, tensors = eagle()
    folder = write(tmp_path / "a", config, tensors | {"layers.0.input_layernorm.weight": torch.ones(64)})
    with pytest.raises(ArtifactError, match="tensor layers.0.input_layernorm.weight is not part of the graph"):
        logits(folder, tiny_target)


def test_configs_of_early_drafters_with_fields_left_out(tiny_target, tmp_path):
    config, tensors = eagle(num_key_value_heads=4)
    expected = eagle_logits(tensors, config, tiny_target)
    left_out = ("num_key_value_heads", "max_position_embeddings")
    early = {key: value for key, value in config.items() if key not in left_out}
    folder = write(tmp_path / "a", early | {"max_sequence_length": 128, "model_type": "mixtral"}, tensors)
    assert read_public(folder, tiny_target).shape.max_position_embeddings == 128
    assert far(logits(folder, tiny_target), expected) < 1e-4
    del early["rope_theta"]
    assert read_public(write(tmp_path / "b", early, tensors), tiny_target).shape.rope_theta == 10000.0


COMMON = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.02, "torch_dtype": "float16",
          "transformers_version": "4.28.1", "use_cache": True}  # fmt: skip
QWEN = {"attention_bias": False, "attention_dropout": 0.0, "max_window_layers": 24, "rope_scaling": None,
        "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_sliding_window": False}  # fmt: skip
# What config.json of published recipes has beside the sizes, and what it leaves out.
EAGLE3_LAYOUTS = {
    "EAGLE, Llama-3 8B": ({"architectures": ["LlamaForCausalLM"]}, ("rope_theta",)),
    "SpecForge, Llama-3 8B": ({"max_position_embeddings": 2048}, ("rope_theta",)),
    "SpecForge, Qwen2.5 0.5B": ({**QWEN, "sliding_window": 131072, "max_position_embeddings": 32768}, ()),
    "SpecForge, Qwen3 8B": ({**QWEN, "sliding_window": None, "head_dim": 24, "max_position_embeddings": 40960}, ()),
}
EAGLE_LAYOUTS = {
    "Llama-2 7B": ({"pretraining_tp": 1, "rope_scaling": None}, ("rope_theta",)),
    "Mixtral": ({"model_type": "mixtral", "pretraining_tp": 1, "max_position_embeddings": 4096}, ("rope_theta",)),
    "Vicuna 7B": ({}, ("rope_theta", "num_key_value_heads")),
    "Vicuna 33B": ({"max_sequence_length": 2048}, ("rope_theta", "max_position_embeddings")),
}


@pytest.mark.parametrize("layout", [*EAGLE3_LAYOUTS, *EAGLE_LAYOUTS])
def test_config_files_of_published_recipes(tiny_target, tmp_path, layout):
    third = layout in EAGLE3_LAYOUTS
    said, left_out = (EAGLE3_LAYOUTS | EAGLE_LAYOUTS)[layout]
    heads = {"num_key_value_heads": 4} if "num_key_value_heads" in left_out else {}
    theta = {"rope_theta": 10000.0} if "rope_theta" in left_out else {}
    full, tensors = (eagle3 if third else eagle)(**(COMMON | said | heads | theta))
    config = {key: value for key, value in full.items() if key not in left_out}
    if third:
        expected = eagle3_logits(tensors, full, tiny_target, IDS, states(tiny_target, (2, 4, 5)))
    else:
        expected = eagle_logits(tensors, full, tiny_target)
    folder = write(tmp_path / "a", config, tensors)
    assert read_public(folder, tiny_target).family == ("eagle3" if third else "eagle")
    assert far(logits(folder, tiny_target), expected) < 1e-4


# ---- Medusa


def medusa(heads: int = 3, layers: int = 1, own: bool = True, rows: int = 512) -> dict[str, Tensor]:
    sizes = {}
    for head in range(heads):
        for layer in range(layers):
            sizes |= {f"{head}.{layer}.linear.weight": (64, 64), f"{head}.{layer}.linear.bias": (64,)}
        sizes |= {f"{head}.{layers}.weight": (rows, 64)} if own else {}
    return drawn(sizes)


def medusa_logits(t: dict[str, Tensor], target: Target, layers: int = 1, head: int = 0) -> Tensor:
    x = states(target, LAST)[0]
    for layer in range(layers):
        block = under(t, f"{head}.{layer}.linear.")
        x = x + functional.silu(functional.linear(x, block["weight"], block["bias"]))
    return x @ t.get(f"{head}.{layers}.weight", target.head_weight).T


def vllm(t: dict[str, Tensor], layers: int, prefix: str = "") -> dict[str, Tensor]:
    named = {}
    for name, tensor in t.items():
        head, rest = name.split(".", 1)
        layer = rest.split(".")[0]
        kind = rest.rsplit(".", 1)[1]
        own = f"blocks.{head}.layers.{layer}.{kind}" if "linear" in rest else f"lm_heads.{head}.weight"
        named[prefix + own] = tensor
    return named


def test_version_1_has_its_own_output_heads_and_version_2_has_not(tiny_target, tmp_path):
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
    tensors = medusa()
    first = write(tmp_path / "a", config, tensors, "medusa_lm_head.safetensors")
    assert far(logits(first, tiny_target), medusa_logits(tensors, tiny_target)) < 1e-4
    second = medusa(own=False)
    folder = write(tmp_path / "b", config | {"version": "2"}, second, "medusa_lm_head.safetensors")
    assert far(logits(folder, tiny_target), medusa_logits(second, tiny_target)) < 1e-4
    assert far(medusa_logits(second, tiny_target), medusa_logits(tensors, tiny_target)) > 0.1


def test_more_heads_than_config_says_are_all_taken_and_fewer_are_refused(tiny_target, tmp_path, caplog):
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1}
    public = read_public(write(tmp_path / "a", config, medusa(heads=5)), tiny_target)
    assert public.shape.num_heads == 5 and "medusa_num_heads is 2, all 5 heads" in caplog.text
    with pytest.raises(ArtifactError, match="medusa_num_heads is 6, by the tensors 5"):
        read_public(write(tmp_path / "b", config | {"medusa_num_heads": 6}, medusa(heads=5)), tiny_target)
    with pytest.raises(ArtifactError, match="medusa_num_layers is 2, by the tensors 1"):
        read_public(write(tmp_path / "c", config | {"medusa_num_layers": 2}, medusa(heads=5)), tiny_target)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [True, False])
def test_vllms_layout_with_two_blocks_a_head(tiny_target, tmp_path, prefix, bias):
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 3, "num_hidden_layers": 2}
    tensors = medusa(layers=2)
    if not bias:
        tensors = {name: tensor * (not name.endswith("bias")) for name, tensor in tensors.items()}
    named = vllm(tensors, 2, prefix)
    kept = {name: tensor for name, tensor in named.items() if bias or not name.endswith("bias")}
    folder = write(tmp_path / "a", config, kept)
    assert far(logits(folder, tiny_target), medusa_logits(tensors, tiny_target, 2)) < 1e-4
    public = read_public(folder, tiny_target)
    drafter, taps = assemble(public, public.readings[0], tiny_target), states(tiny_target, LAST)[0]
    assert far(drafter.logits(2, drafter.read(taps)), medusa_logits(tensors, tiny_target, 2, head=2)) < 1e-4


def test_vllms_token_map_and_shared_head(tiny_target, tmp_path):
    config = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, "truncated_vocab_size": 200}
    kept = torch.randperm(512, generator=torch.Generator().manual_seed(3))[:200]
    tensors = medusa(rows=200)
    folder = write(tmp_path / "a", config, vllm(tensors, 1) | {"token_map": kept})
    order = kept.argsort()
    assert far(logits(folder, tiny_target), medusa_logits(tensors, tiny_target)[:, order]) < 1e-4
    whole = medusa()
    folder = write(tmp_path / "b", config, vllm(whole, 1) | {"token_map": kept})
    assert far(logits(folder, tiny_target), medusa_logits(whole, tiny_target)[:, kept.sort().values]) < 1e-4
    blocks = medusa(own=False)
    config = config | {"original_lm_head": True, "truncated_vocab_size": 512}
    folder = write(tmp_path / "c", config, vllm(blocks, 1) | {"lm_head.weight": tiny_target.head_weight})
    assert not read_public(folder, tiny_target).shape.own_heads
    other = vllm(blocks, 1) | {"lm_head.weight": tensors["0.1.weight"].repeat(3, 1)[:512]}
    public = read_public(write(tmp_path / "d", config, other), tiny_target)
    assert public.shape.own_heads and far(logits(public.folder, tiny_target), medusa_logits(blocks, tiny_target)) > 0.1


def test_heads_merged_into_a_model_draft_for_that_model_alone(tiny_target, tiny_folder, tmp_path):
    heads = {f"medusa_head.{name}": tensor for name, tensor in medusa(own=False).items()}
    model = load_file(tiny_folder / "model.safetensors")
    model = model | {"model.norm.weight": 1.1 * model["model.norm.weight"]}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes((tiny_folder / name).read_bytes())
    config = open_folder(tiny_folder).config | {"medusa_num_heads": 3, "medusa_num_layers": 1}
    folder = write(tmp_path / "a", config, model | heads)
    with pytest.raises(ContractError, match="is a whole model with Medusa heads, which draft for it alone"):
        read_public(folder, tiny_target)
    merged = Target.load(TargetConfig(name="merged", path=str(folder), dtype="float32", device="cpu"))
    assert far(logits(folder, merged), medusa_logits(medusa(own=False), merged)) < 1e-4


# ---- MTP

DEEPSEEK = "model.layers.8."
NAMES = {
    "mtp.": {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
             "shared_head.norm": "norm"},
    "model.mtp_layers.0.": {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm",
                            "shared_head.norm": "final_layernorm"},
}  # fmt: skip
NAMES["mtp_layers.0."] = NAMES["model.mtp_layers.0."]


def mtp() -> tuple[dict, dict[str, Tensor]]:
    config = SIZES | {"architectures": ["LlamaForCausalLMNextN"], "rope_theta": 10000.0, "intermediate_size": 128}
    sizes = layer_sizes(config, 64) | {"eh_proj.weight": (64, 128), "input_layernorm.weight": (64,)}
    sizes |= {f"{name}.weight": (64,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return config, drawn(sizes)


def mtp_logits(t: dict[str, Tensor], c: dict, target: Target) -> Tensor:
    embed = t.get("embed_tokens.weight", target.embed_weight)[IDS[0, 1:]]
    normed = rms(embed, t["enorm.weight"]), rms(states(target, LAST)[0], t["hnorm.weight"])
    x = torch.cat(normed, -1) @ t["eh_proj.weight"].T
    out, _ = decoded(t, c, rms(x, t["input_layernorm.weight"]), x)
    return rms(out, t["shared_head.norm.weight"]) @ t.get("shared_head.head.weight", target.head_weight).T


def renamed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """DeepSeek's names, of which `tensors` has the last parts, as another family has them."""
    table = NAMES.get(prefix, {})
    found = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        inner = "layers.0." if prefix == "mtp." else ""
        found[prefix + (f"{table[part]}.weight" if part in table else inner + name)] = tensor
    return found


@pytest.mark.parametrize("prefix", [DEEPSEEK, *NAMES])
def test_an_mtp_layer_under_each_naming(tiny_target, tmp_path, prefix):
    config, tensors = mtp()
    expected = mtp_logits(tensors, config, tiny_target)
    swapped = tensors | {"eh_proj.weight": tensors["eh_proj.weight"].roll(64, 1)}
    named = renamed(swapped if prefix == "model.mtp_layers.0." else tensors, prefix)
    assert far(logits(write(tmp_path / "a", config, named), tiny_target), expected) < 1e-4
    assert far(mtp_logits(swapped, config, tiny_target), expected) > 0.1


def test_an_mtp_layers_own_embedding_and_head(tiny_target, tmp_path):
    config, tensors = mtp()
    plain = mtp_logits(tensors, config, tiny_target)
    shared = {"embed_tokens.weight": tiny_target.embed_weight, "shared_head.head.weight": tiny_target.head_weight}
    public = read_public(write(tmp_path / "a", config, renamed(tensors | shared, DEEPSEEK)), tiny_target)
    assert not public.shape.own_embedding and not public.shape.own_head
    for name in shared:
        own = tensors | {name: drawn({name: (512, 64)}, seed=9)[name]}
        expected = mtp_logits(own, config, tiny_target)
        found = logits(write(tmp_path / name, config, renamed(own, DEEPSEEK)), tiny_target)
        assert far(found, expected) < 1e-4 and far(plain, expected) > 0.1


def test_norms_stored_less_one_are_a_reading_of_qwens_names(tiny_target, tmp_path):
    config, tensors = mtp()
    expected = mtp_logits(tensors, config, tiny_target)
    less = {name: tensor - 1 if "norm" in name else tensor for name, tensor in tensors.items()}
    folder = write(tmp_path / "a", config, renamed(less, "mtp."))
    assert far(logits(folder, tiny_target, reading=1), expected) < 1e-4
    assert far(logits(folder, tiny_target, reading=0), expected) > 0.1


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"mlp.experts.0.up_proj.weight": (8, 64)}, "its layer has a mixture of experts"),
        ({"self_attn.kv_a_proj.weight": (8, 64)}, "its layer has multi-head latent attention"),
    ],
)
def test_another_kind_of_layer_is_named(tiny_target, tmp_path, change, wrong):
    config, tensors = mtp()
    folder = write(tmp_path / "a", config, renamed(tensors | drawn(change), DEEPSEEK))
    with pytest.raises(ArtifactError, match=wrong):
        read_public(folder, tiny_target)


def test_a_layer_of_another_targets_depth_or_rope_is_refused(tiny_target, tmp_path):
    config, tensors = mtp()
    with pytest.raises(ContractError, match="holds none of the names model.layers.8"):
        read_public(write(tmp_path / "a", config, renamed(tensors, "model.layers.61.")), tiny_target)
    with pytest.raises(ArtifactError, match="rope is 5.0 and the target's default, 10000.0"):
        read_public(write(tmp_path / "b", config | {"rope_theta": 5.0}, renamed(tensors, DEEPSEEK)), tiny_target)


# ---- small, and what is no drafter


def test_a_small_model_of_its_own_width(tiny_target, tmp_path):
    config = SIZES | {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
                      "tie_word_embeddings": True, "model_type": "llama"}  # fmt: skip
    sizes = {"model.embed_tokens.weight": (512, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in layer_sizes(config, 32).items()}
        sizes |= {f"model.layers.{layer}.input_layernorm.weight": (32,)}
    tensors = drawn(sizes)
    folder = write(tmp_path / "a", config, tensors)
    public = read_public(folder, tiny_target)
    drafter = assemble(public, public.readings[0], tiny_target)
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits[0, 1:]
        found = drafter.first_logits(IDS, torch.zeros(1, 23, 0), torch.arange(23)[None])[0]
    assert far(found, expected) < 1e-3
    untied = write(tmp_path / "b", config, tensors | drawn({"lm_head.weight": (512, 32)}, seed=5))
    with pytest.raises(ConfigError, match="lm_head.weight is not model.embed_tokens.weight.*drafter.path=small:"):
        read_public(untied, tiny_target)


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "it is a DFlashDraftModel drafter"),
        ({"speculators_model_type": "peagle"}, "it is a peagle drafter"),
        ({"hydra_num_heads": 4}, "it is a hydra drafter"),
        ({"speculators_model_type": "mtp"}, "it is a mtp drafter"),
    ],
)
def test_a_kind_that_is_not_read_is_named(tmp_path, config, wrong):
    folder = write(tmp_path / "a", config, eagle3()[1])
    with pytest.raises(ConfigError, match=f"{wrong}; those read here are eagle3, medusa, mtp, eagle, small"):
        recognise(open_folder(folder))


def test_tensors_of_no_drafter_are_listed(tmp_path):
    folder = write(tmp_path / "a", {}, drawn({"bert.encoder.weight": (2, 2)}))
    with pytest.raises(ConfigError, match=r"its tensors \(bert.encoder.weight, ..\) are of no drafter"):
        recognise(open_folder(folder))


def test_what_a_folder_lacks_is_said(tmp_path):
    config, tensors = eagle3()
    with pytest.raises(ArtifactError, match="has no config.json"):
        open_folder(tmp_path)
    folder = write(tmp_path / "a", config, tensors)
    write(folder, config, tensors, "more.safetensors")
    with pytest.raises(ArtifactError, match="holds model.safetensors, more.safetensors and no model.safetensors.index"):
        open_folder(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ArtifactError, match="gone.safetensors is missing"):
        open_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match="config.json is not JSON"):
        open_folder(folder)
    write(tmp_path / "b", config, {}, "draft_vocab.safetensors")
    (tmp_path / "b" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"pytorch_model.bin.*python -m drafters.public.convert"):
        open_folder(tmp_path / "b")


def test_an_export_of_ours_is_not_public_even_when_damaged(exported, tmp_path):
    assert not is_public(exported)
    folder = write(tmp_path / "a", *eagle3())
    assert is_public(folder)
    (folder / "contract.json").write_text("{}")
    assert not is_public(folder)


def test_a_bare_copy_of_an_exports_weights_reads_as_the_export(exported, tiny_target, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    public = read_public(tmp_path, tiny_target)
    from tests.drafters.export_setup import SHAPE

    assert (public.family, public.shape) == ("eagle3", replace(SHAPE))
    stored = load_file(exported / "model.safetensors")
    assert all(public.tensors[name].equal(stored[name]) for name in stored)
