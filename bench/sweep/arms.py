"""The policies of the sweep by name, each as an arm that serves: ``none``, ``fixed-DRAFT-LENGTH``,
the baselines that comparisons run (``bench.baselines``) and ``spindle``. ``none`` has no draft
loaded; ``none-again`` is the same arm a second time, which shows the noise. A baseline gets the
best draft, length and schedule; ``smartspec-untold`` is SmartSpec with the first draft.

``with-PART`` is spindle with a part that the configuration has off, ``without-PART`` spindle
without one that it has on (``PARTS``) or without one of its drafts. A dotted path,
``my_package.MyPolicy[:NAME=VALUE]``, is a policy of your own (``policy.custom``), its other options
those of the configuration.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from backend import PROJECT_ROOT
from backend.app import App, build
from backend.config import ServingConfig, parse_config
from backend.model_folders import model_path
from backend.speculation.policy_factory import make_policy
from backend.storage.tables import load_tables, timed_engines
from bench.baselines import compared_baselines
from bench.servers import InProcessArm, LoadArm, ServerArm
from policy import LatencyTable
from policy.custom import parse_path

NONE, AGAIN, SPINDLE = "none", "none-again", "spindle"
UNTOLD = "smartspec-untold"
ADAPTING = tuple(
    name
    for baseline in compared_baselines()
    for name in ((baseline, UNTOLD) if baseline == "smartspec" else (baseline,))
)
PARTS: dict[str, tuple[str, str, Any, Any]] = {
    "prefix-reuse": ("limits", "enable_kv_cache_reuse", False, True),
}
"""The place of a part's setting in ``serving.json``, and its values without the part and with it.
"""
_DEFAULTS = ServingConfig()
_UNLIMITED = 100_000
_SWITCHED = "fixed"


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of the baselines, chosen on other prompts: one draft and length, and the best
    length of that draft by batch size.
    """

    draft: str = ""
    length: int = 0
    schedule: tuple[tuple[int, int], ...] = ()


def fixed_names(config: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """Return the names of all fixed choices."""
    return [f"fixed-{draft['name']}-{length}" for draft in config["drafts"] for length in lengths]


def fixed_choice(name: str) -> tuple[str, int]:
    """Return the draft and the length that a fixed arm is named after."""
    draft, _, length = name.removeprefix("fixed-").rpartition("-")
    return draft, int(length)


def is_ablation(name: str) -> bool:
    """Say whether an arm is spindle with or without a part."""
    return name.startswith(("with-", "without-"))


def ablation_names(config: dict[str, Any]) -> list[str]:
    """Return the arms that differ from spindle by one part or draft."""
    named = [f"{'without' if _has(config, part) else 'with'}-{part}" for part in PARTS]
    return [*named, *(f"without-{draft['name']}" for draft in config["drafts"])]


def _has(config: dict[str, Any], part: str) -> bool:
    section, key, off, _ = PARTS[part]
    return bool(config.get(section, {}).get(key, getattr(getattr(_DEFAULTS, section), key)) != off)


def _ablate(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the configuration with or without a part. Raises KeyError for a part that is neither
    one of ``PARTS`` nor a draft.
    """
    kind, _, part = name.partition("-")
    drafts = [draft for draft in config["drafts"] if draft["name"] != part]
    if kind == "without" and len(drafts) < len(config["drafts"]):
        return {**config, "drafts": drafts}
    section, key, off, on = PARTS[part]
    return {**config, section: {**config.get(section, {}), key: on if kind == "with" else off}}


def arm_config(config: dict[str, Any], name: str, tuning: Tuning, active: int) -> dict[str, Any]:
    """Return the ``serving.json`` of an arm: the configuration with its policy, which begins cold,
    and a queue that refuses no request.
    """
    if is_ablation(name):
        return arm_config(_ablate(config, name), SPINDLE, tuning, active)
    base = config.get("policy", {})
    first = next((draft["name"] for draft in config["drafts"]), "")
    limits = {
        **config.get("limits", {}),
        "max_active_requests": active,
        "max_queued_requests": _UNLIMITED,
    }
    policies: dict[str, dict[str, Any]] = {
        SPINDLE: {**base, "kind": "adaptive", "options": {}, "trace_file": ""},
        UNTOLD: {"kind": "smartspec", "draft": first},
    }
    tuned = {
        "draft": tuning.draft,
        "length": tuning.length,
        "schedule": [{"batch": batch, "length": length} for batch, length in tuning.schedule],
    }
    for baseline, its in compared_baselines().items():
        needs = {need: tuned[need] for need in its.needs}
        policies[baseline] = {"kind": its.path, "options": needs} if its.path else needs
    if "." in name:
        path, options = parse_path(name)
        base_options = base.get("options", {}) if base.get("kind") == path else {}
        policies[name] = {"kind": path, "options": {**base_options, **options}}
    if name in (NONE, AGAIN):
        return {**config, "limits": limits, "drafts": [], "policy": {"kind": "none"}}
    if name.startswith("fixed-"):
        draft, length = fixed_choice(name)
        policies[name] = {"kind": "fixed", "draft": draft, "length": length}
    shared = {key: base[key] for key in ("k_max", "seed") if key in base}
    return {
        **config,
        "limits": limits,
        "policy": {"kind": name, **shared, **policies.get(name, {}), "keep_learned": False},
    }


def tables(config: ServingConfig) -> dict[str, LatencyTable]:
    """Return the latency tables that a deployment on this machine is served with, by engine; none
    for engines without a model.
    """
    return load_tables(
        config, {engine.name: model_path(engine) for engine in timed_engines(config)}
    )[0]


class Roster(Protocol):
    """Gives arms by name; ``tuning`` is set before those that need it are asked for."""

    tuning: Tuning

    def arm(self, name: str) -> tuple[LoadArm, bool]:
        """Return the arm and whether it has just begun, cold."""
        ...

    def close(self) -> None:
        """End all arms."""
        ...


class Servers:
    """A tritonserver for each arm, started when first asked for; beyond ``most`` the one not used
    for longest ends.

    The fixed choices share one, whose switches are set (no planner runs in it, and no draft but
    theirs).
    """

    def __init__(
        self,
        config: dict[str, Any],
        active: int,
        folder: Path,
        most: int,
        environments: Mapping[str, dict[str, str]] = MappingProxyType({}),
    ) -> None:
        self.tuning = Tuning()
        self._config, self._active, self._folder, self._most = config, active, folder, most
        self._environments = environments  # by arm, besides this process's own
        self._running: OrderedDict[str, ServerArm] = OrderedDict()
        self._starts = 0

    def arm(self, name: str) -> tuple[LoadArm, bool]:
        """Return the arm, its server ready."""
        key = NONE if name == AGAIN else _SWITCHED if name.startswith("fixed-") else name
        fresh = key not in self._running
        if fresh:
            while len(self._running) >= self._most:
                self._running.popitem(last=False)[1].close()
            self._starts += 1
            self._running[key] = ServerArm(
                self._serving(key),
                self._folder / f"{self._starts}-{key}",
                PROJECT_ROOT,
                **self._environments.get(key, {}),
            )
        self._running.move_to_end(key)
        server = self._running[key]
        if key == _SWITCHED:
            server.command(
                "set canary_share=0 fixed_draft={} fixed_length={}".format(*fixed_choice(name))
            )
        return server, fresh

    def end(self, name: str) -> None:
        """End an arm's server, if it runs: when next asked for, it begins again."""
        if (server := self._running.pop(name, None)) is not None:
            server.close()

    def close(self) -> None:
        """End all servers."""
        while self._running:
            self._running.popitem()[1].close()

    def _serving(self, key: str) -> dict[str, Any]:
        settings = arm_config(
            self._config, NONE if key == _SWITCHED else key, self.tuning, self._active
        )
        return (
            settings
            if key != _SWITCHED
            else {
                **settings,
                "drafts": self._config["drafts"],
                "policy": {**self._config.get("policy", {}), "kind": "none", "options": {}},
            }
        )


class InProcess:
    """Every arm in this process, without Triton. Those that speculate share their engines; ``none``
    has a target without drafts.

    An ablation has engines of its own, since a part may be theirs; beyond ``most`` engines those
    not used for longest make room.
    """

    def __init__(self, config: dict[str, Any], active: int, most: int) -> None:
        self.tuning = Tuning()
        self._config, self._active, self._most = config, active, most
        self._apps: OrderedDict[str, App] = OrderedDict()
        self._arms: dict[str, InProcessArm] = {}

    def arm(self, name: str) -> tuple[LoadArm, bool]:
        """Return the arm, and whether its engines or its policy had to be made."""
        key = NONE if name == AGAIN else name
        fresh = key not in self._arms
        if fresh:
            self._arms[key] = self._make(key)
        self._apps.move_to_end(_engines_of(key))
        return self._arms[key], fresh

    def close(self) -> None:
        """Free the engines."""
        while self._apps:
            self._free()

    def _make(self, name: str) -> InProcessArm:
        app = self._app(_engines_of(name))
        config = replace(
            parse_config(arm_config(self._config, name, self.tuning, self._active)),
            drafts=app.config.drafts,
        )
        return InProcessArm(app, make_policy(config, app.drafts, tables(config), app.step_stats))

    def _app(self, name: str) -> App:
        if name not in self._apps:
            while len(self._apps) >= self._most:
                self._free()
            config = parse_config(arm_config(self._config, name, self.tuning, self._active))
            self._apps[name] = build(config, tables(config))
        return self._apps[name]

    def _free(self) -> None:
        """End the engines not used for longest, and the arms that stand on them."""
        name, app = self._apps.popitem(last=False)
        app.close()
        self._arms = {key: arm for key, arm in self._arms.items() if _engines_of(key) != name}
        del app
        gc.collect()  # arms and engines refer to each other; the next ones need the memory


def _engines_of(name: str) -> str:
    """Return the arm whose engines an arm in process stands on."""
    return name if name == NONE or is_ablation(name) else SPINDLE
