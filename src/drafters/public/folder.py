"""A folder with config.json and safetensors, as the hub has them: what it says, and which tensors it holds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.contract import INDEX_NAME, listed_weights
from drafters.errors import ArtifactError

VOCAB = "draft_vocab.safetensors"  # d2t and t2d, where the ecosystem's weights file has no place for them
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class PublicFolder:
    """config: of config.json; files: the file that each tensor is in."""

    path: Path
    config: dict[str, Any]
    files: dict[str, Path]

    def names(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self.files)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these names; ArtifactError names one with a number that is none."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self.files[name], []).append(name)
        found = {}
        for path, inside in wanted.items():
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in inside}
        return {name: self.finite(name, tensor) for name, tensor in found.items()}

    def finite(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor; ArtifactError names it where a number of it is none."""
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise self.wrong(f"tensor {name} holds NaN or infinity", "Fetch the folder again.")
        return tensor

    def wrong(self, problem: str, way_out: str) -> ArtifactError:
        """The error that says what about this folder stands in the way."""
        return ArtifactError(f"{self.path}: {problem}. {way_out}")


def open_folder(path: Path) -> PublicFolder:
    """What a drafter's folder holds; ArtifactError says what it lacks and how to come by it."""
    path = Path(path)
    config = path / "config.json"
    if not config.is_file():
        raise ArtifactError(f"{path} has no config.json. Give the folder of a drafter, or one made by train.py.")
    said = _json(config)
    files: dict[str, Path] = {}
    for file in _weight_files(path):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    if name in files:
                        raise ArtifactError(
                            f"{path}: tensor {name} is in {files[name].name} and in {file.name}. Leave the one that is "
                            "not the drafter's out of the folder."
                        )
                    files[name] = file
        except SafetensorError as error:
            raise ArtifactError(f"{file} is not a safetensors file ({error}). Fetch it again.") from error
    return PublicFolder(path, said, files)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON ({error}). Fetch it again.") from error
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} is a JSON {type(found).__name__}, not an object. Fetch it again.")
    return found


def _weight_files(path: Path) -> list[Path]:
    """The shards of an index, or the one safetensors file, and the vocabulary kept beside it."""
    beside = [path / VOCAB] if (path / VOCAB).is_file() else []
    if (path / INDEX_NAME).is_file():
        shards = [path / name for name in listed_weights(path)]
        missing = next((shard for shard in shards if not shard.is_file()), None)
        if missing is not None:
            raise ArtifactError(f"{missing} is missing, {INDEX_NAME} names it. Fetch the folder again.")
        return shards + beside
    found = sorted(each for each in path.glob("*.safetensors") if each.name != VOCAB)
    if len(found) == 1:
        return found + beside
    if found:
        names = ", ".join(each.name for each in found)
        raise ArtifactError(
            f"{path} holds {names} and no {INDEX_NAME}: nothing says which of them is the drafter. Leave one in it."
        )
    pickled = sorted(each for pattern in PICKLED for each in path.glob(pattern))
    if pickled:
        raise ArtifactError(
            f"{path} holds no safetensors but {pickled[0].name}, which can run code when it is opened and is not read. "
            f"Convert it: python -m drafters.public.convert {path} NEW_FOLDER, then give NEW_FOLDER."
        )
    raise ArtifactError(f"{path} holds no safetensors. Give the folder of a drafter, or fetch it again whole.")
