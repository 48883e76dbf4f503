"""What drafter.path may say."""

from pathlib import Path

import pytest

from drafters.drafter_path import BUILT_IN, DrafterPart, parse_drafter_path
from drafters.errors import ConfigError


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("export", "a+b", "a+b+c", "small:odd", "x"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


def shown(path):
    return [f"{part.kind} {part.folder}" if part.folder else part.kind for part in parse_drafter_path(path)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_built_in_name(name):
    assert parse_drafter_path(name) == (DrafterPart(name),)


def test_folders_and_joins(folders):
    assert shown("export") == ["export export"]
    assert shown(str(folders / "export")) == [f"export {folders / 'export'}"]
    assert shown("small:x") == ["small x"]
    assert shown("export+suffix+recycle") == ["export export", "suffix", "recycle"]
    assert shown("ngram+small:x+export") == ["ngram", "small x", "export export"]


def test_what_is_no_folder_but_could_be_a_repository_is_a_hub_id(folders):
    assert parse_drafter_path("org/name-1.2_b") == (DrafterPart("hub", hub_id="org/name-1.2_b"),)
    assert parse_drafter_path("org/name+suffix+x") == (
        DrafterPart("hub", hub_id="org/name"), DrafterPart("suffix"), DrafterPart("export", Path("x")),
    )  # fmt: skip
    (folders / "org" / "name").mkdir(parents=True)
    assert shown("org/name") == ["export org/name"]
    for path in ("org/nmae", "./org", "org/name/deeper", "/org/x", "~/x/y"):
        with pytest.raises(ConfigError, match="there is no such folder"):  # of org there is a folder: mistyped
            parse_drafter_path(path if path != "./org" else "./nowhere")
    with pytest.raises(ConfigError, match="names a/b twice"):
        parse_drafter_path("a/b+a/b")


def test_a_home_folder_is_expanded(folders, monkeypatch):
    monkeypatch.setenv("HOME", str(folders))
    assert shown("~/export+small:~/x") == [f"export {folders / 'export'}", f"small {folders / 'x'}"]


def test_an_existing_folder_may_have_a_plus_in_its_name():
    assert shown("a+b") == ["export a+b"]
    assert shown("a+b+c") == ["export a+b+c"]
    assert shown("ngram+a+b+suffix") == ["ngram", "export a+b", "suffix"]
    assert shown("small:a+b+ngram") == ["small a+b", "ngram"]


@pytest.mark.parametrize(
    "path, wrong",
    [
        ("nowhere", "'nowhere' is not a drafter: there is no such folder"),
        ("file", "'file' is not a drafter"),
        ("ngram+nowhere", "'nowhere' is not a drafter"),
        ("ngram+", "'' is not a drafter"),
        ("", "'' is not a drafter"),
        ("a", "'a' is not a drafter"),
        ("Ngram", "'Ngram' is not a drafter"),
        ("small:", "small: names no folder that exists, ''"),
        ("suffix+small:nowhere", "small: names no folder that exists, 'nowhere'"),
    ],
)
def test_a_wrong_part_is_named_with_the_choices(path, wrong):
    with pytest.raises(ConfigError) as caught:
        parse_drafter_path(path)
    message = str(caught.value)
    assert message.startswith(f"drafter.path={path}: {wrong}")
    assert "an export folder, none, ngram, suffix, recycle, random, small:FOLDER, or several" in message


@pytest.mark.parametrize("path, twice", [("ngram+suffix+ngram", "ngram"), ("export+export", "export")])
def test_a_drafter_named_twice_is_refused(path, twice):
    with pytest.raises(ConfigError, match=f"names {twice} twice"):
        parse_drafter_path(path)


def test_none_cannot_be_joined():
    with pytest.raises(ConfigError, match="none drafts nothing and cannot be joined"):
        parse_drafter_path("none+ngram")
