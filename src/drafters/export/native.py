"""The native export of every family: a sealed folder in its ecosystem's own names, with contract and probe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters import artifacts
from drafters.adapter import FOLDER as ADAPTER_FOLDER
from drafters.adapter import Adapter
from drafters.contract import CONTRACT_NAME, Contract, make_contract, read_contract, require_equal
from drafters.drift import DRIFT_NAME
from drafters.errors import ArtifactError, ContractError
from drafters.export.card import DataSummary, model_card
from drafters.export.dialect import CONFIG_NAME, DIALECTS, EXPORT_DTYPE, VOCAB_NAME, Dialect
from drafters.export.probe import PROBE_NAME, Probe, check_probe, make_probe, read_tensors
from drafters.export.source import WEIGHTS_NAME, write_index
from drafters.models import FAMILIES
from drafters.models.base import Drafter, DrafterShape
from drafters.target import Target
from drafters.vocab import DraftVocab

KIND = "export"
MEASURED_NAME = "measured.json"  # Drafter.measured, where it is not empty
FEATURE_SHIFT = 1
_INTEGER_TENSORS = {"d2t": torch.int64, "t2d": torch.bool}


def describe_drafter(
    drafter: Drafter, target: Target, *, taps: tuple[int, ...], steps: int, max_length: int
) -> Contract:
    """Return the contract of a drafter with its draft vocabulary bound; taps are `hidden_states` indices."""
    return make_contract(
        target,
        family=drafter.family,
        graph=drafter.graph(drafter.shape, steps),
        tap_indices=taps,
        rope=drafter.rope(drafter.shape),
        max_length=max_length,
        draft_vocab_sha256=DraftVocab(drafter.d2t.cpu(), drafter.t2d.cpu()).sha256(),
        feature_shift=FEATURE_SHIFT,
    )


def export_drafter(
    drafter: Drafter,
    target: Target,
    contract: Contract,
    dest: Path,
    *,
    command: str,
    data: DataSummary | None = None,
    report: dict[str, Any] | None = None,
    beside: Mapping[str, dict[str, Any]] | None = None,
) -> Path:
    """Write the drafter as a sealed folder of kind 'export' (bf16) and return its absolute path.

    beside: further JSON files to seal in, by name. The adapter of a tuned target is kept with the drafter.
    The weights are read back and compared bit for bit, and the probe is made from what was read back.
    Raises ContractError when contract, drafter and target do not agree, ArtifactError on non-finite weights.
    """
    contract.check_target(target)
    contract.check_adapter(target)
    shape = shape_of(contract)
    require_equal("family", contract.family, drafter.family, CONTRACT_NAME)
    require_equal("graph", asdict(shape), asdict(drafter.shape), CONTRACT_NAME)
    dialect = DIALECTS[contract.family]
    tensors = _export_tensors(drafter)
    _check_tensors(tensors, contract, dialect.weights)
    _check_vocab(tensors, contract, dialect.weights)

    def write(folder: Path) -> None:
        files = _files(tensors, dialect)
        files[dialect.weights] |= dialect.repeated(contract, target)
        for name, part in files.items():
            save_file(part, folder / name, metadata={"format": "pt"})
        if dialect.weights == WEIGHTS_NAME:
            write_index(folder, list(files[WEIGHTS_NAME]))
        dialect.complete(folder, target)
        read_back = stored_tensors(folder, contract, target)
        _check_same_bits(tensors, read_back, folder / dialect.weights)
        for name, config in dialect.configs(contract, target).items():
            artifacts.atomic_write_json(folder / name, config)
        more = {MEASURED_NAME: drafter.measured} if drafter.measured else {}
        for name, content in (more | dict(beside or {})).items():
            artifacts.atomic_write_json(folder / name, content)
        if target.adapter is not None:
            target.adapter.save(folder / ADAPTER_FOLDER, contract.target)
            read_again = Adapter.read(folder / ADAPTER_FOLDER).sha256
            require_equal("adapter_sha256", read_again, contract.adapter_sha256, str(folder / ADAPTER_FOLDER))
        artifacts.atomic_write_json(folder / CONTRACT_NAME, contract.to_json())
        probe = make_probe(_build(contract, read_back, target), target, contract.tap_indices)
        probe.save(folder / PROBE_NAME, contract)
        card = model_card(contract, target.config.license, command, data, report, (beside or {}).get(DRIFT_NAME))
        (folder / "README.md").write_text(card, encoding="utf-8")

    return artifacts.write_folder(dest, write, KIND, {"family": contract.family})


def load_drafter(folder: Path, target: Target) -> tuple[Drafter, Contract]:
    """Load an export for `target`, in the target's dtype and on its device, with what it borrows bound.

    Checks in this order and stops at the first failure: manifest (ArtifactError naming the file), contract,
    target and config.json (ContractError naming the field), tensors (ArtifactError naming the tensor), probe.
    """
    folder = Path(folder)
    manifest = artifacts.verify_folder(folder, KIND)
    contract = read_contract(folder)
    where = str(folder / CONTRACT_NAME)
    contract.check_target(target, where)
    contract.check_adapter(target, where)
    shape_of(contract, where)
    _check_config(folder / CONFIG_NAME, contract, target)
    tensors = stored_tensors(folder, contract, target)
    _check_tensors(tensors, contract, str(folder / DIALECTS[contract.family].weights))
    _check_vocab(tensors, contract, where)
    drafter = _build(contract, tensors, target)
    if MEASURED_NAME in manifest.files:
        drafter.measured = _read_json(folder / MEASURED_NAME)
        drafter.check_measured(str(folder / MEASURED_NAME))
    probe = Probe.read(folder / PROBE_NAME)
    check_probe(probe, drafter, target, contract.tap_indices)
    probe.check_contract(contract, where)
    return drafter, contract


def shape_of(contract: Contract, where: str = CONTRACT_NAME) -> DrafterShape:
    """Return the drafter shape a contract records; ContractError names a field this code cannot run."""
    if contract.family not in FAMILIES:
        raise ContractError(
            f"{where}: family is {contract.family!r}, this code runs {', '.join(FAMILIES)}. "
            "Use the Outrider version that wrote it."
        )
    require_equal("feature_shift", contract.feature_shift, FEATURE_SHIFT, where)
    _check_types(contract, where)
    shape = FAMILIES[contract.family].shape_from(contract.graph, contract.rope, where)
    if "num_taps" in contract.graph:
        require_equal("graph.num_taps", contract.graph["num_taps"], len(contract.tap_indices), where)
    return shape


_JSON_KINDS = {"int": int, "float": float, "bool": bool, "None": type(None)}
_JSON_KINDS |= {"dict[str, Any]": dict, "dict[str, list[int]]": dict}


def _check_types(contract: Contract, where: str) -> None:
    """A size of another type would fail far from here, or compute the same and be written otherwise."""
    for each in fields(FAMILIES[contract.family].shape_type):
        value = contract.graph.get(each.name)
        kinds = [_JSON_KINDS[name] for name in each.type.split(" | ")]
        # Python counts True as 1.
        if each.name in contract.graph and type(value) not in kinds + [int] * (float in kinds):
            raise ContractError(
                f"{where}: graph.{each.name} is {value!r}, expected a JSON {each.type}. The record was edited: "
                "copy the folder again, or export it again."
            )


def build(contract: Contract) -> Drafter:
    """A drafter of the recorded shape, untrained and unbound."""
    return FAMILIES[contract.family](shape_of(contract))


def _files(tensors: dict[str, Tensor], dialect: Dialect) -> dict[str, dict[str, Tensor]]:
    """Which file holds which tensor, under the ecosystem's names."""
    if dialect.vocab_inside:
        return {dialect.weights: {dialect.rename(name): tensor for name, tensor in tensors.items()}}
    vocab = {name: tensors[name] for name in _INTEGER_TENSORS}
    rest = {dialect.rename(name): tensor for name, tensor in tensors.items() if name not in vocab}
    return {dialect.weights: rest, VOCAB_NAME: vocab}


def stored_tensors(folder: Path, contract: Contract, target: Target) -> dict[str, Tensor]:
    """The tensors of an export under the drafter's own names; those it does not know keep the file's.

    Raises ArtifactError when the file repeats a tensor of the target in another form than the target has it.
    """
    dialect = DIALECTS[contract.family]
    own = {dialect.rename(name): name for name in _expected(contract)}
    found, _ = read_tensors(folder / dialect.weights)
    for name, theirs in dialect.repeated(contract, target).items():
        mine = found.pop(name, None)
        if mine is None or mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            raise ArtifactError(
                f"{folder / dialect.weights}: tensor {name} is missing or not the target's own. Copy the folder again, "
                "or export it again."
            )
    tensors = {own.get(name, name): tensor for name, tensor in found.items()}
    if not dialect.vocab_inside:
        tensors |= read_tensors(folder / VOCAB_NAME)[0]
    return tensors


def _expected(contract: Contract) -> dict[str, Tensor]:
    """The tensors an export of this contract has, without their numbers."""
    with torch.device("meta"):
        return build(contract).exported_state()


def _check_config(path: Path, contract: Contract, target: Target) -> None:
    """Engines build the graph from config.json, we from contract.json: they must say the same."""
    found = _read_json(path)
    expected = DIALECTS[contract.family].configs(contract, target)[path.name]
    # Which id ends a text is the target's business and changes no number of the drafter.
    for key in sorted((set(found) | set(expected)) - {"bos_token_id", "eos_token_id"}):
        mine, theirs = found.get(key, "absent"), expected.get(key, "absent")
        # As JSON: for Python 1, 1.0 and true are equal, for another loader they may not be.
        if json.dumps(mine, sort_keys=True) != json.dumps(theirs, sort_keys=True):
            raise ContractError(
                f"{path}: {key} is {mine!r}, {CONTRACT_NAME} says {theirs!r}. One of them was edited: copy "
                "the folder again, or export it again."
            )


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ArtifactError(f"{path} is missing. Copy the folder again, or export it again.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(
            f"{path} is not JSON ({error}). Copy the folder again, or export it again."
        ) from error


def _export_tensors(drafter: Drafter) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in drafter.exported_state().items():
        dtype = _INTEGER_TENSORS.get(name, EXPORT_DTYPE)
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return tensors


def _check_tensors(tensors: dict[str, Tensor], contract: Contract, where: str) -> None:
    """Nothing missing, nothing unused, every shape and dtype as the graph says, every number finite."""
    expected = _expected(contract)
    for name in sorted(set(expected) | set(tensors)):
        renamed = name in expected and name not in _INTEGER_TENSORS
        inside = DIALECTS[contract.family].rename(name) if renamed else name
        called = f"In the file it is {inside}. " if inside != name else ""
        remedy = f"{called}The folder is damaged or of another drafter: copy it again, or export it again."
        if name not in tensors:
            raise ArtifactError(f"{where}: tensor {name} is missing. {remedy}")
        if name not in expected:
            raise ArtifactError(f"{where}: tensor {name} is not part of this graph. {remedy}")
        tensor, size = tensors[name], list(expected[name].shape)
        if list(tensor.shape) != size:
            raise ArtifactError(
                f"{where}: tensor {name} has shape {list(tensor.shape)}, expected {size}. {remedy}"
            )
        dtype = _INTEGER_TENSORS.get(name, EXPORT_DTYPE)
        if tensor.dtype != dtype:
            raise ArtifactError(f"{where}: tensor {name} is {tensor.dtype}, expected {dtype}. {remedy}")
        if not bool(torch.isfinite(tensor).all()):
            raise ArtifactError(
                f"{where}: tensor {name} holds NaN or infinity. {called}Train from an earlier checkpoint."
            )


def _check_vocab(tensors: dict[str, Tensor], contract: Contract, where: str) -> None:
    digest = DraftVocab(tensors["d2t"], tensors["t2d"]).sha256()
    require_equal("draft_vocab_sha256", contract.draft_vocab_sha256, digest, where)


def _check_same_bits(written: dict[str, Tensor], read: dict[str, Tensor], path: Path) -> None:
    for name in sorted(set(written) | set(read)):
        same = name in written and name in read and written[name].dtype == read[name].dtype
        if not (same and torch.equal(written[name].view(torch.uint8), read[name].view(torch.uint8))):
            raise ArtifactError(
                f"{path}: tensor {name} reads back other than written. Check the disk and run again."
            )


def _build(contract: Contract, tensors: dict[str, Tensor], target: Target) -> Drafter:
    return fill(build(contract), tensors, target)


def fill(drafter: Drafter, tensors: dict[str, Tensor], target: Target) -> Drafter:
    """Set what `tensors` names, every other parameter to NaN, cast to the target's dtype, bind what is borrowed."""
    drafter.bind_vocab(tensors["d2t"], tensors["t2d"])
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.fill_(float("nan"))
            if name in tensors:
                parameter.copy_(tensors[name])
    drafter.to(target.device, target.dtype)
    drafter.bind(target)
    return drafter.eval()
