"""The tables of fields in docs/reference/openai.md (``python -m docs.tools.reference``)."""

from __future__ import annotations

import re

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from backend import PROJECT_ROOT
from backend.openai_frontend import schema
from backend.openai_frontend.bodies import IGNORED, REFUSED, ChatMessage

PAGE = PROJECT_ROOT / "docs" / "reference" / "openai.md"
BODIES: tuple[type[BaseModel], ...] = (
    schema.CompletionOptions,
    schema.CompletionRequest,
    schema.ChatRequest,
    ChatMessage,
    schema.TokenizeRequest,
    schema.DetokenizeRequest,
)
_BEGIN, _END = "<!-- fields: python -m docs.tools.reference -->", "<!-- end -->"
_FATES = ("supported", IGNORED, REFUSED)


def with_fields(page: str) -> str:
    """Return a page with its tables as they should be: a kind of body each, and what becomes of its
    fields.
    """
    lines = [_BEGIN, ""]
    for body in BODIES:
        title = (body.__doc__ or "").splitlines()[0].partition(".")[0].replace("``", "`")
        lines += [f"### {title}", "", "| field | | what it does |", "| --- | --- | --- |"]
        shared = {} if body is BODIES[0] else BODIES[0].model_fields
        fields = {
            name: field
            for name, field in body.model_fields.items()
            if not _same(field, shared.get(name))
        }
        rows = [(_fate(field), f"`{name}`", _what(field)) for name, field in fields.items()]
        rows.sort(key=lambda row: _FATES.index(row[0]))
        lines += [f"| {name} | {fate} | {what} |" for fate, name, what in rows]
        lines.append("")
    table = "\n".join([*lines, _END])
    return re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: table, page, flags=re.DOTALL)


def _same(field: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and field.description == other.description


def _extra(field: FieldInfo) -> dict[str, object]:
    return dict(field.json_schema_extra) if isinstance(field.json_schema_extra, dict) else {}


def _fate(field: FieldInfo) -> str:
    return str(_extra(field).get("fate", "supported"))


def _what(field: FieldInfo) -> str:
    neutral = _extra(field).get("neutral") or []
    accepted = (
        f"; `{'`, `'.join(map(str, neutral))}` is accepted"
        if isinstance(neutral, list) and any(neutral)
        else ""
    )
    return ("**required**; " if field.is_required() else "") + (field.description or "") + accepted
