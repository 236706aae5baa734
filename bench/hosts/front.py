"""The processor time that a token costs in each of Spindle's processes on its way from a hosted
engine to the client.

    python -m bench.hosts.front --out docs/results/front.json    # a minute

A real tritonserver with the OpenAI front end serves the tests' hosted fake, one token a step
(``--config`` names another configuration), and streams ``--in-flight`` texts at once through each
door. The time that the processes take while idle is apart. A busy machine makes all of it longer:
compare processes whose code is the same.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench import records
from bench.hosts.arms import Prompt
from bench.hosts.vllm_served import SERVED, Streams, of_openai, of_triton
from bench.resources import role_of
from tests.server.harness import Service, free_ports

FAKE = {
    "target": {
        "engine": "tests.fakes.hosted_fake",
        "options": {"step_s": 0.01, "drafts": False},
    }
}
IDLE_S = 3.0


def cpu_s(service: Service) -> dict[str, float]:
    """Return the processor time that each role has taken so far."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for pid in [service.process.pid, *service.tree()]:
        if (role := role_of(pid)) is not None:
            for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                seconds[role] += 1e-9 * int(task.read_text().split()[0])
    return seconds


def measure(service: Service, streams: Streams, in_flight: int, tokens: int) -> dict[str, Any]:
    """Return microseconds a token, and milliseconds a second while idle, by role."""
    prompts = [Prompt("How are you? ", [72, 111, 119]) for _ in range(in_flight)]
    streams.serve(prompts, 8)
    before, idle_s = cpu_s(service), time.perf_counter()
    time.sleep(IDLE_S)
    between, began_s = cpu_s(service), time.perf_counter()
    run = streams.serve(prompts, tokens)
    after, ended_s = cpu_s(service), time.perf_counter()
    token_us, idle_ms = {}, {}
    for role in sorted(after, key=lambda role: between[role] - after[role]):
        share = (between[role] - before[role]) / (began_s - idle_s)
        idle_ms[role] = round(1e3 * share, 2)
        spent_s = after[role] - between[role] - share * (ended_s - began_s)
        token_us[role] = round(1e6 * spent_s / run["tokens"])
    return {
        "in_flight": in_flight,
        "token_us": token_us | {"all": sum(token_us.values())},
        "idle_ms_per_s": idle_ms | {"all": round(sum(idle_ms.values()), 1)},
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, help="a serving.json (default: the hosted fake)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        config = options.config or Path(name) / "serving.json"
        if options.config is None:
            config.write_text(json.dumps(FAKE))
        (port,) = free_ports(1)
        service = Service(
            Path(name) / "log", config.resolve(), OPENAI_PORT=str(port), SERVED_MODEL_NAME=SERVED
        )
        try:
            service.wait_ready(limit_s=600)
            service.wait_for_front_end()
            doors = {
                "openai": Streams(f"http://127.0.0.1:{port}", of_openai()),
                "triton": Streams(f"http://127.0.0.1:{service.http}", of_triton),
            }
            for door, streams in doors.items():
                for in_flight in options.in_flight:
                    row = measure(service, streams, in_flight, options.tokens)
                    rows.append({"door": door} | row)
                    print(json.dumps(rows[-1]), flush=True)
        finally:
            service.stop()
    if options.out:
        records.write(options.out, {"tokens": options.tokens, "found": rows})


if __name__ == "__main__":
    main()
