"""A native export of every kind of drafter on the tiny target, its dialects, and every way to damage one field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.config_drafter import (
    DrafterConfig,
    EagleConfig,
    HydraConfig,
    Medusa2Config,
    MedusaConfig,
    MtpConfig,
    SmallConfig,
)
from drafters.export.expected import Native
from drafters.export.forms import write_form
from drafters.export.verify import Checker
from drafters.target import Target, default_taps
from tests.drafters import forms_setup
from tests.drafters.export_setup import SHAPE, reseal
from tests.drafters.export_setup import export as export_eagle3

VOCAB = 300
KINDS: dict[str, DrafterConfig] = {
    "eagle": EagleConfig(draft_vocab_size=VOCAB),
    "medusa-own": MedusaConfig(draft_vocab_size=512, num_heads=2, num_layers=2, own_heads=True),
    "medusa": MedusaConfig(draft_vocab_size=VOCAB, num_heads=2),
    "mtp": MtpConfig(draft_vocab_size=VOCAB),
    "small": SmallConfig(draft_vocab_size=VOCAB, num_layers=2),
    "hydra": HydraConfig(draft_vocab_size=VOCAB, num_heads=2, num_layers=1),
    "medusa2": Medusa2Config(draft_vocab_size=VOCAB, num_heads=2, lora_rank=4),
}
# Which of the exports a dialect is written from here.
FROM = {
    "eagle3": "eagle3",
    "speculators": "eagle3",
    "eagle-vllm": "eagle",
    "eagle-sglang": "eagle",
    "medusa-v1": "medusa-own",
    "medusa-v2": "medusa",
    "medusa-vllm": "medusa",
    "mtp-deepseek": "mtp",
    "mtp-qwen3next": "mtp",
    "small": "small",
    "medusa2-merged": "medusa2",
}


def native(target: Target, kind: str, dest: Path) -> Path:
    """An export of random weights, none of them at rest."""
    if kind == "eagle3":
        return export_eagle3(target, dest, replace(SHAPE, fc_norm=True), default_taps(target.num_layers))
    return forms_setup.native(target, dest, KINDS[kind])


def written(target: Target, folder: Path, dialect: str, dest: Path) -> Path:
    """A dialect's folder, as train.py leaves it, of a native export."""
    return write_form(dialect, forms_setup.source_of(folder, target), dest)


def checker(target: Target, folder: Path, dialect: str) -> Checker:
    """What a dialect's folders are held against; the target is tuned where the export tunes it."""
    return Checker(Native.read(folder, forms_setup.source_of(folder, target).target), dialect)


# ---- damage


@dataclass(frozen=True)
class Damage:
    """One change of one thing. part: a file's name; name: what an error must name; apply: makes it in a folder."""

    kind: str
    part: str
    name: str
    apply: Callable[[Path], None]


def _rewrite_tensors(part: str, change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / part)
        change(tensors)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / part)
        reseal(folder)

    return apply


def _spoil(tensor: Tensor) -> Tensor:
    """NaN, or for whole numbers the largest there is, in one place."""
    spoiled = tensor.clone()
    flat = spoiled.view(-1)
    flat[len(flat) // 2] = float("nan") if tensor.is_floating_point() else _worst(flat[len(flat) // 2])
    return spoiled


def _worst(value: Tensor) -> bool | int:
    return not bool(value) if value.dtype == torch.bool else torch.iinfo(value.dtype).max


def _other(tensor: Tensor) -> Tensor:
    return tensor.roll(1, 0) if tensor.dtype == torch.bool else tensor + 1


def _retyped(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.float() if tensor.dtype != torch.float32 else tensor.double()
    return tensor.to(torch.int32)


def tensor_damages(folder: Path, part: str) -> Iterator[Damage]:
    """Delete, rename, reshape, retype and spoil each tensor of a file, and add one."""
    for name in load_file(folder / part):
        changes: dict[str, Callable[[dict[str, Tensor], str], Any]] = {
            "delete": lambda tensors, key: tensors.pop(key),
            "rename": lambda tensors, key: tensors.update({f"{key}_": tensors.pop(key)}),
            "reshape": lambda tensors, key: tensors.update({key: tensors[key].unsqueeze(0)}),
            "retype": lambda tensors, key: tensors.update({key: _retyped(tensors[key])}),
            "nan": lambda tensors, key: tensors.update({key: _spoil(tensors[key])}),
            "value": lambda tensors, key: tensors.update({key: _other(tensors[key])}),
        }
        for kind, change in changes.items():
            yield Damage(kind, part, name, _rewrite_tensors(part, lambda tensors, c=change, n=name: c(tensors, n)))
    added = _rewrite_tensors(part, lambda tensors: tensors.update(stranger=torch.zeros(3)))
    yield Damage("add", part, "stranger", added)


def _paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*at, key))
    elif isinstance(value, list):
        for place in range(len(value)):
            yield from _paths(value[place], (*at, place))


def _inside(value: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def other_value(value: Any) -> Any:
    """Another value of the same JSON type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return [*value, *value] or [1]
    return {"x": 1} if value is None else dict(value) | {"stranger": 1}


def other_type(value: Any) -> Any:
    """The same, as nearly as another JSON type says it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return float(value)
    if isinstance(value, str):
        return [value]
    return {"float": str, "list": lambda each: {"0": each}, "NoneType": lambda each: 0, "dict": lambda each: [each]}[
        type(value).__name__
    ](value)


def json_damages(folder: Path, part: str) -> Iterator[Damage]:
    """Delete, change the value and the type of each field, at every depth, and add one."""
    original = json.loads((folder / part).read_text(encoding="utf-8"))

    def edited(path: tuple[str | int, ...], change: Callable[[Any, str | int], Any]) -> Callable[[Path], None]:
        def apply(place: Path) -> None:
            value = copy.deepcopy(original)
            change(_inside(value, path[:-1]), path[-1])
            (place / part).write_text(json.dumps(value), encoding="utf-8")
            reseal(place)

        return apply

    for path in _paths(original):
        # Errors name a field by its top-level key at least; below it by the last key too.
        name = str(next(key for key in reversed(path) if isinstance(key, str)))
        old = _inside(original, path)
        yield Damage("delete", part, name, edited(path, lambda inner, key: inner.pop(key)))
        for kind, new in (("value", other_value(old)), ("type", other_type(old))):
            yield Damage(kind, part, name, edited(path, lambda inner, key, v=new: inner.__setitem__(key, v)))
    yield Damage("add", part, "stranger", edited(("stranger",), lambda inner, key: inner.__setitem__(key, 1)))
