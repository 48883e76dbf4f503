"""What a drafter was made against, and the refusal when what is loaded differs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.errors import ArtifactError, ContractError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafters.target import Target

FORMAT_VERSION = 1
CONTRACT_NAME = "contract.json"
INDEX_NAME = "model.safetensors.index.json"
TARGET_HASHES = ("target_weights_sha256", "target_config_sha256", "tokenizer_sha256", "chat_template_sha256")
# Bookkeeping on who loaded or wrote a model, not what it computes; keys with a leading underscore go too.
VOLATILE = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache", "attn_implementation"})
_JSON_TYPES = {
    "int": int,
    "str": str,
    "dict[str, Any]": dict,
    "tuple[str, ...]": list,
    "tuple[int, ...]": list,
}
_WAY_OUT = {
    "format_version": "Use the Outrider version that wrote it, or make it anew.",
    "family": "Set drafter={value}, or choose another output_dir.",
    "graph": "Set the drafter's {key} to {value}, or train anew in another output_dir.",
    "target": "Set target.path to the target it was made with, or train for this one in another output_dir.",
    "target_config_sha256": "Set target.path to the target it was made with, unchanged, or train for this.",
    "target_weights_sha256": "Set target.path to the target it was made with, unchanged, or train for this.",
    "tokenizer_sha256": "Restore the tokenizer files the drafter was made with, or train for this tokenizer.",
    "chat_template_sha256": "Restore the chat template the drafter was made with, or train for this one.",
    "taps": "Set drafter.taps as it was, or train anew with these taps.",
    "tap_indices": "Set drafter.taps={value}, or train anew with these taps.",
    "feature_shift": "Use the Outrider version that wrote it, or train anew.",
    "dtype": "Set target.dtype={value}, or train anew in another output_dir.",
    "rope": "Use the rope settings it was made with, or train anew.",
    "max_length": "Set trainer.row_length={value}, or train anew in another output_dir.",
    "adapter_sha256": "A drafter fits the target it was trained with, tuned or not: give its export's folder, which "
    "tunes the target itself, and join only drafters of the same adapter.",
    "draft_vocab_sha256": "Use the responses and drafter.draft_vocab_size it was made with, or train anew.",
}


@dataclass(frozen=True)
class Contract:
    """Everything a drafter's numbers depend on; one per response set, checkpoint and export.

    taps names each tapped state by meaning, tap_indices gives the same as HF `hidden_states` indices;
    feature_shift is how many tokens the paired embedding is ahead of the feature; max_length is in tokens.
    `target` and `code_version` are labels: a target is recognised by its hashes. adapter_sha256: of the adapter that
    tunes the target, "" and left out of the JSON where there is none.
    """

    family: str
    graph: dict[str, Any]
    target: str
    target_config_sha256: str
    target_weights_sha256: str
    tokenizer_sha256: str
    chat_template_sha256: str
    taps: tuple[str, ...]
    tap_indices: tuple[int, ...]
    feature_shift: int
    dtype: str
    rope: dict[str, Any]
    max_length: int
    draft_vocab_sha256: str
    code_version: str
    format_version: int = FORMAT_VERSION
    adapter_sha256: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values; `from_json` gives back an equal contract."""
        values = asdict(self) | {"taps": list(self.taps), "tap_indices": list(self.tap_indices)}
        return {name: value for name, value in values.items() if (name, value) != ("adapter_sha256", "")}

    @classmethod
    def from_json(cls, raw: Any, where: str = CONTRACT_NAME) -> Contract:
        """Build a contract from parsed JSON; ContractError names a missing, unknown or mistyped field."""
        if not isinstance(raw, dict):
            raise ContractError(
                f"{where}: a contract is a JSON object, got {type(raw).__name__}. Make it anew."
            )
        # The version comes first: an older layout should be called old, not incomplete.
        if raw.get("format_version", FORMAT_VERSION) != FORMAT_VERSION:
            raise ContractError(
                f"{where}: format_version is {raw['format_version']!r}, this code reads {FORMAT_VERSION}. "
                f"{_WAY_OUT['format_version']}"
            )
        raw = {"adapter_sha256": "", **raw}
        names = {field.name: _JSON_TYPES[field.type] for field in fields(cls)}
        for name, kind in names.items():
            if name not in raw:
                raise ContractError(
                    f"{where}: field {name} is missing. The record was cut or edited: make it anew."
                )
            if not isinstance(raw[name], kind) or isinstance(raw[name], bool):
                raise ContractError(
                    f"{where}: field {name} is {raw[name]!r}, expected a JSON {kind.__name__}. Make it anew."
                )
        unknown = sorted(set(raw) - set(names))
        if unknown:
            raise ContractError(
                f"{where}: unknown field {unknown[0]}; known are {', '.join(names)}. Make it anew."
            )
        return cls(**(raw | {"taps": tuple(raw["taps"]), "tap_indices": tuple(raw["tap_indices"])}))

    def compare(self, other: Contract, where: str) -> None:
        """Raise ContractError at the first field in which `self`, found at `where`, and `other` differ."""
        mine, theirs = (each.to_json() | {"adapter_sha256": each.adapter_sha256} for each in (self, other))
        for name in mine:
            # Not compared: an upgrade that changes no number must not void trained drafters.
            if name != "code_version":
                require_equal(name, mine[name], theirs[name], where)

    def check_target(self, target: Target, where: str = CONTRACT_NAME) -> None:
        """Refuse with ContractError unless `target`, tuned or not, has the recorded hashes, sizes and taps."""
        found = target.fingerprint
        for name in TARGET_HASHES:
            require_equal(name, getattr(self, name), found[name], where)
        sizes = {"target_hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        for key, size in sizes.items():
            if key not in self.graph:
                raise ContractError(f"{where}: field graph.{key} is missing. Make it anew.")
            require_equal(f"graph.{key}", self.graph[key], size, where)
        meaning = describe_taps(self.tap_indices, target.num_layers)
        if meaning != self.taps:
            raise ContractError(
                f"{where}: taps is {list(self.taps)}, but tap_indices {list(self.tap_indices)} mean "
                f"{list(meaning)} in this target of {target.num_layers} blocks. The record was edited: "
                "restore it, or train anew."
            )

    def check_adapter(self, target: Target, where: str = CONTRACT_NAME) -> None:
        """Refuse with ContractError unless `target` is tuned by the recorded adapter, or by none if there is none."""
        found = target.fingerprint.get("adapter_sha256", "")
        require_equal("adapter_sha256", self.adapter_sha256 or "none", found or "none", where)


def make_contract(
    target: Target,
    *,
    family: str,
    graph: dict[str, Any],
    tap_indices: Iterable[int],
    rope: dict[str, Any],
    max_length: int,
    draft_vocab_sha256: str,
    feature_shift: int = 1,
) -> Contract:
    """Describe a drafter made against `target`; hashes, dtype and tap meanings come from the target."""
    indices = tuple(tap_indices)
    return Contract(
        family=family,
        graph=graph,
        **target.fingerprint,
        taps=describe_taps(indices, target.num_layers),
        tap_indices=indices,
        feature_shift=feature_shift,
        dtype=str(target.dtype).removeprefix("torch."),
        rope=rope,
        max_length=max_length,
        draft_vocab_sha256=draft_vocab_sha256,
        code_version=code_version(),
    )


def read_contract(folder: Path) -> Contract:
    """Read `contract.json` of a folder; ContractError when it is absent, not JSON or incomplete."""
    path = Path(folder) / CONTRACT_NAME
    if not path.is_file():
        raise ContractError(
            f"{path} is missing: nothing says what this drafter fits. Export it with train.py."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ContractError(
            f"{path} is not JSON ({error}). Copy the folder again, or make it anew."
        ) from error
    return Contract.from_json(raw, str(path))


def require_equal(name: str, mine: Any, theirs: Any, where: str) -> None:
    """Raise ContractError when two values of a contract field differ; inside a dict the key is named."""
    if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
        for key in list(mine) + [key for key in theirs if key not in mine]:
            require_equal(f"{name}.{key}", mine.get(key, "absent"), theirs.get(key, "absent"), where)
        return
    if isinstance(mine, bool) == isinstance(theirs, bool) and mine == theirs:
        return
    top, _, key = name.partition(".")
    way_out = _WAY_OUT[top].format(key=key, value=json.dumps(mine))
    raise ContractError(f"{where}: {name} is {mine!r}, but what is loaded now has {theirs!r}. {way_out}")


def describe_taps(indices: Iterable[int], num_layers: int) -> tuple[str, ...]:
    """Name HF `hidden_states` indices by meaning, blocks counted from 0; ContractError outside 0..num_layers.

    Index i is what block i reads, so it is the output of block i - 1; only the last is after the final norm.
    """
    return tuple(_describe_tap(index, num_layers) for index in indices)


def _describe_tap(index: int, num_layers: int) -> str:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= num_layers:
        raise ContractError(
            f"tap_indices holds {index!r}, a target of {num_layers} blocks has hidden_states 0 to "
            f"{num_layers}. Set drafter.taps to indices in that range."
        )
    if index == 0:
        return "embedding output"
    norm = "after the final norm" if index == num_layers else "before norm"
    return f"output of block {index - 1} {norm}"


def code_version() -> str:
    """Return the installed version of Outrider, or 'source' when it runs uninstalled from a checkout."""
    try:
        return importlib.metadata.version("outrider")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def hash_config(config: Mapping[str, Any]) -> str:
    """Return the sha256 of a model config dict without its volatile keys, key order ignored."""
    return _hash_json(_stable(config))


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the id -> token map, added and special tokens included."""
    return _hash_json(sorted((index, token) for token, index in tokenizer.get_vocab().items()))


def hash_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the sha256 of the chat template (text, dict of named texts, or none at all)."""
    return _hash_json(tokenizer.chat_template)


def hash_weights(folder: Path) -> str:
    """Return the sha256 over sorted (name, dtype, shape, sha256 of bytes) of a model folder's safetensors.

    Read from the files, so it depends neither on the dtype the model is loaded in nor on how it is sharded.
    Raises TargetError when the folder has no readable safetensors.
    """
    folder = Path(folder)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        entries = [entry for path in weight_files(folder) for entry in _hash_tensors(path, pool)]
    names = [entry[0] for entry in entries]
    if len(set(names)) != len(names):
        raise TargetError(f"{folder}: two safetensors files hold the same tensor. Save the model again.")
    return _hash_json(sorted(entries))


def listed_weights(folder: Path, single: str = "model.safetensors") -> list[str]:
    """Names of the files with a folder's tensors: the shards that an index lists, or `single` where there is none.

    Raises ArtifactError for an index that does not say.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        return [single]
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{index} is not JSON ({error}). Fetch it again.") from error
    shards = found.get("weight_map") if isinstance(found, dict) else None
    names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    if not names or any(Path(name).name != name for name in names):
        raise ArtifactError(f"{index}: weight_map does not name a file of the folder for each tensor. Fetch it again.")
    return sorted(names)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; raises TargetError naming one that is missing."""
    paths = [folder / name for name in listed_weights(folder)]
    for path in paths:
        if not path.is_file():
            raise TargetError(f"{path} is missing. Set target.path to a folder with its safetensors weights.")
    return paths


def _hash_tensors(path: Path, pool: ThreadPoolExecutor) -> list[list[Any]]:
    """Hash each tensor of one file, in threads (hashlib lets go of the interpreter)."""
    with open(path, "rb") as file:
        try:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        except (ValueError, OverflowError, MemoryError) as error:
            raise TargetError(f"{path} is not a safetensors file ({error}). Fetch it again.") from error
        header.pop("__metadata__", None)
        start, end = 8 + size, os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:

            def digest(name: str) -> list[Any]:
                entry = header[name]
                low, high = (start + offset for offset in entry["data_offsets"])
                if not start <= low <= high <= end:
                    raise TargetError(
                        f"{path}: tensor {name} reaches past the end of the file. Fetch it again."
                    )
                with memoryview(data) as view, view[low:high] as part:
                    return [name, entry["dtype"], entry["shape"], hashlib.sha256(part).hexdigest()]

            return list(pool.map(digest, header))


def _stable(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = (key for key in value if str(key) not in VOLATILE and not str(key).startswith("_"))
        return {str(key): _stable(value[key]) for key in kept}
    if isinstance(value, (list, tuple)):
        return [_stable(item) for item in value]
    return value


def _hash_json(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
