"""MTP layers that a target's checkpoint brings along and transformers leaves unread."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch import Tensor

from drafters.contract import weight_files
from drafters.errors import TargetError
from drafters.models.layers import causal_attention
from drafters.warm_start import DECODER, copy_layer, last_layer, unlike

if TYPE_CHECKING:
    from drafters.models.mtp import MtpLayer
    from drafters.target import Target

SAME = 1e-3  # relative gap in fp32 of layers that compute the same; another norm or rotation gives .1 or more
SAME_HALF = 5e-2
CHECKED_TOKENS = 16
# Parts of names that tell of a layer other than a dense one with grouped-query attention.
FOREIGN = {
    "experts": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
    "kv_a_proj": "multi-head latent attention",
    "q_a_proj": "multi-head latent attention",
    "linear_attn": "linear attention",
}


@dataclass(frozen=True)
class Naming:
    """How one family of checkpoints names its MTP tensors. prefix: of the first layer's; counted, first: a further
    layer's are counted+number, above first; renamed: theirs -> DeepSeek's; hidden_first: eh_proj reads the hidden
    state before the embedding."""

    prefix: str
    counted: str
    first: int
    renamed: dict[str, str]
    hidden_first: bool = False

    def own(self, name: str) -> str:
        """DeepSeek's name, without its prefix, of a tensor of the first layer."""
        rest = name.removeprefix(self.prefix)
        return self.renamed.get(rest, rest.removeprefix("layers.0."))

    def another(self, name: str) -> bool:
        """Whether the tensor is of a further MTP layer."""
        number = name.removeprefix(self.counted).split(".")[0]
        return name.startswith(self.counted) and number.isdigit() and int(number) > self.first


QWEN = {
    "fc.weight": "eh_proj.weight",
    "pre_fc_norm_embedding.weight": "enorm.weight",
    "pre_fc_norm_hidden.weight": "hnorm.weight",
    "norm.weight": "shared_head.norm.weight",
}
MIMO = {
    "input_proj.weight": "eh_proj.weight",
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}


def namings(layers: int) -> tuple[Naming, ...]:
    """DeepSeek's, Qwen3-Next's and MiMo's names of the MTP layer of a target of so many decoder layers."""
    return (
        Naming(f"model.layers.{layers}.", "model.layers.", layers, {}),
        Naming("mtp.", "mtp.layers.", 0, QWEN),
        Naming("model.mtp_layers.0.", "model.mtp_layers.", 0, MIMO, hidden_first=True),
    )


class _Refusal:
    """Says what about a target's MTP layer stands in the way."""

    def __init__(self, target: Target) -> None:
        self.who = f"target {target.name!r} ({type(target.model).__name__})"

    def __call__(self, problem: str) -> TargetError:
        return TargetError(f"{self.who}: {problem}. Set drafter.native=false to train an MTP layer anew.")


@torch.no_grad()
def load_native(layer: MtpLayer, target: Target) -> None:
    """Fill an MTP layer with the one in the target's checkpoint.

    Raises TargetError when there is none or more than one, naming a missing tensor, or what makes the layer another
    than a dense one with grouped-query attention that computes as the target's own last layer does.
    """
    refusal = _Refusal(target)
    found, naming = _read(target, refusal)
    for name in sorted(found):
        kind = next((kind for part, kind in FOREIGN.items() if part in name), None)
        if kind is not None:
            raise refusal(f"its MTP layer has {kind} ({name}), which this code does not run")
    tensors = {naming.own(name): tensor for name, tensor in found.items()}
    _check_shared(tensors, target, refusal)
    own = dict(layer.named_parameters())
    missing = sorted(own.keys() - tensors.keys())
    if missing:
        raise refusal(f"its checkpoint lacks {', '.join(missing)} of its MTP layer; fetch it again")
    for name, tensor in tensors.items():
        if name not in own:
            raise refusal(f"its MTP layer has {name}, for which this code has no place")
        if name == "self_attn.q_proj.weight" and len(tensor) == 2 * len(own[name]):
            raise refusal(f"its MTP layer has gated attention ({name}), which this code does not run")
        if tensor.shape != own[name].shape:
            sizes = f"{tuple(tensor.shape)}, of the target's sizes would be {tuple(own[name].shape)}"
            raise refusal(f"{name} of its MTP layer is {sizes}")
    _check_kind(layer, target, refusal)
    if naming.hidden_first:
        tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    for name, parameter in own.items():
        parameter.copy_(tensors[name])


def _read(target: Target, refusal: _Refusal) -> tuple[dict[str, Tensor], Naming]:
    """The MTP tensors of the target's checkpoint under its own names, and whose names those are."""
    known = namings(target.num_layers)
    found: dict[str, Tensor] = {}
    used: list[Naming] = []
    for path in weight_files(target.folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (a safe_open is no mapping)
                if any(naming.another(name) for naming in known):
                    raise refusal(f"its checkpoint holds more than one MTP layer ({name}), this code runs one")
                naming = next((naming for naming in known if name.startswith(naming.prefix)), None)
                if naming is not None:
                    found[name] = file.get_tensor(name)
                    used += [] if naming in used else [naming]
    if len(used) != 1:
        what = "no tensors" if not used else "tensors under more than one"
        raise refusal(f"its checkpoint holds {what} of the names {', '.join(f'{each.prefix}*' for each in known)}")
    return found, used[0]


def _check_shared(tensors: dict[str, Tensor], target: Target, refusal: _Refusal) -> None:
    """Drop copies of the embedding and of the head, which are the target's own here."""
    for name, theirs in (("embed_tokens.weight", target.embed_weight), ("shared_head.head.weight", target.head_weight)):
        if name in tensors and not torch.equal(tensors.pop(name).to(theirs.device, theirs.dtype), theirs):
            raise refusal(f"{name} of its MTP layer is another than the target's own, this code has one for both")


def _check_kind(layer: MtpLayer, target: Target, refusal: _Refusal) -> None:
    """Refuse a target whose own last layer, computed by an MtpLayer, gives another result than the target's."""
    rope = target.text_config.rope_parameters["rope_type"]
    if rope != "default":  # the few tokens below do not tell all kinds apart
        raise refusal(f"its rope_type is {rope}, an MTP layer runs here with default")
    problem = unlike(layer, last_layer(target), DECODER)
    if problem is not None:
        raise refusal(f"its decoder layers are of another kind than this code's MTP layer: {problem}")
    twin = copy.deepcopy(layer)
    copy_layer(twin, last_layer(target), DECODER)
    positions = torch.arange(CHECKED_TOKENS, device=target.device)[None]
    mask = torch.ones(1, 1, CHECKED_TOKENS, CHECKED_TOKENS, dtype=torch.bool, device=target.device).tril()
    stream, last = target.hidden(positions % target.vocab_size, positions, mask, (target.num_layers - 1,))
    joined, residual = twin.enter(stream.to(twin.hnorm.weight.dtype))
    attended = causal_attention(twin.queries(joined, positions), *twin.keys_values(joined, positions))
    out = target.backbone.norm(twin.finish(residual, attended).to(target.dtype)).float()
    gap = float((out - last.float()).norm() / last.float().norm())
    if not gap <= (SAME if target.dtype == torch.float32 else SAME_HALF):
        raise refusal(f"its decoder layers compute otherwise than this code's MTP layer, by {gap:.2g}")
