"""Hours of trouble in minutes: many streams, some cancelled, some read slowly, some prompts far too
long, while stubs and the engine process are killed.

    python -m bench.micro.soak --minutes 30

A real tritonserver with the OpenAI front end serves the fake engine (``--config`` names another
configuration). Requests come through every door: gRPC streams, Triton's HTTP interface and the
OpenAI routes. Each must end exactly once: sent = final replies + errors + cancelled by the client.
Prompts that cannot fit the context must be refused.
Memory, threads, file handles and shared memory are sampled and compared between the first and the
last third. Writes a record; the exit status is 1 when something was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from backend import PROJECT_ROOT
from backend.loopback import open_url
from bench import records
from bench.load import CANCELLED, FINAL, UNANSWERED, RequestOutcome, channel, percentiles_ms, serve
from bench.micro.doors import serve_http
from bench.resources import Watch
from tests.server.harness import Service, free_ports

FAKE = {
    "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.03}},
    "drafts": [
        {"name": "good", "engine": "tests.fakes.fake", "options": {"agreement": 0.8}},
        {"name": "poor", "engine": "tests.fakes.fake", "options": {"agreement": 0.3}},
    ],
    "policy": {"kind": "random", "k_max": 4},
}
MODELS = ("ensemble", "tensorrt_llm_bls")
DOORS = ("grpc", "http", "openai")
SAMPLE_PERIOD_S = 3.0
LEAVING_LIMIT_S = 3.0
CANCELLED_SHARE, SLOW_SHARE, OVERSIZE_SHARE = 0.15, 0.1, 0.03
OVERSIZE_CHARACTERS = (100_000, 1_000_000, 4_000_000, 8_000_000)
"""Digits, each of them a token: 100,000 blanks would fit into 2,048 tokens."""


class Soak:
    """One run: its clients, its killer and what they saw."""

    def __init__(self, service: Service, args: argparse.Namespace) -> None:
        self.service = service
        self.args = args
        self.model = ""  # as the front end names it: asked before the first request
        self.end_s = time.perf_counter() + 60 * args.minutes
        self.watch = Watch(service)
        self.sent_requests = 0
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.by_door = {door: Counter[str]() for door in DOORS}
        self.messages: Counter[str] = Counter()
        self.gaps_s: list[tuple[float, float]] = []
        self.recoveries: list[dict[str, Any]] = []
        self.violations: list[str] = []

    async def run(self) -> None:
        """Run everything to the end of the time, then let what is in flight end."""
        with open_url(f"http://127.0.0.1:{self.service.openai}/v1/models", 30) as models:
            self.model = json.load(models)["data"][0]["id"]
        tasks = [asyncio.ensure_future(work()) for work in (self._sample, self._kill)]
        await asyncio.gather(*(self._client(index) for index in range(self.args.streams)))
        await asyncio.gather(*tasks)

    async def _client(self, index: int) -> None:
        rng = random.Random(f"{self.args.seed}/{index}")
        async with channel(self.service.grpc) as connection, aiohttp.ClientSession() as session:
            for number in itertools.count():
                if time.perf_counter() >= self.end_s:
                    return
                shares = (CANCELLED_SHARE, SLOW_SHARE, OVERSIZE_SHARE)
                kinds = ("cancels", "slow", "oversize", "plain")
                kind = rng.choices(kinds, (*shares, 1 - sum(shares)))[0]
                record = await self._one(
                    connection, session, kind, f"client {index} request {number} ", rng
                )
                if record.outcome not in (FINAL, CANCELLED):
                    # as a client would before it tries again
                    await asyncio.sleep(rng.uniform(0.2, 1.0))

    async def _one(
        self,
        connection: Any,
        session: aiohttp.ClientSession,
        kind: str,
        text: str,
        rng: random.Random,
    ) -> RequestOutcome:
        inputs: dict[str, Any] = {
            "text_input": text + "x" * rng.randrange(200),
            "max_tokens": rng.randrange(4, 120),
            "end_id": -1,
        }
        if kind == "oversize":
            inputs["text_input"] = rng.choice("123") * rng.choice(OVERSIZE_CHARACTERS)
        pause_s = rng.uniform(0.05, 0.5)
        stop_at = rng.randrange(8)
        self.sent_requests += 1
        self.kinds[kind] += 1
        pause = (lambda _: asyncio.sleep(pause_s)) if kind == "slow" else None
        door, stops = rng.choice(DOORS), stop_at if kind == "cancels" else None
        if door == "grpc":
            record = await serve(connection, rng.choice(MODELS), inputs, pause, stops, codes=False)
        else:
            url, body = self._address(door, inputs, rng)
            record = await serve_http(session, url, body, pause, stops)
        self.by_door[door][record.outcome] += 1
        self.outcomes[record.outcome] += 1
        if kind == "oversize" and record.outcome == FINAL:
            self.violations.append(f"a prompt of {len(inputs['text_input'])} characters was served")
        if record.message:
            self.messages[record.message[:100]] += 1
        if kind == "plain" and record.outcome == FINAL:
            self.gaps_s += [
                (at_s, gap_s)
                for at_s, gap_s in zip(record.arrivals_s[1:], record.gaps_s, strict=True)
            ]
        return record

    def _address(
        self, door: str, inputs: dict[str, Any], rng: random.Random
    ) -> tuple[str, dict[str, Any]]:
        stream = rng.random() < 0.7
        if door == "http":
            route = "generate_stream" if stream else "generate"
            return f"http://127.0.0.1:{self.service.http}/v2/models/{rng.choice(MODELS)}/{route}", {
                **inputs,
                "stream": stream,
            }
        body = {"model": self.model, "max_tokens": inputs["max_tokens"], "stream": stream}
        if rng.random() < 0.5:
            return f"http://127.0.0.1:{self.service.openai}/v1/completions", {
                **body,
                "prompt": inputs["text_input"],
            }
        messages = [{"role": "user", "content": inputs["text_input"]}]
        return f"http://127.0.0.1:{self.service.openai}/v1/chat/completions", {
            **body,
            "messages": messages,
        }

    async def _sample(self) -> None:
        while time.perf_counter() < self.end_s:
            self.watch.sample()
            await asyncio.sleep(SAMPLE_PERIOD_S)

    async def _kill(self) -> None:
        """Kill the engine process and a stub once in every period, far apart, and time how long
        until everything answers again.
        """
        victims = itertools.cycle(("ensemble", "spindle", "tensorrt_llm_bls"))
        period_s = 60 * self.args.kill_minutes
        next_s = time.perf_counter() + period_s / 4
        while next_s + period_s / 4 < self.end_s:
            for victim in ("engine process", f"stub {next(victims)}"):
                await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
                next_s += period_s / 2
                if next_s - period_s / 4 < self.end_s:
                    await self._kill_and_time(victim)

    async def _kill_and_time(self, victim: str) -> None:
        words = (
            (self.args.kill,)
            if victim == "engine process"
            else ("triton_python_backend_stub ", f"/{victim.split()[1]}/")
        )
        try:
            pid = self.service.pid_of(*words)
        except AssertionError:
            self.violations.append(f"there was no {victim} to kill")
            return
        os.kill(pid, signal.SIGKILL)
        killed_s = time.perf_counter()
        while (
            not await asyncio.to_thread(self.all_answer)
            and time.perf_counter() < killed_s + self.args.recovery_s
        ):
            await asyncio.sleep(0.05)
        took_s = round(time.perf_counter() - killed_s, 2)
        self.recoveries.append(
            {
                "killed": victim,
                "at_s": round(killed_s + 60 * self.args.minutes - self.end_s, 1),
                "recovered_after_s": took_s,
            }
        )
        print(f"killed the {victim}: everything answered again after {took_s} s", flush=True)
        if took_s >= self.args.recovery_s:
            self.violations.append(
                f"after the {victim} was killed the service did not come back within "
                f"{self.args.recovery_s:.0f} s"
            )

    def all_answer(self) -> bool:
        body = {"text_input": "are you there? ", "max_tokens": 2, "end_id": -1}
        try:
            answers = [
                self.service.post(f"/v2/models/{model}/generate", body, timeout=10)[0]
                for model in MODELS
            ]
            return (
                answers == [200, 200]
                and self.service.post(
                    "/v2/models/spindle/generate", {"command": "health"}, timeout=10
                )[0]
                == 200
            )
        except OSError:
            return False

    def check(self) -> dict[str, Any]:
        """Return the figures, and note what was violated."""
        resources, growth = self.watch.summary()
        self.violations += growth
        answered = sum(self.outcomes.values()) - self.outcomes[UNANSWERED]
        if answered != self.sent_requests:
            self.violations.append(f"{self.sent_requests} requests were sent, {answered} ended")
        odd = [outcome for outcome in self.outcomes if outcome.endswith("final responses")]
        self.violations += [f"{self.outcomes[outcome]} requests got {outcome}" for outcome in odd]
        third_s = (60 * self.args.minutes) / 3
        starts = [self.end_s - third_s * n for n in (3, 2, 1)]
        thirds = [
            [gap for at, gap in self.gaps_s if start <= at < start + third_s] for start in starts
        ]
        return {
            "sent": self.sent_requests,
            "outcomes": dict(self.outcomes),
            "by_behaviour": dict(self.kinds),
            "by_door": {door: dict(outcomes) for door, outcomes in self.by_door.items()},
            "errors": dict(self.messages.most_common(12)),
            "recoveries": self.recoveries,
            "inter_response_ms_by_third": [percentiles_ms(third) for third in thirds],
            "resources": resources,
            "shared_memory_mib_most": max(sample.mib for sample in self.watch.shared),
        }


def leftovers(service: Service, tree: list[int]) -> list[str]:
    """Return the processes and files that a stopped service has left."""
    deadline_s = time.perf_counter() + LEAVING_LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in tree) and time.perf_counter() < deadline_s:
        time.sleep(0.1)
    processes = [f"process {pid}" for pid in tree if Path(f"/proc/{pid}").exists()]
    return processes + [str(path) for path in (*service.shared_memory(), *service.run_folders())]


def main() -> int:
    """Run the soak, print and write the record; return the exit status."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as name:
        config = args.config or Path(name) / "serving.json"
        if args.config is None:
            template = Path(name) / "chat.jinja"
            template.write_text(
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
            )
            config.write_text(json.dumps({**FAKE, "openai": {"chat_template": str(template)}}))
        (port,) = free_ports(1)
        service = Service(Path(name) / "log", config.resolve(), OPENAI_PORT=str(port))
        service.wait_ready(limit_s=600)
        service.wait_for_front_end()
        soak = Soak(service, args)
        try:
            asyncio.run(soak.run())
            service.wait_until(soak.all_answer)
            health = service.health()
            if (health["active"], health["waiting"]) != (0, 0):
                soak.violations.append(f"requests are left in the engine: {health}")
            figures = soak.check()
            tree = service.tree()
        finally:
            status = service.stop()
        if status != 0:
            soak.violations.append(f"the launcher ended with status {status}")
        soak.violations += [f"left over: {thing}" for thing in leftovers(service, tree)]
        record = {
            "benchmark": "soak: streams, cancels, slow readers, killed stubs and engine processes",
            "seed": args.seed,
            "minutes": args.minutes,
            "streams": args.streams,
            "config": json.loads(config.read_text()),
            "violations": soak.violations,
            **figures,
        }
    records.write(args.out, record)
    print(json.dumps(record, indent=1))
    return 1 if soak.violations else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--streams", type=int, default=48)
    parser.add_argument(
        "--kill-minutes",
        type=float,
        default=5,
        help="in every such period one engine process and one stub are killed",
    )
    parser.add_argument(
        "--kill",
        default="backend.engine_process --config",
        help="words of the engine process's command; VLLM::EngineCore: vLLM's own",
    )
    parser.add_argument(
        "--recovery-s", type=float, default=60.0, help="the most seconds until all answers again"
    )
    parser.add_argument(
        "--config", type=Path, help="a serving.json (default: the fake engine at 30 ms a step)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=PROJECT_ROOT / "docs" / "results" / "soak.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
