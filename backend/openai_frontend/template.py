"""The chat template of a model, which comes with its tokenizer, and special tokens in messages
as plain text: what a client writes forges no turn of the chat.

To make them text, the template is rendered with cuts, which no client can guess, in every special
token that a message spells. The prompt is then tokenised as a whole, and the tokens of those are
replaced by the tokens of their letters.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backend.checked_settings import ConfigError
from backend.files import read_object, read_text
from backend.openai_frontend.call_bodies import as_json
from backend.openai_frontend.calls import call_format
from backend.openai_frontend.reading import has_channels, reasoning_format
from backend.special_tokens import named_token

_KEYS = frozenset(
    (
        *("role", "content", "name", "tool_call_id", "tool_calls", "id", "type", "function"),
        *("arguments", "reasoning_content", "reasoning", "thinking"),
    )
)
"""Names that templates look for; others are those of a call's arguments."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning off and on."""
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, slots=True)
class EscapedPrompt:
    """A prompt, and the special tokens in it as they follow each other: name, and whether it is
    plain text.
    """

    text: str
    tokens: tuple[tuple[str, bool], ...]

    @property
    def plain(self) -> set[str]:
        """The names that are plain text somewhere."""
        return {name for name, is_plain in self.tokens if is_plain}

    def ids(
        self, ids: list[int], special_tokens: Mapping[str, int], plain: Mapping[str, list[int]]
    ) -> list[int] | None:
        """Return the prompt's tokens, of those with all special tokens as such and those of the
        ``plain`` names' letters; None where the two do not match.
        """
        special_ids = set(special_tokens.values())
        places = [place for place, token in enumerate(ids) if token in special_ids]
        if not places:  # the tokenizer takes their names as text anyway
            return ids
        if [ids[place] for place in places] != [special_tokens[name] for name, _ in self.tokens]:
            return None
        merged, end = list[int](), 0
        for place, (name, is_plain) in zip(places, self.tokens, strict=True):
            merged += ids[end:place] + (plain[name] if is_plain else [ids[place]])
            end = place + 1
        return merged + ids[end:]


class Escaper:
    """Marks special tokens in messages for one rendering of a template."""

    def __init__(self, names: Iterable[str]) -> None:
        self._shapes = _shapes(tuple(names))
        self._cut_mark = secrets.token_hex(16)

    def messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with their special tokens cut."""
        return [{**self._value(message), "role": message["role"]} for message in messages]

    def prompt(self, rendered: str) -> str | EscapedPrompt:
        """Return the prompt of a rendered template; an escaped one where there is need."""
        parts = rendered.split(self._cut_mark)
        cuts, text = list(accumulate(map(len, parts[:-1]))), "".join(parts)
        tokens = [
            (match[0], any(match.start() < cut < match.end() for cut in cuts))
            for match in (self._shapes.pattern.finditer(text) if cuts else ())
        ]
        return EscapedPrompt(text, tuple(tokens)) if any(plain for _, plain in tokens) else text

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict):
            return {self._key(name): self._value(item) for name, item in value.items()}
        return [self._value(item) for item in value] if isinstance(value, list) else value

    def _key(self, name: str) -> str:
        return name if name in _KEYS else self._text(name)

    def _text(self, text: str) -> str:
        """Return a text with cuts in special tokens, and at an end that may be a part of one."""
        shapes, mark = self._shapes, self._cut_mark
        is_tail = any(text[:size] in shapes.tails for size in range(1, shapes.longest))
        is_head = any(text[-size:] in shapes.heads for size in range(1, shapes.longest))
        text = shapes.pattern.sub(lambda match: match[0][:1] + mark + match[0][1:], text)
        return mark * is_tail + text + mark * is_head


@dataclass(frozen=True, slots=True)
class _TokenForms:
    """The forms of special tokens that are looked for: them, their beginnings, and their ends."""

    pattern: re.Pattern[str]
    heads: frozenset[str]
    tails: frozenset[str]
    longest: int


@lru_cache(1)
def _shapes(names: tuple[str, ...]) -> _TokenForms:
    longest_first = sorted(names, key=len, reverse=True)
    return _TokenForms(
        re.compile("|".join(map(re.escape, longest_first)) or "(?!)"),
        frozenset(name[:size] for name in names for size in range(1, len(name))),
        frozenset(name[size:] for name in names for size in range(1, len(name))),
        max(map(len, names), default=0),
    )


class RenderError(ValueError):
    """The template cannot render what a client gave in the body's ``field``."""

    def __init__(self, field: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class _Generation(Extension):
    """``{% generation %}`` marks what the model writes, for training; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is between the marks."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns messages into the prompt of a model. A template can compute on what it is given, and no
    more: it runs in jinja2's sandbox.

    ``calls`` is the format in which the model writes calls of tools, None where it is not known;
    ``reasoning`` the marks around its reasoning, None where it has none; ``has_channels``: it
    writes messages on channels.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", tool_use: str | None = None
    ) -> None:
        """``tool_use`` is the template for conversations with tools; None: the same."""
        self._made_of = (source, bos_token, eos_token, tool_use)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        environment.filters["tojson"] = (
            _to_json  # jinja2's own writes for HTML: "<" would be "\\u003c"
        )
        self._templates = [environment.from_string(one or source) for one in (None, tool_use)]
        source += tool_use or ""
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._developers = "developer" in source
        self.shows_tools = "tools" in source
        self.calls = call_format(source)
        self.reasoning = reasoning_format(source)
        self.has_channels = has_channels(source)
        self._takes_effort = _EFFORT in source
        self._switches = tuple(name for name in SWITCHES if name in source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes it."""
        return ChatTemplate, self._made_of

    def variables(self, effort: str | None) -> dict[str, Any]:
        """Return the variables that a client's ``reasoning_effort`` sets. Raises RenderError
        where the template reads none.
        """
        named = {_EFFORT: effort} if self._takes_effort else {}
        if effort == "none":
            return {**dict.fromkeys(self._switches, False), **named}
        if effort is not None and not named:
            raise RenderError(
                _EFFORT,
                f"Unsupported parameter: '{_EFFORT}' is not supported: the model's chat template "
                f"reads none, got {as_json(effort)}",
                "unsupported_parameter",
            )
        return named if effort is not None else {}

    def prompt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        opens_answer: bool = True,
    ) -> str:
        """Return the text to complete; ``variables`` are the template's, by name. Without
        ``opens_answer`` it lacks what the template begins an answer with. Raises RenderError.
        """
        if not self._developers:
            roles = {"developer": "system"}
            messages = [
                {**message, "role": roles.get(message["role"], message["role"])}
                for message in messages
            ]
        context = {"messages": messages, "tools": tools, "add_generation_prompt": opens_answer}
        try:
            return self._render(context, variables or {})
        except Exception as error:  # a template can compute anything, and fail at it
            raise self._refusal(context, variables or {}, error) from None

    def _render(self, context: dict[str, Any], variables: Mapping[str, Any]) -> str:
        template = self._templates[bool(context["tools"])]
        return template.render({**context, **self._tokens, **variables})

    def _refusal(
        self, context: dict[str, Any], variables: Mapping[str, Any], error: Exception
    ) -> RenderError:
        """Return the refusal of the variables, if the messages can be rendered without them, else
        of the messages.
        """
        if variables:
            try:
                self._render(context, {})
            except Exception:
                variables = {}
        reason = str(error) or type(error).__name__
        if not variables:
            return RenderError(
                "messages", f"messages: the model's chat template refuses them: {reason}"
            )
        field = "chat_template_kwargs"
        return RenderError(
            field,
            f"{field}: the model's chat template refuses {as_json(dict(variables))}: {reason}",
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise TemplateError(message)


def load_template(folder: Path | None, file: Path | None) -> ChatTemplate | None:
    """Return the template in ``file``, else that of a checkpoint folder, else None. Raises
    ConfigError for one that cannot be read.
    """
    templates = {} if folder is None else _templates(folder)
    if file is not None:
        templates = {"default": read_text(file)}
    if "default" not in templates:
        return None
    names = ("bos_token", "eos_token")
    begin, end = ("" if folder is None else named_token(folder, name) for name in names)
    try:
        return ChatTemplate(templates["default"], begin, end, templates.get("tool_use"))
    except TemplateError as error:
        text = f"the chat template of {file or folder} cannot be read: {error}"
        raise ConfigError(text) from error


def _templates(folder: Path) -> dict[str, str]:
    """Return a folder's templates by name, where transformers puts them: ``default``, and perhaps
    ``tool_use`` for conversations with tools.
    """
    path = folder / "tokenizer_config.json"
    value = read_object(path).get("chat_template") if path.is_file() else None
    named = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates = {str(item["name"]): item["template"] for item in named if item["template"]}
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in folder.glob("additional_chat_templates/*.jinja")}
    return templates | {name: read_text(file) for name, file in files.items() if file.is_file()}
