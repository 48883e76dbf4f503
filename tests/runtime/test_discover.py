"""Which export serve.py takes when none is named."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from drafters.artifacts import write_folder
from drafters.contract import make_contract
from drafters.errors import ArtifactError, ContractError
from runtime.discover import choose_drafter, exports


@pytest.fixture
def roots(tmp_path):
    return tmp_path / "outputs", tmp_path / "artifacts"


@pytest.fixture
def make(tiny_target):
    graph = {"target_hidden_size": 64, "vocab_size": 512}
    contract = make_contract(
        tiny_target, family="eagle3", graph=graph, tap_indices=(2, 4, 5), rope={}, max_length=64, draft_vocab_sha256="0"
    ).to_json()

    def write(folder: Path, age: int, kind: str = "export", **changes: str) -> Path:
        def fill(temp: Path) -> None:
            (temp / "contract.json").write_text(json.dumps(contract | changes))

        write_folder(folder, fill, kind, {})
        os.utime(folder / "manifest.json", (1e9 - age, 1e9 - age))
        return folder

    return write


def test_a_given_path_is_taken_as_it_is(tiny_target, roots):
    assert choose_drafter("ngram", tiny_target, roots) == "ngram"


def test_the_newest_export_is_taken_and_named(tiny_target, roots, make, caplog):
    make(roots[0] / "b" / "export", age=20)
    newest = make(roots[0] / "a" / "export", age=10)
    make(roots[0] / "c" / "export", age=30)
    with caplog.at_level(logging.INFO, "runtime.discover"):
        assert choose_drafter(None, tiny_target, roots) == str(newest)
    assert f"taking the newest export, {newest} (written " in caplog.text


def test_outputs_come_before_artifacts(tiny_target, roots, make):
    shipped = make(roots[1] / "tiny-eagle3", age=0)
    assert choose_drafter(None, tiny_target, roots) == str(shipped)
    own = make(roots[0] / "run" / "export", age=50)
    assert choose_drafter(None, tiny_target, roots) == str(own)
    assert exports(roots) == [own, shipped]


def test_other_folders_are_passed_over(tiny_target, roots, make, caplog):
    wanted = make(roots[0] / "run" / "export", age=50)
    make(roots[0] / "run" / "checkpoint", age=0, kind="checkpoint")
    hidden = make(roots[0] / "run" / "later", age=0)
    os.rename(hidden, roots[0] / "run" / ".export.tmp-1-ab")
    damaged = make(roots[0] / "bad" / "export", age=0)
    (damaged / "manifest.json").write_text("{")
    assert exports(roots) == [wanted]
    assert f"passing over {damaged}" in caplog.text


def test_no_export_says_how_to_get_one(tiny_target, roots):
    with pytest.raises(
        ArtifactError, match=r"no export under .*outputs or .*artifacts. Train one with train.py, or set drafter.path"
    ):
        choose_drafter(None, tiny_target, roots)


def test_an_export_for_another_target_is_refused_with_the_way_out(tiny_target, roots, make):
    other = make(roots[0] / "other" / "export", age=0, target_weights_sha256="beef")
    with pytest.raises(ContractError) as caught:
        choose_drafter(None, tiny_target, roots)
    assert str(other) in str(caught.value) and "target_weights_sha256 is 'beef'" in str(caught.value)
    assert "Set drafter.path to an export made for it" in str(caught.value)
    fits = make(roots[1] / "mine", age=90)
    with pytest.raises(ContractError) as caught:
        choose_drafter(None, tiny_target, roots)
    assert str(caught.value).endswith(f"The newest that fits is {fits}: set drafter.path={fits}.")


def test_the_roots_are_outputs_and_artifacts_of_the_working_folder(tiny_target, tmp_path, make, monkeypatch):
    make(tmp_path / "outputs" / "run" / "export", age=0)
    monkeypatch.chdir(tmp_path)
    assert choose_drafter(None, tiny_target) == "outputs/run/export"
