"""Start the drafter's layer from the target's last one; worth .04 of tau at equal compute on a small target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from drafters.batches import Batch, mask4d
from drafters.errors import ConfigError
from drafters.models.layers import INITIALIZER_STD

if TYPE_CHECKING:
    from drafters.models.eagle3 import Eagle3Drafter
    from drafters.models.layers import DraftLayer
    from drafters.target import Target

DECODER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")  # the parts of a Llama-like layer
LOGIT_STD = 1.5  # std of logits over the draft vocabulary that trains well from the first step


def _copy(name: str, destination: Tensor, source: Tensor) -> None:
    if destination.shape != source.shape:
        raise ConfigError(
            f"drafter.warm_start=true needs the target's shape: {name} is {tuple(destination.shape)} in the drafter, "
            f"{tuple(source.shape)} in the target's last layer. Set drafter.warm_start=false, or leave "
            "drafter.hidden_size, intermediate_size, num_heads, num_kv_heads and head_dim at null."
        )
    destination.copy_(source)


def decoder_layers(target: Target) -> nn.ModuleList:
    """The target's decoder layers; raises ConfigError where its decoder has no `layers`."""
    try:
        return target.backbone.layers
    except AttributeError as error:
        raise ConfigError(
            f"target {target.name!r} ({type(target.model).__name__}) has no Llama-like decoder layers ({error}). "
            "Set drafter=eagle3 and drafter.warm_start=false, or another target."
        ) from error


def last_layer(target: Target) -> nn.Module:
    """The target's last decoder layer; raises ConfigError where its decoder has no `layers`."""
    return decoder_layers(target)[-1]


def unlike(mine: nn.Module, theirs: nn.Module, parts: tuple[str, ...]) -> str | None:
    """The first parameter under `parts` of a drafter's layer that the target's lacks, has besides or has in another
    shape, in words; None where they are alike."""
    own, found = _under(mine, parts), dict(theirs.named_parameters())
    for name in sorted(own.keys() | found.keys()):
        if name not in found:
            return f"the target's layer has no {name}"
        if name not in own:
            return f"the drafter's layer has no place for {name}"
        if own[name].shape != found[name].shape:
            return f"{name} is {tuple(own[name].shape)} in the drafter, {tuple(found[name].shape)} in the target"
    return None


@torch.no_grad()
def copy_layer(mine: nn.Module, theirs: nn.Module, parts: tuple[str, ...]) -> None:
    """Fill every parameter under `parts` of a drafter's layer from the target's; raises ConfigError unless alike."""
    problem = unlike(mine, theirs, parts)
    if problem is not None:
        raise ConfigError(
            f"drafter.warm_start=true needs a Llama-like target and its sizes: {problem}. Set drafter.warm_start=false."
        )
    found = dict(theirs.named_parameters())
    for name, weight in _under(mine, parts).items():
        weight.copy_(found[name])


def _under(layer: nn.Module, parts: tuple[str, ...]) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in layer.named_parameters() if name.split(".")[0] in parts}


def _layer_weights(layer: nn.Module, name: str) -> Tensor:
    try:
        return layer.get_parameter(f"{name}.weight")
    except AttributeError as error:
        raise ConfigError(
            f"drafter.warm_start=true needs a Llama-like target; its last layer has no {name} ({error}). "
            "Set drafter.warm_start=false."
        ) from error


def _start_layer(drafter: Eagle3Drafter, layer: nn.Module) -> None:
    """Copy o, MLP, norms and the hidden half of q, k, v; the embedding half stays random."""
    mine, size = drafter.midlayer, drafter.shape.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        half = getattr(mine.self_attn, name).weight[:, size:]
        _copy(name, half, _layer_weights(layer, f"self_attn.{name}"))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        _copy(name, mine.get_parameter(f"{name}.weight"), _layer_weights(layer, name))
    _copy("hidden_norm", mine.hidden_norm.weight, _layer_weights(layer, "input_layernorm"))


@torch.no_grad()
def start_without_input_norm(mine: DraftLayer, theirs: nn.Module, inner: Tensor, normed: Tensor) -> None:
    """Fill a layer that reads final-normed states, and norms no input, with one of the target's.

    inner [N, Ht]: what the target's layer reads; normed [N, Ht]: final-normed states. The input norm goes into q, k
    and v, and what the layer adds keeps its size relative to the stream. Raises ConfigError when the shapes differ.
    """
    for name in ("q_proj", "k_proj", "v_proj"):
        _copy(name, getattr(mine.self_attn, name).weight, _layer_weights(theirs, f"self_attn.{name}"))
        getattr(mine.self_attn, name).weight.mul_(_layer_weights(theirs, "input_layernorm") / _typical(normed))
    for name in ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm"):
        _copy(name, mine.get_parameter(f"{name}.weight"), _layer_weights(theirs, name))
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        mine.get_parameter(f"{name}.weight").mul_(_typical(normed) / _typical(inner))


def _typical(states: Tensor) -> Tensor:
    """Root mean square of states [N, H]: the median, for the first position of a text can be a hundred times larger."""
    return states.float().pow(2).mean(-1).sqrt().median()


def _start_fc(drafter: Eagle3Drafter, taps: Tensor) -> None:
    """Pass the highest tap through at its own scale; the others come in small, each channel at unit scale.

    taps [N, taps*Ht]. Medians, because the first position of a text can be a hundred times larger than the rest.
    """
    shape = drafter.shape
    size, weight = shape.target_hidden_size, drafter.fc.weight
    if shape.hidden_size != size:
        raise ConfigError(
            f"drafter.warm_start=true needs drafter.hidden_size={size}, the target's; it is {shape.hidden_size}. "
            "Set drafter.warm_start=false."
        )
    typical = taps[:, -size:].float().pow(2).mean(-1).sqrt().median()
    nn.init.normal_(weight, std=INITIALIZER_STD)
    if shape.fc_norm:
        weight[:, -size:] = torch.eye(size, device=weight.device) * typical
        return
    channels = taps.float().abs().median(0).values.clamp(min=1e-3)
    weight.div_(channels.to(weight.dtype))
    weight[:, -size:] = torch.eye(size, device=weight.device)


@torch.no_grad()
def warm_start(drafter: Eagle3Drafter, target: Target, batch: Batch, taps: tuple[int, ...]) -> None:
    """Initialise a bound drafter from the target; `batch` is a sample for scales, `taps` HF hidden_states indices.

    The final norm is scaled so that logits have std LOGIT_STD: the target's own weight on an untrained layer gave
    logits several times too large and very slow learning. Raises ConfigError when the shapes differ.
    """
    device = drafter.fc.weight.device
    ids, positions = batch.ids.to(device), batch.position_ids.to(device)
    mask = mask4d(batch.document_ids.to(device))
    features, _ = target.hidden(ids, positions, mask, taps)
    real = (batch.document_ids >= 0).to(device)
    real[:, -1] = False  # the last position of a row has no next token to read
    _start_layer(drafter, target.backbone.layers[-1])
    _start_fc(drafter, features[real])
    drafter.lm_head.weight.copy_(target.head_weight[drafter.t2d])
    drafter.norm.weight.copy_(target.backbone.norm.weight)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    out = drafter.forward_layer(ids.roll(-1, 1), drafter.fuse(features), positions, attend)
    spread = drafter.logits(out[real]).float().std(-1).mean()
    drafter.norm.weight.mul_(LOGIT_STD / spread)
