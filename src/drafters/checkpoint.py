"""Training checkpoints: weights, optimiser, position and random state in one atomic folder, no pickle anywhere."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.artifacts import read_manifest, settle, verify_folder, write_folder
from drafters.contract import CONTRACT_NAME, Contract, read_contract
from drafters.errors import ArtifactError, ContractError
from drafters.models.base import Drafter

log = logging.getLogger(__name__)

KIND = "checkpoint"
WEIGHTS = "drafter.safetensors"
STATE = "state.json"
RANDOM = "random.safetensors"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `step` optimiser steps are done; `run` holds the settings every one of them depended on.

    seconds, cpu_seconds: time the steps took, see TrainingFacts; None in a checkpoint older than these fields.
    """

    step: int
    best_value: float | None
    best_step: int | None
    run: dict[str, Any]
    seconds: float | None = None
    cpu_seconds: float | None = None

    def check(self, run: dict[str, Any], where: str) -> None:
        """Refuse with ContractError at the first setting that differs between this checkpoint and the run now."""
        for name in [*self.run, *(name for name in run if name not in self.run)]:
            saved, now = self.run.get(name, "absent"), run.get(name, "absent")
            if saved != now:
                raise ContractError(
                    f"{where} was trained with {name}={saved!r}, this run has {now!r}: going on would be neither run. "
                    f"Set {name} as it was, or start over with resume=never (init_from={where} keeps the weights)."
                )


def _shard_name(rank: int, world_size: int) -> str:
    return f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def weights_of(drafter: Drafter) -> dict[str, Tensor]:
    """Return the drafter's own tensors as independent CPU copies."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in drafter.own_state().items()}


def save(
    dest: Path,
    weights: dict[str, Tensor],
    progress: Progress,
    contract: Contract,
    optimizer: dict[str, Tensor] | None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Write a checkpoint folder; every rank calls it, each with its own optimiser tensors, rank 0 with the weights.

    Without `optimizer` the folder holds weights only: fit for an export or init_from, not for resuming.
    """
    staging = dest.parent / f".{dest.name}.shards"
    if optimizer is not None:
        staging.mkdir(parents=True, exist_ok=True)
        save_file(optimizer, staging / _shard_name(rank, world_size))
        save_file(_random_state(), staging / f"{rank:05d}.{RANDOM}")
    barrier()
    if rank == 0:

        def write(folder: Path) -> None:
            save_file(weights, folder / WEIGHTS)
            (folder / STATE).write_text(json.dumps(asdict(progress), indent=2) + "\n", encoding="utf-8")
            (folder / CONTRACT_NAME).write_text(json.dumps(contract.to_json(), indent=2) + "\n", encoding="utf-8")
            if optimizer is not None:
                for index in range(world_size):
                    for name in (_shard_name(index, world_size), f"{index:05d}.{RANDOM}"):
                        os.replace(staging / name, folder / name)

        try:
            write_folder(dest, write, KIND, {"step": progress.step, "world_size": world_size})
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    barrier()


def find(folder: Path) -> Path | None:
    """Return `folder` when it holds a checkpoint, whole and unchanged; None when there is none at all.

    Raises ArtifactError naming the damaged file: going back to an older state unasked would hide the damage.
    """
    settle(folder)
    if not folder.exists():
        return None
    verify_folder(folder, KIND)
    return folder


def load_weights(folder: Path, drafter: Drafter) -> None:
    """Fill the drafter from a checkpoint; raises ArtifactError naming a missing, unknown or misshapen tensor."""
    tensors = load_file(folder / WEIGHTS)
    state = drafter.own_state()
    for name in [*state, *(name for name in tensors if name not in state)]:
        expected = tuple(state[name].shape) if name in state else "no such tensor"
        found = tuple(tensors[name].shape) if name in tensors else "no such tensor"
        if expected != found:
            raise ArtifactError(
                f"{folder / WEIGHTS}: {name} is {found}, the drafter has {expected}. "
                "Set the drafter options it was trained with, or resume=never."
            )
        state[name].copy_(tensors[name])


def load_progress(folder: Path, contract: Contract, run: dict[str, Any]) -> Progress:
    """Read where a run stands; ContractError when the checkpoint belongs to another target, drafter, data or plan."""
    read_contract(folder).compare(contract, str(folder))
    progress = Progress(**json.loads((folder / STATE).read_text(encoding="utf-8")))
    progress.check(run, str(folder))
    return progress


def load_optimizer(folder: Path, rank: int, world_size: int) -> dict[str, Tensor]:
    """Read this rank's optimiser tensors and set the random state; ContractError on another number of ranks."""
    manifest = read_manifest(folder, KIND)
    saved = manifest.meta["world_size"]
    if saved != world_size:
        raise ContractError(
            f"{folder} was saved by world_size={saved} processes, this run has {world_size}. "
            f"Start it with torchrun --nproc_per_node {saved}, or resume=never init_from={folder}."
        )
    name = _shard_name(rank, world_size)
    if name not in manifest.files:
        raise ArtifactError(f"{folder} holds weights only, no {name}. Set resume=never init_from={folder}.")
    states = load_file(folder / f"{rank:05d}.{RANDOM}")
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return load_file(folder / name)
