"""Drafts added and removed while the service runs: ``serving.json`` is read again, and the loop
changes over between two steps.
"""

from __future__ import annotations

import concurrent.futures
import logging
from dataclasses import fields
from time import monotonic
from typing import Any

import policy
from backend.app import App
from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.engines.port import Engine
from backend.engines.registry import Service, make_engine
from backend.model_folders import check_memory, check_pairs, model_path
from backend.speculation.learned_state import LearnedState, learned_key
from backend.speculation.policy_factory import make_policy
from backend.storage.tables import load_tables, timed_engines

logger = logging.getLogger(__name__)

CHANGE_LIMIT_S = 60.0
"""How long the loop may take to find no turn in flight."""


def reload_drafts(app: App, config: ServingConfig) -> dict[str, list[str]]:
    """Make the drafts those of ``config``: a draft whose entry is the same goes on, requests in
    flight notice nothing.

    Learned state of the drafts that stay is kept. Raises ConfigError where anything but drafts
    differs, a switch needs a draft that goes or a draft does not fit the target; LatencyError where
    one was never measured; then nothing has changed. Any thread but the loop's.
    """
    _check_change(app, config)
    running = dict(zip(app.config.drafts, app.drafts, strict=True))
    added = [draft for draft in config.drafts if draft not in running]
    wanted = Service(config, 1, model_path).taps
    if not set(wanted) <= set(app.taps):
        raise ConfigError(
            f"a head that reads the target's layers {list(wanted)} cannot be added while the "
            f"service runs: the running target gives {list(app.taps) or 'none'}; restart the "
            "service"
        )
    app.switches.check(config)
    check_pairs(config)
    folders = {engine.name: model_path(engine) for engine in timed_engines(config)}
    tables, threads = load_tables(config, folders)
    check_memory(config, [draft.name for draft in added])
    new_engines: dict[Any, Engine] = {}
    try:
        for draft in added:
            new_engines[draft] = make_engine(
                draft, Service(config, threads, model_path, app.stats.count)
            )
        engines = [{**running, **new_engines}[draft] for draft in config.drafts]
        key = learned_key(config, folders)
        planned = make_policy(config, engines, tables, app.step_stats)
        planner = policy.SwitchedPolicy(planned, app.switches.current)
        changed = app.orchestrator.between_steps(
            lambda: _change(app, config, engines, planner, key)
        )
        concurrent.futures.wait([changed], CHANGE_LIMIT_S)
        if changed.cancel():  # it has not begun
            raise ConfigError(
                f"timed out after {CHANGE_LIMIT_S:g} s waiting for in-flight work to finish"
            )
        changed.result()
    except BaseException:
        for engine in new_engines.values():
            engine.close()
        raise
    removed = [draft for draft in running if draft not in config.drafts]
    for draft in removed:
        running[draft].close()
    reply = {
        "drafts": [draft.name for draft in config.drafts],
        "added": [d.name for d in added],
        "removed": [d.name for d in removed],
    }
    logger.warning("drafts changed: %s", reply)
    return reply


def _check_change(app: App, config: ServingConfig) -> None:
    """Raise ConfigError where anything but drafts differs, or a trace is written."""
    differing = [
        field.name
        for field in fields(config)
        if getattr(config, field.name) != getattr(app.config, field.name)
    ]
    if app.config.target.kind.hosted:
        raise ConfigError("the drafter of a hosted engine cannot change while the service runs")
    if app.config.target.kind.hosted:
        raise ConfigError("the drafter of a hosted engine cannot change while the service runs")
    if others := [name for name in differing if name != "drafts"]:
        raise ConfigError(
            f"only drafts can change while the service runs; {', '.join(others)} differs and "
            f"needs a restart"
        )
    if config.policy.trace_file:
        raise ConfigError(
            f"drafts cannot change while policy.trace_file is written, got "
            f"{config.policy.trace_file!r}"
        )


def _change(
    app: App, config: ServingConfig, engines: list[Engine], planner: policy.AnyPolicy, key: str
) -> None:
    """Let the loop draft with these engines (loop's thread)."""
    app.switches.change_drafts(config)
    assert isinstance(app.learned_state, LearnedState)  # no target is hosted here
    with app.learned_state.changing(planner, key) as data:
        now = monotonic()
        state = planner.load(data, now, 0.0) if data else planner.start()
        app.orchestrator.draft_with(engines, planner, state)
    app.config = config
    app.engines[1:] = engines
