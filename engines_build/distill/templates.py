"""The wording of the generated prompts, ``wording.json``, written for this project: {0}, {1}, {2}
are topic words, {n} and {m} small numbers. Entries of several parts are tuples.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _entries(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _entries(inner) for name, inner in value.items()}
    return [tuple(entry) if isinstance(entry, list) else entry for entry in value]


_WORDING: dict[str, Any] = {
    name: _entries(value)
    for name, value in json.loads(
        Path(__file__).with_name("wording.json").read_text("utf-8")
    ).items()
}

ABOUT: list[str] = _WORDING["about"]
TEXT_STARTS: list[str] = _WORDING["text_starts"]
PASSAGE_ASKS: dict[str, list[str]] = _WORDING["passage_asks"]
CODE_ASKS: list[str] = _WORDING["code_asks"]
TABLES: list[str] = _WORDING["tables"]
COLUMNS: list[tuple[str, str]] = _WORDING["columns"]
SQL_SHAPES: list[str] = _WORDING["sql_shapes"]
SQL_ANSWERS: list[str] = _WORDING["sql_answers"]
"""Answers to the question of the same place in ``SQL_SHAPES``."""
JUDGED_TABLES: list[str] = _WORDING["judged_tables"]
"""Tables of the SQL that models are judged by; none is in ``TABLES``."""
JUDGED_COLUMNS: list[str] = _WORDING["judged_columns"]
JUDGED_QUESTIONS: list[tuple[str, str]] = _WORDING["judged_questions"]
"""Questions and answers of that SQL; their wording is not that of ``SQL_SHAPES``."""
