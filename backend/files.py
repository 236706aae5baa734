"""Files that a user or a model folder brings, read with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError

_POINTER = b"version https://git-lfs.github.com/spec/"
"""The first bytes of a Git LFS pointer."""


def read_json(path: Path) -> Any:
    """Return what a JSON file holds. Raises ConfigError naming the file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds. Raises ConfigError naming the file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not an object")
    return value


def read_text(path: Path) -> str:
    """Return what a file of text holds. Raises ConfigError naming the file."""
    check_content(path)
    try:
        return path.read_text("utf-8")
    except ValueError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error


def check_content(path: Path) -> None:
    """Raise ConfigError for a file that cannot be read, or that is only a Git LFS pointer."""
    try:
        with path.open("rb") as stream:
            beginning = stream.read(len(_POINTER))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if beginning == _POINTER:
        text = "is a Git LFS pointer, not the file that it stands for"
        raise ConfigError(f"{path} {text}: run `git lfs pull` in its folder")
