"""The chat template of a model, which comes with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from backend.openai_frontend.calls import call_format


class ChatTemplate:
    """Turns messages into the prompt of a model. A template can compute on what it is given, and no
    more: it runs in jinja2's sandbox.

    ``calls`` is the format in which the model writes calls of tools, None where it is not known.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", *, bos_added: bool = False
    ) -> None:
        """``bos_added``: the tokenizer begins every text by the begin token, so that the template's
        own is one too many.
        """
        self._made_of = (source, bos_token, eos_token, bos_added)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = (
            _to_json  # jinja2's own writes for HTML: "<" would be "\\u003c"
        )
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._bos_added = bos_added
        self._developers = "developer" in source
        self.shows_tools = "tools" in source
        self.calls = call_format(source)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process makes it."""
        return _template, self._made_of

    def prompt(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the text to complete. Raises ValueError where the template refuses the
        messages.
        """
        if not self._developers:
            known = {"developer": "system"}
            messages = [
                {**message, "role": known.get(message["role"], message["role"])}
                for message in messages
            ]
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"messages: the model's chat template refuses them: {error}") from None
        return text.removeprefix(self._tokens["bos_token"]) if self._bos_added else text


def _template(source: str, bos_token: str, eos_token: str, bos_added: bool) -> ChatTemplate:
    return ChatTemplate(source, bos_token, eos_token, bos_added=bos_added)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def load_template(folder: Path | None, file: Path | None) -> ChatTemplate | None:
    """Return the template in ``file``, else that of a checkpoint folder, else None."""
    config: dict[str, Any] = {}
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    source = config.get("chat_template")
    for path in (folder / "chat_template.jinja" if folder is not None else None, file):
        if path is not None and (path == file or path.is_file()):
            source = path.read_text("utf-8")
    if not isinstance(source, str):
        return None
    tokens = [_token(config.get(name)) for name in ("bos_token", "eos_token")]
    return ChatTemplate(source, *tokens, bos_added=folder is not None and _adds(folder, tokens[0]))


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else value or ""


def _adds(folder: Path, bos_token: str) -> bool:
    """Return whether the tokenizer begins a text by the begin token."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = library.token_to_id(bos_token) if bos_token else None
    return begin is not None and library.encode("a").ids[:1] == [begin]
