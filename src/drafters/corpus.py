"""Prompts from every source, and response records on disk: one JSON object per line, known by id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, BinaryIO

from drafters.config import BuiltinData, DataConfig, HubData, JsonlData, MagpieData
from drafters.errors import ConfigError, DataError

ROLES = {  # ShareGPT's words and the common ones, in the template's words
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
LAYOUTS = (
    '{"messages": [{"role": "user", "content": "..."}]}, '
    '{"conversations": [{"from": "human", "value": "..."}]}, {"turns": ["..."]} or {"prompt": "..."}, '
    'each with optional "id" (or "question_id") and "category"'
)
FINISH_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Prompt:
    """A conversation awaiting the target's answer: the last message is the user's (magpie: none yet)."""

    id: str
    category: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class ResponseRecord:
    """What the target answered, as the exact ids it read and emitted; text is never rendered again."""

    id: str
    category: str
    prompt_ids: list[int]
    response_ids: list[int]
    finish_reason: str
    temperature: float
    seed: int


# ---- prompts ----------------------------------------------------------------------------------------------


def load_prompts(cfg: DataConfig, split: str = "train") -> list[Prompt]:
    """Return the prompts of one split ("train" or "eval") of a data config, in an order fixed by the source.

    builtin carries its own split; of jsonl and hub, the cfg.eval_prompts ids with the smallest hash of (seed,
    id) are held out; magpie trains on turns the target is still to write and evaluates on builtin's held-out
    prompts. cfg.num_prompts keeps the first so many of the training split, cfg.eval_prompts of the held-out
    one. Raises DataError naming file and line, or the setting that leaves nothing.
    """
    if split not in ("train", "eval"):
        raise DataError(f"split {split!r} does not exist. Use 'train' or 'eval'.")
    if isinstance(cfg, MagpieData):
        return _magpie(cfg.num_prompts) if split == "train" else _builtin("eval")[: cfg.eval_prompts]
    if isinstance(cfg, BuiltinData):
        chosen = _builtin(split)
    elif isinstance(cfg, JsonlData):
        chosen = _split(read_prompt_file(Path(cfg.path)), split, cfg.eval_prompts, cfg.seed)
    elif isinstance(cfg, HubData):
        chosen = _split(_hub(cfg), split, cfg.eval_prompts, cfg.seed)
    else:
        raise ConfigError(f"data.source is {cfg.source!r}. Set data to builtin, magpie, jsonl or hub.")
    chosen = chosen[: cfg.num_prompts if split == "train" else cfg.eval_prompts]
    if not chosen and split == "train":
        raise DataError(
            f"data.source={cfg.source} leaves no training prompt after holding out data.eval_prompts="
            f"{cfg.eval_prompts}. Lower data.eval_prompts."
        )
    return chosen


def read_prompt_file(path: Path) -> list[Prompt]:
    """Read prompts from JSON lines or one JSON array, any of LAYOUTS; DataError names file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"prompt file {path} cannot be read: {error}. Set the path of a UTF-8 JSON lines file."
        ) from error
    if text.lstrip().startswith("["):
        try:
            rows = [(f"{path}: item {number}", row) for number, row in enumerate(json.loads(text), 1)]
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno}: not JSON ({error.msg}); expected an array of rows."
            ) from error
    else:
        lines = enumerate(text.split("\n"), 1)
        rows = [
            (f"{path}:{number}", _loads(line, f"{path}:{number}")) for number, line in lines if line.strip()
        ]
    if not rows:
        raise DataError(f"prompt file {path} is empty. Expected one row per line: {LAYOUTS}.")
    return _parse_rows(rows, path.stem)


def _loads(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); expected one row per line: {LAYOUTS}."
        ) from error


def _parse_rows(rows: Iterable[tuple[str, Any]], stem: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    first_seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows, 1):
        prompt = _parse_row(row, where, f"{stem}-{number:05d}")
        if prompt.id in first_seen:
            raise DataError(
                f"{where}: id {prompt.id!r} was already used at {first_seen[prompt.id]}. "
                "Give each row its own id, or leave ids out to have rows numbered."
            )
        first_seen[prompt.id] = where
        prompts.append(prompt)
    return prompts


def _parse_row(row: Any, where: str, default_id: str) -> Prompt:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object, got {type(row).__name__}. Layouts: {LAYOUTS}.")
    if "messages" in row:
        messages = _turns(row["messages"], "role", "content", f"{where}: messages")
    elif "conversations" in row:
        messages = _turns(row["conversations"], "from", "value", f"{where}: conversations")
    elif "turns" in row:
        # Only the first: a later question refers to an answer that the target has not given yet.
        turns = row["turns"]
        messages = [_user(turns[0] if isinstance(turns, list) and turns else None, f"{where}: turns[0]")]
    elif "prompt" in row:
        messages = [_user(row["prompt"], f"{where}: prompt")]
    else:
        raise DataError(f"{where}: keys {sorted(row)} hold no conversation. Layouts: {LAYOUTS}.")
    identity = row["id"] if "id" in row else row["question_id"] if "question_id" in row else default_id
    if not isinstance(identity, (str, int)) or isinstance(identity, bool) or identity == "":
        raise DataError(f"{where}: id must be text or a whole number, got {identity!r}.")
    category = row["category"] if "category" in row else "other"
    if not isinstance(category, str):
        raise DataError(f"{where}: category must be text, got {category!r}.")
    return Prompt(str(identity), category, tuple(_up_to_last_user(messages, where)))


def _user(text: Any, where: str) -> dict[str, str]:
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: expected the user's text, got {text!r}.")
    return {"role": "user", "content": text}


def _turns(turns: Any, role_key: str, text_key: str, where: str) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: expected a list of turns, got {turns!r}.")
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict) or role_key not in turn or text_key not in turn:
            raise DataError(
                f'{where}[{number}]: expected {{"{role_key}": ..., "{text_key}": ...}}, got {turn!r}.'
            )
        role, text = turn[role_key], turn[text_key]
        if role not in ROLES:
            raise DataError(f"{where}[{number}]: role {role!r} is unknown. Use one of {', '.join(ROLES)}.")
        if not isinstance(text, str) or not text.strip():
            raise DataError(f"{where}[{number}]: expected text in {text_key!r}, got {text!r}.")
        messages.append({"role": ROLES[role], "content": text})
    return messages


def _up_to_last_user(messages: list[dict[str, str]], where: str) -> list[dict[str, str]]:
    """Drop answers after the last user turn: the target writes its own."""
    while messages and messages[-1]["role"] != "user":
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{where}: the conversation has no user turn to answer.")
    return messages


def _builtin(split: str) -> list[Prompt]:
    resource = files("drafters").joinpath("data/builtin.jsonl")
    rows = [
        (f"builtin.jsonl:{number}", json.loads(line))
        for number, line in enumerate(resource.read_text(encoding="utf-8").splitlines(), 1)
    ]
    prompts = _parse_rows(rows, "builtin")
    return [prompt for prompt, (_, row) in zip(prompts, rows, strict=True) if row["split"] == split]


def _magpie(count: int) -> list[Prompt]:
    return [Prompt(f"magpie-{number:06d}", "magpie", ()) for number in range(count)]


def _split(prompts: Sequence[Prompt], split: str, held_out: int, seed: int) -> list[Prompt]:
    """Hold out by a hash of the id, so that adding rows to a file moves few prompts between the splits."""

    def key(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}/{prompt.id}".encode()).digest()

    kept_back = {prompt.id for prompt in sorted(prompts, key=key)[:held_out]}
    return [prompt for prompt in prompts if (prompt.id in kept_back) == (split == "eval")]


def _hub(cfg: HubData) -> list[Prompt]:
    import datasets  # slow to import, and only this source needs it

    try:
        table = datasets.load_dataset(cfg.dataset, name=cfg.config, split=cfg.split, revision=cfg.revision)
    except Exception as error:  # the library raises many kinds; each means "not available as asked"
        raise DataError(
            f"data.dataset={cfg.dataset!r} (config {cfg.config!r}, split {cfg.split!r}, revision "
            f"{cfg.revision!r}) cannot be loaded: {type(error).__name__}: {error}. Check the names and "
            "the network, or set data=jsonl data.path=FILE."
        ) from error
    columns = cfg.columns
    missing = [theirs for theirs in columns.values() if theirs not in table.column_names]
    if missing:
        raise DataError(
            f"data.columns names {missing}, but {cfg.dataset!r} has the columns {table.column_names}. "
            "Set data.columns.messages (or conversations, turns, prompt) to one of them."
        )
    rows = ({ours: row[theirs] for ours, theirs in columns.items()} if columns else row for row in table)
    return _parse_rows(((f"{cfg.dataset} row {number}", row) for number, row in enumerate(rows)), "hub")


# ---- response records -------------------------------------------------------------------------------------


def record_line(record: ResponseRecord) -> str:
    """Return a record as one line of JSON, newline included."""
    return json.dumps(asdict(record), ensure_ascii=False, separators=(",", ":")) + "\n"


def parse_record(line: str, where: str) -> ResponseRecord:
    """Read one line; DataError names `where` and the field that is missing, unknown or of the wrong kind."""
    row = _loads(line, where)
    names = [field.name for field in fields(ResponseRecord)]
    if not isinstance(row, dict) or set(row) != set(names):
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise DataError(f"{where}: a response record has exactly the fields {names}, got {found}.")
    for name in ("prompt_ids", "response_ids"):
        ids = row[name]
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise DataError(f"{where}: {name} must be a list of token ids, got {str(ids)[:60]}.")
    if row["finish_reason"] not in FINISH_REASONS:
        raise DataError(
            f"{where}: finish_reason is {row['finish_reason']!r}, expected one of {FINISH_REASONS}."
        )
    for name, kinds in (("id", str), ("category", str), ("temperature", (int, float)), ("seed", int)):
        if not isinstance(row[name], kinds) or isinstance(row[name], bool):
            raise DataError(f"{where}: {name} is of the wrong kind: {row[name]!r}.")
    return ResponseRecord(**{**row, "temperature": float(row["temperature"])})


def read_records(path: Path) -> Iterator[ResponseRecord]:
    """Yield the records of a JSON lines file in order; raises DataError naming the line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield parse_record(line, f"{path}:{number}")


def drop_torn_line(path: Path) -> int:
    """Cut off bytes after the last newline, left by a process killed while writing; return how many."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    torn = len(data) - (data.rfind(b"\n") + 1)
    if torn:
        with path.open("rb+") as file:
            file.truncate(len(data) - torn)
    return torn


def append_line(file: BinaryIO, line: str) -> None:
    """Append one whole line to a binary file and hand it to the operating system at once."""
    file.write(line.encode("utf-8"))
    file.flush()
