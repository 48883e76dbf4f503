"""The model card of an export: what was measured, by which command, on which data; nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCardData

from drafters.contract import Contract
from drafters.errors import ArtifactError
from drafters.export.dialect import DIALECTS


@dataclass(frozen=True)
class DataSummary:
    """Training data: where from, records, supervised tokens, and whether the target wrote the responses."""

    source: str
    records: int
    tokens: int
    self_generated: bool


def model_card(
    contract: Contract,
    license: str,
    command: str,
    data: DataSummary | None,
    report: dict[str, Any] | None,
    drift: dict[str, Any] | None = None,
) -> str:
    """Return README.md as Markdown with the hub's YAML header; an unknown fact is said to be unknown.

    `report` is serve.py's report.json; ArtifactError names a key it lacks. `drift`: measure_drift's, of an adapter.
    """
    local = contract.target.startswith(("/", ".", "~"))
    # A card travels: of a local path it shows the folder's name, not where the machine keeps it.
    name = PurePath(contract.target).name if local else contract.target
    header = ModelCardData(
        base_model=name if "/" in name else None,
        license="other" if license else None,
        license_name=license.lower() or None,
        library_name="outrider",
        tags=["speculative-decoding", contract.family, "drafter"],
    ).to_yaml()
    sections = [
        f"---\n{header}\n---",
        f"# {DIALECTS[contract.family].title} drafter for {name}",
        *_promise(contract, name, drift),
        "## Acceptance",
        _acceptance(report),
        "## Command",
        f"```\n{command}\n```",
        "## Data",
        _data(data),
        "## Fits",
        _fits(contract, name),
        "## Use",
        _use(contract),
        "## Licence",
        _licence(name, license),
    ]
    return "\n\n".join(sections) + "\n"


def _promise(contract: Contract, name: str, drift: dict[str, Any] | None) -> list[str]:
    if not contract.adapter_sha256:
        return ["A drafter changes the speed of its target, never a token: the target checks every drafted token."]
    said = (
        f"**This export changes the target's text.** It holds an adapter of {name} beside the drafter: outputs equal "
        "the tuned target's plain decoding, token for token, not the original's. The drafter drafts for the tuned "
        "target and no other."
    )
    if drift is None or drift["kl"] is None:
        return [said, "## Drift", "Not measured: no record was held out of training."]
    rows = [
        ("KL(original || tuned), nats per token", f"{drift['kl']:.4f}"),
        ("both choose the same token", f"{drift['top1_agreement']:.1%}"),
        ("held-out response tokens", f"{drift['positions']} of {drift['records']} records"),
    ]
    return [said, "## Drift", _table(("measure", "value"), rows)]


def _acceptance(report: dict[str, Any] | None) -> str:
    if report is None:
        return (
            "Not evaluated: no tau was measured for this export. `python serve.py drafter.path=<this "
            "folder>` does."
        )
    depths = enumerate(_get(report, "acceptance_at"), 1)
    rows = [
        ("tau (acceptance length)", _number(_get(report, "acceptance_length"))),
        *((f"acceptance at depth {depth}", _number(value)) for depth, value in depths),
        *((key, _number(_get(report, key))) for key in ("rounds", "drafted", "accepted", "emitted")),
        ("tokens per second", _number(_get(report, "tokens_per_s"))),
        ("plain decoding, same engine", _number(_get(report, "plain_tokens_per_s"))),
        ("`transformers.generate`", _number(_get(report, "transformers_tokens_per_s"))),
        ("speed-up over plain decoding", _number(_get(report, "speedup"))),
        ("speed-up over `transformers.generate`", _number(_get(report, "speedup_vs_transformers"))),
        ("identical to plain decoding", f"{_get(report, 'identical')} of {_get(report, 'prompts')} prompts"),
        ("near ties", _number(_get(report, "near_ties"))),
        ("dtype, temperature", f"{_get(report, 'dtype')}, {_get(report, 'temperature')}"),
    ]
    definition = (
        "tau = tokens emitted per target forward while decoding, bonus token included; acceptance at depth k "
        "= rounds in which the k-th drafted token was accepted / all rounds. Both are sums over sums."
    )
    table = _table(("measure", "value"), rows)
    return f"{definition}\n\n{table}\n\nMeasured by:\n\n```\n{_get(report, 'command')}\n```"


def _data(data: DataSummary | None) -> str:
    if data is None:
        return "Not recorded."
    origin = "written by the target itself" if data.self_generated else "not written by the target"
    return _table(
        ("source", "records", "supervised tokens", "responses"),
        [(data.source, str(data.records), str(data.tokens), origin)],
    )


def _fits(contract: Contract, name: str) -> str:
    rows = [
        ("target", name),
        ("target weights sha256", contract.target_weights_sha256),
        *([("adapter sha256", contract.adapter_sha256)] if contract.adapter_sha256 else []),
        ("tapped states", "; ".join(contract.taps)),
        ("draft vocabulary", f"{contract.graph['draft_vocab_size']} of {contract.graph['vocab_size']} ids"),
        ("trained length", f"{contract.max_length} tokens"),
        ("target dtype in training", contract.dtype),
    ]
    return _table(("what", "value"), rows) + "\n\nThe whole record is `contract.json`; the loader checks it."


def _use(contract: Contract) -> str:
    return (
        f"```\npython serve.py drafter.path=<this folder>\n```\n\n{DIALECTS[contract.family].use} No "
        f"engine run is part of this card. Exported by Outrider {contract.code_version}."
    )


def _licence(name: str, license: str) -> str:
    if not license:
        return (
            f"The licence of {name} is not recorded; the drafter was trained on its outputs, so "
            "look it up."
        )
    return (
        f"{name} is under {license}. The drafter was trained on its states; its terms may reach "
        "the drafter."
    )


def _get(report: dict[str, Any], key: str) -> Any:
    if key not in report:
        raise ArtifactError(
            f"report: key {key} is missing, present are {sorted(report)}. Run serve.py again."
        )
    return report[key]


def _number(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def dialect_card(native: str, dialect: str, use: str, note: str) -> str:
    """Return the card of an export written in another dialect: the native card, with how this folder is used.

    native: README.md of the export, whose measurements and data stay as they are; note: what the dialect leaves out.
    ArtifactError when it lacks a section.
    """
    head, *parts = native.split("\n\n## ")
    sections = dict(part.split("\n\n", 1) for part in parts)
    for name in ("Fits", "Use"):
        if name not in sections:
            raise ArtifactError(f"README.md of the export has no section {name}. Export it again.")
    table, _, _ = sections["Fits"].partition("\n\n")
    sections["Fits"] = f"{table}\n\nThe whole record, `contract.json`, is in the export that this was written from."
    here = "Outrider: `python serve.py drafter.path=<this folder>`, which measures what it takes it for."
    sections["Use"] = "\n\n".join(filter(None, (use, note, here)))
    title = f"{head}\n\nWritten in the dialect `{dialect}`; what is measured below was measured on the export itself."
    return "\n\n## ".join([title, *(f"{name}\n\n{text.rstrip()}" for name, text in sections.items())]) + "\n"
