"""MTP modules under the names of DeepSeek, Qwen3-Next, MiMo and speculators, alone or inside a model's checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from drafters.config_drafter import MtpConfig
from drafters.errors import ContractError
from drafters.models.mtp import MtpDrafter, MtpShape
from drafters.models.native_mtp import FOREIGN, MIMO, Naming, namings
from drafters.public.eagle3 import draft_vocab_size, renamed, same
from drafters.public.folder import PublicFolder
from drafters.public.reading import PublicDrafter, Reading
from drafters.public.sizes import OTHER, check_target_width, rope, size, vocab_size
from drafters.public.vocab import row_map
from drafters.target import Target

WHOLE = ("d2t", "t2d")
BORROWED = {"embed_tokens.weight": "own_embedding", "shared_head.head.weight": "own_head"}
OWN = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
NORMS = (
    "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm", "self_attn.q_norm",
    "self_attn.k_norm",
)  # fmt: skip


def read_mtp(folder: PublicFolder, target: Target) -> PublicDrafter:
    """The readings of a folder with one MTP layer; ArtifactError, ContractError name a tensor or field at fault."""
    naming = _naming(folder, target)
    prefix = f"model.layers.{target.num_layers}."

    def place(name: str) -> str:
        return name if name in WHOLE else OWN.get(name, prefix + name)

    kept = [name for name in folder.names() if name.startswith(naming.prefix) or name in WHOLE]
    names = renamed(folder, {name: name if name in WHOLE else naming.own(name) for name in kept})
    for theirs in kept:
        kind = next((kind for part, kind in FOREIGN.items() if part in theirs), None)
        if kind is not None:
            raise folder.wrong(f"tensor {theirs}: its layer has {kind}", OTHER)
    found = folder.read(kept)
    tensors = {own: found[theirs] for own, theirs in names.items()}
    if naming.hidden_first and "eh_proj.weight" in tensors:
        tensors["eh_proj.weight"] = torch.cat(tensors["eh_proj.weight"].chunk(2, dim=1)[::-1], dim=1)
    shape = _shape(folder, tensors, target)
    rows = row_map(folder, tensors, shape.draft_vocab_size, shape.vocab_size)
    vocab = rows.tensors(shape.vocab_size)
    shape = _take_shared(tensors, vocab["t2d"], shape, target)
    own = {place(name): tensor for name, tensor in tensors.items()}
    if shape.own_head:
        own["lm_head.weight"] = rows.order(own["lm_head.weight"])
    reading = Reading("norm weights as stored", shape, own | vocab, (target.num_layers,))
    # Qwen3-Next's norms multiply with 1 + weight: engines that read its names add the 1.
    added = {name: tensor + 1 for name, tensor in own.items() if name.removeprefix(prefix).startswith(NORMS)}
    readings = (reading, reading.but("norm weights stored less 1", tensors=reading.tensors | added))
    readings = readings if naming.prefix == "mtp." else (reading,)
    return PublicDrafter(folder.path, "mtp", "mtp", readings, (), {place(own): name for own, name in names.items()})


def _naming(folder: PublicFolder, target: Target) -> Naming:
    """Whose names the tensors have; ArtifactError where there is no layer or more than one of them."""
    known = (*namings(target.num_layers), Naming("mtp_layers.0.", "mtp_layers.", 0, MIMO))
    used = [naming for naming in known if any(name.startswith(naming.prefix) for name in folder.files)]
    if len(used) != 1:
        prefixes = ", ".join(f"{naming.prefix}*" for naming in known)
        raise ContractError(
            f"{folder.path}: it holds {'none' if not used else 'more than one kind'} of the names {prefixes} that the "
            f"MTP layer of target {target.name!r} has. Set target.path to the model that this drafter was made for."
        )
    further = next((name for name in folder.names() if used[0].another(name)), None)
    if further is not None:
        raise folder.wrong(f"it holds more than one MTP layer ({further}), this code runs one", OTHER)
    return used[0]


def _shape(folder: PublicFolder, tensors: dict[str, Tensor], target: Target) -> MtpShape:
    config = folder.config.get("transformer_layer_config") or folder.config.get("text_config") or folder.config
    shape = MtpDrafter.shape_for(MtpConfig(draft_vocab_size=target.vocab_size), target)
    check_target_width(folder, size(folder, config, "hidden_size", target.hidden_size), "hidden_size", target)
    theta, scaling = rope(folder, config)
    stated = "rope_theta" in config or "rope_parameters" in config
    kind = target.text_config.rope_parameters["rope_type"]
    if scaling is not None or kind != "default" or (stated and theta != shape.rope_theta):
        raise folder.wrong(f"rope is {scaling or theta} and the target's {kind}, {shape.rope_theta}", OTHER)
    gate = tensors.get("mlp.gate_proj.weight")
    head, total = tensors.get("shared_head.head.weight"), vocab_size(folder, config, target)
    return replace(
        shape,
        rms_norm_eps=size(folder, config, "rms_norm_eps", shape.rms_norm_eps),
        intermediate_size=shape.intermediate_size if gate is None else gate.shape[0],
        vocab_size=total,
        draft_vocab_size=draft_vocab_size(folder, folder.config, tensors, head, total),
        qk_norm="self_attn.q_norm.weight" in tensors,
        qkv_bias="self_attn.q_proj.bias" in tensors,
    )


def _take_shared(tensors: dict[str, Tensor], t2d: Tensor, shape: MtpShape, target: Target) -> MtpShape:
    """Drop an embedding and a head that are the target's own from `tensors`; others are the drafter's."""
    ours = {"embed_tokens.weight": target.embed_weight, "shared_head.head.weight": target.head_weight}
    owns = {}
    for name, part in BORROWED.items():
        if name not in tensors:
            continue
        mine = ours[name] if name == "embed_tokens.weight" else ours[name][t2d.to(target.device)]
        if same(tensors[name], mine):
            del tensors[name]
        else:
            owns[part] = True
    return replace(shape, **owns)
