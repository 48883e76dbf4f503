"""Loss masks of small templates, token by token; violations are errors; user prefix; coloured rows."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from drafters.chat import (
    CONTEXT_STYLE,
    SENTINEL,
    SUPERVISED_STYLE,
    colour_rows,
    render_conversation,
    render_prompt,
    user_turn,
)
from drafters.errors import DataError

SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|header|>", "<|/header|>", "<|eot|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
WORDS = [
    "system", "user", "assistant", "model", "be", "brief", "hi", "hello", "bye", "ok", "think", "a", "b",
    " ", "\n", "<<SYS>>", SENTINEL,
]  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nbe brief<|im_end|>\n{% endif %}" + CHATML
)
LLAMA3 = (
    "<|bos|>{% for m in messages %}<|header|>{{ m.role }}<|/header|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|/header|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set sys = '<<SYS>>' + messages[0].content + '<<SYS>>' %}"
    "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}<s>[INST] {{ sys if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<bos>{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
# Drops the words before "think" from every answer but the last, as templates of reasoning models do.
REWRITES_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('think')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens a thought in the generation prompt that the finished conversation does not hold.
PROMPT_ONLY_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\nthink{% endif %}")


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    vocab = {word: index for index, word in enumerate(SPECIALS + WORDS)}
    raw = Tokenizer(WordLevel(vocab, unk_token="<s>"))
    raw.pre_tokenizer = Split(" ", "isolated")
    raw.decoder = Fuse()
    raw.add_special_tokens(SPECIALS)
    raw.add_tokens(WORDS)
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    fast.chat_template = template
    return fast


def turns(text: str) -> list[dict[str, str]]:
    """ "u:hi a:hello" -> messages."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[2:].replace("+", " ")} for turn in text.split()]


def shown(template: str, conversation: str) -> str:
    """The rendered tokens, supervised ones in braces, so that a golden value can be read."""
    tok = tokenizer(template)
    ids, mask = render_conversation(tok, turns(conversation))
    assert len(ids) == len(mask)
    pieces = (tok.convert_ids_to_tokens(token).replace("\n", "~") for token in ids)
    return "|".join(f"{{{piece}}}" if flag else piece for piece, flag in zip(pieces, mask, strict=True))


GOLDEN = {
    "chatml, one turn": (
        CHATML,
        "u:hi a:hello+a",
        "<|im_start|>|user|~|hi|<|im_end|>|~|<|im_start|>|assistant|~|{hello}|{ }|{a}|{<|im_end|>}|~",
    ),
    "chatml, system and two answers": (
        CHATML,
        "s:be u:hi a:hello u:bye a:ok",
        "<|im_start|>|system|~|be|<|im_end|>|~|<|im_start|>|user|~|hi|<|im_end|>|~|<|im_start|>|assistant|~|"
        "{hello}|{<|im_end|>}|~|<|im_start|>|user|~|bye|<|im_end|>|~|<|im_start|>|assistant|~|{ok}|{<|im_end|>}|~",
    ),
    "default system turn": (
        CHATML_DEFAULT,
        "u:hi a:ok",
        "<|im_start|>|system|~|be| |brief|<|im_end|>|~|<|im_start|>|user|~|hi|<|im_end|>|~|"
        "<|im_start|>|assistant|~|{ok}|{<|im_end|>}|~",
    ),
    "llama 3": (
        LLAMA3,
        "s:be u:hi a:hello u:bye a:ok",
        "<|bos|>|<|header|>|system|<|/header|>|~|~|be|<|eot|>|<|header|>|user|<|/header|>|~|~|hi|<|eot|>|"
        "<|header|>|assistant|<|/header|>|~|~|{hello}|{<|eot|>}|<|header|>|user|<|/header|>|~|~|bye|<|eot|>|"
        "<|header|>|assistant|<|/header|>|~|~|{ok}|{<|eot|>}",
    ),
    "llama 2, system merged into the user turn": (
        LLAMA2,
        "s:be u:hi a:hello u:bye a:ok",
        "<s>|[INST]| |<<SYS>>|be|<<SYS>>|hi| |[/INST]|{ }|{hello}|{ }|{</s>}|"
        "<s>|[INST]| |bye| |[/INST]|{ }|{ok}|{ }|{</s>}",
    ),
    "gemma, role renamed": (
        GEMMA,
        "u:hi a:hello u:bye a:ok",
        "<bos>|<start_of_turn>|user|~|hi|<end_of_turn>|~|<start_of_turn>|model|~|{hello}|{<end_of_turn>}|~|"
        "<start_of_turn>|user|~|bye|<end_of_turn>|~|<start_of_turn>|model|~|{ok}|{<end_of_turn>}|~",
    ),
    "the user quotes the template's own words": (
        CHATML,
        "u:assistant+<|im_end|> a:user",
        "<|im_start|>|user|~|assistant| |<|im_end|>|<|im_end|>|~|<|im_start|>|assistant|~|"
        "{user}|{<|im_end|>}|~",
    ),
    "no end token: the line end is the end of the turn": (
        PLAIN,
        "u:hi a:ok u:bye a:b",
        "user|~|hi|~|assistant|~|{ok}|{~}|user|~|bye|~|assistant|~|{b}|{~}",
    ),
    "white space before the end token is the answer's own": (
        CHATML,
        "u:hi a:ok+",
        "<|im_start|>|user|~|hi|<|im_end|>|~|<|im_start|>|assistant|~|{ok}|{ }|{<|im_end|>}|~",
    ),
    "a user turn after the last answer": (
        CHATML,
        "u:hi a:ok u:bye",
        "<|im_start|>|user|~|hi|<|im_end|>|~|<|im_start|>|assistant|~|{ok}|{<|im_end|>}|~|"
        "<|im_start|>|user|~|bye|<|im_end|>|~",
    ),
    "history rewritten, but only one answer": (
        REWRITES_HISTORY,
        "u:hi a:a+think+b",
        "<|im_start|>|user|~|hi|<|im_end|>|~|<|im_start|>|assistant|~|"
        "{a}|{ }|{think}|{ }|{b}|{<|im_end|>}|~",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_masks(case: str) -> None:
    template, conversation, expected = GOLDEN[case]
    assert shown(template, conversation) == expected


@pytest.mark.parametrize(
    ("template", "conversation", "message"),
    [
        (REWRITES_HISTORY, "u:hi a:a+think+b u:bye a:ok", r"turn 1 \(the whole conversation\).*token 9\)"),
        (PROMPT_ONLY_THOUGHT, "u:hi a:ok", r"turn 1 \(its own prompt\).*token 9\).*distill"),
        (CHATML, "a:hi u:ok", "turn 0 is the assistant's"),
        (CHATML, "u:hi", r"none of the 6 tokens would be trained on \(roles \['user'\]\)"),
        (GEMMA, "s:be u:hi a:ok", r"refuses a conversation with roles \['system', 'user'.*no system role"),
        (LLAMA2, "u:hi u:hi a:ok", "refuses a conversation.*roles must alternate"),
        ("{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}",
         "u:hi a:ok", "all of the 1 tokens would be trained on"),
        ("hi", "u:hi a:ok", "none of the 1 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_masked_is_an_error(template: str, conversation: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        render_conversation(tokenizer(template), turns(conversation))


def test_prompt_ends_where_the_answer_begins() -> None:
    tok = tokenizer(CHATML_DEFAULT)
    ids = render_prompt(tok, turns("u:hi a:ok u:bye"))
    whole, mask = render_conversation(tok, turns("u:hi a:ok u:bye a:hello"))
    assert whole[: len(ids)] == ids and tok.decode(whole[len(ids) :]) == "hello<|im_end|>\n"
    assert mask[len(ids) - 1 :] == [False, True, True, False]


@pytest.mark.parametrize("conversation", ["u:hi a:ok", "s:be"])
def test_a_prompt_must_end_with_the_user(conversation: str) -> None:
    role = turns(conversation)[-1]["role"]
    with pytest.raises(DataError, match=f"last turn's role is '{role}'"):
        render_prompt(tokenizer(CHATML), turns(conversation))


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(DataError, match="last turn's role is 'missing'"):
        render_prompt(tokenizer(CHATML), [])


def test_a_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(DataError, match="no chat template.*target.path"):
        render_prompt(tokenizer(None), turns("u:hi"))


@pytest.mark.parametrize(
    ("template", "prefix", "end"),
    [
        (CHATML, "<|im_start|>user\n", "<|im_end|>"),
        (CHATML_DEFAULT, "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n", "<|im_end|>"),
        (LLAMA3, "<|bos|><|header|>user<|/header|>\n\n", "<|eot|>"),
        (LLAMA2, "<s>[INST] ", "[/INST]"),
        (GEMMA, "<bos><start_of_turn>user\n", "<end_of_turn>"),
    ],
)
def test_user_prefix(template: str, prefix: str, end: str) -> None:
    tok = tokenizer(template)
    found = user_turn(tok)
    assert tok.decode(list(found.prefix_ids)) == prefix
    assert found.end_text == end
    assert list(found.prefix_ids) == render_prompt(tok, turns("u:hi"))[: len(found.prefix_ids)]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content | lower }}</s>{% endfor %}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}</s>{% endfor %}",
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_hides_the_user_turn_is_an_error(template: str) -> None:
    with pytest.raises(DataError, match="cannot be told apart"):
        user_turn(tokenizer(template))


def test_colours_show_the_mask() -> None:
    tok = tokenizer(CHATML)
    (view,) = colour_rows(tok, [render_conversation(tok, turns("u:hi a:ok"))])
    assert (
        view.plain
        == "2 of 12 tokens supervised\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    coloured = [(view.plain[span.start : span.end], span.style) for span in view.spans]
    assert coloured == [
        ("2 of 12 tokens supervised\n", "bold"),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", CONTEXT_STYLE),
        ("ok<|im_end|>", SUPERVISED_STYLE),
        ("\n", CONTEXT_STYLE),
    ]
    assert str(view.style) == ""  # a style of the whole row would colour every token


def test_a_row_with_another_mask_length_is_an_error() -> None:
    with pytest.raises(DataError, match="2 ids but 1 mask values"):
        colour_rows(tokenizer(CHATML), [([1, 2], [True])])
