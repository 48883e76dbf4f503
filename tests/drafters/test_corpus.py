"""Prompt layouts, splits and their errors; the shipped prompts; response records on disk."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.config import BuiltinData, DataConfig, HubData, JsonlData, MagpieData
from drafters.corpus import (
    Prompt,
    ResponseRecord,
    append_line,
    drop_torn_line,
    load_prompts,
    parse_record,
    read_prompt_file,
    read_records,
    record_line,
)
from drafters.errors import ConfigError, DataError

CATEGORIES = {"chat", "code", "maths", "summarise", "translate", "rewrite", "roleplay", "multi-turn"}
RECORD = ResponseRecord("r\u2028é", "chat", [1, 2], [3], "stop", 0.5, 7)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- the shipped prompts ----------------------------------------------------------------------------------


def test_builtin_has_eight_even_categories_and_a_held_out_part() -> None:
    train = load_prompts(BuiltinData())
    held_out = load_prompts(BuiltinData(eval_prompts=1000), "eval")
    assert len(train) + len(held_out) >= 360 and len(held_out) == 40
    for part in (train, held_out):
        counts = Counter(prompt.category for prompt in part)
        assert set(counts) == CATEGORIES and len(set(counts.values())) == 1
    everything = train + held_out
    assert len({prompt.id for prompt in everything}) == len(everything)
    assert len({json.dumps(prompt.messages) for prompt in everything}) == len(everything)


def test_builtin_conversations_wait_for_an_answer() -> None:
    for prompt in load_prompts(BuiltinData()) + load_prompts(BuiltinData(), "eval"):
        roles = [message["role"] for message in prompt.messages]
        if prompt.category == "multi-turn":
            assert len(roles) >= 3
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


def test_any_number_of_builtin_prompts_is_a_mix() -> None:
    first = load_prompts(BuiltinData(num_prompts=16))
    assert Counter(prompt.category for prompt in first) == dict.fromkeys(CATEGORIES, 2)
    assert len(load_prompts(BuiltinData(eval_prompts=8), "eval")) == 8


# ---- layouts ----------------------------------------------------------------------------------------------

ROWS = [
    {"id": "m", "category": "chat", "messages": [user("hi"), assistant("yes?"), user("bye")]},
    {"id": "s", "conversations": [{"from": "system", "value": "brief"}, {"from": "human", "value": "hi"},
                                  {"from": "gpt", "value": "dropped: the target writes its own"}]},
    {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    {"prompt": "plain"},
]  # fmt: skip
PARSED = [
    Prompt("m", "chat", (user("hi"), assistant("yes?"), user("bye"))),
    Prompt("s", "other", ({"role": "system", "content": "brief"}, user("hi"))),
    Prompt("81", "writing", (user("first"),)),
    Prompt("rows-00004", "other", (user("plain"),)),
]


def test_every_layout_by_line(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert read_prompt_file(path) == PARSED
    path.write_text(path.read_text().replace("\n", "\n\n"))  # blank lines are not rows
    assert read_prompt_file(path) == PARSED


def test_every_layout_in_one_array(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=1))
    assert read_prompt_file(path) == PARSED


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1", "rows.jsonl:2: not JSON"),
        ("3", "rows.jsonl:2: expected an object, got int"),
        ({"text": "x"}, r"rows.jsonl:2: keys \['text'\] hold no conversation.*messages"),
        ({"messages": []}, "rows.jsonl:2: messages: expected a list of turns"),
        ({"messages": [{"role": "user"}]}, r"rows.jsonl:2: messages\[0\]: expected \{\"role\""),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            r"messages\[0\]: role 'tool' is unknown.*system, user",
        ),
        ({"messages": [user(" ")]}, r"messages\[0\]: expected text in 'content'"),
        (
            {"messages": [{"role": "system", "content": "x"}]},
            "rows.jsonl:2: the conversation has no user turn",
        ),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\]: expected \{\"from\""),
        ({"turns": []}, r"turns\[0\]: expected the user's text"),
        ({"turns": "first"}, r"turns\[0\]: expected the user's text"),
        ({"prompt": ""}, "prompt: expected the user's text"),
        ({"id": "first", "prompt": "x"}, "rows.jsonl:2: id 'first' was already used at .*rows.jsonl:1"),
        ({"id": "", "prompt": "x"}, "rows.jsonl:2: id must be text or a whole number, got ''"),
        ({"id": True, "prompt": "x"}, "id must be text or a whole number, got True"),
        ({"category": 3, "prompt": "x"}, "rows.jsonl:2: category must be text, got 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"id": "first", "prompt": "good"}])
    with path.open("a") as file:
        file.write(row if isinstance(row, str) else json.dumps(row))
    with pytest.raises(DataError, match=message):
        read_prompt_file(path)


def test_a_bad_item_of_an_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "good"}, {"prompt": 3}]))
    with pytest.raises(DataError, match="rows.json: item 2: prompt: expected the user's text, got 3"):
        read_prompt_file(path)
    path.write_text('[{"prompt": "good"},\n{"prompt"}]')
    with pytest.raises(DataError, match="rows.json:2: not JSON"):
        read_prompt_file(path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"\n", "is empty")]
)
def test_a_file_without_rows_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"prompt file .*rows.jsonl {message}"):
        read_prompt_file(path)


# ---- sources and splits -----------------------------------------------------------------------------------


def numbered(tmp_path: Path, count: int) -> str:
    return str(
        write(tmp_path / "rows.jsonl", [{"id": f"p{i}", "prompt": f"number {i}"} for i in range(count)])
    )


def test_jsonl_is_split_by_hash_and_keeps_its_order(tmp_path: Path) -> None:
    path = numbered(tmp_path, 20)
    cfg = JsonlData(path=path, eval_prompts=5)
    train, held_out = load_prompts(cfg), load_prompts(cfg, "eval")
    assert len(train) == 15 and len(held_out) == 5
    assert {p.id for p in train} | {p.id for p in held_out} == {f"p{i}" for i in range(20)}
    assert [p.id for p in train] == [f"p{i}" for i in range(20) if f"p{i}" in {p.id for p in train}]
    assert load_prompts(JsonlData(path=path, eval_prompts=5, num_prompts=4)) == train[:4]
    assert load_prompts(JsonlData(path=path, eval_prompts=5, seed=1), "eval") != held_out
    longer = JsonlData(path=numbered(tmp_path, 21), eval_prompts=5)
    moved = {p.id for p in load_prompts(longer, "eval")} ^ {p.id for p in held_out}
    assert len(moved) <= 2  # one more row moves at most one other


def test_nothing_left_to_train_on_is_an_error(tmp_path: Path) -> None:
    cfg = JsonlData(path=numbered(tmp_path, 3), eval_prompts=3)
    with pytest.raises(
        DataError, match=r"data\.source=jsonl leaves no training prompt.*data\.eval_prompts=3"
    ):
        load_prompts(cfg)


def test_magpie_waits_for_the_targets_own_turns() -> None:
    prompts = load_prompts(MagpieData(num_prompts=2))
    assert prompts == [Prompt("magpie-000000", "magpie", ()), Prompt("magpie-000001", "magpie", ())]
    assert load_prompts(MagpieData(eval_prompts=8), "eval") == load_prompts(
        BuiltinData(eval_prompts=8), "eval"
    )


def test_unknown_source_and_split_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"data\.source is 'web'"):
        load_prompts(DataConfig(source="web"))
    with pytest.raises(DataError, match="split 'test' does not exist"):
        load_prompts(BuiltinData(), "test")


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A local dataset folder; no network is touched."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = [{"talk": [user(f"number {i}")], "kind": "chat", "key": f"k{i}", "note": i} for i in range(6)]
    write(folder / "train.jsonl", rows)
    return str(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_hub_columns_are_mapped(dataset: str, cache: None) -> None:
    columns = {"messages": "talk", "category": "kind", "id": "key"}
    prompts = load_prompts(HubData(dataset=dataset, columns=columns, eval_prompts=2))
    assert len(prompts) == 4
    assert all(p == Prompt(p.id, "chat", (user(f"number {p.id[1:]}"),)) for p in prompts)


def test_hub_names_a_missing_column(dataset: str, cache: None) -> None:
    with pytest.raises(
        DataError, match=r"data\.columns names \['speech'\].*has the columns \['talk', 'kind'"
    ):
        load_prompts(HubData(dataset=dataset, columns={"messages": "speech"}))


def test_hub_names_what_cannot_be_loaded(tmp_path: Path, cache: None) -> None:
    with pytest.raises(DataError, match=r"data\.dataset='.*absent'.*cannot be loaded.*data=jsonl"):
        load_prompts(HubData(dataset=str(tmp_path / "absent")))


# ---- records ----------------------------------------------------------------------------------------------


def test_records_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    with path.open("ab") as file:
        append_line(file, record_line(RECORD))
        assert list(read_records(path)) == [RECORD]  # on disk before the file is closed
        append_line(file, record_line(RECORD))
    assert list(read_records(path)) == [RECORD, RECORD]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": None}, "file:3: seed is of the wrong kind: None"),
        ({"seed": True}, "seed is of the wrong kind: True"),
        ({"temperature": "0"}, "temperature is of the wrong kind"),
        ({"id": 3}, "id is of the wrong kind"),
        ({"category": None}, "category is of the wrong kind"),
        ({"finish_reason": "eos"}, r"finish_reason is 'eos', expected one of \('stop', 'length'\)"),
        ({"response_ids": [1, -1]}, r"response_ids must be a list of token ids, got \[1, -1\]"),
        ({"response_ids": [1.0]}, "response_ids must be a list of token ids"),
        ({"prompt_ids": "12"}, "prompt_ids must be a list of token ids"),
        ({"text": "x"}, r"exactly the fields \['id', 'category', 'prompt_ids'.*got \['category'.*'text'"),
    ],
)
def test_a_bad_record_is_named(change: dict[str, object], message: str) -> None:
    row = {**json.loads(record_line(RECORD)), **change}
    with pytest.raises(DataError, match=message):
        parse_record(json.dumps(row), "file:3")


@pytest.mark.parametrize("field", ["id", "prompt_ids", "temperature", "seed"])
def test_a_missing_field_is_an_error(field: str) -> None:
    row = json.loads(record_line(RECORD))
    del row[field]
    with pytest.raises(DataError, match="exactly the fields"):
        parse_record(json.dumps(row), "file:3")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_cut_at_any_byte_loses_only_the_last_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = (record_line(RECORD) * 3).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("torn") / "responses.jsonl"
    path.write_bytes(whole[:cut])
    line = len(whole) // 3
    assert drop_torn_line(path) == cut % line
    assert list(read_records(path)) == [RECORD] * (cut // line)
    assert drop_torn_line(path) == 0


def test_no_file_has_no_torn_line(tmp_path: Path) -> None:
    assert drop_torn_line(tmp_path / "absent") == 0
