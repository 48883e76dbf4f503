"""verify reads every dialect back, recomputes its probe, and names whatever was changed in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafters.contract import Contract
from drafters.errors import ConfigError
from drafters.export import gguf as gguf_module
from drafters.export import native as native_module
from drafters.export import verify as verify_module
from drafters.export.expected_config import FREE
from drafters.export.recompute import first_logits
from drafters.export.verify import Checker, gguf_errors, main, verify_folder, weights_in
from drafters.target import default_taps
from tests.drafters.dialect_setup import (
    FROM,
    KINDS,
    Damage,
    checker,
    json_damages,
    native,
    other_type,
    other_value,
    tensor_damages,
    written,
)
from tests.drafters.export_setup import SHAPE
from tests.drafters.export_setup import export as export_eagle3

ROOT = Path(__file__).parents[2]
EVERY_DIALECT = pytest.mark.parametrize("dialect", list(FROM))
EVERY_KIND = pytest.mark.parametrize("kind", ["eagle3", *KINDS])
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors", "draft_vocab.safetensors")


@pytest.fixture(scope="module")
def natives(tiny_target, tmp_path_factory):
    place = tmp_path_factory.mktemp("natives")
    made = {kind: native(tiny_target, kind, place / kind) for kind in ("eagle3", *KINDS)}
    plain = export_eagle3(tiny_target, place / "eagle3-plain", SHAPE, default_taps(tiny_target.num_layers))
    return made | {"eagle3-plain": plain}  # llama.cpp knows no fc_norm


@pytest.fixture(scope="module")
def folders(tiny_target, natives, tmp_path_factory):
    """Every dialect's folder and what it is checked against, made when asked for."""
    place, made = tmp_path_factory.mktemp("dialects"), {}

    def get(dialect: str) -> tuple[Path, Checker]:
        if dialect not in made:
            source = natives[FROM[dialect]]
            folder = written(tiny_target, source, dialect, place / dialect)
            made[dialect] = folder, checker(tiny_target, source, dialect)
        return made[dialect]

    return get


@EVERY_DIALECT
def test_a_folder_as_it_was_written_reads_back_and_computes_the_probe(tiny_target, natives, folders, dialect):
    folder, against = folders(dialect)
    found = verify_folder(folder, dialect, tiny_target, natives[FROM[dialect]])
    assert found["errors"] == [] and found["round_trip"] is True and found["folder"] == str(folder)
    assert found["probe"]["max_difference"] < 1e-4
    assert found["probe"]["accepted"] == against.probe.accepted.tolist()


@EVERY_KIND
def test_a_native_export_reads_back_and_computes_its_own_probe(tiny_target, natives, kind):
    found = verify_folder(natives[kind], "native", tiny_target)
    assert found["errors"] == [] and found["probe"]["max_difference"] < 1e-4


# ---- every change of every thing is named


def unnoticed(folder: Path, against: Checker, damages: list[Damage]) -> list[str]:
    """Which of the changes leave no error that names what was changed; the folder is as before afterwards."""
    missed = []
    for damage in damages:
        before = {name: (folder / name).read_bytes() for name in (damage.part, "manifest.json")}
        try:
            damage.apply(folder)
            errors = against.errors(folder)
        finally:
            for name, data in before.items():
                (folder / name).write_bytes(data)
        if not any(damage.name in error for error in errors):
            missed.append(f"{damage.kind} {damage.part}: {damage.name}: {errors[:1]}")
    return missed


def parts(folder: Path, *suffixes: str) -> list[Damage]:
    found: list[Damage] = []
    for name in sorted(path.name for path in folder.iterdir()):
        if name in WEIGHTS:
            found += tensor_damages(folder, name)
        elif name in ("config.json", "config.sglang.json", "contract.json"):
            found += json_damages(folder, name)
    return found


@pytest.mark.parametrize(
    "dialect", [pytest.param(name, marks=pytest.mark.slow if name == "medusa2-merged" else ()) for name in FROM]
)
def test_every_change_of_a_dialects_tensor_or_field_is_named(folders, dialect):
    folder, against = folders(dialect)
    free = FREE.get(dialect, {})
    damages = [damage for damage in parts(folder) if damage.name not in free]
    tensors = len(load_file(folder / weights_in(dialect)))
    fields = len(json.loads((folder / "config.json").read_text()))
    assert len(damages) >= 6 * tensors + 1 + 3 * (fields - len(free)) + 1
    assert against.errors(folder) == []
    assert unnoticed(folder, against, damages) == []


@pytest.fixture
def known_graphs(monkeypatch):
    """Lays each graph out once: with hundreds of loads that is most of the time."""
    kept, lay_out = {}, native_module._expected

    def once(contract: Contract) -> dict[str, Tensor]:
        key = json.dumps([contract.family, contract.graph, contract.rope])
        if key not in kept:
            kept[key] = lay_out(contract)
        return kept[key]

    monkeypatch.setattr(native_module, "_expected", once)


@pytest.mark.parametrize("kind", ["eagle3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_every_change_of_a_native_tensor_or_field_is_named(tiny_target, natives, known_graphs, kind):
    folder = natives[kind]
    against = checker(tiny_target, folder, "native")
    # Other numbers of the right form have no name: the probe sees them, not where they are (test_export_probe).
    damages = [each for each in parts(folder) if each.kind != "value" or each.part.endswith(".json")]
    assert {damage.part for damage in damages} >= {"config.json", "contract.json"} and len(damages) > 100
    assert unnoticed(folder, against, damages) == []


def test_what_may_differ_is_listed_with_its_reason():
    assert {dialect: list(fields) for dialect, fields in FREE.items()} == {"medusa2-merged": ["transformers_version"]}
    assert all(len(reason) > 20 for fields in FREE.values() for reason in fields.values())


# ---- the second path reads everything


@EVERY_DIALECT
def test_the_recomputed_logits_follow_every_tensor_of_the_first_draft(folders, dialect):
    folder, against = folders(dialect)
    _, config, tensors = against._graph(folder)
    plain, ids = first_logits(dialect, config, tensors, against.run)
    # Heads of later drafts, the map of which ids there are, and a merged target change no number of the first.
    merged = ("model.", "lm_head.", "medusa_head.1.") if dialect == "medusa2-merged" else ()
    for name, old in tensors.items():
        if name.startswith(("1.", "blocks.1.", "lm_heads.1.", "t2d", *merged)):
            continue
        # Whole numbers are a map, and a bias may be zero everywhere: rolled it is the same.
        new = old + 1 if old.dtype == torch.int64 or name == "fc.bias" else old.roll(1, 0)
        logits, columns = first_logits(dialect, config, tensors | {name: new}, against.run)
        assert not torch.equal(columns, ids) or float((logits - plain).abs().max()) > 1e-3, name


# ---- llama.cpp's files


def test_a_gguf_folder_reads_back_and_every_tensor_and_field_is_named(tiny_target, natives, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_module, "vocab_problem", lambda *_: None)
    monkeypatch.setattr(gguf_module, "add_vocab", lambda writer, *_: writer.add_tokenizer_model("gpt2"))
    folder = written(tiny_target, natives["eagle3-plain"], "gguf", tmp_path / "gguf")
    found = verify_folder(folder, "gguf", tiny_target, natives["eagle3-plain"])
    assert found["errors"] == [] and found["probe"]["max_difference"] < 1e-4
    assert found["engines"]["llama.cpp"]["loads"] and "-md" in found["engines"]["llama.cpp"]["command"]
    against = checker(tiny_target, natives["eagle3-plain"], "gguf")
    fields, tensors = verify_module.read_gguf(folder / "drafter.gguf")
    for name, old in tensors.items():
        for new in ({}, {f"{name}_": old}, {name: old[None]}, {name: old.double()}, {name: old + 1}):
            read = (fields, {key: value for key, value in tensors.items() if key != name} | new)
            monkeypatch.setattr(verify_module, "read_gguf", lambda path, r=read: r)
            assert any(f" {name} " in error for error in gguf_errors(folder, against.native)), (name, new.keys())
    for name, old in fields.items():
        if name == "general.name":  # a label, nothing reads it
            continue
        for new in ({}, {name: other_value(old)}, {name: other_type(old)}):
            rest = {key: value for key, value in fields.items() if key != name}
            monkeypatch.setattr(verify_module, "read_gguf", lambda path, r=(rest | new, tensors): r)
            if not name.startswith("tokenizer."):
                assert any(f"{name} " in error for error in gguf_errors(folder, against.native)), (name, new)


# ---- the command


def arguments(folder: Path, dialect: str, target: Path, probe: Path, out: Path) -> list[str]:
    return [str(folder), "--dialect", dialect, "--target", str(target), "--probe", str(probe), "--json", str(out)]


def test_the_command_writes_what_it_found_and_fails_where_something_is_wrong(tiny_target, natives, folders, tmp_path):
    folder, _ = folders("eagle3")
    out = tmp_path / "found.json"
    args = arguments(folder, "eagle3", tiny_target.folder, natives["eagle3"], out)
    assert main(args) == 0
    found = json.loads(out.read_text())
    assert found["round_trip"] and found["engines"]["vllm"]["loads"]
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "model.safetensors").write_bytes(b"junk")
    assert main([str(damaged), *args[1:]]) == 1
    found = json.loads(out.read_text())
    assert not found["round_trip"] and "model.safetensors" in found["errors"][0] and found["engines"] == {}


@pytest.mark.slow
def test_it_runs_in_a_process_of_its_own(tiny_target, natives, folders, tmp_path):
    folder, _ = folders("eagle3")
    out = tmp_path / "found.json"
    args = arguments(folder, "eagle3", tiny_target.folder, natives["eagle3"], out)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "drafters.export.verify", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "vllm serve" in done.stderr, done.stderr
    assert json.loads(out.read_text())["round_trip"]


def test_what_cannot_be_checked_is_refused_by_name(tiny_target, folders, tmp_path):
    folder, _ = folders("eagle3")
    with pytest.raises(ConfigError, match="--dialect is 'eagle4'. Set it to one of native, eagle3"):
        verify_folder(folder, "eagle4", tiny_target)
    with pytest.raises(ConfigError, match="--probe is missing"):
        verify_folder(folder, "eagle3", tiny_target)
