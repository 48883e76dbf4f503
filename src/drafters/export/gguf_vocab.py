"""A byte-level BPE tokenizer as llama.cpp keeps it in a GGUF file (llama.cpp: src/llama-vocab.cpp)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from gguf import GGUFWriter

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _steps(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return json.loads(tokenizer.backend_tokenizer.to_str())


def _pre_tokenizer(steps: dict[str, Any]) -> str | None:
    """llama.cpp's name for how text is cut before merging; None where it is none of those known here."""
    found = steps["pre_tokenizer"] or {}
    parts = found["pretokenizers"] if found.get("type") == "Sequence" else [found]
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1]["add_prefix_space"]:
        return None
    *before, last = parts
    if last["use_regex"]:
        if not before:
            return "gpt-2"
        digits = len(before) == 1 and before[0] == {"type": "Digits", "individual_digits": True}
        return "smollm" if digits else None
    split = len(before) == 1 and before[0]["type"] == "Split" and before[0]["behavior"] == "Isolated"
    return "llama-bpe" if split and before[0]["pattern"] == {"Regex": LLAMA3_PATTERN} else None


def vocab_problem(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str | None:
    """Why the tokenizer of a model with this many rows cannot be written, or None."""
    steps = _steps(tokenizer)
    if steps["model"]["type"] != "BPE" or steps["model"]["byte_fallback"] or steps["normalizer"] is not None:
        return "its target's tokenizer is not a byte-level BPE on text as it is, the one kind that is written"
    if _pre_tokenizer(steps) is None:
        return "its target's tokenizer cuts text in a way that is not one of those written (GPT-2, SmolLM, Llama-3)"
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        return f"its target's tokenizer has id {highest}, its embedding {vocab_size} rows"
    return None


def add_vocab(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Add tokens, merges, the special ids and the chat template; ids without a token are marked as unused."""
    from gguf import TokenType

    steps = _steps(tokenizer)
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        tokens[index], types[index] = token, TokenType.NORMAL
    for added in steps["added_tokens"]:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer(steps))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in steps["model"]["merges"]])
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    marked = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(marked[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(marked[-1] == tokenizer.eos_token_id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
