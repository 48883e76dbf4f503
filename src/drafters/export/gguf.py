"""An EAGLE-3 drafter and its target as GGUF, as llama.cpp reads them (llama.cpp: src/models/eagle3.cpp)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from drafters.errors import ConfigError
from drafters.export.gguf_vocab import add_vocab, vocab_problem
from drafters.export.source import Source
from drafters.target import Target

if TYPE_CHECKING:
    from gguf import GGUFWriter

DRAFTER_NAME = "drafter.gguf"
TARGET_NAME = "target.gguf"
ARCHITECTURE = "eagle3"
NUM_TAPS = 3
# The drafter's names and llama.cpp's; d2t, which holds the target's ids themselves there, is written apart.
TENSORS = {
    "embed_tokens.weight": "token_embd.weight",
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
# Flags of a graph that llama.cpp's eagle3 does not have; one that it has not heard of computes another graph.
FOREIGN = {
    "fc_norm": "it norms each tapped state on its own (drafter.fc_norm=true), where llama.cpp knows one norm over all",
    "norm_output": "it feeds back its normed output (drafter.norm_output=true), where llama.cpp feeds back the other",
    "fc_bias": "its fc has a bias, where llama.cpp has none",
    "attention_bias": "its attention has biases, where llama.cpp has none",
    "qk_norm": "its queries and keys pass a norm, where llama.cpp has none",
    "rope_scaling": "its rotary positions are scaled, which is not written",
}


def gguf_problem(source: Source) -> str | None:
    """What llama.cpp's eagle3, or the file of this target, has no place for."""
    graph = source.graph
    for flag, words in FOREIGN.items():
        if graph.get(flag):
            return words
    if graph["num_taps"] != NUM_TAPS:
        return f"it taps {graph['num_taps']} states, where llama.cpp reads {NUM_TAPS}"
    if source.target.num_layers in source.contract.tap_indices:
        return "it taps the state after the final norm, where llama.cpp reads what goes into a layer"
    return target_problem(source.target)


def target_problem(target: Target) -> str | None:
    """Why a target cannot be written as GGUF here, or None."""
    config = target.text_config
    if type(target.model).__name__ != "LlamaForCausalLM":
        return f"its target is a {type(target.model).__name__}; only a LlamaForCausalLM is written as GGUF"
    if config.attention_bias or config.mlp_bias:
        return "its target's layers have biases (attention_bias, mlp_bias), which are not written"
    if config.rope_parameters["rope_type"] != "default":
        return f"its target's rotary positions are scaled ({config.rope_parameters['rope_type']}), which is not written"
    if target.dtype not in (torch.float32, torch.bfloat16):
        return f"target.dtype is {target.dtype}; float32 and bfloat16 are written"
    return vocab_problem(target.tokenizer, target.vocab_size)


def write_gguf(source: Source, folder: Path) -> None:
    """Write drafter.gguf and target.gguf, both in the target's dtype: float32, or bfloat16 with norms in float32.

    For sources in which gguf_problem finds nothing.
    """
    write_drafter(source, folder / DRAFTER_NAME)
    write_target(source.target, folder / TARGET_NAME)


def write_drafter(source: Source, path: Path) -> None:
    """Write the drafter alone; the embedding, where it has none of its own, llama.cpp takes from the target."""
    graph, target = source.graph, source.target
    writer = _writer(path, ARCHITECTURE, target)
    _add_layer_sizes(
        writer,
        block_count=1,
        context_length=graph["max_position_embeddings"],
        embedding_length=graph["hidden_size"],
        feed_forward_length=graph["intermediate_size"],
        head_count=graph["num_heads"],
        head_count_kv=graph["num_kv_heads"],
        head_dim=graph["head_dim"],
        rms_eps=graph["rms_norm_eps"],
        rope_theta=source.contract.rope["rope_theta"],
        vocab_size=graph["vocab_size"],
    )
    # A target layer stands for what goes into it, which is how hidden_states counts.
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(source.contract.tap_indices))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", graph["target_hidden_size"])
    for flag in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"{ARCHITECTURE}.{flag}", graph.get(flag, False))
    heads = {"q_proj": graph["num_heads"], "k_proj": graph["num_kv_heads"]}
    head = {} if graph.get("own_head", True) else {"lm_head.weight": source.draft_head}
    for name, tensor in (source.weights | head).items():
        part = name.split(".")[-2]
        _add(writer, TENSORS[name], interleaved(tensor, heads[part]) if part in heads else tensor, target.dtype)
    if source.reduced:
        ids = source.tensors["t2d"].nonzero().flatten()
        writer.add_tensor("d2t", ids.numpy())
    _save(writer)


def write_target(target: Target, path: Path) -> None:
    """Write the target's own files as one GGUF in the dtype it is loaded in; ConfigError on a tensor it has no place
    for. For targets in which target_problem finds nothing."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    config = target.text_config
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = _writer(path, "llama", target)
    _add_layer_sizes(
        writer,
        block_count=config.num_hidden_layers,
        context_length=config.max_position_embeddings,
        embedding_length=config.hidden_size,
        feed_forward_length=config.intermediate_size,
        head_count=config.num_attention_heads,
        head_count_kv=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        vocab_size=config.vocab_size,
    )
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in _stored(target.folder):
        there = names.get_name(name, try_suffixes=(".weight",))
        if there is None:
            raise ConfigError(
                f"export.dialect=gguf: target {target.name!r} has a tensor {name}, for which llama.cpp's llama has no "
                "place. Leave gguf out of export.dialect."
            )
        part = name.split(".")[-2]
        _add(writer, there, interleaved(tensor, heads[part]) if part in heads else tensor, target.dtype)
    _save(writer)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection [heads*d, X] reordered per head from (first half, second half) to pairs of the two.

    llama.cpp turns neighbouring channels by one angle, transformers' Llama channels half a head apart.
    """
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors as the target's files have them: an engine may have laid out the loaded ones anew."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def _writer(path: Path, architecture: str, target: Target) -> GGUFWriter:
    from gguf import GGUFWriter, LlamaFileType

    writer = GGUFWriter(path, architecture, use_temp_file=True)
    writer.add_name(target.name)
    exact = target.dtype == torch.float32
    writer.add_file_type(LlamaFileType.ALL_F32 if exact else LlamaFileType.MOSTLY_BF16)
    add_vocab(writer, target.tokenizer, target.vocab_size)
    return writer


def _add_layer_sizes(writer: GGUFWriter, **sizes: Any) -> None:
    writer.add_block_count(sizes["block_count"])
    writer.add_context_length(sizes["context_length"])
    writer.add_embedding_length(sizes["embedding_length"])
    writer.add_feed_forward_length(sizes["feed_forward_length"])
    writer.add_head_count(sizes["head_count"])
    writer.add_head_count_kv(sizes["head_count_kv"])
    writer.add_key_length(sizes["head_dim"])
    writer.add_value_length(sizes["head_dim"])
    writer.add_rope_dimension_count(sizes["head_dim"])
    writer.add_layer_norm_rms_eps(sizes["rms_eps"])
    writer.add_rope_freq_base(sizes["rope_theta"])
    writer.add_vocab_size(sizes["vocab_size"])


def _add(writer: GGUFWriter, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Add one weight; llama.cpp takes vectors in float32 alone."""
    from gguf import GGMLQuantizationType

    if dtype == torch.float32 or tensor.dim() == 1:
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    else:
        data = tensor.to(torch.bfloat16).contiguous().view(torch.uint8)
        writer.add_tensor(name, data.numpy(), raw_dtype=GGMLQuantizationType.BF16)


def _save(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
