"""Pickled weights (.bin, .pt) into safetensors: python -m drafters.public.convert FOLDER_OR_HUB_ID NEW_FOLDER.

The one place that opens pickles, and only with torch's weights_only unpickler, which runs no code of the file.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from drafters.artifacts import write_folder
from drafters.cli import fail
from drafters.drafter_path import HUB_ID
from drafters.errors import ArtifactError, ConfigError, OutriderError
from drafters.public.folder import PICKLED
from drafters.public.hub import hub_folder

KIND = "converted"
KEPT = ("*.json", "*.jinja", "*.model", "*.txt")  # what goes along: config and tokenizer
SHARDED = "pytorch_model"  # of Hugging Face's file names; its shards become one file


def convert(source: Path, dest: Path) -> Path:
    """Write a copy of a folder whose pickled weights are safetensors, and return its absolute path.

    Raises ArtifactError where there is nothing to convert, or naming a file, or an entry of it, that is no tensor.
    """
    source = Path(source)
    files = sorted(path for pattern in PICKLED for path in source.glob(pattern))
    if not files:
        raise ArtifactError(f"{source} holds no {' or '.join(PICKLED)}: there is nothing to convert.")
    if source.resolve() == Path(dest).resolve():
        raise ArtifactError(f"{dest} is the folder to convert. Give another one for the result.")
    merged: dict[str, dict[str, Tensor]] = {}
    for path in files:
        name = "model" if path.stem.startswith(SHARDED) else path.stem
        tensors = merged.setdefault(f"{name}.safetensors", {})
        for key, tensor in _tensors(path).items():
            if key in tensors:
                raise ArtifactError(f"{path}: tensor {key} is in another file of {source} too. Leave one of them.")
            tensors[key] = tensor

    def write(folder: Path) -> None:
        for pattern in KEPT:
            for path in source.glob(pattern):
                if not path.name.startswith(SHARDED):  # the index of shards that are no more
                    shutil.copyfile(path, folder / path.name)
        for name, tensors in merged.items():
            save_file(tensors, folder / name, metadata={"format": "pt"})

    return write_folder(dest, write, KIND, {"from": [path.name for path in files]})


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ArtifactError(
            f"{path} holds more than weights, or is damaged, and is not opened ({reason}). Fetch it again, or have its "
            "maker save the weights alone."
        ) from error
    if not isinstance(found, dict):
        raise ArtifactError(f"{path} holds a {type(found).__name__}, not tensors by name. Save its state_dict alone.")
    wrong = next((key for key, value in found.items() if not isinstance(value, Tensor)), None)
    if wrong is not None:
        kind = type(found[wrong]).__name__
        raise ArtifactError(f"{path}: entry {wrong!r} is a {kind}, not a tensor. Save its state_dict alone.")
    # Copies, since tensors of one file may share their memory, which safetensors does not say.
    return {str(key): value.detach().clone().contiguous() for key, value in found.items()}


def main(arguments: list[str]) -> None:
    """The command: leaves with 0, or with an error of one line."""
    try:
        if len(arguments) != 2:
            raise ConfigError("two arguments are needed: python -m drafters.public.convert FOLDER_OR_HUB_ID NEW_FOLDER")
        source, dest = Path(arguments[0]).expanduser(), Path(arguments[1]).expanduser()
        if not source.is_dir():
            if not HUB_ID.fullmatch(arguments[0]):
                raise ConfigError(f"{source} is neither a folder nor a hub id. Give the folder of a drafter.")
            source = hub_folder(arguments[0], pickled=True)
        written = convert(source, dest)
    except OutriderError as error:
        fail(str(error), error.exit_code)
    Console().print(f"converted to {written}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
