"""Medusa heads: version 1 (own output heads), version 2 (the target's), vLLM's layout, and merged into their model."""

from __future__ import annotations

import logging
import re

import torch
from torch import Tensor

from drafters.contract import hash_weights
from drafters.errors import ContractError
from drafters.models.medusa import MedusaShape
from drafters.public.eagle3 import draft_vocab_size, renamed, same
from drafters.public.folder import PublicFolder
from drafters.public.reading import Doubt, PublicDrafter, Reading
from drafters.public.sizes import size, vocab_size
from drafters.public.vocab import row_map
from drafters.target import Target

log = logging.getLogger(__name__)

PREFIX = re.compile(r"medusa_heads?\.")
BLOCKS = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
OWN_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")  # Medusa's own: the head is numbered after its blocks
LISTED_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")  # vLLM's
SHARED = "lm_head.weight"
WHOLE = ("token_map", "d2t", "t2d", SHARED)


def read_medusa(folder: PublicFolder, target: Target) -> PublicDrafter:
    """The reading of a folder with Medusa heads; ArtifactError, ContractError name a tensor or field that cannot be."""
    merged = any(name.startswith("model.layers.") for name in folder.files)
    if merged:
        _check_merged(folder, target)
    kept = [name for name in folder.names() if not merged or PREFIX.match(name)]
    plain = renamed(folder, {name: PREFIX.sub("", name, count=1) for name in kept})
    heads, layers = _count(folder, list(plain), merged)
    names = renamed(folder, {theirs: _own_name(folder, name, layers) for name, theirs in plain.items()})
    found = folder.read(names.values())
    tensors = {own: found[theirs] for own, theirs in names.items()}
    for own in [own for own in tensors if own.endswith(".linear.weight")]:
        # vLLM's layout may do without biases, which then are 0.
        tensors.setdefault(own.replace("weight", "bias"), torch.zeros(tensors[own].shape[0]))
    shape = _place_heads(folder, tensors, heads, layers, target)
    reading = Reading("the last state, after the final norm", shape, tensors, (target.num_layers,))
    return PublicDrafter(folder.path, "medusa", "medusa", (reading,), _doubts(reading), names)


def _check_merged(folder: PublicFolder, target: Target) -> None:
    """Heads inside a model draft for that model alone."""
    same_folder = target.folder.resolve() == folder.path.resolve()
    if not same_folder and hash_weights(folder.path) != target.fingerprint["target_weights_sha256"]:
        raise ContractError(
            f"{folder.path} is a whole model with Medusa heads, which draft for it alone, and the target is "
            f"{target.name!r}. Set target=custom target.path={folder.path}."
        )


def _block(name: str) -> tuple[int, int, str] | None:
    """Head, block and kind of a residual block's tensor."""
    match = next((found for layout in BLOCKS if (found := layout.fullmatch(name))), None)
    return None if match is None else (int(match[1]), int(match[2]), match[3])


def _count(folder: PublicFolder, names: list[str], merged: bool) -> tuple[int, int]:
    """Heads, and residual blocks of each, by the tensors; ArtifactError where config.json says otherwise."""
    blocks = [found for name in names if (found := _block(name))]
    heads, layers = 1 + max(head for head, _, _ in blocks), 1 + max(layer for _, layer, _ in blocks)
    ours = "medusa_num_heads" in folder.config or merged
    keys = ("medusa_num_heads", "medusa_num_layers") if ours else ("num_heads", "num_hidden_layers")
    stated = [size(folder, folder.config, key, there) for key, there in zip(keys, (heads, layers), strict=True)]
    if ours and stated[0] < heads:
        # Published folders say 2 and hold 5, and Medusa's own loader goes by 5.
        log.warning("%s: config.json: %s is %d, all %d heads there are taken", folder.path, keys[0], stated[0], heads)
        stated[0] = heads
    for key, value, there in zip(keys, stated, (heads, layers), strict=True):
        if value != there:
            raise folder.wrong(f"config.json: {key} is {value}, by the tensors {there}", "Fetch the folder again.")
    return heads, layers


def _own_name(folder: PublicFolder, name: str, layers: int) -> str:
    if name in WHOLE:
        return name
    block, own, listed = _block(name), OWN_HEAD.fullmatch(name), LISTED_HEAD.fullmatch(name)
    if block:
        return f"heads.{block[0]}.{block[1]}.linear.{block[2]}"
    if listed or (own and int(own[2]) == layers):
        return f"heads.{(listed or own)[1]}.{layers}.weight"
    raise folder.wrong(f"tensor {name} is of no Medusa head", "Leave it out of the folder.")


def _place_heads(
    folder: PublicFolder, tensors: dict[str, Tensor], heads: int, layers: int, target: Target
) -> MedusaShape:
    """The shape; output heads of `tensors` are put in the order of ids, a shared one is given to each or dropped."""
    places = [f"heads.{index}.{layers}.weight" for index in range(heads)]
    total = vocab_size(folder, folder.config, target)
    for name in [name for name in (*places, SHARED) if name in tensors and "token_map" in tensors]:
        if tensors[name].shape[0] == total:  # vLLM takes the mapped rows of a whole head
            tensors[name] = tensors[name][tensors["token_map"].long()]
    first = next((tensors[name] for name in (*places, SHARED) if name in tensors), None)
    ids = draft_vocab_size(folder, folder.config, tensors, first, total)
    rows = row_map(folder, tensors, ids, total)
    tensors |= rows.tensors(total)
    for name in [name for name in (*places, SHARED) if name in tensors]:
        tensors[name] = rows.order(tensors[name])
    shared = tensors.pop(SHARED, None)
    if shared is not None and not same(shared, target.head_weight[tensors["t2d"].to(target.device)]):
        log.info("%s: %s is not the target's own: each head has a copy of it", folder.path, SHARED)
        tensors |= dict.fromkeys(places, shared)
    return MedusaShape(target.hidden_size, total, ids, heads, layers, any(name in tensors for name in places))


def _doubts(reading: Reading) -> tuple[Doubt, ...]:
    shape = reading.shape
    if not shape.own_heads:
        return ()
    places = {f"heads.{index}.{shape.num_layers}.weight" for index in range(shape.num_heads)}
    rest = {name: tensor for name, tensor in reading.tensors.items() if name not in places}
    return (Doubt("the target's own in place of the heads' output heads", {"tensors": rest, "own_heads": False}),)
