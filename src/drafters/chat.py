"""Conversation -> token ids and loss mask through the tokenizer's own template, by rendering prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jinja2.exceptions import TemplateError
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from drafters.errors import DataError

Message = Mapping[str, str]

# Any text a template passes through unchanged would do; this one no template contains.
SENTINEL = "OUTRIDERSENTINEL"
SUPERVISED_STYLE = "bold green"
CONTEXT_STYLE = "dim"


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tokenize: bool, generate: bool
) -> str | list[int]:
    if tokenizer.chat_template is None:
        raise DataError(
            "the target's tokenizer has no chat template. Set target.path to an instruct model, "
            "or add chat_template.jinja to its folder."
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=tokenize, add_generation_prompt=generate, return_dict=False
        )
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise DataError(
            f"the target's chat template refuses a conversation with roles {roles}: {error}. "
            "Change the order of the turns, or leave the refused role out."
        ) from error


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the ids after which the target answers; raises DataError unless the last turn is the user's."""
    if not messages or messages[-1]["role"] != "user":
        last = messages[-1]["role"] if messages else "missing"
        raise DataError(f"a prompt must end with a user turn; the last turn's role is {last!r}.")
    return list(_template(tokenizer, messages, tokenize=True, generate=True))


def _require_prefix(prefix: list[int], longer: list[int], turn: int, what: str) -> None:
    if longer[: len(prefix)] != prefix:
        first = next(
            (i for i, (a, b) in enumerate(zip(prefix, longer, strict=False)) if a != b),
            min(len(prefix), len(longer)),
        )
        raise DataError(
            f"turn {turn} ({what}): the chat template renders the turns before it differently once it is "
            f"added (first difference at token {first}), so no loss mask is right. Train on recorded "
            "responses instead (python distill.py), whose token ids need no second rendering."
        )


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, ids: list[int], start: int) -> int:
    """Leave out white space after a special token: the target has stopped there, the template goes on."""
    end = len(ids)
    while end > start and tokenizer.decode([ids[end - 1]]).isspace():
        end -= 1
    added = tokenizer.added_tokens_decoder
    stops = end > start and ids[end - 1] in added and added[ids[end - 1]].special
    return end if stops else len(ids)


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[bool]]:
    """Return ids and loss mask, both [T]; the mask is true from each prompt's end to its answer's end.

    For each assistant turn the prompt is the rendering of all turns before it plus the generation prompt, the
    end is the rendering up to and including it, less white space after its end token. Raises DataError where
    the first is not a prefix of the second, where an earlier rendering is not a prefix of a later one, and
    where the mask comes out all false or all true.
    """
    full = list(_template(tokenizer, messages, tokenize=True, generate=False))
    mask = [False] * len(full)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if turn == 0:
            raise DataError("turn 0 is the assistant's; a conversation starts with a system or user turn.")
        prompt = list(_template(tokenizer, messages[:turn], tokenize=True, generate=True))
        whole = list(_template(tokenizer, messages[: turn + 1], tokenize=True, generate=False))
        _require_prefix(prompt, whole, turn, "its own prompt")
        _require_prefix(whole, full, turn, "the whole conversation")
        end = _end_of_turn(tokenizer, whole, len(prompt))
        mask[len(prompt) : end] = [True] * (end - len(prompt))
    if all(mask) or not any(mask):
        share = "all" if mask and all(mask) else "none"
        roles = [message["role"] for message in messages]
        raise DataError(
            f"{share} of the {len(full)} tokens would be trained on (roles {roles}). "
            "A conversation needs a user turn and an assistant turn with text."
        )
    return full, mask


@dataclass(frozen=True)
class UserTurn:
    """What surrounds a user's words in the template: the ids before them and the text that ends the turn."""

    prefix_ids: tuple[int, ...]
    end_text: str


def user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn:
    """Find the template's user prefix by rendering a sentinel user message (Magpie, arXiv 2406.08464).

    Raises DataError when the template alters the sentinel or ends the turn with nothing.
    """
    text = _template(tokenizer, [{"role": "user", "content": SENTINEL}], tokenize=False, generate=False)
    before, found, after = text.partition(SENTINEL)
    end = after.strip()
    if not found or SENTINEL in after or not end:
        raise DataError(
            f"data.source=magpie: the chat template renders a lone user turn as {text!r}, in which the words "
            "and the end of the turn cannot be told apart. Set data=builtin or data=jsonl."
        )
    ids = tokenizer(before, add_special_tokens=False)["input_ids"]
    return UserTurn(tuple(ids), end)


def colour_rows(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[tuple[Sequence[int], Sequence[bool]]]
) -> list[Text]:
    """Decode (ids, mask) rows into rich Texts whose supervised tokens stand out, each headed by its counts.

    Runs of equal mask are decoded as one piece, because a character may be spread over several tokens.
    """
    views = []
    for ids, mask in rows:
        if len(ids) != len(mask):
            raise DataError(f"a row has {len(ids)} ids but {len(mask)} mask values; both must be equal.")
        view = Text().append(f"{sum(mask)} of {len(ids)} tokens supervised\n", style="bold")
        for supervised, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
            piece = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
            view.append(piece, style=SUPERVISED_STYLE if supervised else CONTEXT_STYLE)
        views.append(view)
    return views
