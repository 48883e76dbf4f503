"""EAGLE-3 in the official names, readable by vLLM and SGLang (names: EAGLE eagle/model/cnets.py)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafters import artifacts
from drafters.contract import CONTRACT_NAME, Contract, make_contract, read_contract, require_equal
from drafters.errors import ArtifactError, ContractError
from drafters.export.card import DataSummary, model_card
from drafters.export.probe import PROBE_NAME, Probe, check_probe, make_probe, read_tensors
from drafters.models.eagle3 import Eagle3Drafter, Eagle3Shape
from drafters.target import Target, default_taps
from drafters.vocab import DraftVocab

KIND = "export"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
SGLANG_CONFIG_NAME = "config.sglang.json"
EXPORT_DTYPE = torch.bfloat16
FEATURE_SHIFT = 1
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_INTEGER_TENSORS = {"d2t": torch.int64, "t2d": torch.bool}


def describe_drafter(
    drafter: Eagle3Drafter, target: Target, *, taps: tuple[int, ...], ttt_steps: int, max_length: int
) -> Contract:
    """Return the contract of a drafter with its draft vocabulary bound; taps are `hidden_states` indices."""
    graph = asdict(drafter.shape)
    rope = {"rope_type": "default", "rope_theta": graph.pop("rope_theta")}
    return make_contract(
        target,
        family="eagle3",
        graph=graph | {"ttt_steps": ttt_steps},
        tap_indices=taps,
        rope=rope,
        max_length=max_length,
        draft_vocab_sha256=DraftVocab(drafter.d2t.cpu(), drafter.t2d.cpu()).sha256(),
        feature_shift=FEATURE_SHIFT,
    )


def export_eagle3(
    drafter: Eagle3Drafter,
    target: Target,
    contract: Contract,
    dest: Path,
    *,
    command: str,
    data: DataSummary | None = None,
    report: dict[str, Any] | None = None,
) -> Path:
    """Write the drafter as a sealed folder of kind 'export' (bf16) and return its absolute path.

    The weights are read back and compared bit for bit, and the probe is made from what was read back.
    Raises ContractError when contract, drafter and target do not agree, ArtifactError on non-finite weights.
    """
    contract.check_target(target)
    shape = shape_of(contract)
    require_equal("graph", asdict(shape), asdict(drafter.shape), CONTRACT_NAME)
    tensors = _official_tensors(drafter)
    _check_tensors(tensors, shape, WEIGHTS_NAME)
    _check_vocab(tensors, contract, WEIGHTS_NAME)

    def write(folder: Path) -> None:
        save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
        read_back, _ = read_tensors(folder / WEIGHTS_NAME)
        _check_same_bits(tensors, read_back, folder / WEIGHTS_NAME)
        for name, config in _configs(contract, target).items():
            artifacts.atomic_write_json(folder / name, config)
        artifacts.atomic_write_json(folder / CONTRACT_NAME, contract.to_json())
        make_probe(_build(shape, read_back, target), target, contract.tap_indices).save(folder / PROBE_NAME)
        card = model_card(contract, target.config.license, command, data, report)
        (folder / "README.md").write_text(card, encoding="utf-8")

    return artifacts.write_folder(dest, write, KIND, {"family": contract.family})


def load_eagle3(folder: Path, target: Target) -> tuple[Eagle3Drafter, Contract]:
    """Load an export for `target`, in the target's dtype and on its device, with its embedding bound.

    Checks in this order and stops at the first failure: manifest (ArtifactError naming the file), contract,
    target and config.json (ContractError naming the field), tensors (ArtifactError naming the tensor), probe.
    """
    folder = Path(folder)
    artifacts.verify_folder(folder, KIND)
    contract = read_contract(folder)
    where = str(folder / CONTRACT_NAME)
    contract.check_target(target, where)
    shape = shape_of(contract, where)
    _check_config(folder / CONFIG_NAME, contract, target)
    tensors, _ = read_tensors(folder / WEIGHTS_NAME)
    _check_tensors(tensors, shape, str(folder / WEIGHTS_NAME))
    _check_vocab(tensors, contract, where)
    drafter = _build(shape, tensors, target)
    check_probe(Probe.read(folder / PROBE_NAME), drafter, target, contract.tap_indices)
    return drafter, contract


def shape_of(contract: Contract, where: str = CONTRACT_NAME) -> Eagle3Shape:
    """Return the drafter shape a contract records; ContractError names a field this code cannot run."""
    require_equal("family", contract.family, "eagle3", where)
    require_equal("feature_shift", contract.feature_shift, FEATURE_SHIFT, where)
    wanted = set(Eagle3Shape.__dataclass_fields__) - {"rope_theta"} | {"ttt_steps"}
    for key in sorted(wanted ^ set(contract.graph)):
        problem = "is missing" if key in wanted else "is unknown to this code"
        raise ContractError(f"{where}: field graph.{key} {problem}. Use the Outrider version that wrote it.")
    if set(contract.rope) != {"rope_type", "rope_theta"} or contract.rope["rope_type"] != "default":
        raise ContractError(
            f"{where}: rope is {contract.rope}, this code runs rope_type 'default' with a rope_theta. Use "
            "the Outrider version that wrote it."
        )
    require_equal("graph.num_taps", contract.graph["num_taps"], len(contract.tap_indices), where)
    sizes = {key: value for key, value in contract.graph.items() if key != "ttt_steps"}
    return Eagle3Shape(**sizes, rope_theta=contract.rope["rope_theta"])


def official_config(contract: Contract, target: Target) -> dict[str, Any]:
    """Return config.json for vLLM and SGLang; flags appear only when set, tap ids only when not the default.

    vLLM takes the ids as they are and SGLang adds 1, so they are left out when both would choose them anyway.
    """
    graph, theta = contract.graph, contract.rope["rope_theta"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": graph["hidden_size"],
        "intermediate_size": graph["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": graph["num_heads"],
        "num_key_value_heads": graph["num_kv_heads"],
        "head_dim": graph["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": graph["rms_norm_eps"],
        "max_position_embeddings": graph["max_position_embeddings"],
        "vocab_size": graph["vocab_size"],
        "draft_vocab_size": graph["draft_vocab_size"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "torch_dtype": str(EXPORT_DTYPE).removeprefix("torch."),
        "bos_token_id": target.tokenizer.bos_token_id,
        "eos_token_id": target.tokenizer.eos_token_id,
    }
    if graph["target_hidden_size"] != graph["hidden_size"]:
        config["target_hidden_size"] = graph["target_hidden_size"]
    for flag in ("fc_norm", "norm_output"):
        if graph[flag]:
            config[flag] = True
    if not _taps_are_default(contract, target):
        config[AUX_LAYERS_KEY] = list(contract.tap_indices)
    return config


def _taps_are_default(contract: Contract, target: Target) -> bool:
    return target.num_layers >= 6 and contract.tap_indices == default_taps(target.num_layers)


def _configs(contract: Contract, target: Target) -> dict[str, dict[str, Any]]:
    """Return config.json and, for custom taps only, the same in SGLang's counting."""
    config = official_config(contract, target)
    configs = {CONFIG_NAME: config}
    if AUX_LAYERS_KEY in config:
        # SGLang reads the nested list and adds 1; vLLM reads a nested list raw: one file cannot serve both.
        nested = {AUX_LAYERS_KEY: [index - 1 for index in contract.tap_indices], "use_aux_hidden_state": True}
        rest = {key: value for key, value in config.items() if key != AUX_LAYERS_KEY}
        configs[SGLANG_CONFIG_NAME] = rest | {"eagle_config": nested}
    return configs


def _check_config(path: Path, contract: Contract, target: Target) -> None:
    """Engines build the graph from config.json, we from contract.json: they must say the same."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing. Copy the folder again, or export it again.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(
            f"{path} is not JSON ({error}). Copy the folder again, or export it again."
        ) from error
    expected = official_config(contract, target)
    # Which id ends a text is the target's business and changes no number of the drafter.
    for key in sorted((set(found) | set(expected)) - {"bos_token_id", "eos_token_id"}):
        mine, theirs = found.get(key, "absent"), expected.get(key, "absent")
        if mine != theirs:
            raise ContractError(
                f"{path}: {key} is {mine!r}, {CONTRACT_NAME} says {theirs!r}. One of them was edited: copy "
                "the folder again, or export it again."
            )


def _official_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        dtype = _INTEGER_TENSORS.get(name, EXPORT_DTYPE)
        tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return tensors


def _check_tensors(tensors: dict[str, Tensor], shape: Eagle3Shape, where: str) -> None:
    """Nothing missing, nothing unused, every shape and dtype as the graph says, every number finite."""
    with torch.device("meta"):
        expected = Eagle3Drafter(shape).state_dict()
    remedy = "The folder is damaged or of another drafter: copy it again, or export it again."
    for name in sorted(set(expected) | set(tensors)):
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
                f"{where}: tensor {name} holds NaN or infinity. Train from an earlier checkpoint."
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


def _build(shape: Eagle3Shape, tensors: dict[str, Tensor], target: Target) -> Eagle3Drafter:
    """Allocate as NaN, fill every parameter, and cast to the target's dtype."""
    drafter = Eagle3Drafter(shape)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.fill_(float("nan"))
            parameter.copy_(tensors[name])
            # Parameters only: module.to(dtype) would round the rotary frequencies, so far positions go wrong.
            parameter.data = parameter.data.to(target.dtype)
    drafter.bind_vocab(tensors["d2t"], tensors["t2d"])
    drafter.to(target.device)
    drafter.bind_embedding(target.embed_weight)
    return drafter.eval()
