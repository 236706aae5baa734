"""Prove or refute an advice: plain, before and after by turns, with the same requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from backend.advise import AdviceError
from backend.advise.campaign import (
    MOST_IN_FLIGHT,
    CampaignSettings,
    StartedServers,
    is_length,
)
from backend.advise.goodput import PLAIN, Interval, LoadRange, length_at
from backend.advise.load import Body, Client, measure
from policy.simulation.statistics import abba, median_interval

PROVEN, REFUTED, NOT_SHOWN = 0, 3, 4
_WORDS = {PROVEN: "proven", REFUTED: "refuted", NOT_SHOWN: "not shown"}
_IGNORED, _ABOVE = 0.5, 0.5
"""The share of proposals left at length 0, and tokens above a length, that a heeded table may show:
the first and last requests are fewer at a time.
"""
BLOCKS = 5
"""Blocks below which a median's interval says little."""


@dataclass
class AdviceFile:
    """The parts of advice.json that a proof needs."""

    table: list[LoadRange]
    speculate: bool
    now: int
    spec: dict[str, Any]
    engine: str

    @classmethod
    def read(cls, path: Path) -> AdviceFile:
        """Read advice.json. Raises AdviceError."""
        try:
            data = json.loads(path.read_text("utf-8"))
            table = [LoadRange(*map(int, one)) for one in data["table"]]
            return cls(
                table,
                bool(data["speculate"]),
                int(data["now"]),
                dict(data.get("spec", {})),
                str(data.get("engine", "")),
            )
        except OSError as problem:
            raise AdviceError(f"--advice {path}: {problem.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise AdviceError(f"--advice {path} is not advice: {problem!r}") from None

    def arms(self) -> dict[str, list[LoadRange]]:
        """Return the tables to compare by name. Without speculation, after is plain."""
        every = (1, MOST_IN_FLIGHT)
        arms = {"plain": [LoadRange(*every, PLAIN)]}
        arms["before"] = [LoadRange(*every, self.now or PLAIN)]
        if self.speculate:
            arms["after"] = self.table
        return arms


@dataclass
class Proof:
    """Tokens a second by arm, load and block, and what the engine drafted."""

    advised: AdviceFile
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    drafted: dict[int, list[float]] = field(default_factory=dict)
    """Drafted tokens of a proposal after the change, by load."""
    proposing: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """The share of requests' steps that had a proposal, by arm and load."""

    @property
    def after(self) -> str:
        """The arm that is advised."""
        return "after" if self.advised.speculate else "plain"

    def loads(self) -> list[int]:
        """Return the measured loads."""
        return sorted({load for _, load in self.speeds})

    def ratio(self, other: str, loads: Sequence[int]) -> Interval:
        """Return the advised speed over another's: the median of the blocks' geometric means over
        the loads, with its 95 % interval.
        """
        logs = [
            np.log(np.array(self.speeds[self.after, n]) / np.array(self.speeds[other, n]))
            for n in loads
        ]
        blocks = np.exp(np.mean(logs, 0))
        low, high = median_interval(blocks.tolist(), seed=0)
        return Interval(float(np.median(blocks)), low, high)

    def ignored_loads(self) -> list[str]:
        """Return the loads at which the engine drafts something other than the table says."""
        lines = []
        for n, drafted in sorted(self.drafted.items()):
            length, mean = length_at(self.advised.table, n), float(np.mean(drafted))
            before, after = (self._proposing(name, n) for name in ("before", "after"))
            if not length and after <= _IGNORED * before:
                continue
            if not is_length(mean, length, _ABOVE):
                lines.append(
                    f"at {n} in flight the table says {length}, the engine drafts {mean:.1f}"
                )
        return lines

    def _proposing(self, name: str, load: int) -> float:
        return float(np.mean(self.proposing.get((name, load), [1.0])))

    def outcome(self) -> tuple[int, str]:
        """Return the exit status and the reason."""
        if ignored := self.ignored_loads():
            return REFUTED, f"the engine ignores the table: {'; '.join(ignored)}"
        before = self.ratio("before", self.loads())
        worse = [n for n in self.loads() if self.ratio("before", [n]).high < 1]
        if before.high < 1:
            return REFUTED, "it is slower than before"
        if self.after != "plain" and self.ratio("plain", self.loads()).high < 1:
            return REFUTED, "it is slower than a plain server"
        if before.low > 1:
            loads = f", but slower at {', '.join(map(str, worse))} in flight" if worse else ""
            return (REFUTED if worse else PROVEN), f"it is faster than before{loads}"
        return NOT_SHOWN, "no difference shown from before: more --blocks may show one"

    def text(self) -> str:
        """Return the proof in words."""
        status, reason = self.outcome()
        lines = []
        for other in ("before", "plain"):
            if other == self.after:
                continue
            for n in self.loads():
                one = self.ratio(other, [n])
                ratio = f"{one.ratio:.2f}x ({one.low:.2f}-{one.high:.2f})"
                lines.append(f"{n} in flight: after over {other} {ratio}: {one.verdict}")
        return "\n".join([*lines, f"{_WORDS[status]}: {reason}"])

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as JSON-able data."""
        status, reason = self.outcome()
        others = [other for other in ("before", "plain") if other != self.after]
        return {
            "outcome": _WORDS[status],
            "reason": reason,
            "ratios": [
                {"over": other, "in_flight": n, "interval": list(self.ratio(other, [n]))}
                for other in others
                for n in self.loads()
            ],
            "over_all_loads": {other: list(self.ratio(other, self.loads())) for other in others},
            "tokens_per_s": [[arm, n, values] for (arm, n), values in self.speeds.items()],
            "drafted": {str(n): values for n, values in self.drafted.items()},
        }


def run(
    options: argparse.Namespace,
    make: Callable[..., Client],
    say: Callable[[str], None],
    consent: Callable[..., None],
    read_log: Callable[[Path], list[Body]],
) -> int:
    """Measure the arms in blocks and print the outcome; returns the exit status."""
    advised = AdviceFile.read(options.advice)
    if not options.requests:
        raise AdviceError("verify needs --requests: the log that the advice was made for")
    bodies = read_log(options.requests)
    loads = options.in_flight
    settings = CampaignSettings(
        bodies,
        loads,
        1,
        most_tokens=options.most_tokens,
        start_limit_s=options.start_limit,
        allowance=[options.most_requests],
    )
    campaign = StartedServers(
        settings,
        say,
        engine=advised.engine or "vllm",
        command=options.serve or "",
        spec=advised.spec,
        client=partial(make, allowance=settings.allowance),
    )
    arms, urls = advised.arms(), dict(one.partition("=")[::2] for one in options.urls or [])
    if options.urls and {*urls} != {*arms}:
        raise AdviceError(f"--urls must name {', '.join(arms)}, got {', '.join(urls)}")
    blocks = options.blocks or BLOCKS
    count = len(arms) * blocks * settings.requests(loads)
    consent([*urls.values()], count, options, bodies)
    proof, clock = Proof(advised), "cpu" if options.by_cpu else "wall"
    with ExitStack() as stack:
        servers = _ArmServers(campaign, arms, urls, stack, at_once=options.together)
        for block in range(blocks):
            for name in abba([*arms], block):
                with servers.use(name) as client:
                    measure_arm({clock: proof}, campaign, client, name, block)
    print(proof.text())
    if options.out:
        options.out.write_text(json.dumps(proof.to_dict(), indent=1) + "\n", "utf-8")
    return proof.outcome()[0]


def measure_arm(
    proofs: Mapping[str, Proof], campaign: StartedServers, client: Client, name: str, block: int
) -> None:
    """Measure a server at all loads, for proofs by ``wall`` or ``cpu`` time."""
    model = campaign.look(client)
    for n in campaign.settings.loads:
        cell = measure(client, campaign.settings.slice(n, block, model), 0, n)
        for clock, proof in proofs.items():
            seconds = cell.window.cpu_s if clock == "cpu" else cell.window.wall_s
            if not seconds:
                raise AdviceError("--by-cpu needs --serve: the processor time is known only there")
            speed = cell.window["generated"] / seconds
            proof.speeds.setdefault((name, n), []).append(speed)
            campaign.say(f"  block {block + 1}, {name}, {n} in flight: {speed:.4g} tokens/s")
            drafts, drafted = cell.window["drafts"], cell.window["drafted"]
            proof.proposing.setdefault((name, n), []).append(drafts / cell.row_steps)
            if name == "after":
                proof.drafted.setdefault(n, []).append(drafted / drafts if drafts else 0.0)


@dataclass
class _ArmServers:
    """The servers of the arms: running ones, all started at once, or one at a time."""

    campaign: StartedServers
    arms: dict[str, list[LoadRange]]
    urls: dict[str, str]
    stack: ExitStack
    at_once: bool
    clients: dict[str, Client] = field(default_factory=dict)
    _last: tuple[str, ExitStack] | None = None

    @contextmanager
    def use(self, name: str) -> Iterator[Client]:
        """Yield the client of an arm; the last one of a block is the first of the next."""
        if name in self.urls:
            yield self.campaign.client(self.urls[name])
        elif self.at_once:
            if name not in self.clients:
                self.clients[name] = self._start(name, self.stack)
            yield self.clients[name]
        else:
            if self._last is None or self._last[0] != name:
                if self._last is not None:
                    self._last[1].close()
                stack = self.stack.enter_context(ExitStack())
                self._last = (name, stack)
                self.clients[name] = self._start(name, stack)
            yield self.clients[name]

    def _start(self, name: str, stack: ExitStack) -> Client:
        self.campaign.say(f"starting the server {name}")
        longest = max(one.length for table in self.arms.values() for one in table)
        client = stack.enter_context(self.campaign.serve(self.arms[name], longest))
        self.campaign.warm(client)
        return client
