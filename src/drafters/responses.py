"""The target's own responses: collected so that a kill loses at most one line; packed, read and compared."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from drafters.artifacts import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    atomic_write_json,
    atomic_write_text,
    sha256_file,
    verify_folder,
    write_folder,
)
from drafters.chat import render_prompt
from drafters.config import DataConfig, MagpieData
from drafters.corpus import Prompt, ResponseRecord, append_line, drop_torn_line, read_records, record_line
from drafters.errors import ArtifactError, ContractError, DataError
from drafters.generation import Generate, RowReport, check_ids, record_seed
from drafters.magpie import TURNS_NAME, write_user_turns
from drafters.packed import decode, encode
from drafters.target import Target

log = logging.getLogger(__name__)

KIND = "responses"
RECORDS_NAME = "responses.jsonl"
PACKED_NAME = "responses.safetensors.xz"
SETTINGS_NAME = "settings.json"  # written first, so that an unfinished folder can tell what it was begun with


@dataclass(frozen=True)
class ResponseSet:
    """Finished responses: records in prompt order, and the manifest's facts (settings, counts, command)."""

    folder: Path
    records: list[ResponseRecord]
    meta: dict[str, Any]

    def require_target(self, target: Target) -> None:
        """Raise ContractError naming the first field in which `target` differs from the one that answered."""
        settings = self.meta["settings"]
        for name, now in target.fingerprint.items():
            # The id is a name or path and may change with the machine; the hashes may not.
            if name != "target" and settings.get(name) != now:
                raise ContractError(
                    f"{self.folder}: {name} is {settings.get(name)} (target {settings['target']!r}), the loaded "
                    f"target {target.name!r} has {now}. Set target to the one that answered, or "
                    "data.responses=null to collect again."
                )


def collect(
    prompts: Sequence[Prompt],
    target: Target,
    generate: Generate,
    cfg: DataConfig,
    out_dir: Path,
    *,
    generate_user_turn: Generate | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> ResponseSet:
    """Have the target answer every prompt into out_dir/responses.jsonl, seal it with a manifest, return it.

    `generate` samples with cfg.temperature up to cfg.max_new_tokens; `generate_user_turn` (magpie only) with
    cfg.user_temperature up to cfg.max_prompt_tokens. Started again on the same folder it answers what is
    missing; a finished folder is returned as it is. Raises ContractError when the folder was begun with other
    settings or another target, DataError when no prompt is left.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    settings = _settings(prompts, target, cfg)
    _open_folder(out_dir, settings)
    if (out_dir / MANIFEST_NAME).exists():
        return read_responses(out_dir)
    counts = {"dropped_too_long": 0}
    if isinstance(cfg, MagpieData):
        if generate_user_turn is None:
            raise DataError("data.source=magpie needs a generator of user turns; pass generate_user_turn.")
        prompts = write_user_turns(prompts, target, generate_user_turn, cfg, out_dir, progress, counts)
    rows = []
    for prompt in prompts:
        ids = render_prompt(target.tokenizer, prompt.messages)
        if len(ids) > cfg.max_prompt_tokens:
            counts["dropped_too_long"] += 1
        else:
            rows.append((prompt, ids, record_seed(cfg.seed, prompt.id)))
    if not rows:
        raise DataError(
            f"none of {len(prompts)} prompts is within data.max_prompt_tokens={cfg.max_prompt_tokens}. "
            "Set it higher."
        )
    _answer(rows, target, generate, cfg, out_dir, progress)
    return _finish(out_dir, [prompt.id for prompt, _, _ in rows], settings, counts, command)


def _settings(prompts: Sequence[Prompt], target: Target, cfg: DataConfig) -> dict[str, Any]:
    """Everything that decides what the records hold; batch_size is absent, it may only change speed."""
    names = ["source", "temperature", "max_new_tokens", "max_prompt_tokens", "seed"]
    names += ["user_temperature"] if isinstance(cfg, MagpieData) else []
    rows = json.dumps([asdict(prompt) for prompt in prompts], ensure_ascii=False).encode("utf-8")
    return {
        **target.fingerprint,
        **{f"data.{name}": getattr(cfg, name) for name in names},
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(rows).hexdigest(),
    }


def _open_folder(out_dir: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a new folder, or check them against those a run before this one wrote."""
    path = out_dir / SETTINGS_NAME
    if not path.exists():
        if (out_dir / RECORDS_NAME).exists():
            raise ArtifactError(
                f"{out_dir} holds {RECORDS_NAME} but no {SETTINGS_NAME}, so nobody can tell how its records "
                "were made. Choose another output_dir, or move that file away."
            )
        atomic_write_json(path, settings)
        return
    begun = json.loads(path.read_text(encoding="utf-8"))
    for name, now in settings.items():
        if name not in begun:
            raise ContractError(
                f"{path} lacks {name}; it was written by another version. Choose another output_dir."
            )
        if name != "target" and begun[name] != now:
            back = (
                f"Set {name}={begun[name]}" if name.startswith("data.") else f"Bring back the former {name}"
            )
            raise ContractError(
                f"{out_dir} was begun with {name}={begun[name]}, this run has {name}={now}. "
                f"{back} to go on, or choose another output_dir."
            )


def _answer(
    rows: Sequence[tuple[Prompt, list[int], int]],
    target: Target,
    generate: Generate,
    cfg: DataConfig,
    out_dir: Path,
    progress: Progress | None,
) -> None:
    """Append a record for every row that has none yet."""
    path = out_dir / RECORDS_NAME
    torn = drop_torn_line(path)
    done = {record.id for record in read_records(path)} if path.exists() else set()
    if done or torn:
        log.info("%s: %d records kept, %d bytes of an unfinished line dropped", path, len(done), torn)
    pending = [row for row in rows if row[0].id not in done]
    report = RowReport(progress, "responses", len(rows) - len(pending), len(rows))
    with path.open("ab") as file:
        for index, ids, reason in generate([(prompt_ids, seed) for _, prompt_ids, seed in pending]):
            prompt, prompt_ids, seed = pending[index]
            check_ids(ids, prompt.id, target.vocab_size)
            record = ResponseRecord(
                prompt.id, prompt.category, prompt_ids, list(ids), reason, cfg.temperature, seed
            )
            append_line(file, record_line(record))
            report.row(len(ids))


def _finish(
    out_dir: Path, order: Sequence[str], settings: dict[str, Any], counts: dict[str, int], command: str
) -> ResponseSet:
    """Put the records in prompt order (a kill must not show in the data's order), write the manifest last."""
    path = out_dir / RECORDS_NAME
    by_id: dict[str, ResponseRecord] = {}
    for record in read_records(path):
        if record.id in by_id:
            raise DataError(
                f"{path}: record {record.id!r} occurs twice. Move the folder away and collect again."
            )
        by_id[record.id] = record
    missing = [record_id for record_id in order if record_id not in by_id]
    if missing or len(by_id) != len(order):
        strange = sorted(set(by_id) - set(order))
        raise DataError(
            f"{path}: {len(by_id)} records for {len(order)} prompts (missing {missing[:3]}, unasked "
            f"{strange[:3]}). Run the same command again to answer missing ones; move the "
            "folder away if some are unasked."
        )
    records = [by_id[record_id] for record_id in order]
    atomic_write_text(path, "".join(record_line(record) for record in records))
    names = [name for name in (RECORDS_NAME, SETTINGS_NAME, TURNS_NAME) if (out_dir / name).exists()]
    files = {
        name: {"bytes": (out_dir / name).stat().st_size, "sha256": sha256_file(out_dir / name)}
        for name in names
    }
    meta = {
        "settings": settings,
        "counts": {
            "records": len(records),
            "prompt_tokens": sum(len(record.prompt_ids) for record in records),
            "response_tokens": sum(len(record.response_ids) for record in records),
            "stopped": sum(record.finish_reason == "stop" for record in records),
            "cut_at_length": sum(record.finish_reason == "length" for record in records),
            **counts,
        },
        "command": command,
    }
    if counts["dropped_too_long"]:
        log.warning(
            "%d prompts longer than data.max_prompt_tokens=%d were left out",
            counts["dropped_too_long"],
            settings["data.max_prompt_tokens"],
        )
    manifest = {"kind": KIND, "format_version": FORMAT_VERSION, **meta, "files": files}
    atomic_write_json(out_dir / MANIFEST_NAME, manifest)
    return ResponseSet(out_dir, records, meta)


def read_responses(path: Path) -> ResponseSet:
    """Read a folder made by collect() or pack_responses() after checking sizes and hashes.

    Raises ArtifactError naming what is missing or damaged; a folder without a manifest is unfinished and
    refused.
    """
    folder = Path(path)
    if (folder / SETTINGS_NAME).exists() and not (folder / MANIFEST_NAME).exists():
        raise ArtifactError(
            f"{folder} was begun but not finished. Run the same distill.py command again: it goes on where "
            "it stopped."
        )
    manifest = verify_folder(folder, KIND)
    if PACKED_NAME in manifest.files:
        records = decode((folder / PACKED_NAME).read_bytes(), str(folder / PACKED_NAME))
    else:
        records = list(read_records(folder / RECORDS_NAME))
    stated = manifest.meta["counts"]["records"]
    if len(records) != stated:
        raise ArtifactError(
            f"{folder}: {len(records)} records, {MANIFEST_NAME} says {stated}. Copy the folder again."
        )
    return ResponseSet(folder, records, manifest.meta)


def join(sets: Sequence[ResponseSet]) -> ResponseSet:
    """Several sets as one, in order: the first's facts, counts added up; raises DataError for an id in two of them."""
    if len(sets) == 1:
        return sets[0]
    owner: dict[str, Path] = {}
    for found in sets:
        for record in found.records:
            if record.id in owner:
                raise DataError(
                    f"record {record.id!r} is in both {owner[record.id]} and {found.folder}. Leave one of the folders "
                    "out of data.responses, or collect from prompts with other ids."
                )
            owner[record.id] = found.folder
    counts: Counter[str] = Counter()
    for found in sets:
        counts.update(found.meta["counts"])
    records = [record for found in sets for record in found.records]
    return ResponseSet(sets[0].folder, records, sets[0].meta | {"counts": dict(counts)})


def pack_responses(folder: Path, dest: Path) -> Path:
    """Write the finished responses of `folder` as the packed folder `dest`: one .xz file, the same facts."""
    found = read_responses(folder)
    data = encode(found.records)
    return write_folder(Path(dest), lambda temp: _write(temp / PACKED_NAME, data), KIND, found.meta)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def regenerate_slice(
    records: Sequence[ResponseRecord], generate: Generate, n: int, tokens: int
) -> tuple[int, int]:
    """Answer n records again, spread evenly over the set, and return (token-for-token equal, compared).

    `generate` must sample with the temperature of the set's manifest and stop after `tokens` tokens, or at the
    manifest's own limit where that is lower; so much of each answer is compared.
    """
    count = min(n, len(records))
    chosen = [records[index * len(records) // count] for index in range(count)]
    equal = 0
    for index, ids, _ in generate([(record.prompt_ids, record.seed) for record in chosen]):
        record = chosen[index]
        kept = record.response_ids[:tokens]
        if list(ids) == kept:
            equal += 1
            continue
        pairs = zip(ids, kept, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(kept)))
        log.warning("record %s: regenerated response differs from token %d on", record.id, first)
    return equal, count
