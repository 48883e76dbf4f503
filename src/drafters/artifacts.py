"""Folders that are either complete or absent: temp folder, manifest last, one rename."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafters.errors import ArtifactError

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_RESERVED = ("kind", "format_version", "files")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (hex) of one file of an artifact."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What an artifact folder holds: its kind, every file (posix path relative to it), and free-form meta."""

    kind: str
    format_version: int
    files: dict[str, FileEntry]
    meta: dict[str, Any]


def sha256_file(path: Path) -> str:
    """Return the sha256 (hex) of a file's bytes, read in 1 MiB chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file so that a kill at any moment leaves the old or the new text, never a mix."""
    path = Path(path)
    # A fixed temp name: what a killed run left behind is overwritten by the next one instead of piling up.
    temp = path.with_name(f".{path.name}.tmp")
    with open(temp, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temp, path)
    _fsync_path(path.parent)


def atomic_write_json(path: Path, value: Any) -> None:
    """Write JSON (2-space indent, trailing newline) atomically; NaN and infinity raise ValueError."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_folder(dest: Path, write: Callable[[Path], None], kind: str, meta: dict[str, Any]) -> Path:
    """Fill a temp folder with `write`, seal it with a manifest and swap it in as `dest` (absolute, returned).

    Raises ArtifactError when `dest` holds anything but an artifact of the same kind, or when the disk
    refuses; whatever `write` raises passes through. In every failure the previous folder stays as it was.
    """
    dest = Path(os.path.abspath(dest))
    clash = sorted(set(meta) & set(_RESERVED))
    if clash:
        raise ArtifactError(f"meta holds {clash}, which the manifest itself writes. Rename those meta keys.")
    dest.parent.mkdir(parents=True, exist_ok=True)
    settle(dest)
    _check_replaceable(dest, kind)
    _sweep(dest)
    temp = _temp_name(dest)
    try:
        temp.mkdir()
        with _locked(temp):
            write(temp)
            _seal(temp, kind, meta)
            _swap(temp, dest)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {dest}: {error}. What was there before is untouched. Free space or permissions "
            "there, or choose another folder, and run the same command again."
        ) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return dest


def settle(dest: Path) -> None:
    """Bring back the previous folder when a kill fell between the two renames of a swap; cheap otherwise."""
    dest = Path(os.path.abspath(dest))
    old = _old(dest)
    if not old.is_dir():
        return
    with _locked(dest.parent):
        # Looked at again under the lock: a live writer holds it while `dest` is away.
        if not dest.exists() and old.is_dir():
            os.rename(old, dest)


def read_manifest(folder: Path, kind: str | None = None) -> Manifest:
    """Read a folder's manifest; ArtifactError when it is missing, malformed, of another kind or version."""
    folder = Path(folder)
    settle(folder)
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder. Check the path, or run the command that makes it.")
    if not path.is_file():
        raise ArtifactError(
            f"{folder} has no {MANIFEST_NAME}, which is written last: it is not a folder written by "
            "Outrider, or a copy was cut short. Copy it again whole, or run the command that makes it."
        )
    try:
        manifest = _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is not a manifest ({type(error).__name__}: {error}). Copy the folder again, or make it "
            "anew."
        ) from error
    if manifest.format_version != FORMAT_VERSION:
        raise ArtifactError(
            f"{path}: format_version is {manifest.format_version}, this code reads {FORMAT_VERSION}. Use the "
            "Outrider version that wrote it, or make it anew."
        )
    if kind is not None and manifest.kind != kind:
        raise ArtifactError(
            f"{path}: kind is '{manifest.kind}', expected '{kind}'. Give a folder of kind '{kind}'."
        )
    return manifest


def verify_folder(folder: Path, kind: str | None = None) -> Manifest:
    """Check every listed file's size and sha256, return the manifest; ArtifactError names the first bad file.

    Files that the manifest does not list (notes, logs added by hand) are left alone: nothing reads them.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, kind)
    remedy = "The file changed after it was written: copy the folder again, or make it anew."
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise ArtifactError(f"{path}: listed in {MANIFEST_NAME} but missing. {remedy}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise ArtifactError(f"{path}: {size} bytes, {MANIFEST_NAME} says {entry.bytes}. {remedy}")
        digest = sha256_file(path)
        if digest != entry.sha256:
            raise ArtifactError(f"{path}: sha256 {digest}, {MANIFEST_NAME} says {entry.sha256}. {remedy}")
    return manifest


def _parse(raw: dict[str, Any]) -> Manifest:
    files = {}
    for name, entry in raw["files"].items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"file name '{name}' points outside the folder")
        files[name] = FileEntry(bytes=int(entry["bytes"]), sha256=str(entry["sha256"]))
    meta = {key: value for key, value in raw.items() if key not in _RESERVED}
    return Manifest(kind=str(raw["kind"]), format_version=int(raw["format_version"]), files=files, meta=meta)


def _check_replaceable(dest: Path, kind: str) -> None:
    if not dest.exists():
        return
    if not dest.is_dir():
        raise ArtifactError(
            f"{dest} is a file, a folder belongs there. Move it away or choose another folder."
        )
    if (dest / MANIFEST_NAME).is_file():
        read_manifest(dest, kind)
    elif any(dest.iterdir()):
        # Replacing means deleting; only what this module wrote may be deleted.
        raise ArtifactError(
            f"{dest} holds files but no {MANIFEST_NAME}: it was not written by Outrider and will not be "
            "replaced. Move it away or choose another folder."
        )


def _sweep(dest: Path) -> None:
    """Delete the temp folders of killed writers; a live writer holds a lock on its own and is left alone."""
    for temp in dest.parent.glob(f".{glob.escape(dest.name)}.tmp-*"):
        with contextlib.suppress(OSError), _locked(temp, wait=False):
            shutil.rmtree(temp)
    with _locked(dest.parent):
        if dest.exists():
            _discard_old(dest)


def _seal(temp: Path, kind: str, meta: dict[str, Any]) -> None:
    paths = sorted(path for path in temp.rglob("*") if path.is_file())
    files = {}
    for path in paths:
        _fsync_path(path)
        files[path.relative_to(temp).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = {"kind": kind, "format_version": FORMAT_VERSION, **meta, "files": files}
    atomic_write_json(temp / MANIFEST_NAME, manifest)
    for folder in sorted(path for path in temp.rglob("*") if path.is_dir()):
        _fsync_path(folder)


def _swap(temp: Path, dest: Path) -> None:
    old = _old(dest)
    # The parent's lock makes the two renames one step for other writers and for `settle`.
    with _locked(dest.parent):
        if dest.exists():
            _discard_old(dest)
            os.rename(dest, old)
        try:
            os.rename(temp, dest)
        except OSError:
            if old.exists():
                os.rename(old, dest)
            raise
        _fsync_path(dest.parent)
        _discard_old(dest)


def _discard_old(dest: Path) -> None:
    old = _old(dest)
    if old.exists():
        # Renamed before it is deleted: what is called .old is whole, so `settle` never revives half a folder.
        trash = _temp_name(dest)
        os.rename(old, trash)
        shutil.rmtree(trash, ignore_errors=True)


def _temp_name(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.tmp-{os.getpid()}-{os.urandom(3).hex()}")


def _old(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.old")


@contextlib.contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the kernel drops it when the process dies, however it dies."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def joined_folders(given: str) -> list[Path]:
    """The folders a setting names: one, or several joined by +; a folder that exists may have + in its name."""
    whole = Path(given).expanduser()
    return [whole] if whole.exists() else [Path(part).expanduser() for part in given.split("+")]
