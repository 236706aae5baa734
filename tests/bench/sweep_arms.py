"""The policies of the sweep by name, each as an arm that serves: ``none``, ``fixed-DRAFT-LENGTH``, ``schedule``, ``ema``, ``smartspec``,
``spin`` and ``spindle``. ``none`` has no draft loaded; ``none-again`` is the same arm a second time, which shows the noise.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from backend.app import build, make_policy, model_path, timed_engines
from backend.config import parse_config
from backend.tables import load_tables
from tests.bench.arms import Arm, InProcessArm, ServerArm

NONE, AGAIN, SPINDLE = "none", "none-again", "spindle"
ADAPTING = ("schedule", "ema", "smartspec", "spin")
_UNLIMITED = 100_000
_SWITCHED = "fixed"


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the baselines are told, chosen on other prompts: one draft and length, and the best length of that draft by batch size."""

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


def arm_config(config: dict[str, Any], name: str, tuning: Tuning, active: int) -> dict[str, Any]:
    """Return the ``serving.json`` of an arm: the configuration with its policy, which begins cold, and a queue that refuses nobody."""
    base = config.get("policy", {})
    limits = {**config.get("limits", {}), "max_active_requests": active, "max_queued_requests": _UNLIMITED}
    policies: dict[str, dict[str, Any]] = {
        SPINDLE: {**base, "kind": "adaptive", "trace_file": ""},
        "schedule": {"draft": tuning.draft, "schedule": [{"batch": batch, "length": length} for batch, length in tuning.schedule]},
        "ema": {"kind": "average", "draft": tuning.draft},
        "smartspec": {"draft": tuning.draft},
        "spin": {"length": tuning.length},
    }
    if name in (NONE, AGAIN):
        return {**config, "limits": limits, "drafts": [], "policy": {"kind": "none"}}
    if name.startswith("fixed-"):
        draft, length = fixed_choice(name)
        policies[name] = {"kind": "fixed", "draft": draft, "length": length}
    shared = {key: base[key] for key in ("k_max", "seed") if key in base}
    return {**config, "limits": limits, "policy": {"kind": name, **shared, **policies[name], "keep_learned": False}}


class Roster(Protocol):
    """Gives arms by name; ``tuning`` is set before those that need it are asked for."""

    tuning: Tuning

    def arm(self, name: str) -> tuple[Arm, bool]:
        """Return the arm and whether it has just begun, cold."""
        ...

    def close(self) -> None:
        """End all arms."""
        ...


class Servers:
    """A tritonserver for each arm, started when first asked for; beyond ``most`` the one not used for longest ends.

    The fixed choices share one, whose switches are set (no planner runs in it, and no draft but theirs).
    """

    def __init__(self, config: dict[str, Any], active: int, folder: Path, most: int) -> None:
        self.tuning = Tuning()
        self._config, self._active, self._folder, self._most = config, active, folder, most
        self._running: OrderedDict[str, ServerArm] = OrderedDict()
        self._starts = 0

    def arm(self, name: str) -> tuple[Arm, bool]:
        """Return the arm, its server ready."""
        key = NONE if name == AGAIN else _SWITCHED if name.startswith("fixed-") else name
        fresh = key not in self._running
        if fresh:
            while len(self._running) >= self._most:
                self._running.popitem(last=False)[1].close()
            self._starts += 1
            self._running[key] = ServerArm(self._serving(key), self._folder / f"{self._starts}-{key}")
        self._running.move_to_end(key)
        server = self._running[key]
        if key == _SWITCHED:
            server.command("set canary_share=0 fixed_draft={} fixed_length={}".format(*fixed_choice(name)))
        return server, fresh

    def close(self) -> None:
        """End all servers."""
        while self._running:
            self._running.popitem()[1].close()

    def _serving(self, key: str) -> dict[str, Any]:
        made = arm_config(self._config, NONE if key == _SWITCHED else key, self.tuning, self._active)
        return (
            made
            if key != _SWITCHED
            else {**made, "drafts": self._config["drafts"], "policy": {**self._config.get("policy", {}), "kind": "none"}}
        )


class InProcess:
    """Every arm in this process, without Triton. Those that speculate share their engines; ``none`` has a target without drafts."""

    def __init__(self, config: dict[str, Any], active: int) -> None:
        self.tuning = Tuning()
        self._config, self._active = config, active
        whole, plain = (parse_config(arm_config(config, name, self.tuning, active)) for name in (SPINDLE, NONE))
        self._tables, _ = load_tables(whole, {engine.name: model_path(engine) for engine in timed_engines(whole)})
        self._apps = {False: build(plain, self._tables), True: build(whole, self._tables)}
        self._arms: dict[str, InProcessArm] = {}

    def arm(self, name: str) -> tuple[Arm, bool]:
        """Return the arm."""
        key = NONE if name == AGAIN else name
        fresh = key not in self._arms
        if fresh:
            self._arms[key] = self._made(key)
        return self._arms[key], fresh

    def close(self) -> None:
        """Free the engines."""
        for app in self._apps.values():
            app.close()

    def _made(self, name: str) -> InProcessArm:
        app = self._apps[name != NONE]
        config = parse_config(arm_config(self._config, name, self.tuning, self._active))
        policy = make_policy(replace(config, drafts=app.config.drafts), app.drafts, self._tables, app.step_stats, app.target.limits.tree)
        return InProcessArm(app, policy)
