"""Folders are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from drafters import artifacts
from drafters.errors import ArtifactError

KILLED = 77


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "a.txt").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b.txt").write_text(text * 2)

    return write


def content(folder: Path) -> str:
    return (folder / "a.txt").read_text()


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path != folder)


def test_manifest_lists_every_file_with_size_and_hash(tmp_path):
    dest = artifacts.write_folder(tmp_path / "x", writer("hello"), "demo", {"steps": 3})
    assert dest == tmp_path / "x"
    raw = json.loads((dest / "manifest.json").read_text())
    assert raw["kind"] == "demo" and raw["format_version"] == 1 and raw["steps"] == 3
    assert raw["files"] == {
        "a.txt": {"bytes": 5, "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"},
        "sub/b.txt": {"bytes": 10, "sha256": artifacts.sha256_file(dest / "sub" / "b.txt")},
    }
    manifest = artifacts.verify_folder(dest, "demo")
    assert manifest.meta == {"steps": 3} and manifest.files["a.txt"].bytes == 5
    assert leftovers(dest) == []


@pytest.mark.parametrize("name", ["a.txt", "sub/b.txt"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_damaged_file(tmp_path, name, damage):
    dest = artifacts.write_folder(tmp_path / "x", writer("hello"), "demo", {})
    path = dest / name
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[2] ^= 1
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    words = {"flip": "sha256", "cut": "bytes", "remove": "missing"}
    with pytest.raises(ArtifactError, match=rf"{re.escape(str(path))}: .*{words[damage]}"):
        artifacts.verify_folder(dest, "demo")


def test_files_added_by_hand_are_left_alone(tmp_path):
    dest = artifacts.write_folder(tmp_path / "x", writer("hello"), "demo", {})
    (dest / "notes.md").write_text("mine")
    assert "notes.md" not in artifacts.verify_folder(dest, "demo").files


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "other"}, "kind is 'other', expected 'demo'"),
        ({"format_version": 9}, "format_version is 9, this code reads 1"),
        ({"files": {"../secret": {"bytes": 1, "sha256": ""}}}, "'../secret' points outside the folder"),
        ({"files": {"a.txt": {"bytes": 5}}}, "is not a manifest .KeyError: 'sha256'"),
    ],
)
def test_manifest_errors_name_both_values(tmp_path, changes, message):
    dest = artifacts.write_folder(tmp_path / "x", writer("hello"), "demo", {})
    edit_manifest(dest, **changes)
    with pytest.raises(ArtifactError, match=message):
        artifacts.read_manifest(dest, "demo")


def test_missing_folder_missing_manifest_and_broken_manifest_differ(tmp_path):
    with pytest.raises(ArtifactError, match="is not a folder"):
        artifacts.read_manifest(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"has no manifest\.json"):
        artifacts.read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ArtifactError, match="is not a manifest"):
        artifacts.read_manifest(tmp_path)


def test_replaces_its_own_kind_only(tmp_path):
    dest = tmp_path / "x"
    artifacts.write_folder(dest, writer("old"), "demo", {})
    with pytest.raises(ArtifactError, match="kind is 'demo', expected 'export'"):
        artifacts.write_folder(dest, writer("new"), "export", {})
    assert content(dest) == "old"
    artifacts.write_folder(dest, writer("new"), "demo", {})
    assert content(dest) == "new" and leftovers(dest) == []


def test_never_replaces_what_it_did_not_write(tmp_path):
    dest = tmp_path / "thesis"
    dest.mkdir()
    (dest / "chapter.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match="was not written by Outrider"):
        artifacts.write_folder(dest, writer("new"), "demo", {})
    with pytest.raises(ArtifactError, match="is a file, a folder belongs there"):
        artifacts.write_folder(dest / "chapter.tex", writer("new"), "demo", {})
    assert (dest / "chapter.tex").read_text() == "years of work"


def test_meta_cannot_shadow_the_manifest(tmp_path):
    with pytest.raises(ArtifactError, match=r"\['files'\]"):
        artifacts.write_folder(tmp_path / "x", writer("new"), "demo", {"files": {}})
    assert not (tmp_path / "x").exists()


FAILURES = [KeyboardInterrupt(), RuntimeError("boom"), OSError(28, "No space left on device")]


@pytest.mark.parametrize("error", FAILURES)
def test_a_failing_write_leaves_the_old_folder_and_no_temp(tmp_path, error):
    dest = artifacts.write_folder(tmp_path / "x", writer("old"), "demo", {})

    def write(folder: Path) -> None:
        (folder / "a.txt").write_text("ne")
        raise error

    expected = ArtifactError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match="No space left" if expected is ArtifactError else None):
        artifacts.write_folder(dest, write, "demo", {})
    artifacts.verify_folder(dest, "demo")
    assert content(dest) == "old" and leftovers(dest) == []


def test_a_refused_rename_brings_the_old_folder_back(tmp_path, monkeypatch):
    dest = artifacts.write_folder(tmp_path / "x", writer("old"), "demo", {})
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(target) == dest and ".tmp-" in str(source):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ArtifactError, match="Input/output error"):
        artifacts.write_folder(dest, writer("new"), "demo", {})
    assert content(dest) == "old" and leftovers(dest) == []


def die_at(step: int, action: Callable[[], object]) -> int:
    """Run `action` in a child that dies, without any clean-up, just before its step-th call to the system."""
    child = os.fork()
    if child == 0:
        calls = 0

        def counted(function: Callable) -> Callable:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal calls
                if calls == step:
                    os._exit(KILLED)
                calls += 1
                return function(*args, **kwargs)

            return call

        for name in ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir", "open"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("before", ["nothing", "old"])
def test_killed_at_every_step_leaves_old_or_new_and_the_next_run_finishes(tmp_path, before):
    seen = []
    for step in range(200):
        dest = tmp_path / str(step) / "x"
        dest.parent.mkdir()
        if before == "old":
            artifacts.write_folder(dest, writer("old"), "demo", {})
        code = die_at(step, lambda dest=dest: artifacts.write_folder(dest, writer("new"), "demo", {}))
        if code == 0:
            break
        assert code == KILLED
        if (dest.parent / ".x.old").exists():
            # It may be brought back at any later time, so it too must be whole.
            artifacts.verify_folder(dest.parent / ".x.old", "demo")
        artifacts.settle(dest)
        if dest.exists():
            artifacts.verify_folder(dest, "demo")
            seen.append(content(dest))
        else:
            assert before == "nothing"
            seen.append("nothing")
        artifacts.write_folder(dest, writer("again"), "demo", {})
        artifacts.verify_folder(dest, "demo")
        assert content(dest) == "again" and leftovers(dest) == []
    # Every outcome turns up, in this order, and the loop ended because a child got through.
    assert code == 0 and len(seen) > 15
    assert seen == sorted(seen, key=[before, "new"].index) and set(seen) == {before, "new"}


def test_readers_bring_back_the_old_folder_after_a_kill_between_the_renames(tmp_path):
    dest = artifacts.write_folder(tmp_path / "x", writer("old"), "demo", {})
    os.rename(dest, tmp_path / ".x.old")
    assert artifacts.verify_folder(dest, "demo").kind == "demo"
    assert content(dest) == "old" and leftovers(dest) == []


def test_a_live_writers_temp_folder_is_not_swept(tmp_path):
    dest = tmp_path / "x"

    def write(folder: Path) -> None:
        # Another writer of the same folder starts and finishes meanwhile.
        artifacts.write_folder(dest, writer("second"), "demo", {})
        writer("first")(folder)

    artifacts.write_folder(dest, write, "demo", {})
    artifacts.verify_folder(dest, "demo")
    assert content(dest) == "first" and leftovers(dest) == []


def test_an_old_folder_left_by_another_killed_writer_is_no_obstacle(tmp_path):
    dest = artifacts.write_folder(tmp_path / "x", writer("old"), "demo", {})

    def write(folder: Path) -> None:
        writer("new")(folder)
        (tmp_path / ".x.old").mkdir()
        writer("older")(tmp_path / ".x.old")

    artifacts.write_folder(dest, write, "demo", {})
    artifacts.verify_folder(dest, "demo")
    assert content(dest) == "new" and leftovers(dest) == []


def test_atomic_text_and_json(tmp_path):
    path = tmp_path / "report.json"
    artifacts.atomic_write_json(path, {"b": 1, "a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "b": 1,\n  "a": "é"\n}\n'
    with pytest.raises(ValueError, match="JSON compliant"):
        artifacts.atomic_write_json(path, {"tau": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"b": 1, "a": "é"}
    for step in range(50):
        path.write_text("old")
        if die_at(step, lambda: artifacts.atomic_write_text(path, "new")) == 0:
            break
        assert path.read_text() in ("old", "new")
    assert step > 2 and path.read_text() == "new" and [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_folders_joined_by_plus(tmp_path):
    odd = tmp_path / "a+b"
    odd.mkdir()
    assert artifacts.joined_folders(str(odd)) == [odd]
    assert artifacts.joined_folders(f"{tmp_path}/x+{tmp_path}/y") == [tmp_path / "x", tmp_path / "y"]
