"""The probe: a drafter's numbers on fixed texts, replayed at load to catch a wrong layer, norm or head."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.contract import Contract, describe_taps
from drafters.errors import ArtifactError, ContractError
from drafters.models.base import Drafter
from drafters.target import Target

PROBE_NAME = "probe.safetensors"
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def area(width, height):\n    return width * height\n\nprint(area(",
    "Once upon a time a small fox lived at the edge of a forest. One",
)
MAX_TOKENS = 24
MAX_COLUMNS = 1024
MAX_CHANNELS = 64
FORMAT_VERSION = "1"
# Allowed `_gap`. fp32 differs by summation order only. bf16 against fp32 on a 30-block target measures 0.04
# on the taps and 0.03 on the logits; a tap one block off measures 0.48 or more.
TOLERANCE_FP32 = 1e-3
TOLERANCE_HALF = 0.2
# A position whose top two are closer than this many tolerances may fall either way.
NEAR_TIE = 2.0
_SHAPES = {
    "ids": ("N", "L"),
    "columns": ("C",),
    "features": ("N", "L-1", "S", "F"),
    "logits": ("N", "L-1", "C"),
    "hits": ("N", "L-1"),
    "margin": ("N", "L-1"),
    "accepted": ("N",),
}


@dataclass(frozen=True)
class Probe:
    """N texts of L tokens and what the drafter said: teacher-forced first draft step, positions 0..L-2.

    ids int64 [N, L]; features fp32 [N, L-1, S, F], evenly spaced channels of each of the S tapped states;
    columns int64 [C], the draft ids whose logits are kept; logits fp32 [N, L-1, C];
    hits bool [N, L-1], drafter's choice == target's choice; accepted int64 [N] = hits per text;
    margin fp32 [N, L-1], the smaller of both models' top-two gaps in units of their logits' spread.
    contract: the contract, as JSON, of the drafter it was made with; None in probes made before it was kept.
    """

    ids: Tensor
    columns: Tensor
    features: Tensor
    logits: Tensor
    hits: Tensor
    margin: Tensor
    accepted: Tensor
    dtype: str
    contract: dict[str, Any] | None = None

    def save(self, path: Path, contract: Contract) -> None:
        """Write the probe as safetensors with its dtype, format version and the drafter's contract in the metadata."""
        tensors = {name: getattr(self, name).contiguous() for name in _SHAPES}
        metadata = {"format_version": FORMAT_VERSION, "dtype": self.dtype, "contract": json.dumps(contract.to_json())}
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Read a probe; ArtifactError names what is missing or malformed."""
        tensors, metadata = read_tensors(path)
        if metadata.get("format_version") != FORMAT_VERSION or "dtype" not in metadata:
            raise ArtifactError(
                f"{path}: metadata {metadata}, expected format_version {FORMAT_VERSION} and dtype."
            )
        for name, axes in _SHAPES.items():
            if name not in tensors or tensors[name].dim() != len(axes):
                raise ArtifactError(f"{path}: tensor {name} {axes} is missing. Export it again.")
        rows, length = tensors["ids"].shape
        taps, channels = tensors["features"].shape[2:]
        sizes = {"N": rows, "L": length, "L-1": length - 1, "S": taps, "F": channels}
        sizes["C"] = tensors["columns"].shape[0]
        for name, axes in _SHAPES.items():
            expected = [sizes[axis] for axis in axes]
            if list(tensors[name].shape) != expected:
                raise ArtifactError(
                    f"{path}: tensor {name} has shape {list(tensors[name].shape)}, expected {expected}. "
                    "Export it again."
                )
        contract = json.loads(metadata["contract"]) if "contract" in metadata else None
        return cls(**{name: tensors[name] for name in _SHAPES}, dtype=metadata["dtype"], contract=contract)

    def check_contract(self, contract: Contract, where: str) -> None:
        """Raise ContractError at the first field of a contract, found at `where`, that the probe was not made with.

        Sees what no number shows: how deep the drafter was trained, on how long texts, in which dtype.
        """
        if self.contract is not None:
            _require_recorded(contract.to_json(), self.contract, "", where)


def _require_recorded(found: Any, recorded: Any, name: str, where: str) -> None:
    if isinstance(found, dict) and isinstance(recorded, dict):
        for key in [*found, *(key for key in recorded if key not in found)]:
            inner = f"{name}.{key}" if name else key
            _require_recorded(found.get(key, "absent"), recorded.get(key, "absent"), inner, where)
    elif type(found) is not type(recorded) or found != recorded:
        raise ContractError(
            f"{where}: {name} is {found!r}, but {PROBE_NAME} was made with {recorded!r}. One of them was edited: copy "
            "the folder again, or export it again."
        )


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a safetensors file's tensors and metadata; ArtifactError when it is absent or unreadable."""
    if not path.is_file():
        raise ArtifactError(f"{path} is missing. Copy the folder again, or export it again.")
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except SafetensorError as error:
        raise ArtifactError(f"{path} is not a safetensors file ({error}). Export it again.") from error


def make_probe(drafter: Drafter, target: Target, taps: tuple[int, ...]) -> Probe:
    """Run the drafter, exactly as it will be loaded, on the probe texts; taps are `hidden_states` indices."""
    encoded = [target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    # One common length: no padding, so nothing about padding can make two runs differ.
    length = min(MAX_TOKENS, *(len(ids) for ids in encoded))
    if length < 3:
        raise ContractError(
            f"the tokenizer of target {target.name!r} turns a probe text into {length} tokens, 3 are needed. "
            "Check the tokenizer files of the target."
        )
    ids = torch.tensor([row[:length] for row in encoded])
    size = drafter.shape.draft_vocab_size
    columns = torch.arange(0, size, -(-size // MAX_COLUMNS))
    features, logits, hits, margin = _replay(drafter, target, ids, taps)
    dtype = str(target.dtype).removeprefix("torch.")
    return Probe(ids, columns, features, logits[..., columns], hits, margin, hits.sum(-1), dtype)


def check_probe(probe: Probe, drafter: Drafter, target: Target, taps: tuple[int, ...]) -> None:
    """Replay the probe; ContractError at the first text whose taps, logits or accepted count differ."""
    fits = int(probe.ids.max()) < target.vocab_size and probe.features.shape[2] == len(taps)
    if not fits or int(probe.columns.max()) >= drafter.shape.draft_vocab_size:
        raise ContractError(
            f"probe: its token ids, draft ids or {probe.features.shape[2]} taps do not fit this drafter and "
            "target. It belongs to another drafter: export again."
        )
    features, logits, hits, _ = _replay(drafter, target, probe.ids, taps)
    exact = probe.dtype == "float32" and target.dtype == torch.float32
    allowed = TOLERANCE_FP32 if exact else TOLERANCE_HALF
    way_out = (
        "Something computes otherwise here than where the drafter was exported. Load the unchanged export "
        "with the target it was trained for, or train anew."
    )
    for text in range(len(probe.ids)):
        parts = [
            (f"tap {place} ({meaning}) differs", features[text, :, place], probe.features[text, :, place])
            for place, meaning in enumerate(describe_taps(taps, target.num_layers))
        ]
        parts.append(("drafter logits differ", logits[text][:, probe.columns], probe.logits[text]))
        for what, found, recorded in parts:
            gap = _gap(found, recorded)
            # Written so that NaN, which compares false with everything, is refused too.
            if not gap <= allowed:
                raise ContractError(f"probe text {text}: {what} by {gap:.3g}, allowed {allowed}. {way_out}")
        clear = probe.margin[text] > NEAR_TIE * allowed
        if bool((clear & (hits[text] != probe.hits[text])).any()):
            raise ContractError(
                f"probe text {text}: {int(hits[text].sum())} positions accepted, recorded "
                f"{int(probe.accepted[text])}. {way_out}"
            )


def _gap(found: Tensor, recorded: Tensor) -> float:
    """Return the worst position's rms difference over the spread of its recorded values, both [T, X].

    Position by position: the first token's state is often a thousand times larger and would hide the rest.
    """
    return float(((found - recorded).square().mean(-1).sqrt() / recorded.std(-1).clamp_min(1e-12)).max())


@torch.no_grad()
def _replay(
    drafter: Drafter, target: Target, ids: Tensor, taps: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return features fp32 [N, L-1, S, F], logits fp32 [N, L-1, Vd], hits and margin [N, L-1], on the CPU."""
    ids = ids.to(target.device)
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device).expand(rows, length)
    mask = torch.ones(rows, 1, length, length, dtype=torch.bool, device=ids.device).tril()
    tapped, last_hidden = target.hidden(ids, positions, mask, taps)
    tapped = tapped[:, :-1]
    logits = drafter.first_logits(ids, tapped, positions[:, :-1]).float()
    # Feature t and token t+1 predict token t+2, which the target itself chooses at position t+1.
    truth = target.logits(last_hidden[:, 1:])
    hits = drafter.draft_to_target(logits.argmax(-1)) == truth.argmax(-1)
    margin = torch.minimum(_margin(logits), _margin(truth))
    states = tapped.view(rows, length - 1, len(taps), target.hidden_size)
    features = states[..., :: -(-states.shape[-1] // MAX_CHANNELS)].float()
    return features.cpu(), logits.cpu(), hits.cpu(), margin.cpu()


def _margin(logits: Tensor) -> Tensor:
    top = logits.topk(2, dim=-1).values
    return (top[..., 0] - top[..., 1]) / logits.std()
