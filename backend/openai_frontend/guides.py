"""The grammar that an answer must follow: of a ``response_format``, or of a call that must come."""

from __future__ import annotations

import json
from typing import Any

from backend.openai_frontend.reasoning import Reasoning
from backend.openai_frontend.schema import ChatRequest, Function
from backend.openai_frontend.strict import close_objects

NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
"""What a function without parameters takes: ``{}``, in exactly these letters."""

_ANNOTATIONS = {"$schema", "title", "description", "type", "properties", "required"}
_BLANKS = r"BLANKS: /[ \n\r\t]+/"


def guide_of(
    body: ChatRequest, reasoning: Reasoning | None = None
) -> tuple[str | None, dict[str, str]]:
    """Return (the function that the text is a call of, '' for one that it names itself, or None;
    the inputs of the text model that constrain the text to a grammar, if any). Reasoning is free.
    """
    choice, functions = body.tool_choice, [tool.function for tool in body.tools or ()]
    if choice is not None and choice.function is not None:
        index = max(i for i, f in enumerate(functions) if f.name == choice.function.name)
        schema = arguments_schema(functions[index])
        return functions[index].name, _schema_guide(schema, reasoning, index)
    if choice is not None and choice.type == "required":
        grammar = call_grammar(functions)
        return "", _guide("ebnf_grammar", _after_reasoning(grammar, reasoning))
    if body.response_format is None or body.response_format.type == "text":
        return None, {}
    asked = body.response_format.json_schema
    if asked is None:
        return None, _schema_guide({"type": "object"}, reasoning)
    schema = close_objects(asked.schema_) if asked.strict else asked.schema_
    return None, _schema_guide(schema, reasoning)


def arguments_schema(function: Function) -> Any:
    """Return the schema of a function's arguments."""
    given = function.parameters or {}
    if not given or (given.keys() <= _ANNOTATIONS and given.get("properties") == {}):
        return NO_ARGUMENTS
    return close_objects(given) if function.strict else given


def call_grammar(functions: list[Function]) -> str:
    """Return the grammar, in Lark, of a call that names one of the functions.

    Each schema stands alone, as a document of its own: references in it, ``#`` and names of
    ``$defs`` mean what they mean there. Line n has the schema of function n, by which
    ``backend.openai_frontend.errors`` names the one that is wrong.
    """
    schemas, calls = [], []
    for index, function in enumerate(functions):
        schemas.append(f"arguments_{index}: %json {json.dumps(arguments_schema(function))}")
        parts = ["{", '"name"', ":", json.dumps(function.name), ",", '"parameters"', ":"]
        texts = " BLANKS? ".join(json.dumps(part) for part in parts)
        calls.append(f'call_{index}: {texts} BLANKS? arguments_{index} BLANKS? "}}"')
    answer = "answer: " + " | ".join(f"call_{index}" for index in range(len(functions)))
    return "\n".join([*schemas, *calls, answer, _BLANKS])


def _schema_guide(
    schema: dict[str, Any] | bool, reasoning: Reasoning | None, index: int = 0
) -> dict[str, str]:
    """Return the guide of a schema; ``index`` is that of the function whose arguments it has."""
    text = json.dumps(schema)
    if reasoning is None:
        return _guide("json_schema", text)
    grammar = "\n" * index + f"answer: %json {text}\n{_BLANKS}"
    return _guide("ebnf_grammar", _after_reasoning(grammar, reasoning))


def _after_reasoning(grammar: str, reasoning: Reasoning | None) -> str:
    """Return a grammar with its start: the ``answer``, after reasoning where there is some."""
    if reasoning is None:
        return f"{grammar}\nstart: answer"
    opening, closing = json.dumps(reasoning.form.opening), json.dumps(reasoning.form.closing)
    rules = f"{grammar}\nreasoning[suffix={closing}]: /(?s:.*)/\n"
    if reasoning.is_open:
        return f"{rules}start: reasoning BLANKS? answer"
    return f"{rules}start: (BLANKS? {opening} reasoning BLANKS?)? answer"


def _guide(kind: str, text: str) -> dict[str, str]:
    return {"guided_decoding_guide_type": kind, "guided_decoding_guide": text}
