"""Reopen an export, in a process of its own: read back, recomputed, judged by each engine's rules.

python -m drafters.export.verify FOLDER --dialect NAME --target PATH [--probe NATIVE_FOLDER] --json OUT
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from drafters import artifacts
from drafters.adapter import FOLDER as ADAPTER_FOLDER
from drafters.adapter import Adapter
from drafters.config import TargetConfig
from drafters.contract import CONTRACT_NAME, listed_weights, read_contract
from drafters.errors import ConfigError, OutriderError
from drafters.export.engines import ENGINES, Served, judge, open_folder
from drafters.export.expected import MEDUSA_FILE, TENSORS, Native, weights_name
from drafters.export.expected_config import FREE, differences, expected_configs
from drafters.export.expected_gguf import (
    DRAFTER,
    TARGET,
    as_official,
    expected_drafter,
    expected_fields,
    expected_target,
    gguf_command,
    read_gguf,
)
from drafters.export.native import load_drafter
from drafters.export.probe import (
    NEAR_TIE,
    PROBE_NAME,
    TOLERANCE_FP32,
    TOLERANCE_HALF,
    Probe,
    read_tensors,
)
from drafters.export.recompute import NATIVE, Run, first_logits, run_target
from drafters.target import Target

log = logging.getLogger(__name__)

NATIVE_DIALECT = "native"
DIALECT_KIND = "dialect"
GGUF = "gguf"
NO_GGUF = {"loads": False, "reasons": ["it reads no EAGLE-3 drafter from GGUF"], "command": None}
SMALL_STEPS = 3  # tokens a small model is asked for in a row: it has no steps of its own
_UNREADABLE = (OutriderError, SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError)


def verify_folder(folder: Path, dialect: str, target: Target, probe: Path | None = None) -> dict[str, Any]:
    """What is found in a folder: {folder, round_trip, errors, probe, engines}; see the module.

    probe: the native export that a dialect's folder was written from; a native folder is its own. errors: in words,
    each tensor, field or file that is not as it was written; round_trip: there is none. probe: max_difference, the
    worst rms difference of recomputed logits over their spread, and the accepted count of each text; both None where
    the folder does not read back. Raises ConfigError for a dialect it does not know or a dialect's folder without
    `probe`, and what reading the native export raises.
    """
    folder, source = Path(folder), _source(Path(folder), dialect, probe)
    if (source / ADAPTER_FOLDER).is_dir():
        target = target.with_adapter(Adapter.read(source / ADAPTER_FOLDER))
    checker = Checker(Native.read(source, target), dialect)
    errors = checker.errors(folder)
    replayed: dict[str, Any] = {"max_difference": None, "accepted": None}
    if not errors:
        with _told(errors, folder):
            replayed = checker.replay(folder, errors)
    engines = checker.engines(folder, errors)
    return {"folder": str(folder), "round_trip": not errors, "errors": errors, "probe": replayed, "engines": engines}


def _source(folder: Path, dialect: str, probe: Path | None) -> Path:
    known = [NATIVE_DIALECT, *TENSORS, GGUF]
    if dialect not in known:
        raise ConfigError(f"--dialect is {dialect!r}. Set it to one of {', '.join(known)}.")
    if dialect == NATIVE_DIALECT:
        return folder
    if probe is None:
        raise ConfigError(
            f"--probe is missing: a folder of dialect {dialect} says nothing of the drafter's numbers. Set it to the "
            "native export that the folder was written from."
        )
    return Path(probe)


@contextmanager
def _told(errors: list[str], folder: Path) -> Iterator[None]:
    """Turn what stops a check into an error of the folder."""
    try:
        yield
    except OutriderError as error:
        errors.append(str(error))
    except _UNREADABLE as error:
        errors.append(f"{folder}: {type(error).__name__} {error}. Export it again.")


# ---- what is in the folder


@dataclass(frozen=True)
class Checker:
    """What folders of one dialect are held against: the native export they were written from."""

    native: Native
    dialect: str

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a folder must hold."""
        return TENSORS[self.dialect](self.native)

    @cached_property
    def configs(self) -> dict[str, dict[str, Any]]:
        """Every JSON file that engines read, by name."""
        return expected_configs(self.dialect, self.native)

    @cached_property
    def probe(self) -> Probe:
        """The numbers that the drafter is known by."""
        return Probe.read(self.native.folder / PROBE_NAME)

    @cached_property
    def run(self) -> Run:
        """What the target computes on the probe's texts."""
        return run_target(self.native.target, self.probe.ids)

    def errors(self, folder: Path) -> list[str]:
        """In words, each file, field and tensor that is not as it was written."""
        errors: list[str] = []
        own = self.dialect == NATIVE_DIALECT
        with _told(errors, folder):
            artifacts.verify_folder(folder, "export" if own else DIALECT_KIND)
        if own:
            with _told(errors, folder):
                load_drafter(folder, self.native.target)
            with _told(errors, folder):
                Probe.read(folder / PROBE_NAME).check_contract(read_contract(folder), str(folder / CONTRACT_NAME))
            with _told(errors, folder):
                errors += _ends(folder, self.native)
            return errors
        if self.dialect == GGUF:
            with _told(errors, folder):
                errors += gguf_errors(folder, self.native)
            return errors
        with _told(errors, folder):
            errors += self._config_errors(folder)
        with _told(errors, folder):
            errors += _tensor_errors(read_folder(folder, weights_in(self.dialect)), self.tensors, str(folder))
        return errors

    def _config_errors(self, folder: Path) -> list[str]:
        errors: list[str] = []
        present = {each.name for each in folder.glob("config*.json")}
        for name in sorted(present | set(self.configs)):
            where = str(folder / name)
            if name not in self.configs:
                errors.append(f"{where} is a file this dialect does not have")
            elif name not in present:
                errors.append(f"{where} is missing")
            else:
                found = json.loads((folder / name).read_text(encoding="utf-8"))
                errors += differences(found, self.configs[name], where, FREE.get(self.dialect, {}))
        return errors

    # ---- the probe, recomputed

    def replay(self, folder: Path, errors: list[str]) -> dict[str, Any]:
        """Recompute the probe from the folder's own tensors and config; adds to errors what differs."""
        probe, target, kept = self.probe, self.native.target, self.native.kept_ids
        logits, ids = first_logits(*self._graph(folder), self.run)
        place = torch.full((target.vocab_size,), -1)
        place[ids.cpu()] = torch.arange(len(ids))
        lacking = kept[place[kept] < 0]
        if len(lacking):
            errors.append(f"{folder}: id {int(lacking[0])} of the draft vocabulary has no logit in this folder")
            return {"max_difference": None, "accepted": None}
        logits = logits.cpu()[..., place[kept]]
        worst = _gap(logits[..., probe.columns], probe.logits)
        exact = probe.dtype == "float32" and target.dtype == torch.float32
        allowed = TOLERANCE_FP32 if exact else TOLERANCE_HALF
        if not worst <= allowed:
            errors.append(f"{folder}: recomputed logits differ from the probe's by {worst:.3g}, allowed {allowed}")
        hits = kept[logits.argmax(-1)] == self.run.choices[:, 1:].cpu()
        clear = probe.margin > NEAR_TIE * allowed
        if bool((clear & (hits != probe.hits)).any()):
            counts = hits.sum(-1).tolist(), probe.accepted.tolist()
            errors.append(f"{folder}: {counts[0]} positions accepted, the probe has {counts[1]}")
        return {"max_difference": worst if worst == worst else None, "accepted": hits.sum(-1).tolist()}

    def _graph(self, folder: Path) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
        """Which graph to compute, by which config, of which tensors."""
        native = self.native
        if self.dialect == GGUF:
            return "eagle3", *as_official(*read_gguf(folder / DRAFTER))
        if self.dialect != NATIVE_DIALECT:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return self.dialect, config, read_folder(folder, weights_in(self.dialect))
        graph, config = native.graph, native.config
        if native.contract.family == "hydra" and graph["prefix"]:  # its config.json has no sizes of the prefix layer
            config = config | {"num_attention_heads": graph["num_attention_heads"]}
            config |= {"num_key_value_heads": graph["num_kv_heads"], "rope_parameters": native.contract.rope}
            config |= {key: graph[key] for key in ("head_dim", "rms_norm_eps", "max_position_embeddings")}
        return NATIVE[native.contract.family], config, native.tensors

    # ---- engines

    def engines(self, folder: Path, errors: list[str]) -> dict[str, Any]:
        """Each engine's verdict as JSON values; adds to errors what keeps the folder from being read at all."""
        if self.dialect == GGUF:
            command = None if errors else gguf_command(folder, served(self.native).steps)
            verdict = {"loads": not errors, "reasons": errors[:1], "command": command}
            return {engine: NO_GGUF for engine in ENGINES} | {"llama.cpp": verdict}
        own = self.dialect == NATIVE_DIALECT
        family = self.native.contract.family
        name, weights = (NATIVE[family], weights_name(family)) if own else (self.dialect, weights_in(self.dialect))
        with _told(errors, folder):
            verdicts = judge(name, open_folder(folder, weights), served(self.native))
            return {engine: verdict.to_json() for engine, verdict in verdicts.items()}
        return {}


def weights_in(dialect: str) -> str:
    """The file of tensors of a dialect's folder."""
    return MEDUSA_FILE if dialect in ("medusa-v1", "medusa-v2") else "model.safetensors"


def read_folder(folder: Path, weights: str) -> dict[str, Tensor]:
    """Every tensor that engines would read: of the file, or of the shards that an index beside it lists."""
    tensors: dict[str, Tensor] = {}
    for name in listed_weights(folder, weights):
        tensors |= read_tensors(folder / name)[0]
    return tensors


def _tensor_errors(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> list[str]:
    errors = []
    for name in sorted(set(found) | set(expected)):
        if name not in found:
            errors.append(f"{where}: tensor {name} is missing")
        elif name not in expected:
            errors.append(f"{where}: tensor {name} is not part of this dialect")
        else:
            problem = _difference(found[name], expected[name])
            errors += [f"{where}: tensor {name} {problem}"] if problem else []
    return errors


def _difference(found: Tensor, expected: Tensor) -> str | None:
    if found.dtype != expected.dtype:
        return f"is {found.dtype}, expected {expected.dtype}"
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)}, expected {list(expected.shape)}"
    if torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)):
        return None
    finite = bool(torch.isfinite(found).all())
    return "holds other numbers than the export it was written from" if finite else "holds NaN or infinity"


def gguf_errors(folder: Path, native: Native) -> list[str]:
    """In words, each tensor and field of a gguf dialect's two files that is not as it was written."""
    fields, tensors = read_gguf(folder / DRAFTER)
    there, weights = read_gguf(folder / TARGET)
    own = {name: value for name, value in fields.items() if not name.startswith(("tokenizer.", "general.name"))}
    errors = differences(own, expected_fields(native), f"{folder / DRAFTER}", {})
    # Both files hold the target's tokenizer.
    halves = [{key: value for key, value in each.items() if key.startswith("tokenizer.")} for each in (fields, there)]
    errors += differences(*halves, f"{folder / DRAFTER}", {})
    errors += _tensor_errors(tensors, expected_drafter(native), f"{folder / DRAFTER}")
    return errors + _tensor_errors(weights, expected_target(native), f"{folder / TARGET}")


def _ends(folder: Path, native: Native) -> list[str]:
    """The ids that begin and end a text: loading passes over them, as they change no number of the drafter."""
    family, tokenizer = native.contract.family, native.target.tokenizer
    if family in ("medusa", "medusa2", "hydra"):
        return []
    ends = list(native.target.eos_ids) if family == "small" else tokenizer.eos_token_id
    expected = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": ends}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return differences(
        {key: config[key] for key in expected if key in config}, expected, str(folder / "config.json"), {}
    )


def _gap(found: Tensor, recorded: Tensor) -> float:
    """The worst position's rms difference over the spread of what was recorded, both [N, L-1, C]."""
    distance = (found - recorded).pow(2).mean(-1).sqrt()
    return float((distance / recorded.std(-1).clamp_min(1e-12)).max())


def served(native: Native) -> Served:
    """What the engines' rules want to know of the target and of how the drafter was trained."""
    graph, target = native.graph, native.target
    own = native.weights.get("embed_tokens.weight")
    different = own is not None and (own.shape != native.embedding.shape or not torch.equal(own, native.embedding))
    return Served(
        name=native.target_names[0],
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        taps=tuple(native.contract.tap_indices),
        steps=graph.get("ttt_steps") or (SMALL_STEPS if native.contract.family == "small" else graph["num_heads"]),
        own_embedding=different,
    )


# ---- the command


def main(argv: list[str] | None = None) -> int:
    """Check one folder, write what was found as JSON, and return 0 where nothing is wrong with it, else 1."""
    parser = argparse.ArgumentParser(prog="python -m drafters.export.verify", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dialect", required=True)
    parser.add_argument("--target", required=True, help="the target's folder or hub id")
    parser.add_argument("--probe", type=Path, help="the native export a dialect's folder was written from")
    parser.add_argument("--json", type=Path, required=True, help="where to write what was found")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        target = Target.load(TargetConfig(name=Path(args.target).name, path=args.target))
        found = verify_folder(args.folder, args.dialect, target, args.probe)
    except OutriderError as error:
        log.error("%s", error)
        return 1
    artifacts.atomic_write_json(args.json, found)
    for error in found["errors"]:
        log.error("%s", error)
    for engine, verdict in found["engines"].items():
        log.info("%s: %s %s", engine, "loads" if verdict["loads"] else "does not load", "; ".join(verdict["reasons"]))
        if verdict["command"]:
            log.info("  %s", verdict["command"])
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
