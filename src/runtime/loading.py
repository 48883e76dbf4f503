"""From names and folders to a ready engine."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

from drafters.adapter import FOLDER, Adapter
from drafters.config import TargetConfig
from drafters.drafter_path import DrafterPart, parse_drafter_path
from drafters.errors import ConfigError
from drafters.export.native import load_drafter
from drafters.models import Drafter
from drafters.models.heads import HeadsDrafter
from drafters.models.small import SmallDrafter
from drafters.public.hub import hub_folder
from drafters.public.load import is_public, is_small, load_public
from drafters.target import Target
from runtime.calibration import Calibration
from runtime.engine import Engine, EngineConfig
from runtime.packing import prepare
from runtime.proposers.base import Proposer
from runtime.proposers.eagle import EagleProposer
from runtime.proposers.heads import HeadsProposer
from runtime.proposers.merge import MergeProposer
from runtime.proposers.ngram import NgramProposer
from runtime.proposers.none import NoneProposer
from runtime.proposers.random import RandomProposer
from runtime.proposers.recycle import RecycleProposer
from runtime.proposers.small import SmallProposer, distilled, load_small
from runtime.proposers.suffix import SuffixProposer

log = logging.getLogger(__name__)


def load_target(target: Target | TargetConfig | str | Path) -> Target:
    """A Target as it is, or one loaded from a config, a folder or a hub id."""
    if isinstance(target, Target):
        return target
    if isinstance(target, TargetConfig):
        return Target.load(target)
    return Target.load(TargetConfig(name=Path(str(target)).name, path=str(target)))


def tuned_target(target: Target, drafter: object) -> Target:
    """The target as a drafter drafts for it: itself, or tuned by the adapter that the drafter brings.

    drafter: as for load_proposer. `target` and its engines stay as they are. Raises ConfigError when the drafters of a
    path bring different adapters, TargetError when the target is tuned by another one already.
    """
    if isinstance(drafter, tuple):
        drafter = drafter[0]
    if isinstance(drafter, Drafter):
        return drafter.tuned(target)
    if drafter is None or isinstance(drafter, Proposer):
        return target
    adapter = adapter_of(str(drafter))
    if adapter is None:
        return target
    tuned = target.with_adapter(adapter)
    if tuned is not target:
        log.info("target: %s, from %s: all text is the tuned target's", tuned.title, drafter)
    return tuned


def adapter_of(path: str) -> Adapter | None:
    """The adapter that the drafters of a drafter.path bring; ConfigError where they bring different ones."""
    folders = [folder_of(part) for part in parse_drafter_path(path) if part.kind in ("export", "hub")]
    adapters = {folder: Adapter.read(folder / FOLDER) for folder in folders if (folder / FOLDER).is_dir()}
    if not adapters:
        return None
    first, *others = adapters
    for other in others:
        if adapters[other].sha256 != adapters[first].sha256:
            raise ConfigError(
                f"drafter.path={path}: {first} tunes the target by adapter {adapters[first].sha256[:12]}, {other} "
                f"by {adapters[other].sha256[:12]}: there is one target. Leave one of them out."
            )
    return adapters[first]


def folder_of(part: DrafterPart) -> Path:
    """The folder of a part that is no built-in way of proposing; ArtifactError where its hub id cannot be had."""
    return part.folder if part.hub_id is None else hub_folder(part.hub_id)


def load_proposer(
    drafter: object, target: Target, config: EngineConfig, calibration: Calibration | None = None
) -> Proposer:
    """A proposer from a drafter.path (see parse_drafter_path), a drafter, or a Proposer as it is.

    A Drafter is copied; (drafter, taps) says which hidden_states it taps, alone it taps its family's usual ones.
    calibration: what a merged tree is ranked by; pass the engine's own, or its counts stay empty. Raises ConfigError,
    ArtifactError, ContractError, TargetError.
    """
    if isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, Drafter):
        drafter = (drafter, drafter.usual_taps(target.num_layers))
    if isinstance(drafter, tuple):
        model, taps = drafter
        members = [_trained(model.clone(), taps, target, config)]
    else:
        parts = parse_drafter_path("none" if drafter is None else str(drafter))
        members = [_from_part(part, target, config) for part in parts]
    if len(members) > 1:
        found = MergeProposer(members, Calibration() if calibration is None else calibration)
    else:
        found = members[0]
    if config.tree == "static":
        _check_static(found)
    return found


def _check_static(proposer: Proposer) -> None:
    measured = isinstance(proposer, HeadsProposer) and proposer.chances
    if not (measured or isinstance(proposer, NoneProposer)):
        raise ConfigError(
            "runtime.tree=static needs one drafter whose heads were measured on held-out text: an export of "
            f"drafter=medusa or drafter=hydra, trained on 20 records or more. Here it is {proposer.name}, without such "
            "a measurement. Set runtime.tree=dynamic."
        )


def _from_part(part: DrafterPart, target: Target, config: EngineConfig) -> Proposer:
    if part.kind == "small":
        return _small(part.folder, target, config)
    if part.kind in ("export", "hub"):
        folder = folder_of(part)
        public = is_public(folder)
        if public and is_small(folder):
            return _small(folder, target, config)
        model, contract = (load_public if public else load_drafter)(folder, target)
        log.info("drafter: %s (%s)", folder, contract.family)
        return _trained(model, contract.tap_indices, target, config, model.deepest(contract.graph))
    return {
        "none": NoneProposer,
        "ngram": NgramProposer,
        "suffix": SuffixProposer,
        "recycle": lambda: RecycleProposer(target.vocab_size),
        "random": lambda: RandomProposer(target.vocab_size),
    }[part.kind]()


def _small(folder: Path, target: Target, config: EngineConfig) -> SmallProposer:
    proposer = load_small(folder, target, config.top_k)
    with torch.device("meta"):  # of what is loaded some was laid out already
        proposer.weights = type(proposer.model.model)(proposer.model.model.config).num_parameters()
    longest = min(config.max_length or target.max_length, target.max_length)
    if proposer.model.max_length < longest:
        raise ConfigError(
            f"drafter.path small:{folder} reads at most {proposer.model.max_length} tokens, but runtime.max_length is "
            f"{longest}. Set runtime.max_length={proposer.model.max_length}."
        )
    return proposer


def _trained(
    model: Drafter, taps: tuple[int, ...], target: Target, config: EngineConfig, deepest: int | None = None
) -> Proposer:
    """The proposer of a trained drafter, which is laid out for decoding; deepest: see Drafter.deepest."""
    model.to(target.device, target.dtype).eval().requires_grad_(False)
    model.bind(target)
    model.for_decoding()
    weights = sum(tensor.numel() for tensor in model.exported_state().values() if tensor.is_floating_point())
    found = _laid_out(model, taps, target, config, deepest)
    found.weights = weights
    return found


def _laid_out(
    model: Drafter, taps: tuple[int, ...], target: Target, config: EngineConfig, deepest: int | None
) -> Proposer:
    if isinstance(model, SmallDrafter):
        return distilled(model, target, config.top_k)
    prepare(model)
    if isinstance(model, HeadsDrafter):
        return HeadsProposer(model, taps, config.top_k, config.depth, _accuracies(model, config))
    return EagleProposer(model, taps, config.top_k, config.depth, deepest)


def _accuracies(model: HeadsDrafter, config: EngineConfig) -> list[list[float]] | None:
    """What static trees are shaped by; None for dynamic ones, or where it was not measured."""
    if config.tree != "static" or model.accuracies is None:
        return None
    ranks = len(model.accuracies[0])
    if ranks < min(config.top_k, model.shape.draft_vocab_size):
        raise ConfigError(
            f"runtime.top_k is {config.top_k}, but the drafter's heads were measured for {ranks} ranks, which is what "
            f"runtime.tree=static goes by. Set runtime.top_k={ranks} or less, or runtime.tree=dynamic."
        )
    return model.accuracies


def load_engine(target: object, drafter: object = None, **settings: int) -> Engine:
    """See Engine.load; settings are EngineConfig's fields, an unknown one raises ConfigError."""
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = sorted(set(settings).difference(known))
    if unknown:
        raise ConfigError(f"runtime.{unknown[0]} is not a setting of the engine. Set one of {', '.join(known)}.")
    config = EngineConfig(**settings)
    loaded = tuned_target(load_target(target), drafter)
    calibration = Calibration()
    with torch.inference_mode(False):
        return Engine(loaded, load_proposer(drafter, loaded, config, calibration), config, calibration)
