"""A drafter's first logits by a second path: torch operations over a folder's own names and config.json alone.

Nothing of drafters.models is used here, so that a mistake there cannot repeat itself in the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.target import Target

Tensors = Mapping[str, Tensor]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """What the target itself computes on N texts of L tokens: ids [N, L], its hidden states, first to last, each
    [N, L, Ht] (the last after the final norm), its choices [N, L], its embedding and output head [V, Ht]."""

    ids: Tensor
    states: tuple[Tensor, ...]
    choices: Tensor
    embedding: Tensor
    head: Tensor

    @property
    def read(self) -> Tensor:
        """The tokens drafters read, one ahead of the state beside them, [N, L-1]."""
        return self.ids[:, 1:]

    def taps(self, indices: list[int]) -> list[Tensor]:
        """The states a drafter reads, by `hidden_states` index, each [N, L-1, Ht]."""
        return [self.states[index][:, :-1] for index in indices]


@torch.no_grad()
def run_target(target: Target, ids: Tensor) -> Run:
    """Run a target on ids [N, L] by its public outputs."""
    ids = ids.to(target.device)
    out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    embedding, head = (get().weight.detach() for get in (target.model.get_input_embeddings, _head(target)))
    return Run(ids, tuple(out.hidden_states), out.logits.argmax(-1), embedding, head)


def _head(target: Target) -> Callable[[], Any]:
    return target.model.get_output_embeddings


@torch.no_grad()
def first_logits(dialect: str, config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    """Logits fp32 [N, L-1, X] of the first draft after each position, and the target's id of every column, [X].

    Row t reads the states of tokens up to t and token t+1, and drafts token t+2. Raises KeyError on a tensor or a
    field that is not there, RuntimeError on shapes that do not fit each other.
    """
    kind = run.embedding.dtype
    weights = {
        name: t.to(run.embedding.device, kind if t.is_floating_point() else t.dtype) for name, t in tensors.items()
    }
    logits, columns = _GRAPHS[dialect](config, weights, run)
    return logits.float(), columns


# ---- layers


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _frequencies(config: Config, size: int) -> tuple[Tensor, float]:
    """Rotary frequencies [size / 2] and the factor of cosine and sine."""
    rope = config["rope_parameters"]
    if rope["rope_type"] == "default":
        return rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    sizes = {"head_dim": size, "max_position_embeddings": config["max_position_embeddings"]}
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](LlamaConfig(rope_parameters=dict(rope), **sizes), torch.device("cpu"))


def _rotate(x: Tensor, config: Config, shift: int) -> Tensor:
    """Rotate heads [N, n, T, d]; the first position is `shift`."""
    size = x.shape[-1]
    frequencies, factor = _frequencies(config, size)
    positions = torch.arange(shift, shift + x.shape[2], dtype=torch.float32)
    angles = (positions[:, None] * frequencies).repeat(1, 2).to(x.device)
    low, high = x[..., : size // 2], x[..., size // 2 :]
    turned = torch.cat((-high, low), dim=-1)
    return x * (angles.cos() * factor).to(x.dtype) + turned * (angles.sin() * factor).to(x.dtype)


def _project(x: Tensor, tensors: Tensors, name: str) -> Tensor:
    return functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _attend(x: Tensor, config: Config, tensors: Tensors, at: str) -> Tensor:
    """Causal grouped attention over x [N, T, ..] by the projections at `at`."""
    size, eps = config["head_dim"], config["rms_norm_eps"]
    counts = {
        "q": config["num_attention_heads"],
        "k": config["num_key_value_heads"],
        "v": config["num_key_value_heads"],
    }
    parts = {}
    for part, count in counts.items():
        heads = _project(x, tensors, f"{at}.{part}_proj").unflatten(-1, (count, size)).transpose(1, 2)
        norm = tensors.get(f"{at}.{part}_norm.weight")
        heads = heads if norm is None else _rms(heads, norm, eps)
        parts[part] = heads if part == "v" else _rotate(heads, config, 0)
    repeats = counts["q"] // counts["k"]
    keys, values = (parts[part].repeat_interleave(repeats, dim=1) for part in "kv")
    scores = (parts["q"] @ keys.transpose(-1, -2)).float() / size**0.5
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(values.dtype)
    return _project((weights @ values).transpose(1, 2).flatten(2), tensors, f"{at}.o_proj")


def _mlp(x: Tensor, tensors: Tensors, at: str) -> Tensor:
    gate = functional.silu(_project(x, tensors, f"{at}.gate_proj"))
    return _project(gate * _project(x, tensors, f"{at}.up_proj"), tensors, f"{at}.down_proj")


def _layer(attended: Tensor, stream: Tensor, config: Config, tensors: Tensors, at: str) -> Tensor:
    """A decoder layer: attention reads `attended`, its output joins `stream` [N, T, H]."""
    hidden = stream + _attend(attended, config, tensors, f"{at}self_attn")
    normed = _rms(hidden, tensors[f"{at}post_attention_layernorm.weight"], config["rms_norm_eps"])
    return hidden + _mlp(normed, tensors, f"{at}mlp")


def _whole(run: Run) -> Tensor:
    return torch.arange(run.head.shape[0], device=run.head.device)


# ---- graphs


def _eagle3(config: Config, tensors: Tensors, run: Run, layer: str, taps: list[int]) -> tuple[Tensor, Tensor]:
    eps, states = config["rms_norm_eps"], run.taps(taps)
    if config.get("fc_norm"):
        states = [_rms(state, tensors[f"fc_norm.{place}.weight"], eps) for place, state in enumerate(states)]
    fused = torch.cat(states, -1)
    if config.get("norm_before_fc"):
        fused = _rms(fused, tensors["input_norm.weight"], eps)
    hidden = _project(fused, tensors, "fc")
    embedded = functional.embedding(run.read, tensors.get("embed_tokens.weight", run.embedding))
    normed = _rms(hidden, tensors[f"{layer}hidden_norm.weight"], eps)
    joined = torch.cat((_rms(embedded, tensors[f"{layer}input_layernorm.weight"], eps), normed), -1)
    stream = normed if config.get("norm_before_residual") else hidden
    out = _rms(_layer(joined, stream, config, tensors, layer), tensors["norm.weight"], eps)
    head = tensors["lm_head.weight"]
    ids = torch.arange(len(head), device=head.device)
    return out @ head.T, ids + tensors["d2t"] if "d2t" in tensors else ids


def _official(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    count = len(run.states) - 1
    taps = config.get("eagle_aux_hidden_state_layer_ids", [2, count // 2, count - 3])
    return _eagle3(config, tensors, run, "midlayer.", taps)


def _speculators(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    inner = config["transformer_layer_config"]
    flat = {**inner, **{key: value for key, value in config.items() if key != "transformer_layer_config"}}
    return _eagle3(flat, tensors, run, "layers.0.", config["eagle_aux_hidden_state_layer_ids"])


def _eagle(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    embedded = functional.embedding(run.read, tensors.get("embed_tokens.weight", run.embedding))
    stream = _project(torch.cat((embedded, run.states[-1][:, :-1]), -1), tensors, "fc")
    out = _layer(stream, stream, config, tensors, "layers.0.")
    return out @ tensors.get("lm_head.weight", run.head).T, _whole(run)


def _blocks(x: Tensor, tensors: Tensors, names: list[str]) -> Tensor:
    for name in names:
        skip = _project(x, tensors, _skip(name)) if f"{_skip(name)}.weight" in tensors else x
        x = skip + functional.silu(_project(x, tensors, name))
    return x


def _skip(name: str) -> str:
    return f"{name.removesuffix('.linear')}.res_connection"


def _medusa(config: Config, tensors: Tensors, run: Run, prefix: str = "") -> tuple[Tensor, Tensor]:
    layers = config["medusa_num_layers"]
    names = [f"{prefix}0.{place}.linear" for place in range(layers)]
    out = _blocks(run.states[-1][:, :-1], tensors, names)
    head = run.head if config.get("version") == "2" else tensors[f"{prefix}0.{layers}.weight"]
    return out @ head.T, _kept(tensors, run, head)


def _kept(tensors: Tensors, run: Run, head: Tensor) -> Tensor:
    """Which ids a head [X, Ht] has rows for: a native export says it beside the weights."""
    return _whole(run) if len(head) == len(run.head) else tensors["t2d"].nonzero().flatten()


def _merged(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    return _medusa(config, tensors, run, "medusa_head.")


def _medusa_vllm(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    names = [f"blocks.0.layers.{place}" for place in range(config["num_hidden_layers"])]
    out = _blocks(run.states[-1][:, :-1], tensors, names)
    head = tensors["lm_head.weight" if config["original_lm_head"] else "lm_heads.0.weight"]
    return out @ head.T, tensors.get("token_map", _whole(run))


def _hydra(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    state, at = run.states[-1][:, :-1], "prefix_embeding_layer."
    if config["hydra_head_arch"] == "prefix-mlp":
        layer, eps = f"{at}layers.0.", config["rms_norm_eps"]
        joined = _rms(state, tensors[f"{layer}input_layernorm.weight"], eps)
        state = _rms(_layer(joined, state, config, tensors, layer), tensors[f"{at}norm.weight"], eps)
    joined = torch.cat((state, functional.embedding(run.read, run.embedding)), -1)
    names = [f"hydra_mlp.0.{2 * place + 1}.linear" for place in range(config["hydra_num_layers"])]
    head = tensors.get("hydra_lm_head.0.1.weight", run.head)
    return _blocks(joined, tensors, names) @ head.T, _kept(tensors, run, head)


def _mtp(config: Config, tensors: Tensors, run: Run, names: Mapping[str, str], layer: str) -> tuple[Tensor, Tensor]:
    eps, embedding = config["rms_norm_eps"], tensors.get(names["embed"], run.embedding)
    embedded = _rms(functional.embedding(run.read, embedding), tensors[names["enorm"]], eps)
    state = _rms(run.states[-1][:, :-1], tensors[names["hnorm"]], eps)
    stream = torch.cat((embedded, state), -1) @ tensors[names["join"]].T
    normed = _rms(stream, tensors[f"{layer}input_layernorm.weight"], eps)
    out = _rms(_layer(normed, stream, config, tensors, layer), tensors[names["norm"]], eps)
    return out @ tensors.get(names["head"], run.head).T, _whole(run)


def _mtp_deepseek(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    at = f"model.layers.{config['num_hidden_layers']}."
    parts = {"enorm": "enorm", "hnorm": "hnorm", "join": "eh_proj", "norm": "shared_head.norm"}
    names = {key: f"{at}{part}.weight" for key, part in parts.items()}
    # The native export borrows both; the dialect repeats them inside the layer.
    names |= {"embed": f"{at}embed_tokens.weight", "head": f"{at}shared_head.head.weight"}
    return _mtp(config, tensors, run, names, at)


def _mtp_qwen3next(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    parts = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "join": "fc", "norm": "norm"}
    names = {key: f"mtp.{part}.weight" for key, part in parts.items()}
    names |= {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}
    return _mtp(config, tensors, run, names, "mtp.layers.0.")


def _small(config: Config, tensors: Tensors, run: Run) -> tuple[Tensor, Tensor]:
    embedding, eps = tensors["model.embed_tokens.weight"], config["rms_norm_eps"]
    hidden = functional.embedding(run.ids, embedding)
    for place in range(config["num_hidden_layers"]):
        at = f"model.layers.{place}."
        normed = _rms(hidden, tensors[f"{at}input_layernorm.weight"], eps)
        hidden = _layer(normed, hidden, config, tensors, at)
    out = _rms(hidden, tensors["model.norm.weight"], eps)[:, 1:]
    head = embedding if config["tie_word_embeddings"] else tensors["lm_head.weight"]
    return out @ head.T, _whole(run)


Graph = Callable[[Config, Tensors, Run], tuple[Tensor, Tensor]]
_GRAPHS: dict[str, Graph] = {
    "eagle3": _official,
    "speculators": _speculators,
    "eagle-vllm": _eagle,
    "eagle-sglang": _eagle,
    "medusa-v1": _medusa,
    "medusa-v2": _medusa,
    "medusa-vllm": _medusa_vllm,
    "medusa2-merged": _merged,
    "mtp-deepseek": _mtp_deepseek,
    "mtp-qwen3next": _mtp_qwen3next,
    "small": _small,
    "hydra": _hydra,
}
# Which of these a family's native export is named and configured like.
NATIVE = {
    "eagle3": "eagle3",
    "eagle": "eagle-vllm",
    "medusa": "medusa-v1",
    "medusa2": "medusa-v1",
    "mtp": "mtp-deepseek",
    "small": "small",
    "hydra": "hydra",
}
