"""A folder as an engine sees it, which parameters a config.json makes it build, and how the tensors meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Config = Mapping[str, Any]
WIDE = "it drafts over the whole vocabulary, with the target's own output head"
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Folder:
    """A drafter's folder as an engine sees it: config.json and the shapes of every tensor of its *.safetensors.

    strays: files among them, which engines that read all of them would take tensors from. sglang: config.sglang.json.
    """

    path: Path
    config: Mapping[str, Any]
    shapes: Shapes
    strays: tuple[str, ...] = ()
    sglang: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Served:
    """The target a drafter is for. name: what a serve command calls it; taps: `hidden_states` indices the drafter was
    trained on; steps: tokens to draft in a row; own_embedding: the drafter's differs from the target's."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    taps: tuple[int, ...]
    steps: int
    own_embedding: bool = False


# What stands against an engine's loading it, what stands beside that, and the command.
Ruling = tuple[list[str], list[str], str | None]
Rule = Callable[[Folder, Served], Ruling]


def layer_parameters(config: Config, at: str, width: int, *, qkv_bias: bool = False, o_bias: bool = False) -> Shapes:
    """A Llama layer's projections and its norm after attention; attention reads `width` channels."""
    size, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim") or size // heads
    rows = {"q": heads * dim, "k": config["num_key_value_heads"] * dim, "v": config["num_key_value_heads"] * dim}
    shapes: Shapes = {f"{at}self_attn.{part}_proj.weight": (count, width) for part, count in rows.items()}
    if qkv_bias:
        shapes |= {f"{at}self_attn.{part}_proj.bias": (count,) for part, count in rows.items()}
    shapes[f"{at}self_attn.o_proj.weight"] = (size, heads * dim)
    if o_bias:
        shapes[f"{at}self_attn.o_proj.bias"] = (size,)
    inner = config["intermediate_size"]
    shapes |= {f"{at}mlp.{part}_proj.weight": (inner, size) for part in ("gate", "up")}
    return shapes | {f"{at}mlp.down_proj.weight": (size, inner), f"{at}post_attention_layernorm.weight": (size,)}


def eagle3_parameters(
    config: Config, count: int, *, qkv_bias: bool, o_bias: bool, fc_bias: bool = False, qk_norm: bool = False
) -> Shapes:
    """An EAGLE-3 drafter of `count` tapped states, its one layer called layers.0; without d2t."""
    size, wide = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    shapes = layer_parameters(config, "layers.0.", 2 * size, qkv_bias=qkv_bias, o_bias=o_bias)
    shapes |= {f"layers.0.{norm}.weight": (size,) for norm in ("hidden_norm", "input_layernorm")}
    if qk_norm:
        shapes |= {f"layers.0.self_attn.{part}_norm.weight": (config["head_dim"],) for part in "qk"}
    shapes |= {"fc.weight": (size, wide * count), "norm.weight": (size,)}
    if fc_bias:
        shapes["fc.bias"] = (size,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{place}.weight": (wide,) for place in range(count)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (wide * count,)
    shapes["embed_tokens.weight"] = (config["vocab_size"], size)
    rows = config.get("draft_vocab_size") or config["vocab_size"]
    return shapes | {"lm_head.weight": (rows, size)}


def eagle_parameters(config: Config, *, fc_bias: bool, attention_bias: bool) -> Shapes:
    """An EAGLE-1 drafter, which has no norm before its one layer."""
    size = config["hidden_size"]
    shapes = layer_parameters(config, "layers.0.", size, qkv_bias=attention_bias, o_bias=attention_bias)
    shapes |= {"fc.weight": (size, 2 * size), "embed_tokens.weight": (config["vocab_size"], size)}
    return shapes | ({"fc.bias": (size,)} if fc_bias else {})


def llama_parameters(config: Config) -> Shapes:
    """A whole LlamaForCausalLM."""
    size = config["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (config["vocab_size"], size), "model.norm.weight": (size,)}
    for place in range(config["num_hidden_layers"]):
        at = f"model.layers.{place}."
        bias = bool(config.get("attention_bias"))
        shapes |= layer_parameters(config, at, size, qkv_bias=bias, o_bias=bias)
        shapes[f"{at}input_layernorm.weight"] = (size,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], size)
    return shapes


def medusa_parameters(layers: int, heads: int, size: int, rows: int | None) -> Shapes:
    """Medusa heads by the names of its own files; rows: of each head's output head, None: they read the target's."""
    shapes: Shapes = {}
    for head in range(heads):
        for place in range(layers):
            shapes |= {f"{head}.{place}.linear.weight": (size, size), f"{head}.{place}.linear.bias": (size,)}
        if rows is not None:
            shapes[f"{head}.{layers}.weight"] = (rows, size)
    return shapes


def misfits(
    found: Shapes, expected: Shapes, engine: str, *, borrowed: Iterable[str] = (), drops: bool, drops_bias: bool = False
) -> list[str]:
    """In words, where a file's tensors, by the engine's names, are not what it builds.

    borrowed: what it takes from the target if the file has it not. drops: it passes silently over tensors it does not
    know, where others refuse the file; drops_bias: over unknown biases alone.
    """
    problems = []
    for name in sorted(set(found) | set(expected)):
        if name not in expected:
            silent = drops or (drops_bias and name.endswith(".bias"))
            fate = "silently drops tensor" if silent else "refuses the file for tensor"
            problems.append(f"{engine} {fate} {name}, which its graph has no place for")
        elif name not in found:
            if name not in borrowed:
                problems.append(f"tensor {name} is missing, and {engine} leaves it at random values")
        elif found[name] != expected[name]:
            problems.append(f"tensor {name} is {list(found[name])}, {engine} builds {list(expected[name])}")
    return problems


def stray_problem(folder: Folder, engine: str) -> list[str]:
    fate = "refuses their tensors" if engine == "vLLM" else "passes over those it does not know"
    return [f"{engine} reads every *.safetensors without an index: {', '.join(folder.strays)}; it {fate}"] * bool(
        folder.strays
    )


def default_taps(served: Served) -> tuple[int, ...]:
    count = served.num_layers
    return (2, count // 2, count - 3)


def tap_problem(engine: str, taken: tuple[int, ...], served: Served) -> list[str]:
    return [f"{engine} would tap hidden_states {list(taken)}, trained were {list(served.taps)}"] * (
        taken != served.taps
    )


def size_problems(config: Mapping[str, Any], served: Served) -> list[str]:
    """What holds for an EAGLE-3 config in every engine."""
    wide = config.get("target_hidden_size", config["hidden_size"])
    problems = [f"target_hidden_size is {wide}, the target's {served.hidden_size}"] * (wide != served.hidden_size)
    if config["vocab_size"] != served.vocab_size:
        problems.append(f"vocab_size is {config['vocab_size']}, the target's {served.vocab_size}")
    if config["num_hidden_layers"] != 1:
        problems.append(f"num_hidden_layers is {config['num_hidden_layers']}, the file has one layer")
    return problems


def model_problems(folder: Folder, served: Served, engine: str, drops: bool) -> list[str]:
    config = folder.config
    if config["architectures"] != ["LlamaForCausalLM"]:
        return [f"architectures is {config['architectures']}, the tensors are a LlamaForCausalLM's"]
    if config["vocab_size"] != served.vocab_size:
        return [f"vocab_size is {config['vocab_size']}, the target's {served.vocab_size}: they must be equal"]
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else ()
    return misfits(folder.shapes, llama_parameters(config), engine, borrowed=tied, drops=drops)
