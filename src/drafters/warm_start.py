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
    from drafters.target import Target

LOGIT_STD = 1.5  # std of logits over the draft vocabulary that trains well from the first step


def _copy(name: str, destination: Tensor, source: Tensor) -> None:
    if destination.shape != source.shape:
        raise ConfigError(
            f"drafter.warm_start=true needs the target's shape: {name} is {tuple(destination.shape)} in the drafter, "
            f"{tuple(source.shape)} in the target's last layer. Set drafter.warm_start=false, or leave "
            "drafter.hidden_size, intermediate_size, num_heads, num_kv_heads and head_dim at null."
        )
    destination.copy_(source)


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
