"""The two ways to serve a benchmark's requests: a real tritonserver over gRPC, and the loop in this
process without Triton.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import numpy as np

from backend import PROJECT_ROOT
from backend.app import App
from backend.loopback import open_url
from backend.ops.stats import DrainedStats
from backend.request import GenerationRequest
from bench import load
from policy import AnyPolicy
from tests.server.harness import Service

READY_LIMIT_S = 600.0
"""A first start converts the model and measures latency tables."""
SETTLE_S = 0.6
"""The engine process hands its counts to Triton every 0.5 s."""
CONNECTIONS = 16
FLAGS = {
    "exclude_input_in_output": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_perf_metrics": True,
    "remember": False,  # prompts come again from block to block: what was answered would be known
}
COUNTED = re.compile(
    r"spindle_((steps|fallback|preemptions|emitted_tokens|draft_tokens|accepted_tokens|step_part_seconds)_total"
    r"|(drafted_steps|promised_seconds|promised_tokens|planned_step_seconds|planned_step_tokens)_total"
    r"|(draft|accepted)_tokens_by_position_total|(step|planning|step_predicted)_seconds_(sum|count)|batch_size_(sum|count))"
)
"""The counters, and sums and counts of histograms, that a run is described by."""

Counts = dict[str, float]
"""Amounts that a run added to each of them, by name and labels as in ``/metrics``."""


@dataclass(frozen=True, slots=True)
class ServedReply:
    """One served request. ``first_s`` and ``total_s`` count from when it was due: its scheduled
    arrival, in a closed loop its submission.

    ``gaps_s`` are the times between its responses with text; ``late_s`` is how late the client was
    in sending it, ``due_s`` when it was due, from the run's beginning; ``drafts`` has (proposed,
    accepted) tokens by draft.
    """

    text: str
    output_tokens: int
    drafted: int
    accepted: int
    finish_reason: str
    first_s: float
    total_s: float
    gaps_s: tuple[float, ...] = ()
    late_s: float = 0.0
    due_s: float = 0.0
    input_tokens: int = 0
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Requests (inputs by name) and when they come: at ``at_s`` each (open loop), else
    ``concurrency`` at a time (closed loop).
    """

    requests: Sequence[dict[str, Any]]
    concurrency: int = 1
    at_s: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How an offer went: the replies in order, the time from its beginning to the last of them, and
    what the metrics counted.
    """

    replies: list[ServedReply]
    wall_s: float
    counts: Counts


class LoadArm(Protocol):
    """Something that serves."""

    def run(self, offer: OfferedLoad) -> LoadResult:
        """Serve all requests to their end. Raises when one fails."""
        ...


class ServerArm:
    """A tritonserver of its own, started by the launcher of the checkout ``root``."""

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        root: Path = PROJECT_ROOT,
        **environment: str,
    ) -> None:
        folder.mkdir(parents=True)
        path = folder / "serving.json"
        path.write_text(json.dumps(config), "utf-8")
        self._service = Service(folder / "log", path, root=root, **environment)
        try:
            self._service.wait_ready(limit_s=READY_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def run(self, offer: OfferedLoad) -> LoadResult:
        """Serve over gRPC streams, one a request."""
        before, started_s = self._counts(), time.perf_counter()
        replies = asyncio.run(self._serve(offer))
        wall_s = time.perf_counter() - started_s
        time.sleep(SETTLE_S)
        added = {name: value - before.get(name, 0.0) for name, value in self._counts().items()}
        return LoadResult(replies, wall_s, {name: value for name, value in added.items() if value})

    def command(self, command: str) -> None:
        """Give an administrative command."""
        status, reply = self._service.command(command)
        if status != 200:
            raise RuntimeError(f"{command}: {reply}")

    def close(self) -> None:
        """End the server."""
        try:
            self._service.stop()
        except subprocess.TimeoutExpired:
            self._service.process.kill()
            self._service.process.wait()

    async def _serve(self, offer: OfferedLoad) -> list[ServedReply]:
        channels = [load.channel(self._service.grpc) for _ in range(CONNECTIONS)]
        places = asyncio.Semaphore(offer.concurrency)
        start_s = time.perf_counter()

        async def one(number: int, channel: grpc.aio.Channel) -> ServedReply:
            if offer.at_s is None:
                async with places:
                    return await self._ask(
                        offer.requests[number], channel, time.perf_counter(), start_s
                    )
            due_s = start_s + offer.at_s[number]
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            return await self._ask(offer.requests[number], channel, due_s, start_s)

        replies = await asyncio.gather(
            *(one(i, channels[i % CONNECTIONS]) for i in range(len(offer.requests)))
        )
        for channel in channels:
            await channel.close()
        return replies

    @staticmethod
    async def _ask(
        request: dict[str, Any], channel: grpc.aio.Channel, due_s: float, start_s: float
    ) -> ServedReply:
        record = await load.serve(channel, "ensemble", {**request, **FLAGS})
        if record.outcome != load.FINAL:
            raise RuntimeError(f"a request ended with {record.outcome}: {record.message}")
        return ServedReply(
            record.text,
            record.output_tokens,
            record.drafted,
            record.accepted,
            record.finish_reason,
            (record.arrivals_s or [record.ended_s])[0] - due_s,
            record.ended_s - due_s,
            tuple(record.gaps_s),
            record.sent_s - due_s,
            due_s - start_s,
            record.input_tokens,
            record.drafts,
        )

    def _counts(self) -> Counts:
        with open_url(f"http://127.0.0.1:{self._service.metrics}/metrics", 10) as response:
            lines = response.read().decode().splitlines()
        series = (line.rpartition(" ") for line in lines if COUNTED.match(line))
        return {name: float(value) for name, _, value in series}


class InProcessArm:
    """The composition root's loop, stepped here with a policy of its own, whose state outlasts a
    run; arms may share the engines.
    """

    def __init__(self, app: App, policy: AnyPolicy) -> None:
        self._app = app
        self._policy = policy
        self._state = policy.start()

    def run(self, offer: OfferedLoad) -> LoadResult:
        """Step until all is served, asleep while nothing is due."""
        loop = self._app.orchestrator
        previous = loop.cycle.runner.change(self._policy, self._state)
        self._app.stats.drain()
        started_s = time.perf_counter()
        try:
            replies = self._serve(offer)
        finally:
            _, self._state = loop.cycle.runner.change(*previous)
        return LoadResult(
            replies, time.perf_counter() - started_s, _counts(self._app.stats.drain())
        )

    def _serve(self, offer: OfferedLoad) -> list[ServedReply]:
        loop, start_s = self._app.orchestrator, time.perf_counter()
        waiting, sinks = deque(range(len(offer.requests))), list[_TimingSink]()
        while waiting or any(sink.reply is None for sink in sinks):
            running = sum(sink.reply is None for sink in sinks)
            while waiting:
                now_s = time.perf_counter()
                due_s = now_s if offer.at_s is None else start_s + offer.at_s[waiting[0]]
                if due_s > now_s or (offer.at_s is None and running >= offer.concurrency):
                    break
                sinks.append(_TimingSink(due_s, now_s - due_s, due_s - start_s))
                request = GenerationRequest(
                    **offer.requests[waiting.popleft()], stream=True, exclude_input_in_output=True
                )
                loop.submit(self._app.session(request, sinks[-1]))
                running += 1
            if not loop.step() and waiting and offer.at_s is not None:
                time.sleep(max(0.0, start_s + offer.at_s[waiting[0]] - time.perf_counter()))
        return [sink.reply for sink in sinks if sink.reply is not None]


class _TimingSink:
    """Takes a session's text and times; an error ends the benchmark."""

    cancelled = False

    def __init__(self, due_s: float, late_s: float, since_start_s: float) -> None:
        self._due_s, self._late_s, self._since_start_s = due_s, late_s, since_start_s
        self._parts: list[str] = []
        self._arrivals_s: list[float] = []
        self.reply: ServedReply | None = None

    def chunk(self, delta: Any) -> None:
        self._arrivals_s.append(time.perf_counter())
        self._parts.append(delta.text)

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        self.chunk(delta)
        times = self._arrivals_s
        gaps_s = tuple(np.diff(times).tolist())
        counts = usage.output_tokens, usage.drafted, usage.accepted
        seconds = times[0] - self._due_s, times[-1] - self._due_s
        rest: Any = gaps_s, self._late_s, self._since_start_s, usage.input_tokens, usage.drafts
        self.reply = ServedReply("".join(self._parts), *counts, reason.value, *seconds, *rest)

    def error(self, code: Any, message: str) -> None:
        raise RuntimeError(f"{code}: {message}")


def _counts(drained: DrainedStats) -> Counts:
    """Return what was drained, as ``/metrics`` would name it."""
    counts: Counts = defaultdict(float)

    def add(name: str, labels: dict[str, str], value: float) -> None:
        if COUNTED.match(name):
            pairs = ",".join(f'{key}="{text}"' for key, text in labels.items())
            counts[f"{name}{{{pairs}}}" if pairs else name] += value

    for name, labels, value in drained.counters:
        add(name, labels, value)
    for name, labels, values in drained.observations:
        add(f"{name}_sum", labels, sum(values))
        add(f"{name}_count", labels, len(values))
    return dict(counts)
