"""EAGLE-3 drafters as EAGLE, SpecForge, AngelSlim, Model-Optimizer and speculators write them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from drafters.errors import ContractError
from drafters.models.eagle3 import Eagle3Shape
from drafters.public.conventions import tap_candidates
from drafters.public.folder import PublicFolder
from drafters.public.reading import UNKNOWN_STEPS, Doubt, PublicDrafter, Reading
from drafters.public.sizes import OTHER, check_target_width, flag, layer_sizes, said
from drafters.public.vocab import RowMap, row_map
from drafters.target import Target

log = logging.getLogger(__name__)

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
RENAMED = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
DERIVED = ("rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")  # not the drafter's own numbers
# What Model-Optimizer may say beside the ids, and what an EAGLE-3 graph has.
MODEL_OPTIMIZER = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def own_name(name: str) -> str:
    """The drafter's name of a tensor of the file."""
    name = name.removeprefix("model.")
    name = RENAMED.get(name, name)
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def renamed(folder: PublicFolder, rule: dict[str, str]) -> dict[str, str]:
    """The file's name of each of the drafter's own; ArtifactError where two would be one. rule: theirs -> own."""
    names: dict[str, str] = {}
    for theirs, own in rule.items():
        if own in names:
            raise folder.wrong(f"tensors {names[own]} and {theirs} are the same part", "Leave one of them.")
        names[own] = theirs
    return names


def read_eagle3(folder: PublicFolder, target: Target) -> PublicDrafter:
    """The readings of an EAGLE-3 folder; ArtifactError, ContractError name a tensor or field that cannot be."""
    speculators = "speculators_model_type" in folder.config
    inner = folder.config.get("transformer_layer_config") if speculators else folder.config
    if not isinstance(inner, dict):
        raise folder.wrong("config.json: transformer_layer_config is missing or no object", "Fetch the folder again.")
    nested = folder.config.get("eagle_config") or {}
    places = [folder.config, nested]
    _check_nested(folder, nested)
    left_out = [name for name in folder.files if name.endswith(DERIVED)]
    if left_out:
        log.info("%s: left out %s, which the target has or config.json gives", folder.path, ", ".join(left_out))
    names = renamed(folder, {name: own_name(name) for name in folder.names() if name not in left_out})
    found = folder.read(names.values())
    tensors = {own: found[theirs] for own, theirs in names.items()}
    sizes = layer_sizes(folder, inner, target)
    shape, heads = _shape(folder, places, inner, tensors, names, sizes, target)
    rows = row_map(folder, tensors, shape.draft_vocab_size, shape.vocab_size)
    tensors |= rows.tensors(shape.vocab_size)
    if heads is not None:
        tensors["lm_head.weight"] = rows.order(heads)
    stated = folder.config.get(AUX_LAYERS), nested.get(AUX_LAYERS)
    readings = [
        Reading(title, shape, tensors, taps) for title, taps in tap_candidates(folder, *stated, shape.num_taps, target)
    ]
    left_open = speculators and said(folder, places, "norm_before_residual") is None
    if left_open:
        # Its own library takes the absent flag for false, vLLM for true.
        readings += [r.but(f"{r.title}, norm_before_residual", norm_before_residual=True) for r in readings]
    doubts = vocab_doubts(readings[0], rows, heads)
    if shape.hidden_size == target.hidden_size:
        doubts += borrowing_doubts(readings[0])
    if not left_open:
        flipped = {"norm_before_residual": not shape.norm_before_residual}
        doubts += (Doubt("norm_before_residual the other way round", flipped),)
    steps = _steps(folder.config) if speculators else UNKNOWN_STEPS
    dialect = "speculators" if speculators else "eagle3"
    return PublicDrafter(folder.path, dialect, "eagle3", tuple(readings), doubts, names, steps)


def _check_nested(folder: PublicFolder, nested: dict[str, Any]) -> None:
    for key, expected in MODEL_OPTIMIZER.items():
        value = nested.get(key)
        if value is not None and value != expected:
            raise folder.wrong(f"config.json: eagle_config.{key} is {value!r}, this code runs {expected!r}", OTHER)
    step = nested.get("parallel_draft_step")
    if step not in (None, 0, 1):
        raise folder.wrong(f"config.json: parallel_draft_step is {step}, this code drafts token by token", OTHER)


def _shape(
    folder: PublicFolder,
    places: list[dict[str, Any]],
    inner: dict[str, Any],
    tensors: dict[str, Tensor],
    names: dict[str, str],
    sizes: dict[str, Any],
    target: Target,
) -> tuple[Eagle3Shape, Tensor | None]:
    """The shape, and the output head taken out of `tensors`, if there is one."""

    def has(key: str, own: str, where: list[dict[str, Any]] = places) -> bool:
        return flag(folder, where, key, names.get(own, own))

    key = "target_hidden_size" if folder.config.get("target_hidden_size") else "hidden_size"
    width = folder.config["target_hidden_size"] if key == "target_hidden_size" else sizes["hidden_size"]
    check_target_width(folder, width, key, target)
    head = tensors.pop("lm_head.weight", None)
    if head is None and sizes["hidden_size"] != target.hidden_size:
        raise folder.wrong(f"lm_head.weight is missing, and the target's is of {target.hidden_size}", "Fetch it again.")
    add_output_bias(folder, tensors, "midlayer.self_attn.", sizes["hidden_size"])
    shape = Eagle3Shape(
        **sizes,
        target_hidden_size=width,
        draft_vocab_size=draft_vocab_size(folder, folder.config, tensors, head, sizes["vocab_size"]),
        num_taps=_num_taps(folder, tensors, width),
        fc_norm=has("fc_norm", "fc_norm.0.weight"),
        norm_output=said(folder, places, "norm_output") or False,
        norm_before_residual=said(folder, places, "norm_before_residual") or False,
        norm_before_fc=has("norm_before_fc", "input_norm.weight"),
        fc_bias=has("bias", "fc.bias"),
        attention_bias=has("attention_bias", "midlayer.self_attn.q_proj.bias", [inner]),
        qk_norm="midlayer.self_attn.q_norm.weight" in tensors,
        own_embedding=own_embedding(folder, tensors, sizes["hidden_size"], target),
        own_head=head is not None,
    )
    return shape, head


def add_output_bias(folder: PublicFolder, tensors: dict[str, Tensor], prefix: str, width: int) -> None:
    """Where q, k and v have biases and o has none (Qwen2), put one of 0 for it."""
    if f"{prefix}q_proj.bias" in tensors and f"{prefix}o_proj.bias" not in tensors:
        log.info("%s: o_proj has no bias beside those of q, k and v: it is taken as 0", folder.path)
        tensors[f"{prefix}o_proj.bias"] = torch.zeros(width)


def _num_taps(folder: PublicFolder, tensors: dict[str, Tensor], width: int) -> int:
    if "fc.weight" not in tensors or tensors["fc.weight"].dim() != 2:
        raise folder.wrong("tensor fc.weight is missing or no matrix", "Fetch the folder again.")
    inputs = tensors["fc.weight"].shape[1]
    if inputs % width:
        raise folder.wrong(
            f"tensor fc.weight reads {inputs} numbers, no multiple of the target's {width}",
            "Set target.path to the model that this drafter was made for.",
        )
    return inputs // width


def draft_vocab_size(
    folder: PublicFolder, config: dict[str, Any], tensors: dict[str, Tensor], head: Tensor | None, vocab_size: int
) -> int:
    """Rows of the output head, or what d2t, t2d or config.json say; ArtifactError where two of them differ."""
    keys = ("draft_vocab_size", "truncated_vocab_size")
    found = {f"config.json: {key}": config[key] for key in keys if config.get(key) is not None}
    if head is not None:
        found["lm_head.weight"] = head.shape[0]
    for name in ("d2t", "token_map"):
        if name in tensors:
            found[name] = tensors[name].numel()
    if not found and "t2d" in tensors:
        found["t2d"] = int(tensors["t2d"].sum())
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{value} by {name}" for name, value in found.items())
        raise folder.wrong(f"the number of draft ids is {listed}", "Fetch the folder again.")
    return next(iter(found.values()), vocab_size)


def own_embedding(folder: PublicFolder, tensors: dict[str, Tensor], width: int, target: Target) -> bool:
    """Whether the drafter has an embedding of its own; one that is the target's is taken out of `tensors`."""
    if "embed_tokens.weight" not in tensors:
        if width != target.hidden_size:
            raise ContractError(
                f"{folder.path}: embed_tokens.weight is missing: the drafter reads embeddings of {width}, those of "
                f"target {target.name!r} are of {target.hidden_size}. Fetch the folder again, or set target.path to "
                "the model that this drafter was made for."
            )
        return False
    if same(tensors["embed_tokens.weight"], target.embed_weight):
        log.info("%s: embed_tokens.weight is the target's own, which is shared", folder.path)
        del tensors["embed_tokens.weight"]
        return False
    return True


def same(theirs: Tensor, ours: Tensor) -> bool:
    """Whether a tensor of a file is the target's, in the coarser of both dtypes."""
    if theirs.shape != ours.shape:
        return False
    kinds = sorted((theirs.dtype, ours.dtype), key=lambda kind: kind.itemsize)
    return torch.equal(theirs.to(ours.device, kinds[0]), ours.to(kinds[0]))


def vocab_doubts(reading: Reading, rows: RowMap, head: Tensor | None) -> tuple[Doubt, ...]:
    """The draft vocabulary read otherwise; head: the output head as stored, if there is one."""
    found = []
    for title, ids in rows.others.items():
        other = RowMap(ids, {})
        changed = reading.tensors | other.tensors(reading.shape.vocab_size)
        if head is not None:
            changed["lm_head.weight"] = other.order(head)
        found.append(Doubt(f"{title} in place of d2t's", {"tensors": changed}))
    return tuple(found)


def borrowing_doubts(reading: Reading) -> tuple[Doubt, ...]:
    """The target's embedding and output head in place of its own."""
    found = []
    for part, key in (("own_head", "lm_head.weight"), ("own_embedding", "embed_tokens.weight")):
        if getattr(reading.shape, part):
            rest = {name: tensor for name, tensor in reading.tensors.items() if name != key}
            found.append(Doubt(f"the target's own in place of {key}", {"tensors": rest, part: False}))
    return tuple(found)


def _steps(config: dict[str, Any]) -> int:
    """What speculators says of how many tokens to draft."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens") or UNKNOWN_STEPS
