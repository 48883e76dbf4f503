"""A gguf dialect's two files as llama.cpp reads them, and what they must hold for one drafter."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.errors import ArtifactError
from drafters.export.expected import Native, Tensors

DRAFTER, TARGET = "drafter.gguf", "target.gguf"
ARCHITECTURE = "eagle3"
_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTSIDE = {"embed_tokens": "token_embd", "fc": "fc", "input_norm": "enc.output_norm", "norm": "output_norm"}
_OUTSIDE |= {"lm_head": "output"}
NAMES = {f"midlayer.{name}.weight": f"blk.0.{there}.weight" for name, there in _LAYER.items()}
NAMES |= {f"{name}.weight": f"{there}.weight" for name, there in _OUTSIDE.items()}
# The layer of a target has no second input, hence no hidden_norm.
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def read_gguf(path: Path) -> tuple[dict[str, Any], Tensors]:
    """Fields and tensors of a GGUF file; ArtifactError where it is none, or holds a kind of number not written here."""
    from gguf import GGMLQuantizationType, GGUFReader

    if not path.is_file():
        raise ArtifactError(f"{path} is missing. Copy the folder again, or export it again.")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ArtifactError(
            f"{path} is not a GGUF file ({error}). Copy the folder again, or export it again."
        ) from error
    tensors = {}
    for each in reader.tensors:
        data = torch.from_numpy(each.data.copy())
        if each.tensor_type == GGMLQuantizationType.BF16:
            data = data.view(torch.bfloat16)
        tensors[each.name] = data.view(*reversed([int(size) for size in each.shape]))
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, tensors


def _paired(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp turns rows 2i and 2i+1 of a head together, transformers rows i and i + half."""
    first, second = weight.unflatten(0, (heads, 2, -1)).unbind(1)
    return torch.stack((first, second), 2).flatten(0, 2)


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def expected_drafter(native: Native) -> Tensors:
    """The tensors of drafter.gguf, d2t as the target's ids where there is one."""
    graph, kind = native.graph, native.target.dtype
    heads = {"q_proj": graph["num_heads"], "k_proj": graph["num_kv_heads"]}
    found: Tensors = {"d2t": native.kept_ids} if native.reduced else {}
    for name, tensor in ({"lm_head.weight": native.head[native.kept_ids]} | native.weights).items():
        part = name.split(".")[-2]
        tensor = _paired(tensor, heads[part]) if part in heads else tensor
        found[NAMES[name]] = tensor.to(torch.float32 if tensor.dim() == 1 else kind)
    return found


def expected_target(native: Native) -> Tensors:
    """The tensors of target.gguf, in the target's dtype, vectors in float32."""
    target, config = native.target, native.target.text_config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in target.model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        stem, part = name.removesuffix(".weight"), name.split(".")[-2]
        if stem in MODEL_NAMES:
            there = MODEL_NAMES[stem]
        else:
            place, inside = stem.removeprefix("model.layers.").split(".", 1)
            there = f"blk.{place}.{_LAYER[inside]}"
        tensor = _paired(tensor, heads[part]) if part in heads else tensor
        found[f"{there}.weight"] = tensor.detach().cpu().to(torch.float32 if tensor.dim() == 1 else target.dtype)
    return found


def expected_fields(native: Native) -> dict[str, Any]:
    """The fields of drafter.gguf, all but the tokenizer's."""
    graph, exact = native.graph, native.target.dtype == torch.float32
    sizes = {
        "block_count": 1,
        "context_length": graph["max_position_embeddings"],
        "embedding_length": graph["hidden_size"],
        "feed_forward_length": graph["intermediate_size"],
        "attention.head_count": graph["num_heads"],
        "attention.head_count_kv": graph["num_kv_heads"],
        "attention.key_length": graph["head_dim"],
        "attention.value_length": graph["head_dim"],
        "attention.layer_norm_rms_epsilon": _single(graph["rms_norm_eps"]),
        "rope.dimension_count": graph["head_dim"],
        "rope.freq_base": _single(native.contract.rope["rope_theta"]),
        "vocab_size": graph["vocab_size"],
        "target_layers": list(native.contract.tap_indices),
        "target_hidden_size": native.target.hidden_size,
        "norm_before_residual": graph.get("norm_before_residual", False),
        "norm_before_fc": graph.get("norm_before_fc", False),
    }
    general = {"general.architecture": ARCHITECTURE, "general.file_type": 0 if exact else 32}
    return general | {f"{ARCHITECTURE}.{name}": value for name, value in sizes.items()}


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def as_official(fields: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A drafter.gguf as an official config and tensors, from what the file itself says."""
    own = {name.removeprefix(f"{ARCHITECTURE}."): value for name, value in fields.items()}
    config = {
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["attention.key_length"],
        "rms_norm_eps": own["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": own["context_length"],
        "rope_parameters": {"rope_type": "default", "rope_theta": own["rope.freq_base"]},
        "eagle_aux_hidden_state_layer_ids": own["target_layers"],
        "norm_before_residual": own["norm_before_residual"],
        "norm_before_fc": own["norm_before_fc"],
    }
    names = {there: name for name, there in NAMES.items()}
    found = {names[name]: tensor for name, tensor in tensors.items() if name != "d2t"}
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        name = f"midlayer.self_attn.{part}.weight"
        found[name] = _unpaired(found[name], config[heads])
    if "d2t" in tensors:  # the target's ids themselves, where the official format has their distance
        found["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return config, found


def gguf_command(folder: Path, steps: int) -> str:
    """How llama.cpp's server drafts with the two files."""
    files = f"-m {shlex.quote(str(folder / TARGET))} -md {shlex.quote(str(folder / DRAFTER))}"
    return f"llama-server {files} --spec-type draft-eagle3 --spec-draft-n-max {steps}"
