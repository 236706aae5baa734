"""Advice from the counters of servers in use, without one request.

A replica that always speculates at one length shows acceptance up to it and its steps by load, not
what a plain step takes: that is bounded only. A second replica with another length gives the rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy as np

from backend import __version__
from backend.advise import AdviceError, report
from backend.advise.acceptance import StepTokens
from backend.advise.advice import advise
from backend.advise.load import Cell, Client
from backend.advise.scrape import Scrape, Window, require

LEAST_ROW_STEPS = 20
"""Steps of requests in a reading from which on it counts."""
USELESS = 0.02
"""The share of a step's tokens below which a position is worth dropping."""
_NOTHING = 0.02
_FELL = 0.5


@dataclass
class WatchedServer:
    """A server and what its readings show."""

    url: str
    pages: list[Scrape] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    restarts: int = 0
    version: str = ""

    def add(self, page: Scrape) -> None:
        """Add a reading; after a restart it begins again."""
        if self.pages:
            try:
                self.windows.append(Window.between(self.pages[-1], page))
            except AdviceError:
                self.restarts += 1
        self.pages.append(page)

    @property
    def speculates(self) -> bool:
        """Whether the server counts speculation."""
        return "drafts" in self.pages[-1].values or "accepted" in self.pages[-1].values

    @property
    def length(self) -> int:
        """The length that it drafts, rounded; 0 without speculation."""
        drafts = sum(w["drafts"] for w in self.windows)
        drafted = sum(w["drafted"] for w in self.windows)
        return round(drafted / drafts) if drafts else 0

    def cells(self) -> list[Cell]:
        """Return a cell for each reading with traffic, its load that of its steps. Servers in use
        idle between steps, so a step's time is what decoding requests waited for one.
        """
        cells = []
        for block, window in enumerate(self.windows):
            if window["row_steps"] < LEAST_ROW_STEPS or not window["steps"]:
                continue
            busy_s = window["steps"] * window["row_step_s"] / window["row_steps"]
            busy = Window(busy_s, window.delta, window.accepted)
            cell = Cell(self.length, 1, busy, (), self.speculates, block)
            cells.append(replace(cell, in_flight=max(round(cell.batch), 1)))
        return cells

    def alarms(self) -> list[str]:
        """Return what looks broken."""
        alarms = []
        if self.restarts:
            alarms.append(f"restarted {self.restarts} times meanwhile")
        busy = [w for w in self.windows if w["drafts"] > 0]
        rates = [w["accepted"] / max(w["drafted"], 1.0) for w in busy]
        if len(rates) >= 4:
            half = len(rates) // 2
            before, after = float(np.mean(rates[:half])), float(np.mean(rates[half:]))
            if after < _FELL * before:
                alarms.append(
                    f"acceptance fell from {before:.0%} to {after:.0%} of proposed tokens"
                )
        if rates and rates[-1] < _NOTHING:
            alarms.append(
                f"acceptance is {rates[-1]:.0%} of proposed tokens: does the draft fit the model?"
            )
        if self.speculates and not busy and any(w["row_steps"] for w in self.windows):
            alarms.append("speculation is configured, and nothing is proposed")
        if any(page.gauges.get("waiting", 0) > 0 for page in self.pages[-2:]):
            alarms.append("requests wait: the server is full")
        return alarms

    def describe(self) -> dict[str, Any]:
        """Return what this replica shows by itself."""
        data: dict[str, Any] = {
            "url": self.url,
            "length": self.length,
            "speculates": self.speculates,
            "requests": round(sum(w["firsts"] for w in self.windows)),
            "alarms": self.alarms(),
        }
        cells = self.cells()
        data["loads"] = [_bound(n, [c for c in cells if c.in_flight == n]) for n in _loads(cells)]
        acceptance = _acceptance(cells, self.windows, self.length)
        if acceptance is not None:
            survival, fired = acceptance.survival()
            tokens = [one.emitted for one in acceptance.expect()]
            gains = [fired * share for share in survival]
            data["survival"] = [round(share, 4) for share in survival]
            data["fired"] = round(fired, 4)
            data["tokens_a_step"] = [round(one, 3) for one in tokens]
            data["positions_to_drop"] = [
                place + 1 for place, gain in enumerate(gains) if gain < USELESS * tokens[-1]
            ]
        return data


def _loads(cells: Sequence[Cell]) -> list[int]:
    return sorted({cell.in_flight for cell in cells})


def _acceptance(cells: Sequence[Cell], windows: Sequence[Window], length: int) -> StepTokens | None:
    """Return acceptance from the cells, or from bare counters of it if steps are not counted."""
    bare = [Cell(length, 1, w) for w in windows if w["drafts"] > 0]
    spoken = [cell for cell in cells if cell.length] or bare
    try:
        return StepTokens(spoken)
    except AdviceError:
        return None


def _bound(in_flight: int, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return a load's mean step, and the plain step's time under which speculation loses."""
    row_steps = sum(cell.row_steps for cell in cells)
    step_s = sum(cell.seconds() * cell.row_steps for cell in cells) / row_steps
    emitted = sum(cell.emitted * cell.row_steps for cell in cells) / row_steps
    return {
        "in_flight": in_flight,
        "step_s": round(step_s, 6),
        "emitted": round(emitted, 3),
        "loses_if_plain_step_s_below": round(step_s / emitted, 6),
    }


def run(
    options: argparse.Namespace, make: Callable[..., Client], say: Callable[[str], None]
) -> int:
    """Read for some minutes, and report."""
    replicas = {url: WatchedServer(url) for url in options.metrics_only}
    clients = {url: make(url) for url in replicas}
    say(f"reads /metrics of {', '.join(replicas)} for {options.minutes:g} minutes; sends nothing")
    until = time.monotonic() + 60 * options.minutes
    for url, client in clients.items():
        replicas[url].version = client.version()
        require(client.page(), "generated")
    while True:
        for url, client in clients.items():
            replicas[url].add(client.page())
        if time.monotonic() >= until:
            break
        time.sleep(max(min(options.every, until - time.monotonic()), 0.0))
    return finish(options, [*replicas.values()])


def finish(options: argparse.Namespace, replicas: Sequence[WatchedServer]) -> int:
    """Report what the readings show; a full advice if they are of different lengths."""
    data: dict[str, Any] = {"replicas": [replica.describe() for replica in replicas]}
    for replica_state in data["replicas"]:
        print("\n".join(_lines(replica_state)))
    cells = [cell for replica in replicas for cell in replica.cells()]
    arms = {(cell.length, cell.loaded) for cell in cells}
    about = {
        "spindle": __version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "engine": replicas[0].pages[-1].engine,
        "versions": {"engine": replicas[0].version, "spindle": __version__},
        "requests": f"counters of {len(replicas)} servers in use",
        "clock": "wall",
    }
    if len(arms) > 1 and len(_loads(cells)) > 1:
        now = options.now or max(cell.length for cell in cells)
        advice = advise(cells, now)
        advice.notes = [
            "from servers in use: replicas differ in more than their length, and so may traffic"
        ]
        print(report.table_text(advice))
        if options.out:
            report.write(options.out, advice, about | data, options.spec)
        return 0
    data["missing"] = _missing(replicas, cells)
    print(data["missing"])
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "advice.json").write_text(json.dumps(about | data, indent=1) + "\n", "utf-8")
    return 0


def _missing(replicas: Sequence[WatchedServer], cells: Sequence[Cell]) -> str:
    """Return the one measurement that a full advice lacks."""
    if not any(w["generated"] for replica in replicas for w in replica.windows):
        return "Missing: traffic. No token was generated meanwhile; read for longer."
    if not cells:
        return (
            "Missing: counters of steps, which this engine does not have. Only acceptance is "
            "known; measure with --serve."
        )
    if len(_loads(cells)) < 2:
        return "Missing: a second load. Read for longer, over a quiet and a busy time."
    if any(replica.speculates for replica in replicas):
        return (
            "Missing: the time of a plain step. Run one replica without speculation for these "
            "minutes and give both URLs; that is enough for full advice."
        )
    return "Missing: a replica that speculates. Give one such URL as well."


def _lines(state: dict[str, Any]) -> list[str]:
    lines = [f"{state['url']}: {state['requests']} requests, length {state['length']}"]
    lines += [f"  ALARM: {alarm}" for alarm in state["alarms"]]
    if "tokens_a_step" in state:
        tokens = ", ".join(f"{one:.2f}" for one in state["tokens_a_step"])
        lines.append(
            f"  proposals in {state['fired']:.0%} of steps; tokens a step at 0, 1, ...: {tokens}"
        )
    if state.get("positions_to_drop"):
        places = ", ".join(map(str, state["positions_to_drop"]))
        lines.append(f"  positions to drop: {places} (each brings under {USELESS:.0%})")
    for load in state["loads"]:
        line = f"  {load['in_flight']} in flight: a step takes {1e3 * load['step_s']:.1f} ms"
        if state["length"]:
            line += (
                f" and brings {load['emitted']:.2f} tokens; it loses if a plain one takes under "
                f"{1e3 * load['loses_if_plain_step_s_below']:.1f} ms"
            )
        lines.append(line)
    return lines
