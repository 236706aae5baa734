"""The tables of docs/reference/settings.md: ``python -m docs.tools.reference`` brings them up
to backend/config.py.

Keys, defaults and what they may be come from the dataclasses; what a key does is written on the
page itself and kept. A key that is new gets an empty sentence, which a test refuses.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from typing import Any

from backend import PROJECT_ROOT
from backend.config import ScheduleStep, ServingConfig
from backend.engine_config import EngineConfig

PAGE = PROJECT_ROOT / "docs" / "reference" / "settings.md"
PLACE = re.compile(r"(<!-- settings: ([\w.\[\]]*) -->\n).*?(<!-- end -->)", re.DOTALL)
SENTENCE = re.compile(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", re.MULTILINE)
NESTED = {"drafts[]": EngineConfig, "policy.schedule[]": ScheduleStep}
"""Types of the items of lists."""


def settings_class(path: str) -> type[Any]:
    """Return the dataclass at a place of ``serving.json``; '' is the whole."""
    if path in NESTED:
        return NESTED[path]
    return typing.get_type_hints(ServingConfig)[path] if path else ServingConfig


def keys(path: str) -> dict[str, tuple[str, str]]:
    """Return {key: (default, what it may be)} of a place; the whole's own keys are those that are
    no tables.
    """
    rows = {}
    for item in dataclasses.fields(settings_class(path)):
        default = item.default
        if path and item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        if path or (default is not dataclasses.MISSING and not dataclasses.is_dataclass(default)):
            value = "`" + json.dumps(list(default) if isinstance(default, tuple) else default) + "`"
            rows[item.name] = (value, _may_be(item))
    return rows


def _may_be(item: dataclasses.Field[Any]) -> str:
    low, high, choices = (item.metadata.get(name) for name in ("low", "high", "choices"))
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    if low is not None and high is not None:
        return f"{low:g} to {high:g}"
    return f"{low:g} or more" if low is not None else ""


def rewrite(page: str) -> str:
    """Return the page with its tables as they should be, their sentences as they were."""
    return PLACE.sub(_table, page)


def _table(place: re.Match[str]) -> str:
    sentences = dict(SENTENCE.findall(place[0]))
    lines = ["| key | default | may be | what it does |", "| --- | --- | --- | --- |"]
    for key, (default, may_be) in keys(place[2]).items():
        lines.append(f"| `{key}` | {default} | {may_be} | {sentences.get(key, '')} |")
    return f"{place[1]}{chr(10).join(lines)}\n{place[3]}"
