"""What drafters.export.verify finds in a folder, for llama.cpp's files: read back, recomputed, and how they are served.

python -m drafters.export.verify_gguf FOLDER --dialect gguf --target PATH --probe NATIVE_FOLDER --json OUT
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from safetensors import safe_open
from torch import Tensor

from drafters import artifacts
from drafters.config import TargetConfig
from drafters.contract import weight_files
from drafters.errors import OutriderError
from drafters.export.expected import Native
from drafters.export.gguf import DRAFTER_NAME, TARGET_NAME
from drafters.export.native import shape_of
from drafters.export.verify import Checker
from drafters.public.gguf import halves, open_gguf
from drafters.public.load import read_public
from drafters.target import Target

log = logging.getLogger(__name__)
DIALECT = "gguf"
OFFICIAL = "eagle3"  # the names that the reader of GGUF gives


class GgufChecker(Checker):
    """Checker of a folder with drafter.gguf and target.gguf."""

    def errors(self, folder: Path) -> list[str]:
        try:
            artifacts.verify_folder(folder, "dialect")
            return self._drafter_errors(folder) + self._target_errors(folder / TARGET_NAME)
        except OutriderError as error:
            return [str(error)]

    def _drafter_errors(self, folder: Path) -> list[str]:
        native, where = self.native, folder / DRAFTER_NAME
        reading = read_public(folder, native.target).readings[0]
        errors = []
        if reading.taps != native.contract.tap_indices:
            errors.append(f"{where}: taps are {list(reading.taps)}, expected {list(native.contract.tap_indices)}")
        found, wanted = asdict(reading.shape), asdict(shape_of(native.contract))
        # With an output head written out, a drafter that reads the target's has one of its own.
        for key in sorted(set(wanted) - {"own_head"}):
            if _rounded(found[key]) != _rounded(wanted[key]):
                errors.append(f"{where}: {key} is {found[key]!r}, expected {wanted[key]!r}")
        head = {} if native.graph.get("own_head", True) else {"lm_head.weight": native.head[native.kept_ids]}
        return errors + _differences(reading.tensors, native.tensors | head, where)

    def _target_errors(self, path: Path) -> list[str]:
        target = self.native.target
        config, reader = target.text_config, GGUFReader(path)
        names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        there = {
            tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }
        found, wanted = {}, {}
        for file in weight_files(target.folder):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (a safe_open is no mapping)
                    wanted[name] = opened.get_tensor(name).to(target.dtype)
                    tensor = there.pop(names.get_name(name, try_suffixes=(".weight",)), None)
                    part = name.split(".")[-2]
                    if tensor is not None:
                        found[name] = halves(tensor, heads[part]) if part in heads else tensor
        return _differences(found | there, wanted, path)

    def _graph(self, folder: Path) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        read = open_gguf(folder)
        config = read.config | {"rope_parameters": {"rope_type": "default", "rope_theta": read.config["rope_theta"]}}
        return OFFICIAL, config, read.tensors

    def engines(self, folder: Path, errors: list[str]) -> dict[str, Any]:
        words = ["llama-server", "-m", str(folder / TARGET_NAME), "--spec-type", "draft-eagle3"]
        words += ["--spec-draft-model", str(folder / DRAFTER_NAME)]
        words += ["--spec-draft-n-max", str(self.native.graph["ttt_steps"])]
        found = {"loads": not errors, "reasons": list(errors), "command": None if errors else shlex.join(words)}
        return {"llama.cpp": found}


def _rounded(value: Any) -> Any:
    """A number as GGUF keeps it, in 32 bits."""
    return float(torch.tensor(value, dtype=torch.float32)) if isinstance(value, float) else value


def _differences(found: dict[str, Tensor], wanted: dict[str, Tensor], where: Path) -> list[str]:
    """Every tensor that is missing, unknown or of other numbers; the files keep numbers in the target's dtype."""
    errors = []
    for name in sorted(set(found) | set(wanted)):
        if name not in found:
            errors.append(f"{where}: tensor {name} is missing")
        elif name not in wanted:
            errors.append(f"{where}: tensor {name} is not part of this dialect")
        elif found[name].shape != wanted[name].shape or not torch.equal(found[name].float(), wanted[name].float()):
            errors.append(f"{where}: tensor {name} holds other numbers than what it was written from")
    return errors


def verify_folder(folder: Path, target: Target, probe: Path) -> dict[str, Any]:
    """What is found: {folder, round_trip, errors, probe, engines} as drafters.export.verify.verify_folder has it."""
    checker = GgufChecker(Native.read(probe, target), DIALECT)
    errors = checker.errors(folder)
    replayed: dict[str, Any] = {"max_difference": None, "accepted": None}
    if not errors:
        replayed = checker.replay(folder, errors)
    engines = checker.engines(folder, errors)
    return {"folder": str(folder), "round_trip": not errors, "errors": errors, "probe": replayed, "engines": engines}


def main(argv: list[str] | None = None) -> int:
    """Check one folder, write what was found as JSON, and return 0 where nothing is wrong with it, else 1."""
    parser = argparse.ArgumentParser(prog="python -m drafters.export.verify_gguf", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dialect", required=True, choices=[DIALECT])
    parser.add_argument("--target", required=True, help="the target's folder or hub id")
    parser.add_argument("--probe", type=Path, required=True, help="the native export the folder was written from")
    parser.add_argument("--json", type=Path, required=True, help="where to write what was found")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        target = Target.load(TargetConfig(name=Path(args.target).name, path=args.target))
        found = verify_folder(args.folder, target, args.probe)
    except OutriderError as error:
        log.error("%s", error)
        return 1
    artifacts.atomic_write_json(args.json, found)
    for error in found["errors"]:
        log.error("%s", error)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
