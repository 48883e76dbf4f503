"""Magpie (arXiv 2406.08464): the target writes the user turn too, after its template's own user prefix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from drafters.chat import user_turn
from drafters.config import MagpieData
from drafters.corpus import Prompt, append_line, drop_torn_line
from drafters.errors import DataError
from drafters.generation import Generate, RowReport, check_ids, record_seed
from drafters.target import Target

TURNS_NAME = "user_turns.jsonl"


def write_user_turns(
    prompts: Sequence[Prompt],
    target: Target,
    generate: Generate,
    cfg: MagpieData,
    out_dir: Path,
    progress: Progress | None,
    counts: dict[str, int],
) -> list[Prompt]:
    """Return the prompts with a user turn sampled after the template's user prefix; resumes like responses.

    Turns that do not end, are empty or repeat an earlier one are left out and counted.
    """
    turn = user_turn(target.tokenizer)
    path = out_dir / TURNS_NAME
    drop_torn_line(path)
    texts: dict[str, str] = {}
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            texts = {row["id"]: row["text"] for row in map(json.loads, lines)}
    pending = [prompt for prompt in prompts if prompt.id not in texts]
    rows = [(list(turn.prefix_ids), record_seed(cfg.seed, f"user/{prompt.id}")) for prompt in pending]
    report = RowReport(progress, "user turns", len(prompts) - len(pending), len(prompts))
    with path.open("ab") as file:
        for index, ids, reason in generate(rows):
            check_ids(ids, pending[index].id, target.vocab_size)
            text = _turn_text(target, ids, reason, turn.end_text)
            texts[pending[index].id] = text
            append_line(file, json.dumps({"id": pending[index].id, "text": text}, ensure_ascii=False) + "\n")
            report.row(len(ids))
    chosen, seen = [], set()
    for prompt in prompts:
        text = texts[prompt.id]
        if text and text not in seen:
            seen.add(text)
            chosen.append(Prompt(prompt.id, prompt.category, ({"role": "user", "content": text},)))
    counts["dropped_without_user_turn"] = sum(not texts[prompt.id] for prompt in prompts)
    counts["dropped_repeated_user_turn"] = len(prompts) - len(chosen) - counts["dropped_without_user_turn"]
    if not chosen:
        raise DataError(
            f"magpie: none of {len(prompts)} sampled user turns has an end and text. "
            "Set data.max_prompt_tokens higher, or data=builtin."
        )
    return chosen


def _turn_text(target: Target, ids: Sequence[int], reason: str, end_text: str) -> str:
    """Return the user's words among sampled ids, "" when the turn has no end."""
    words = ids[:-1] if ids[-1] in target.eos_ids else ids
    text, found, _ = target.tokenizer.decode(words, skip_special_tokens=False).partition(end_text)
    return text.strip() if found or reason == "stop" else ""
