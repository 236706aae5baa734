"""The special tokens of a checkpoint folder: their ids by name, and those that end a text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.files import read_object

logger = logging.getLogger(__name__)


def special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of special tokens by name, of a folder that may have no tokenizer."""
    path = folder / "tokenizer.json"
    return special_in(read_object(path)) if path.is_file() else {}


def special_in(spec: Mapping[str, Any]) -> dict[str, int]:
    """Return the same of a decoded ``tokenizer.json``."""
    added = spec.get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token["special"]}


def named_token(folder: Path, name: str) -> str:
    """Return the token that a tokenizer's settings call ``eos_token`` or the like; '' for none."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = _read(folder / file).get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return value
    return ""


def end_ids(folder: Path, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    """Return the ids that end a text: that of the tokenizer's ``eos_token``, and ``eos_token_id``
    of generation_config.json, else of config.json. The first is one of the tokenizer's.

    An id that the model has no row for can never come, and is left out with a warning. Raises
    ConfigError where the tokenizer has none of them.
    """
    config, size = _read(folder / "config.json"), max(vocabulary.values(), default=-1) + 1
    rows = _read_setting(config, "vocab_size")
    rows = rows if isinstance(rows, int) else size
    eos_id = vocabulary.get(named_token(folder, "eos_token"))
    path, stated = _stated_ends(folder, config)
    if beyond := [token for token in stated if not 0 <= token < rows]:
        text = f"{path}: eos_token_id must be token ids below {rows}, got {beyond[0]}"
        if eos_id is None and len(beyond) == len(stated):
            raise ConfigError(text)
        logger.warning("%s, which is left out", text)
    ends = [token for token in (eos_id, *stated) if token is not None and 0 <= token < rows]
    ends.sort(key=lambda token: token >= size)
    if not ends or ends[0] >= size:
        raise ConfigError(
            f"{folder} names no token that ends a text: neither an eos_token_id in "
            "generation_config.json or config.json nor an eos_token in tokenizer_config.json is "
            "one of the tokenizer's"
        )
    return tuple(dict.fromkeys(ends))


def _stated_ends(folder: Path, config: Mapping[str, Any]) -> tuple[Path, list[int]]:
    """Return the file that has ``eos_token_id``, a number or a list, and its ids."""
    path = folder / "generation_config.json"
    value = _read_setting(_read(path), "eos_token_id")
    if value is None:
        path, value = folder / "config.json", _read_setting(config, "eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"{path}: eos_token_id must be token ids, got {value!r}")
    return path, ids


def _read_setting(config: Mapping[str, Any], key: str) -> Any:
    """Return a setting of a model, of a multimodal one of its language model; None: nothing."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    return next((part[key] for part in parts if part.get(key) not in (None, [])), None)


def _read(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}
