"""What the loop costs a step beside the passes of its engines: ``python -m bench.micro.step_loop
[--in-flight N ...] [--steps N] [--json FILE]``. On the tiny family, which OpenVINO runs.

CPU time of the loop's thread outside OpenVINO's own calls and the policy's is counted: what a step
prepares, lays out, decides, commits, replies and counts. Greedy streams, plain and with the chosen
length of one draft; ``texts`` is a hash of what was generated, the same before and after a change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import thread_time
from typing import Any

import openvino

from backend.app import build
from backend.config import parse_config
from backend.request import GenerationRequest
from bench.in_process import Sink
from bench.prompts import PROMPTS
from policy import LatencyTable

FAMILY = "engines_build/drafts"
DRAFT, LENGTH = "0.9m", 4
ARMS = ("plain", "drafted")
TOKENS, WARM_UP = 900, 25


class Clock:
    """Adds up the time inside calls."""

    def __init__(self) -> None:
        self.inside_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed."""

        def timed(*arguments: Any, **options: Any) -> Any:
            started = thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.inside_s += thread_time() - started

        return timed


class Timed:
    """A policy whose calls are timed."""

    def __init__(self, policy: Any, clock: Clock) -> None:
        self._policy, self._clock = policy, clock

    def __getattr__(self, name: str) -> Any:
        return self._clock.around(getattr(self._policy, name))


def settings(arm: str, in_flight: int) -> dict[str, Any]:
    """Return the settings of an arm."""
    drafts = [{"name": DRAFT, "engine": "openvino", "model": f"{FAMILY}/tiny-{DRAFT}"}]
    drafted = {"kind": "fixed", "draft": DRAFT, "length": LENGTH}
    return {
        "target": {"engine": "openvino", "model": f"{FAMILY}/tiny-target"},
        "drafts": drafts if arm == "drafted" else [],
        "policy": drafted if arm == "drafted" else {"kind": "none"},
        "threads": 1,
        "limits": {"max_active_requests": in_flight},
    }


def measure(arm: str, in_flight: int, steps: int, infer: Clock) -> dict[str, Any]:
    """Return the milliseconds of a step (medians): all of it, and the loop's own."""
    config = parse_config(settings(arm, in_flight))
    engines = (config.target, *config.drafts)
    tables = {e.name: LatencyTable.synthetic(e.name, {1: 1e-3, 64: 1e-2}) for e in engines}
    app, planning = build(config, tables), Clock()
    loop = app.orchestrator
    loop.planning.policy = Timed(loop.planning.policy, planning)  # type: ignore[assignment]
    prompts = [prompt for theirs in PROMPTS.values() for prompt in theirs]
    sessions = []
    for number in range(in_flight):
        prompt = prompts[number % len(prompts)]
        request = GenerationRequest(prompt, TOKENS, stream=True, end_id=-1)
        sessions.append(app.session(request, Sink()))
        loop.submit(sessions[-1])
    while not all(session.output_tokens for session in sessions):
        loop.step()
    whole, own = [], []
    for step in range(WARM_UP + steps):
        infer.inside_s = planning.inside_s = 0.0
        started = thread_time()
        loop.step()
        if step >= WARM_UP:
            whole.append(thread_time() - started)
            own.append(whole[-1] - infer.inside_s - planning.inside_s)
    texts = json.dumps([session.sequence.tokens for session in sessions])
    app.close()
    return {
        "arm": arm,
        "in_flight": in_flight,
        "step_ms": 1e3 * median(whole),
        "own_ms": 1e3 * median(own),
        "texts": hashlib.sha256(texts.encode()).hexdigest()[:12],
    }


def main() -> None:
    """Measure every arm, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    infer, rows = Clock(), []
    openvino.InferRequest.infer = infer.around(openvino.InferRequest.infer)
    for in_flight in args.in_flight:
        for arm in ARMS:
            rows.append(measure(arm, in_flight, args.steps, infer))
            print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"steps": args.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
