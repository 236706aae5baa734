"""Command-line options in place of ``serving.json``, and the file that both together make."""

from __future__ import annotations

import difflib
import hashlib
import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from backend.checked_settings import LEAST_LIKENESS, ConfigError
from backend.config import ServingConfig, load_config, parse_config
from backend.engine_config import EMBEDDED_MODEL
from backend.files import read_json
from backend.kinds import KINDS
from backend.launcher.environment import LaunchError
from backend.launcher.processes import run
from backend.storage import cache

MODEL_FREE_DRAFTS = {
    name: {"name": name, "engine": name} for name, kind in KINDS.items() if kind.free
}
"""The entries of drafts that need no model, by name."""
HOSTED_KINDS = [name for name, kind in KINDS.items() if kind.hosted]
DEFAULT_DRAFT = "suffix"
"""That of them which serves a model without drafts of its own."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of ``spindle serve``; None: what ``serving.json`` says.

    ``drafts`` is ``none``, or names of drafts in ``serving.json``, ``lookup``, ``suffix`` and
    ``name=FOLDER``, separated by commas.
    """

    model: str | None = None
    drafts: str | None = None
    engine: str | None = None
    dtype: str | None = None
    policy: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, field.name) is not None for field in fields(self))


def override(path: Path, overrides: Overrides) -> tuple[ServingConfig, dict[str, Any]]:
    """Return a configuration with the options in their place, and the same as ``serving.json``.

    Raises LaunchError or ConfigError naming the option or key and the value.
    """
    config, raw = load_config(path), read_json(path)
    raw["target"] = target = {**raw.get("target", {})}
    if overrides.model is not None:
        target["model"] = folder_or_name(overrides.model)
    if overrides.dtype is not None:
        target["dtype"] = overrides.dtype
    if overrides.engine is not None:
        target["engine"] = overrides.engine
    is_hosted = target.get("engine") in HOSTED_KINDS
    if overrides.drafts is not None:
        raw["drafts"] = drafts(overrides.drafts, raw.get("drafts", []), target)
    elif is_hosted:
        raw["drafts"] = []
    elif target.get("model", "") != config.target.model:
        raw["drafts"] = [MODEL_FREE_DRAFTS[DEFAULT_DRAFT]]
    if overrides.policy is not None:
        policy = {key: value for key, value in raw.get("policy", {}).items() if key != "options"}
        raw["policy"] = {
            **policy,
            "kind": overrides.policy,
        }  # options are of the policy in the file
    if is_hosted and not config.target.kind.hosted:  # lengths of other drafts
        policy = {key: value for key, value in raw.get("policy", {}).items() if key != "k_max"}
        raw["policy"] = policy
    try:
        effective = parse_config(raw, folder=path.absolute().parent)
    except ConfigError as error:
        raise ConfigError(f"{path} with the options of the command line: {error}") from None
    engines = (effective.target, *effective.drafts)  # with a hosted target's drafter at the end
    for entry, engine in zip([target, *raw.get("drafts", [])], engines, strict=False):
        entry["model"] = engine.model
    if effective.openai.chat_template:  # the file is written elsewhere
        raw["openai"]["chat_template"] = effective.openai.chat_template
    return effective, raw


def write_overridden(path: Path, overrides: Overrides, folder: Path) -> tuple[ServingConfig, Path]:
    """Write the file that both make into ``folder``; return the configuration and where it is.

    Without options it is ``path`` itself.
    """
    if not overrides.is_given:
        return load_config(path), path
    config, raw = override(path, overrides)
    file = folder / "serving.json"
    file.write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
    return config, file


def drafts(
    text: str, entries: list[dict[str, Any]], target: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the entries that ``--drafts`` means. Raises LaunchError.

    ``known`` and ``target`` are those of ``serving.json``; a folder runs on the target's device, by
    the engine that ``auto`` means.
    """
    if text == "none":
        return []
    by_name: dict[Any, dict[str, Any]] = {
        **MODEL_FREE_DRAFTS,
        **{draft.get("name"): draft for draft in entries},
    }
    chosen_drafts = []
    for item in text.split(","):
        name, equals, folder = item.partition("=")
        if item in by_name:
            chosen_drafts.append(dict(by_name[item]))
        elif name and equals and folder:
            device = {"device": target["device"]} if "device" in target else {}
            chosen_drafts.append({"name": name, "model": folder_or_name(folder), **device})
        else:
            allowed = f"name=FOLDER and of these names: {', '.join(filter(None, by_name))}"
            near = difflib.get_close_matches(item, [*filter(None, by_name)], 1, LEAST_LIKENESS)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise LaunchError(f"--drafts must be none, or a list of {allowed}; got {item!r}{hint}")
    return chosen_drafts


def folder_or_name(model: str) -> str:
    """Return a folder by its absolute path; what is none (a name, a mistake) as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if model != EMBEDDED_MODEL and folder.is_dir() else model


def folder_of(model: str, stop: threading.Event) -> str:
    """Return the folder of a GGUF file, which is converted unless the cache has it; any other
    ``model`` as it is. Raises LaunchError.
    """
    file = Path(model).expanduser().absolute()
    if file.suffix != ".gguf" or not file.is_file():
        return model
    facts = file.stat()
    key = hashlib.sha256(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache.model_folder(f"{file.stem}-{key}")
    if not folder.is_dir():
        module = [sys.executable, "-m", "engines_build.convert"]
        status = run([*module, "--gguf", str(file), "--out", str(folder)], stop)
        if status != 0 and not stop.is_set():
            raise LaunchError(f"{file} was not converted: the lines above say why")
    return str(folder)
