"""Drafters as others write them, made here, and what they compute by plain functions over the files' own tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from drafters.public.conventions import samples
from drafters.target import Target

EPS = 1e-5
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": EPS, "vocab_size": 512, "rope_theta": 1000.0,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
IDS = torch.arange(3, 27).view(1, -1) * 7 % 512


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, folder / name)
    return folder


def drawn(sizes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors: vectors near 1, matrices of a scale at which every part shows in the result."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    return {
        name: each / each.shape[1] ** 0.5 if each.dim() == 2 else 0.3 * each + (not name.endswith("bias"))
        for name, each in noise.items()
    }


def layer_sizes(config: dict[str, Any], width: int, bias: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama layer whose attention reads `width` numbers."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    sizes = {
        "self_attn.q_proj.weight": (queries, width), "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width), "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,), "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden), "mlp.down_proj.weight": (hidden, inner),
    }  # fmt: skip
    if bias:
        for part, rows in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
            sizes[f"self_attn.{part}_proj.bias"] = (rows,)
    return sizes


def eagle3(draft_ids: int | None = 128, embed: bool = False, head: bool = True, **config: Any) -> tuple[dict, dict]:
    """config.json and tensors of an EAGLE-3 drafter in the official names, whose flags the config's own fields set."""
    config = SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | config
    hidden, target = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    layer = layer_sizes(config, 2 * hidden, config.get("attention_bias", False))
    sizes = {f"midlayer.{name}": size for name, size in layer.items()}
    sizes |= {"fc.weight": (hidden, 3 * target), "norm.weight": (hidden,)}
    sizes |= {f"midlayer.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    sizes |= {"fc.bias": (hidden,)} if config.get("bias") else {}
    sizes |= {"input_norm.weight": (3 * target,)} if config.get("norm_before_fc") else {}
    sizes |= {f"fc_norm.{i}.weight": (target,) for i in range(3)} if config.get("fc_norm") else {}
    if config.pop("qk_norm", False):
        head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
        sizes |= {f"midlayer.self_attn.{part}_norm.weight": (head_dim,) for part in "qk"}
    sizes |= {"embed_tokens.weight": (512, hidden)} if embed else {}
    sizes |= {"lm_head.weight": (draft_ids or 512, hidden)} if head else {}
    tensors = drawn(sizes)
    if draft_ids is not None:
        config["draft_vocab_size"] = draft_ids
        tensors |= vocab(torch.randperm(512, generator=torch.Generator().manual_seed(4))[:draft_ids].sort().values)
    return config, tensors


def vocab(kept: Tensor) -> dict[str, Tensor]:
    t2d = torch.zeros(512, dtype=torch.bool)
    t2d[kept] = True
    return {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}


# ---- what the files' tensors compute


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def rotated(x: Tensor, theta: float, scale: float = 1.0) -> Tensor:
    """Rotary positions 0.. of x [heads, T, d]; scale: of linear scaling."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] / scale * theta ** (-torch.arange(0, size, 2) / size)
    turned = torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)
    return x * torch.cat((angles, angles), -1).cos() + turned * torch.cat((angles, angles), -1).sin()


def attended(t: dict[str, Tensor], c: dict[str, Any], x: Tensor) -> Tensor:
    """Causal attention over x [T, width], its output projection included; biases and norms where t has them."""

    def heads(part: str, count: int) -> Tensor:
        rows = functional.linear(x, t[f"self_attn.{part}_proj.weight"], t.get(f"self_attn.{part}_proj.bias"))
        split = rows.view(len(x), count, -1).transpose(0, 1)
        return rms(split, t[f"self_attn.{part}_norm.weight"]) if f"self_attn.{part}_norm.weight" in t else split

    groups = c["num_key_value_heads"]
    scaling = c.get("rope_scaling") or {}
    q, k = (rotated(heads(part, count), c["rope_theta"], scaling.get("factor", 1.0))
            for part, count in (("q", c["num_attention_heads"]), ("k", groups)))  # fmt: skip
    k, v = (each.repeat_interleave(len(q) // groups, 0) for each in (k, heads("v", groups)))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -1e30)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    return functional.linear(mixed, t["self_attn.o_proj.weight"], t.get("self_attn.o_proj.bias"))


def decoded(t: dict[str, Tensor], c: dict[str, Any], x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's output of attention inputs x and residual stream [T, H], and the inner activations of its MLP."""
    stream = residual + attended(t, c, x)
    normed = rms(stream, t["post_attention_layernorm.weight"])
    inner = functional.silu(normed @ t["mlp.gate_proj.weight"].T) * (normed @ t["mlp.up_proj.weight"].T)
    return stream + inner @ t["mlp.down_proj.weight"].T, inner


def under(t: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in t.items() if name.startswith(prefix)}


def eagle3_out(
    t: dict[str, Tensor], c: dict[str, Any], embed: Tensor, ids: Tensor, taps: Tensor
) -> tuple[Tensor, Tensor]:
    """The layer's output [T - 1, H] of an EAGLE-3 drafter on ids [T] and taps [T - 1, 3*Ht], and its MLP's inside."""
    states = rms(taps, t["input_norm.weight"]) if c.get("norm_before_fc") else taps
    if c.get("fc_norm"):
        states = torch.cat([rms(part, t[f"fc_norm.{i}.weight"]) for i, part in enumerate(states.chunk(3, -1))], -1)
    hidden = functional.linear(states, t["fc.weight"], t["fc.bias"] if c.get("bias") else None)
    layer = under(t, "midlayer.")
    if not c.get("attention_bias"):
        layer = {name: tensor for name, tensor in layer.items() if not name.endswith("bias")}
    normed = rms(hidden, layer["hidden_norm.weight"])
    x = torch.cat((rms(embed[ids[1:]], layer["input_layernorm.weight"]), normed), -1)
    return decoded(layer, c, x, normed if c.get("norm_before_residual") else hidden)


def eagle3_logits(
    t: dict[str, Tensor], c: dict[str, Any], target: Target, ids: Tensor, taps: Tensor, kept: Tensor | None = None
) -> Tensor:
    """First-draft logits [T - 1, Vd] of an EAGLE-3 folder; kept: the ids whose rows of the target's head it borrows."""
    out, _ = eagle3_out(t, c, t.get("embed_tokens.weight", target.embed_weight), ids[0], taps[0])
    head = t["lm_head.weight"] if "lm_head.weight" in t else target.head_weight[kept]
    return rms(out, t["norm.weight"]) @ head.T


def states(target: Target, taps: tuple[int, ...], ids: Tensor = IDS) -> Tensor:
    """The target's hidden states [1, T - 1, S*Ht] of all but the last position."""
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return target.hidden(ids, positions, mask, taps)[0][:, :-1]


def fitted(
    t: dict[str, Tensor], c: dict[str, Any], target: Target, taps: tuple[int, ...], head: Tensor, size: float = 1.0
) -> dict[str, Tensor]:
    """EAGLE-3 tensors whose down projection is solved so that, fed these hidden states, the drafter says what the
    target does on the texts that readings are measured on; head: the output head [V, H] it is read by.

    What enters the layer is brought to a size and MLP and attention are made steep first, so that other states or
    embeddings give other tokens.
    """
    scales = {f"midlayer.{part}.weight": 4.0 for part in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj")}
    entering = torch.cat([text.of(taps, target.hidden_size)[0] for text in samples(target, taps)]) @ t["fc.weight"].T
    scales["fc.weight"] = size / float(entering.std())
    t = t | {name: scale * t[name] for name, scale in scales.items()}
    insides, wanted = [], []
    with torch.no_grad():
        for text in samples(target, taps):
            out, inside = eagle3_out(
                t | {"midlayer.mlp.down_proj.weight": torch.zeros_like(t["midlayer.mlp.down_proj.weight"])},
                c, t.get("embed_tokens.weight", target.embed_weight), text.ids[0], text.of(taps, target.hidden_size)[0],
            )  # fmt: skip
            rows = head[text.law.argmax(-1)]
            insides.append(inside[text.start - 2 :])
            wanted.append(100 * rows / rows.norm(dim=-1, keepdim=True) - out[text.start - 2 :])
        inside, target_out = torch.cat(insides).double(), torch.cat(wanted).double()
        down = torch.linalg.lstsq(inside, target_out).solution.T.float()
    return t | {"midlayer.mlp.down_proj.weight": down, "norm.weight": torch.ones_like(t["norm.weight"])}
