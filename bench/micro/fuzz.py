"""Thousands of malformed requests through every door: no crash, no hang, no missing reply, no
memory that grows.

    python -m bench.micro.fuzz --requests 20000

A real tritonserver with the OpenAI front end serves the fake engine. Hypothesis makes the cases
(``bench.micro.fuzzing``), a third for each of Triton's HTTP interface, its gRPC interface and the
OpenAI routes. Each must be answered in time, by a status that is meant for it, without a path or a
traceback; processes must be the same at the end, hold no more than in the beginning, and have no
request left. Writes a record; the exit status is 1 when something was violated.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import hypothesis
from hypothesis import HealthCheck, Phase, seed, settings

from backend import PROJECT_ROOT
from backend.loopback import CHANNEL_OPTIONS
from bench import records
from bench.micro.fuzzing import (
    GRPC_CASES,
    HTTP_CASES,
    OPENAI_CASES,
    FuzzReply,
    send_grpc,
    send_http,
    send_openai,
)
from bench.resources import Watch
from tests.server.harness import Service, free_ports

FAKE = {
    "target": {"engine": "tests.fakes.fake"},
    "drafts": [{"name": "good", "engine": "tests.fakes.fake", "options": {"agreement": 0.8}}],
    "policy": {"kind": "random", "k_max": 4},
}
SAMPLE_PERIOD_S = 3.0
MOST_REPORTED = 20


class Door:
    """One interface: its cases, how they went, and what must not have been."""

    def __init__(self, name: str, cases: Any, send: Callable[[Any], FuzzReply]) -> None:
        self.name, self._cases, self._send = name, cases, send
        self.sent_requests = 0
        self.kinds: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, count: int, number: int) -> None:
        """Send ``count`` cases, one after another."""
        quiet = settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )

        @seed(number)
        @quiet
        @hypothesis.given(self._cases)
        def one(case: Any) -> None:
            self.sent_requests += 1
            try:
                answer = self._send(case)
            except Exception as error:  # a hang, or no server there
                answer = FuzzReply(type(error).__name__, f"no answer: {error!r}")
            self.kinds[answer.kind] += 1
            if answer.problem:
                self.problems.append(
                    f"{self.name}: {answer.kind}: {answer.problem} for {str(case)[:600]}"
                )

        try:
            self._repeat(one, count)
        except Exception as error:  # a case that could not be made is a fault of the fuzzer
            self.problems.append(f"{self.name}: the fuzzer failed: {type(error).__name__}")

    def _repeat(self, one: Callable[[], None], count: int) -> None:
        """Hypothesis ends early where it has seen all that it can think of."""
        while self.sent_requests < count and len(self.problems) < MOST_REPORTED:
            before = self.sent_requests
            one()
            if self.sent_requests == before:
                return


def fuzz(service: Service, requests: int, number: int) -> tuple[dict[str, Any], list[str]]:
    """Return the figures of a run and what was violated."""
    watch, over = Watch(service), threading.Event()

    def sample() -> None:
        while not over.is_set():
            watch.sample()
            over.wait(SAMPLE_PERIOD_S)

    sampling = threading.Thread(target=sample)
    sampling.start()
    before, started_s = sorted(service.tree()), time.perf_counter()
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc}", CHANNEL_OPTIONS) as channel:
        doors = [
            Door("http", HTTP_CASES, lambda case: send_http(service, case)),
            Door("grpc", GRPC_CASES, lambda case: send_grpc(channel, case)),
            Door("openai", OPENAI_CASES, lambda case: send_openai(service, case)),
        ]
        threads = [
            threading.Thread(target=door.run, args=(-(-requests // len(doors)), number))
            for door in doors
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    took_s = time.perf_counter() - started_s
    over.set()
    sampling.join()
    resources, violations = watch.summary() if took_s > 10 * SAMPLE_PERIOD_S else ({}, [])
    violations += [problem for door in doors for problem in door.problems[:MOST_REPORTED]]
    if not {*before} <= {*service.tree()}:  # readers of bodies and grammars start when needed
        violations.append("a process ended and was started again")
    health = service.health()
    if (health["active"], health["waiting"]) != (0, 0):
        violations.append(f"requests are left in the engine: {health}")
    if service.generate("ab", 4)[0] != 200:
        violations.append("a good request is refused at the end")
    figures = {
        "sent": {door.name: door.sent_requests for door in doors},
        "answers": {door.name: dict(door.kinds.most_common()) for door in doors},
    }
    return {**figures, "seconds": round(took_s, 1), "resources": resources}, violations


def main() -> int:
    """Run, print and write the record; return the exit status."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "serving.json"
        (port,) = free_ports(1)
        template = Path(name) / "chat.jinja"
        template.write_text(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
        )
        config.write_text(json.dumps({**FAKE, "openai": {"chat_template": str(template)}}))
        log = args.log or Path(name) / "log"
        service = Service(log, config, OPENAI_PORT=str(port)).wait_ready(limit_s=600)
        try:
            service.wait_for_front_end()
            figures, violations = fuzz(service, args.requests, args.seed)
        finally:
            status = service.stop()
        if status != 0:
            violations.append(f"the launcher ended with status {status}")
    record = {
        "benchmark": "fuzz: malformed requests through HTTP, gRPC and the OpenAI front end",
        "seed": args.seed,
        "violations": violations,
        **figures,
    }
    records.write(args.out, record)
    print(json.dumps(record, indent=1))
    return 1 if violations else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the service's log here")
    parser.add_argument("--out", type=Path, default=PROJECT_ROOT / "docs" / "results" / "fuzz.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
