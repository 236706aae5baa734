"""The cache of converted models and latency tables, and how they get there: whole or not at all.

A folder is written next to its place, sealed by a manifest of its files (bytes and SHA-256),
flushed and renamed. A reader checks the manifest, so that a half-copied or damaged folder is an
error that names the file, never a model that answers nonsense.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.machine import machine

MANIFEST = "manifest.json"
_FOLDERS = ("models", "graphs", "heads", "decoders", "latency", "learned", "remembered")


class CacheError(Exception):
    """A cached file or folder that is missing or damaged; the message names it and the command that
    mends it.
    """


def root() -> Path:
    """Return the cache folder: ``SPINDLE_CACHE``, by default ``~/.cache/spindle``."""
    return Path(os.environ.get("SPINDLE_CACHE") or "~/.cache/spindle").expanduser()


def model_folder(name: str) -> Path:
    """Return where the converted model of this name lives."""
    return root() / "models" / name


def graph_folder(key: str) -> Path:
    """Return where the converted graph of this key lives."""
    return root() / "graphs" / key


def head_folder(key: str) -> Path:
    """Return where the converted head of this key lives."""
    return root() / "heads" / key


def table_file(key: str) -> Path:
    """Return where the latency table of this key lives."""
    return root() / "latency" / f"{key}.json"


def learned_file(key: str) -> Path:
    """Return where what was learnt with the engines of this key lives."""
    return root() / "learned" / f"{key}.json"


def remembered_file(key: str) -> Path:
    """Return where the answers lie that the draft of this key has kept."""
    return root() / "remembered" / f"{key}.npz"


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the cache's writer lock (waiting for another holder), and remove what a killed writer
    left over.
    """
    root().mkdir(parents=True, exist_ok=True)
    with (root() / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in (path for name in _FOLDERS for path in (root() / name).glob(".*")):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        yield


def recall(subject: object, package: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a decoder's folder says, by a JSON-able ``subject``: it is made first unless the
    cache has it, or if the ``package`` that made it was another version.
    """
    key = hashlib.sha256(json.dumps(subject).encode()).hexdigest()[:32]
    file = root() / "decoders" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError, KeyError):
        stored = json.loads(file.read_text("utf-8"))
        if not is_outdated(stored["packages"]):
            return dict(stored["content"])
    content = make()
    with suppress(OSError):  # a cache that cannot be written is asked again
        stored = {"packages": package_versions(package), "content": content}
        publish_file(file, json.dumps(stored, indent=1) + "\n")
    return content


@contextmanager
def publish(folder: Path, provenance: dict[str, Any]) -> Iterator[Path]:
    """Give an empty folder to write into; on leaving, seal it with a manifest and put it in the
    place of ``folder``.

    When the body raises, nothing is published. ``provenance`` (JSON-able) is kept in the manifest.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield fresh
        files = {
            path.relative_to(fresh).as_posix(): describe(path)
            for path in sorted(fresh.rglob("*"))
            if path.is_file()
        }
        (fresh / MANIFEST).write_text(
            json.dumps({"provenance": provenance, "files": files}, indent=1) + "\n", "utf-8"
        )
        for path in fresh.rglob("*"):
            _flush(path)
        _flush(fresh)
        fresh.chmod(0o755)
        _swap(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def publish_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Put ``content`` into the place of ``path``, whole or not at all; it is never open to more
    than ``mode`` says.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    fresh = Path(name)
    try:
        os.close(handle)
        fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        fresh.chmod(mode)
        _flush(fresh)
        fresh.replace(path)
        _flush(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def check(folder: Path, *, hashes: bool = False) -> dict[str, Any]:
    """Return the manifest of a published folder after comparing every file's size, and with
    ``hashes`` its SHA-256.

    Raises CacheError naming the first file that is missing, of another size or of another hash.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
        files = manifest["files"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CacheError(f"{folder / MANIFEST} is missing or damaged ({error}); {_MEND}") from error
    for name, expected in files:
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            trouble = "is missing" if size is None else f"has {size} bytes"
            raise CacheError(
                f"{path} {trouble}, its manifest says {expected['bytes']} bytes; {_MEND}"
            )
        if hashes and (trouble := sha256(path)) != expected["sha256"]:
            raise CacheError(
                f"{path} has SHA-256 {trouble}, its manifest says {expected['sha256']}; {_MEND}"
            )
    return manifest


@contextmanager
def require_packages(work: str) -> Iterator[None]:
    """Raise ConfigError with the extra to install if ``work`` imports a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = f"{work} needs the package {error.name}: install spindle[convert]"
        other = f"or copy the cache {root()} from a machine that has served the model"
        raise ConfigError(f"{text} (in a clone: make serve), {other}") from None


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of packages that make a file, for the file to record."""
    versions = {name: machine.package_version(name) for name in names}
    # without the name of a build, as in 2.13.0+cpu
    return {name: text.partition("+")[0] for name, text in versions.items() if text}


def is_outdated(recorded: Mapping[str, str]) -> bool:
    """Return whether a package of these versions is installed in another one: what it made is made
    again. Without the package, what it made is read as it is.
    """
    return any(version != recorded[name] for name, version in package_versions(*recorded).items())


def describe(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry: its size in bytes and its SHA-256."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


_MEND = "run `spindle prepare` to make it again"


def _flush(path: Path) -> None:
    """Have the operating system write a file or folder through, so that a rename never overtakes
    its content.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _swap(fresh: Path, folder: Path) -> None:
    """Rename ``fresh`` to ``folder``; an old folder, which a rename cannot replace, is moved aside
    first and then deleted.
    """
    if not folder.exists():
        fresh.rename(folder)
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
        folder.rename(old / folder.name)
        fresh.rename(folder)
        shutil.rmtree(old)
    _flush(folder.parent)
