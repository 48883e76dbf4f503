"""The drafter a training run begins with: a new one, or the weights of an export or checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

import torch

from drafters import checkpoint
from drafters.artifacts import read_manifest, verify_folder
from drafters.config import TrainRun
from drafters.contract import Contract, read_contract, require_equal
from drafters.corpus import ResponseRecord
from drafters.export.native import KIND, build, load_drafter, shape_of
from drafters.models import FAMILIES, Drafter
from drafters.target import Target
from drafters.vocab import build as build_vocab
from drafters.vocab import count_tokens
from runtime.loading import tuned_target


def make_drafter(run: TrainRun, target: Target, records: Sequence[ResponseRecord]) -> Drafter:
    """A drafter ready to train, on the target's device: from init_from, or new with the vocabulary of all records."""
    if run.init_from is not None:
        return _init_from(run, target)
    torch.manual_seed(run.trainer.seed)
    family = FAMILIES[run.drafter.family]
    drafter = family(family.shape_for(run.drafter, target))
    vocab = build_vocab(count_tokens(records, target.vocab_size), run.drafter.draft_vocab_size, target.eos_ids)
    drafter.bind_vocab(vocab.d2t, vocab.t2d)
    drafter.to(target.device)
    drafter.bind(target)
    return drafter


def _init_from(run: TrainRun, target: Target) -> Drafter:
    """Weights and draft vocabulary of an export or a checkpoint; raises ContractError when they do not fit the run."""
    folder = Path(run.init_from).expanduser()
    where = f"init_from={run.init_from}"
    contract = read_contract(folder)
    family = FAMILIES[run.drafter.family]
    first = contract.family == family.first_stage
    if not first:
        require_equal("family", contract.family, run.drafter.family, where)
    require_equal("tap_indices", tuple(contract.tap_indices), family.taps_for(run.drafter, target), where)
    asked, found = family.shape_for(run.drafter, target), shape_of(contract, where)
    shared = {each.name for each in fields(found)}
    wanted = {name: value for name, value in asdict(asked).items() if name in shared}
    require_equal("graph", asdict(found), wanted, where)
    weights = _weights(folder, contract, target, where)
    if not first:
        return weights.float().requires_grad_(True)
    torch.manual_seed(run.trainer.seed)
    drafter = family(asked)
    drafter.bind_vocab(weights.d2t, weights.t2d)
    drafter.load_state_dict(weights.own_state(), strict=False)
    drafter.to(target.device)
    drafter.bind(target)
    return drafter


def _weights(folder: Path, contract: Contract, target: Target, where: str) -> Drafter:
    if read_manifest(folder).kind == KIND:
        drafter, _ = load_drafter(folder, tuned_target(target, folder))
        drafter.bind(target)
        return drafter
    contract.check_target(target, where)
    verify_folder(folder, checkpoint.KIND)
    drafter = build(contract)
    checkpoint.load_weights(folder, drafter)
    drafter.to(target.device)
    drafter.bind(target)
    return drafter
