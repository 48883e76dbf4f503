"""A drafter is refused when anything it was made against differs; the message says what and the way out."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafters.contract import (
    Contract,
    describe_taps,
    hash_config,
    hash_template,
    hash_tokenizer,
    hash_weights,
    make_contract,
    read_contract,
)
from drafters.errors import ContractError, OutriderError, TargetError

HASHES = {
    "target_weights_sha256": "w" * 64,
    "target_config_sha256": "c" * 64,
    "tokenizer_sha256": "t" * 64,
    "chat_template_sha256": "h" * 64,
}


def fake_target(**changes: object) -> SimpleNamespace:
    fingerprint = {"target": "org/model", **HASHES}
    facts = {"hidden_size": 64, "vocab_size": 512, "num_layers": 8, "dtype": "torch.float32"}
    fingerprint |= {name: changes.pop(name) for name in list(changes) if name in fingerprint}
    return SimpleNamespace(fingerprint=fingerprint, **(facts | changes))


ARGUMENTS = {
    "family": "eagle3",
    "graph": {"target_hidden_size": 64, "vocab_size": 512, "fc_norm": False},
    "tap_indices": [2, 4, 5],
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "max_length": 256,
    "draft_vocab_sha256": "d" * 64,
}


def contract(**changes: object) -> Contract:
    return dataclasses.replace(make_contract(fake_target(), **ARGUMENTS), **changes)


def test_taps_are_named_by_meaning():
    assert describe_taps((0, 1, 2, 7, 8), 8) == (
        "embedding output",
        "output of block 0 before norm",
        "output of block 1 before norm",
        "output of block 6 before norm",
        "output of block 7 after the final norm",
    )


@pytest.mark.parametrize("index", [-1, 9, True, "2"])
def test_tap_outside_the_target_is_refused(index):
    with pytest.raises(ContractError, match=f"tap_indices holds {index!r}.* 0 to 8.*drafter.taps"):
        describe_taps((2, index), 8)


def test_make_contract_takes_everything_from_the_target():
    made = contract()
    assert made.taps == tuple(f"output of block {k} before norm" for k in (1, 3, 4))
    assert made.tap_indices == (2, 4, 5) and made.dtype == "float32" and made.feature_shift == 1
    assert {name: getattr(made, name) for name in HASHES} == HASHES and made.target == "org/model"


def test_json_round_trip_through_a_file(tmp_path):
    (tmp_path / "contract.json").write_text(json.dumps(contract().to_json()))
    assert read_contract(tmp_path) == contract()


FIELDS = [field.name for field in dataclasses.fields(Contract)]


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("format_version", "adapter_sha256")])
def test_a_missing_or_mistyped_field_is_named(name):
    raw = contract().to_json()
    with pytest.raises(ContractError, match=rf"here: field {name} is None, expected a JSON "):
        Contract.from_json(raw | {name: None}, "here")
    del raw[name]
    with pytest.raises(ContractError, match=f"here: field {name} is missing"):
        Contract.from_json(raw, "here")


def test_an_adapter_is_recorded_only_where_there_is_one():
    tuned = contract(adapter_sha256="a" * 64)
    assert "adapter_sha256" not in contract().to_json() and tuned.to_json()["adapter_sha256"] == "a" * 64
    assert Contract.from_json(tuned.to_json()) == tuned and Contract.from_json(contract().to_json()) == contract()
    with pytest.raises(ContractError, match="here: field adapter_sha256 is None, expected a JSON str"):
        Contract.from_json(tuned.to_json() | {"adapter_sha256": None}, "here")


def test_check_adapter_names_both_hashes():
    plain, tuned = fake_target(), fake_target()
    tuned.fingerprint["adapter_sha256"] = "a" * 64
    assert make_contract(tuned, **ARGUMENTS).adapter_sha256 == "a" * 64
    contract().check_adapter(plain)
    contract(adapter_sha256="a" * 64).check_adapter(tuned)
    for recorded, target, words in (
        ("a" * 64, plain, f"here: adapter_sha256 is '{'a' * 64}', but what is loaded now has 'none'"),
        ("", tuned, f"here: adapter_sha256 is 'none', but what is loaded now has '{'a' * 64}'"),
        ("b" * 64, tuned, "export's folder, which tunes the target itself"),
    ):
        made = contract(adapter_sha256=recorded)
        made.check_target(target)
        with pytest.raises(ContractError) as caught:
            made.check_adapter(target, "here")
        assert words in str(caught.value)


def test_version_unknown_field_and_non_objects_are_refused(tmp_path):
    raw = contract().to_json()
    with pytest.raises(ContractError, match="format_version is 2, this code reads 1"):
        Contract.from_json(raw | {"format_version": 2})
    with pytest.raises(ContractError, match="field format_version is missing"):
        Contract.from_json({key: value for key, value in raw.items() if key != "format_version"})
    with pytest.raises(ContractError, match="unknown field window"):
        Contract.from_json(raw | {"window": 5})
    with pytest.raises(ContractError, match="field max_length is True"):
        Contract.from_json(raw | {"max_length": True})
    with pytest.raises(ContractError, match="got list"):
        Contract.from_json([raw])
    with pytest.raises(ContractError, match=r"contract\.json is missing"):
        read_contract(tmp_path)
    (tmp_path / "contract.json").write_text("{")
    with pytest.raises(ContractError, match="is not JSON"):
        read_contract(tmp_path)


CHANGES = {
    "family": "medusa",
    "graph": {"target_hidden_size": 64, "vocab_size": 512, "fc_norm": True},
    "target": "org/other",
    "target_config_sha256": "x" * 64,
    "target_weights_sha256": "x" * 64,
    "tokenizer_sha256": "x" * 64,
    "chat_template_sha256": "x" * 64,
    "taps": ("a", "b", "c"),
    "tap_indices": (2, 4, 6),
    "feature_shift": 2,
    "dtype": "bfloat16",
    "rope": {"rope_type": "default", "rope_theta": 5e5},
    "max_length": 512,
    "draft_vocab_sha256": "x" * 64,
    "adapter_sha256": "x" * 64,
    "format_version": 2,
}
NESTED = {"graph": "graph.fc_norm", "rope": "rope.rope_theta"}


def test_every_field_but_the_code_version_is_compared():
    assert set(CHANGES) == set(FIELDS) - {"code_version"}
    contract().compare(contract(code_version="9.9"), "ckpt")


@pytest.mark.parametrize("name", CHANGES)
def test_compare_names_the_field_both_values_and_the_way_out(name):
    mine, other = contract(), contract(**{name: CHANGES[name]})
    with pytest.raises(ContractError) as caught:
        mine.compare(other, "ckpt")
    message = str(caught.value)
    assert message.startswith(f"ckpt: {NESTED.get(name, name)} is ")
    old, new = (json.loads(json.dumps(getattr(each, name))) for each in (mine, other))  # tuples are lists in JSON
    if name in NESTED:
        key = NESTED[name].split(".")[1]
        old, new = old[key], new[key]
    assert repr(old) in message and repr(new) in message
    assert message.split(f"has {new!r}. ")[1].startswith(("Set ", "Use ", "Restore ", "A drafter fits"))


def test_compare_tells_true_from_one_and_sees_an_absent_key():
    graph = contract().graph
    with pytest.raises(ContractError, match="graph.fc_norm is False, but what is loaded now has 0"):
        contract().compare(contract(graph=graph | {"fc_norm": 0}), "ckpt")
    with pytest.raises(ContractError, match="graph.extra is 'absent', but what is loaded now has 1"):
        contract().compare(contract(graph=graph | {"extra": 1}), "ckpt")


def test_check_target_accepts_the_same_target_under_another_name_and_dtype():
    contract().check_target(fake_target(target="/some/folder", dtype="torch.bfloat16"))


@pytest.mark.parametrize("name", HASHES)
def test_check_target_names_the_hash_that_differs(name):
    with pytest.raises(ContractError, match=f"folder: {name} is '{HASHES[name]}', but .* has 'new'"):
        contract().check_target(fake_target(**{name: "new"}), "folder")


SIZES = [("hidden_size", "target_hidden_size"), ("vocab_size", "vocab_size")]


@pytest.mark.parametrize(("fact", "field"), SIZES)
def test_check_target_compares_sizes(fact, field):
    with pytest.raises(ContractError, match=f"graph.{field} is .* has 7"):
        contract().check_target(fake_target(**{fact: 7}))
    graph = {key: value for key, value in contract().graph.items() if key != field}
    with pytest.raises(ContractError, match=f"field graph.{field} is missing"):
        contract(graph=graph).check_target(fake_target())


def test_check_target_refuses_taps_whose_meaning_is_not_their_index():
    taps = ("output of block 2 before norm", *contract().taps[1:])
    with pytest.raises(ContractError, match=r"taps is \['output of block 2.*\[2, 4, 5\] mean \['output"):
        contract(taps=taps).check_target(fake_target())
    with pytest.raises(ContractError, match=r"taps is .*tap_indices \[3, 4, 5\] mean"):
        contract(tap_indices=(3, 4, 5)).check_target(fake_target())


def test_config_hash_ignores_bookkeeping_and_order_only():
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": [1, 2]}
    noise = {"transformers_version": "5", "_name_or_path": "x", "dtype": "bfloat16", "torch_dtype": "float32"}
    same = dict(reversed(config.items())) | noise | {"eos_token_id": (1, 2)}
    assert hash_config(same) == hash_config(config)
    assert hash_config(config | {"text": {"dtype": "x"}}) == hash_config(config | {"text": {"dtype": "y"}})
    assert hash_config(config | {"hidden_size": 65}) != hash_config(config)
    assert hash_config(config | {"rope_parameters": {"rope_theta": 2e4}}) != hash_config(config)


def test_tokenizer_hash_is_of_the_id_map():
    def tokenizer(vocab: dict[str, int]) -> SimpleNamespace:
        return SimpleNamespace(get_vocab=lambda: vocab)

    first = hash_tokenizer(tokenizer({"a": 0, "b": 1, "<eos>": 2}))
    assert hash_tokenizer(tokenizer({"<eos>": 2, "b": 1, "a": 0})) == first
    assert hash_tokenizer(tokenizer({"a": 1, "b": 0, "<eos>": 2})) != first
    assert hash_tokenizer(tokenizer({"a": 0, "b": 1, "<end>": 2})) != first


def test_template_hash_covers_text_named_templates_and_none():
    templates = [None, "", "{{ a }}", "{{ b }}", {"default": "{{ a }}"}, {"default": "{{ b }}"}]
    hashes = {hash_template(SimpleNamespace(chat_template=template)) for template in templates}
    assert len(hashes) == len(templates)


def save(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], **metadata: str) -> None:
    """Write the safetensors layout by hand: no torch, and any damage can be put in."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


TENSORS = {"a": ("F32", [2], b"12345678"), "b": ("BF16", [2, 1], b"abcd")}


def test_weight_hash_is_the_same_for_shards_order_and_metadata(tmp_path):
    save(tmp_path / "model.safetensors", TENSORS)
    first = hash_weights(tmp_path)
    save(tmp_path / "model.safetensors", dict(reversed(TENSORS.items())), format="pt")
    assert hash_weights(tmp_path) == first
    shards = tmp_path / "shards"
    shards.mkdir()
    for name, tensor in TENSORS.items():
        save(shards / f"{name}.safetensors", {name: tensor})
    save(shards / "unlisted.safetensors", TENSORS)
    index = {"weight_map": {name: f"{name}.safetensors" for name in TENSORS}}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hash_weights(shards) == first


@pytest.mark.parametrize(
    "changed",
    [
        {"a": ("F32", [2], b"12345679")},
        {"a": ("F32", [2, 1], b"12345678")},
        {"a": ("I32", [2], b"12345678")},
        {"c": ("F32", [1], b"1234")},
    ],
)
def test_weight_hash_sees_bytes_shape_dtype_and_names(tmp_path, changed):
    save(tmp_path / "model.safetensors", TENSORS)
    first = hash_weights(tmp_path)
    save(tmp_path / "model.safetensors", TENSORS | changed)
    assert hash_weights(tmp_path) != first


def test_weight_hash_errors(tmp_path):
    with pytest.raises(TargetError, match=r"model\.safetensors is missing.*target\.path"):
        hash_weights(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"not a model at all")
    with pytest.raises(TargetError, match="is not a safetensors file"):
        hash_weights(tmp_path)
    save(path, TENSORS)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TargetError, match="tensor b reaches past the end"):
        hash_weights(tmp_path)
    save(tmp_path / "one.safetensors", TENSORS)
    save(tmp_path / "two.safetensors", TENSORS)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(TargetError, match="hold the same tensor"):
        hash_weights(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "weight_map does not name"),
        ("{}", "weight_map does not name"),
        ('{"weight_map": ["a"]}', "weight_map does not name"),
        ('{"weight_map": {}}', "weight_map does not name"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "weight_map does not name"),
        ('{"weight_map": {"a": null}}', r"None is missing"),
    ],
)
def test_an_index_that_lists_no_files_is_refused(tmp_path, text, words):
    save(tmp_path / "model.safetensors", TENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(OutriderError, match=words):
        hash_weights(tmp_path)
