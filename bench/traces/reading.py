"""Reads traces: one request a line, with its tokens and what a head would have had accepted.

Two dialects of field are read: ``eagle``, and ``acc_eagle.acc_len`` of the public repository
SpecDecode-Bench/simulator. Either says for every generated position how many tokens a step there
emits: the accepted ones and one more.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "combined_"
"""The beginning of file names in the public repository."""


class TraceFileError(ValueError):
    """A file of traces that cannot be used."""


class Trace(NamedTuple):
    """One request: token ids, and the tokens that a step emits at each generated position."""

    prompt: list[int]
    text: list[int]
    emitted: list[int]


def files(folder: Path) -> dict[str, Path]:
    """Return the files of traces by the name of their set, sorted.

    Raises TraceFileError where there are none, or two of a set.
    """
    paths: dict[str, Path] = {}
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz"))):
        name = path.name.partition(".")[0].removeprefix(PREFIX)
        if name in paths:
            raise TraceFileError(
                f"{folder}: {paths[name].name} and {path.name} are of the same set"
            )
        paths[name] = path
    if not paths:
        raise TraceFileError(f"{folder}: no file SET.jsonl or SET.jsonl.gz there")
    return dict(sorted(paths.items()))


def traces(path: Path) -> Iterator[Trace]:
    """Return the requests of a file. Raises TraceFileError naming file, line and field."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _trace(line, f"{path}, line {number}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceFileError(f"{path}: {error}") from error


def _trace(line: str, where: str) -> Trace:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise TraceFileError(f"{where}: no JSON: {error}") from None
    if not isinstance(data, dict):
        raise TraceFileError(f"{where}: must be an object, got {line.strip()[:40]!r}")
    prompt = _numbers(data, "prompt_token_ids", 0, where)
    text = _numbers(data, "generated_token_ids", 0, where)
    if "eagle" not in data and "acc_eagle" not in data:
        raise TraceFileError(f"{where}: lacks the field 'eagle' (or 'acc_eagle.acc_len')")
    if "eagle" in data:
        return Trace(prompt, text, _numbers(data, "eagle", 1, where))
    inner = data["acc_eagle"]
    if not isinstance(inner, dict):
        raise TraceFileError(f"{where}: acc_eagle must be an object, got {inner!r}"[:200])
    return Trace(prompt, text, _numbers(inner, "acc_len", 1, where, "acc_eagle."))


def _numbers(data: dict[str, Any], name: str, least: int, where: str, of: str = "") -> list[int]:
    """Return a field that is a list of integers from ``least`` up."""
    if name not in data:
        raise TraceFileError(f"{where}: lacks the field {of + name!r}")
    values = data[name]
    if not isinstance(values, list):
        raise TraceFileError(f"{where}: {of}{name} must be a list, got {values!r}"[:200])
    for place, value in enumerate(values):
        if type(value) is not int or value < least:
            what = f"{of}{name}[{place}] must be an integer >= {least}"
            raise TraceFileError(f"{where}: {what}, got {value!r}"[:200])
    return values
