"""An engine folder's description of itself, read without loading it: enough to pair drafts with a
target and to key measured tables.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engine_config import EMBEDDED_MODEL, EngineConfig
from backend.files import check_content, read_object, read_text
from backend.storage import cache
from backend.storage.weight_files import check_weight_files

_SAMPLES, _SAMPLE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Manifest:
    """An engine folder's description of itself."""

    folder: Path
    architecture: str
    vocab_size: int
    max_context_tokens: int
    vocabulary_sha256: str  # of its tokenizer's tokens, or of those that a draft was made for
    layout_sha256: str  # of the names, headers and sizes of its weight files: what time depends on


def read_manifest(folder: Path) -> Manifest:
    """Read a Hugging Face folder's manifest. Raises ConfigError naming the folder and what it
    lacks.
    """
    config = read_model_config(folder)
    if not {"vocab_size", "max_position_embeddings"} <= config.keys():
        config = _text_config(folder) | config
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"{folder} has no .safetensors file")
    vocabulary = _vocabulary_of(folder)
    if not vocabulary:
        raise ConfigError(
            f"{folder} has neither a tokenizer.json nor a vocabulary_sha256 in its config.json"
        )
    return Manifest(
        folder,
        next(iter(config.get("architectures") or ["unknown"])),
        _positive(config, "vocab_size", folder),
        _positive(config, "max_position_embeddings", folder),
        vocabulary,
        _layout_sha256(weights),
    )


def check_model(
    key: str, engine: EngineConfig, config: ServingConfig, path: Callable[[EngineConfig], Path]
) -> None:
    """Refuse a setting ``key`` that names no Hugging Face folder that the engine's kind loads.
    Raises ConfigError saying what to do.
    """
    tokenizer, folder = engine.name == config.target.name, path(engine)
    check_folder(key, engine.model, folder, engine.kind.architectures, tokenizer=tokenizer)
    with naming(key):
        check_weight_files(folder)
    if misfit := engine.kind.misfit(read_model_config(folder)):
        text = f"{key}: {folder} has {misfit}, which the engine {engine.engine!r} cannot run"
        raise ConfigError(f"{text}. Leave engine out, or name another")


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Let an error about a folder begin with the setting that names it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def check_folder(
    key: str, model: str, folder: Path, architectures: Sequence[str], *, tokenizer: bool
) -> None:
    """Refuse a ``model`` that is no Hugging Face folder of one of these architectures (none: of
    any), or lacks a ``tokenizer`` that it needs. Raises ConfigError beginning with the ``key``.
    """
    if not folder.is_dir():
        raise ConfigError(f"{key} must be a folder, got {model!r}{_download(model)}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: {folder} has no config.json. Give the folder of a Hugging Face checkpoint: "
            "config.json, tokenizer.json and *.safetensors"
        )
    with naming(key):
        architecture = next(iter(read_model_config(folder).get("architectures") or ["none"]))
    if architectures and architecture not in architectures:
        text = f"{key}: {folder} is a {architecture}, which is not supported"
        raise ConfigError(f"{text}. Supported are {', '.join(architectures)}")
    if tokenizer and not (folder / "tokenizer.json").is_file():
        load, save = (f"{verb}_pretrained({str(folder)!r})" for verb in ("from", "save"))
        raise ConfigError(
            f"{key}: {folder} has no tokenizer.json. Download it with the model; of an older "
            f'tokenizer file make it: python -c "from transformers import AutoTokenizer; '
            f'AutoTokenizer.{load}.{save}"'
        )
    if tokenizer:
        with naming(key):
            check_content(folder / "tokenizer.json")


def _download(model: str) -> str:
    """Return how to get a model by its Hugging Face id or of a GGUF file, if it looks like one."""
    if model.endswith(".gguf"):
        convert = f"python -m engines_build.convert --gguf {model} --out FOLDER"
        return f". Of a GGUF file make one: {convert} (spindle serve --model does it by itself)"
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model):
        close = get_close_matches(model, [EMBEDDED_MODEL])
        return f", which is not there{f': did you mean {close[0]!r}?' if close else ''}"
    name = model.rpartition("/")[2]
    command = f"hf download {model} --local-dir {name}"
    return f". If that is a Hugging Face id, download it first: {command}; then give {name}"


def check_pair(target: Manifest, draft: Manifest, *, same_size: bool) -> None:
    """Refuse a draft that does not speak the target's tokens. Without ``same_size`` the two may
    have different numbers of rows for the same tokens, as models of a family that are padded
    otherwise. Raises ConfigError naming both folders and values.
    """
    if same_size and draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft {draft.folder} has a vocabulary of {draft.vocab_size} tokens, its target "
            f"{target.folder} {target.vocab_size}"
        )
    if draft.vocabulary_sha256 != target.vocabulary_sha256:
        rows = min(draft.vocab_size, target.vocab_size)
        _check_tokens(target.folder, draft.folder, draft.vocabulary_sha256, rows)


def check_vocabulary(target: Path, draft: Path) -> None:
    """Refuse a draft folder that says that it has another vocabulary than its target, in its
    ``tokenizer.json`` or in its ``config.json``; one that says nothing is taken at its word. Raises
    ConfigError.
    """
    sizes = [read_model_config(folder).get("vocab_size") for folder in (target, draft)]
    rows = min((size for size in sizes if isinstance(size, int)), default=1 << 31)
    if made_for := _vocabulary_of(draft):
        _check_tokens(target, draft, made_for, rows)


def _vocabulary_of(folder: Path) -> str:
    """Return the hash of a folder's vocabulary; empty where it does not say."""
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists():
        return vocabulary_sha256(tokenizer)
    return str(read_model_config(folder).get("vocabulary_sha256") or "")


def _check_tokens(target: Path, draft: Path, made_for: str, rows: int) -> None:
    """Raise ConfigError unless the ids below ``rows`` mean the same in both folders: a token that
    was added in one of them may be missing in the other.
    """
    files = [folder / "tokenizer.json" for folder in (target, draft)]
    if made_for == (has := _vocabulary_of(target)):
        return
    if not all(file.exists() for file in files):
        raise ConfigError(
            f"draft {draft} was made for the vocabulary {made_for[:12]}, its target {target} has "
            f"{has[:12]}"
        )
    (our_tokens, our_added), (their_tokens, their_added) = map(_tokens_by_id, files)
    wrong = min(
        (
            token
            for token in our_tokens.keys() | their_tokens.keys()
            if token < rows
            and our_tokens.get(token) != their_tokens.get(token)
            and not (token not in our_tokens and token in their_added)
            and not (token not in their_tokens and token in our_added)
        ),
        default=None,
    )
    if wrong is not None:
        names = [
            json.dumps(tokens[wrong], ensure_ascii=False) if wrong in tokens else "no token"
            for tokens in (their_tokens, our_tokens)
        ]
        raise ConfigError(
            f"draft {draft} does not have the vocabulary of its target {target}; first difference: "
            f"id {wrong} is {names[0]} in the draft, {names[1]} in the target"
        )


def vocabulary_sha256(tokenizer: Path) -> str:
    """Return a hash of a ``tokenizer.json``'s tokens by id: equal ids mean equal tokens, however
    the file was written. Raises ConfigError for a file that cannot be read.
    """
    check_content(tokenizer)
    stat = tokenizer.stat()
    return _vocabulary_sha256(tokenizer, stat.st_mtime_ns, stat.st_size)


@lru_cache(16)
def _vocabulary_sha256(tokenizer: Path, *stat: int) -> str:
    del stat  # another one is another file
    tokens = sorted((number, token) for token, number in _tokens(tokenizer)[0].items())
    return hashlib.sha256(json.dumps(tokens, ensure_ascii=False).encode()).hexdigest()


def _tokens_by_id(tokenizer: Path) -> tuple[dict[int, str], set[int]]:
    """Return the tokens of a ``tokenizer.json`` by id, and the ids of those that were added."""
    tokens, added = _tokens(tokenizer)
    return {number: token for token, number in tokens.items()}, {*added.values()}


def _tokens(tokenizer: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ids of all tokens and of those that were added, by token."""
    spec = read_object(tokenizer)
    try:
        added = {token["content"]: token["id"] for token in spec.get("added_tokens", ())}
        return {**spec["model"]["vocab"], **added}, added
    except (KeyError, TypeError) as error:
        raise ConfigError(f"cannot read the vocabulary of {tokenizer}: {error!r}") from error


def weights_sha256(folder: Path) -> str:
    """Return a hash of what the weights are: of each file its name, size, header and samples spread
    over its values.

    Training changes every value, so samples tell checkpoints apart without reading all of their
    gigabytes.
    """
    return sampled_sha256(sorted(folder.glob("*.safetensors")))


def sampled_sha256(files: list[Path]) -> str:
    """Return the same of files, which need not have a header."""
    digest = hashlib.sha256(_layout_sha256(files).encode())
    for file in files:
        size = file.stat().st_size
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(size * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def read_model_config(folder: Path) -> dict[str, Any]:
    """Return a folder's ``config.json``. Raises ConfigError for a file that is not one."""
    return read_object(folder / "config.json")


def layer_count(folder: Path) -> int:
    """Return how many layers a folder's decoder has by its ``config.json``; 0: it does not say."""
    raw = read_model_config(folder)
    return int(
        raw.get("num_hidden_layers") or raw.get("text_config", {}).get("num_hidden_layers", 0)
    )


def _text_config(folder: Path) -> dict[str, Any]:
    """Return what transformers makes of a folder whose ``config.json`` leaves out defaults, or has
    the language model's in a part of it; nothing where that fails.
    """
    subject = ["sizes", read_text(folder / "config.json")]
    return cache.recall(subject, "transformers", lambda: _read_text_config(folder))


def _read_text_config(folder: Path) -> dict[str, Any]:
    with cache.require_packages(f"reading {folder} for the first time"):
        from transformers import AutoConfig  # takes seconds

    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = whole.get_text_config()
    except Exception:  # any configuration's own; what is missing is named
        return {}
    names = ("vocab_size", "max_position_embeddings")
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _positive(config: dict[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{folder / 'config.json'}: {key} must be a positive number, got {value!r}"
        )
    return value


def _layout_sha256(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            digest.update(
                f"{file.name} {file.stat().st_size} ".encode() + stream.read(min(length, 1 << 26))
            )
    return digest.hexdigest()
