"""Replicas of the tiny model, each a real server with its Dynamo worker, and Dynamo's front end.

``python -m bench.fleet --out FILE`` kills replicas in the middle of streams, and measures what
Dynamo costs and what routing by KV is worth. It needs ``make fleet``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from backend import PROJECT_ROOT
from backend.launcher.environment import PORTS
from backend.launcher.processes import WORKER_PYTHON
from backend.loopback import open_url
from bench import records

MODEL = "tiny-target"
TOKENS = 300
START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
STREAMS_AT_ONCE = 8
OVERHEAD_TOKENS = 64
KILL_PAUSE_S = 2.0
SETTLE_S = 2.0  # until counters and KV events have arrived
SERVING: dict[str, Any] = {
    "target": {"model": str(PROJECT_ROOT / "engines_build" / "drafts" / MODEL)},
    "drafts": [{"name": "suffix", "engine": "suffix"}],
    "policy": {"kind": "fixed", "draft": "suffix", "length": 4},
    "threads": 1,
    "limits": {"max_context_tokens": 2048, "kv_cache_tokens": 16384, "max_active_requests": 16},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 7},
    "penalties": {"temperature": 0.9, "seed": 8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "grammar": {
        "temperature": 1.0,
        "seed": 9,
        "nvext": {"annotations": ["regex=([a-c]{7} ){300}"]},
    },
}
"""Kinds of requests whose texts have at least ``TOKENS`` tokens."""
WORDS = ("river", "train", "whale", "bread", "volcano", "chess", "violin", "desert", "clock", "bee")
Value = TypeVar("Value")


@dataclass
class StreamRecord:
    """A client's record of a stream."""

    text: str = ""
    reason: str | None = None
    error: str | None = None
    chunks: int = 0
    first_s: float = 0.0  # from the request to the first text
    whole_s: float = 0.0
    longest_gap_s: float = 0.0  # between two chunks of text


class ReplicaProcess:
    """One server with its worker."""

    def __init__(self, folder: Path, config: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        self.log = folder / "log"
        self.ports = {name: free_port() for name, _, _ in PORTS}
        variables = {name: str(port) for name, port in self.ports.items()}
        variables |= {"SPINDLE_CONFIG": str(config), "DYNAMO_NAMESPACE": "test"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "backend.cli", "serve", "--verbose"],
                cwd=PROJECT_ROOT,
                env={**os.environ, **environment, **variables},
                stdout=log,
                stderr=log,
            )

    @property
    def url(self) -> str:
        """The address of its own OpenAI front end."""
        return f"http://127.0.0.1:{self.ports['OPENAI_PORT']}"

    def count_in_log(self, text: str) -> int:
        """Return how often a text is in its log."""
        return self.log.read_text(errors="replace").count(text)

    def wait(self) -> None:
        """Wait until its worker is registered."""
        until(lambda: self.count_in_log("Registered endpoint"), f"{self.log} registers no worker")

    def counters(self) -> dict[str, float]:
        """Return KV blocks reused and asked for, tokens emitted, and steps of a request."""
        with open_url(f"{self.url}/metrics", 20) as reply:
            lines = reply.read().decode().splitlines()

        def total(name: str, label: str = "") -> float:
            values = (line for line in lines if line.startswith(name) and label in line)
            return sum(float(line.rpartition(" ")[2]) for line in values)

        reused = total("spindle_kv_block_events_total", '"reused"')
        return {
            "reused": reused,
            "asked": reused + total("spindle_kv_block_events_total", '"missed"'),
            "emitted": total("spindle_emitted_tokens_total"),
            "steps": total("spindle_draft_length_count"),
        }


class Fleet:
    """Replicas that find each other through files in ``folder``."""

    def __init__(self, folder: Path, python: str = str(WORKER_PYTHON)) -> None:
        self._folder = folder
        self._python = python
        self._config = folder / "serving.json"
        self._config.write_text(json.dumps(SERVING))
        self.replicas: list[ReplicaProcess] = []
        self._front_ends: list[subprocess.Popen[bytes]] = []
        self._environment = {
            "DYNAMO_PYTHON": python,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
        }

    def add(self) -> ReplicaProcess:
        """Start a replica."""
        folder = self._folder / str(len(self.replicas))
        self.replicas.append(ReplicaProcess(folder, self._config, self._environment))
        return self.replicas[-1]

    def front_end(self, *arguments: str) -> str:
        """Start a front end of Dynamo and return its URL once it serves."""
        port = free_port()
        command = [self._python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port), "--discovery-backend", "file", *arguments]
        with (self._folder / f"front-end-{port}").open("wb") as log:
            environment = {**os.environ, **self._environment}
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._front_ends.append(process)
        url = f"http://127.0.0.1:{port}"
        until(lambda: models(url) == [MODEL], f"{url} lists no model")
        return url

    def count_moved(self) -> int:
        """Return how many texts a worker took over."""
        return sum(replica.count_in_log(" resumes after ") for replica in self.replicas)

    def counters(self) -> dict[str, float]:
        """Return the sums of the counters of all replicas that run."""
        every = [r.counters() for r in self.replicas if r.process.poll() is None]
        return {name: sum(each[name] for each in every) for name in every[0]}

    def close(self) -> None:
        """End everything."""
        processes = [*self._front_ends, *(replica.process for replica in self.replicas)]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:  # noqa: PERF203 (a few processes)
                process.kill()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Value], failure: str, limit_s: float = START_LIMIT_S) -> Value:
    """Return the first true value of a condition. Raises TimeoutError after the limit."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if value := condition():
            return value
        time.sleep(0.1)
    raise TimeoutError(f"after {limit_s:.0f} s: {failure}")


def models(url: str) -> list[str]:
    """Return the models that a front end serves; none where it does not answer."""
    with suppress(OSError), open_url(f"{url}/v1/models", 5) as reply:
        return [model["id"] for model in json.load(reply)["data"]]
    return []


def chat(number: int, kind: str, tokens: int = TOKENS) -> dict[str, Any]:
    """Return the body of a chat of this number that goes on to ``tokens``."""
    word = WORDS[number % len(WORDS)]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Say {number} things of the {word}."}],
        "max_tokens": tokens,
        "ignore_eos": kind != "grammar",
    }
    return {**body, **OPTIONS[kind]}


def ask(
    url: str, body: dict[str, Any], started: Callable[[], object] = lambda: None
) -> StreamRecord:
    """Send a chat whose answer is streamed; return the whole, and report its eighth chunk."""
    data = json.dumps({**body, "stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    answer, begun_s = StreamRecord(), time.monotonic()
    last_s = begun_s
    try:
        with open_url(request, 180) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    answer.error = str(event)
                for choice in event.get("choices", ()):
                    answer.reason = choice.get("finish_reason") or answer.reason
                    if not (text := choice["delta"].get("content")):
                        continue
                    now_s = time.monotonic()
                    if not answer.chunks:
                        answer.first_s = now_s - begun_s
                    else:
                        answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_s)
                    last_s = now_s
                    answer.text += text
                    answer.chunks += 1
                    if answer.chunks == 8:
                        started()
    except (OSError, ValueError) as error:
        answer.error = repr(error)
    answer.whole_s = time.monotonic() - begun_s
    return answer


def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], when_started: Callable[[], object] = lambda: None
) -> list[StreamRecord]:
    """Send chats at once; call ``when_started`` once each has some text."""
    every = threading.Semaphore(0)
    with ThreadPoolExecutor(len(bodies)) as pool:
        pending = [pool.submit(ask, url, body, every.release) for body in bodies]
        for _ in bodies:
            every.acquire(timeout=60)
        when_started()
        return [answer.result() for answer in pending]


def converse(url: str, name: str, conversations: int, turns: int) -> None:
    """Hold conversations in turn; ``name`` makes their texts differ from others'."""
    talks: list[list[dict[str, str]]] = []
    for number in range(conversations):
        word = WORDS[number % len(WORDS)]
        about = f"Answer about the {word} only, plainly, with facts and examples of a {word}. " * 3
        talks.append([{"role": "system", "content": f"[{name} {number}] {about}"}])
    for turn in range(turns):
        for number, talk in enumerate(talks):
            word = WORDS[number % len(WORDS)]
            talk.append({"role": "user", "content": f"Question {turn} about the {word}: why so?"})
            body = {"model": MODEL, "messages": talk, "max_tokens": 48, "temperature": 0}
            talk.append({"role": "assistant", "content": ask(url, body).text})
            time.sleep(0.1)  # KV events are on their way


def overhead(direct: str, by_dynamo: str, requests: int, tokens: int) -> dict[str, Any]:
    """Return medians of the same chats, in turn directly and through Dynamo, one at a time."""
    answers: dict[str, list[StreamRecord]] = {"direct": [], "dynamo": []}
    for number in range(requests + 3):
        for name, url in (("direct", direct), ("dynamo", by_dynamo)):
            body = {**chat(number, "greedy", tokens), "stream_options": {"include_usage": True}}
            answers[name].append(ask(url, body))
    figures = {}
    for name, every in answers.items():
        measured = every[3:]
        rest_s = [(answer.whole_s - answer.first_s) / (tokens - 1) for answer in measured]
        figures[name] = {
            "first_text_ms": round(1e3 * statistics.median(a.first_s for a in measured), 2),
            "token_ms": round(1e3 * statistics.median(rest_s), 3),
        }
    return {"requests": requests, "tokens": tokens, **figures}


def survive(fleet: Fleet, url: str, streams: int) -> dict[str, Any]:
    """Return how streams fare while one replica after another is killed and replaced."""
    kinds = [*OPTIONS]
    bodies = [chat(number, kinds[number % len(kinds)]) for number in range(streams)]
    with ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
        unbroken = [answer.text for answer in pool.map(lambda body: ask(url, body), bodies)]
    ended, kills = threading.Event(), 0
    before = fleet.count_moved()

    def kill() -> None:
        nonlocal kills
        while not ended.wait(KILL_PAUSE_S):
            oldest = next(r for r in fleet.replicas if r.process.poll() is None)
            oldest.process.send_signal(signal.SIGKILL)
            oldest.process.wait()
            kills += 1
            fleet.add().wait()

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(STREAMS_AT_ONCE) as pool:
        answers = list(pool.map(lambda body: ask(url, body), bodies))
    ended.set()
    killer.join()
    gaps_s = sorted(answer.longest_gap_s for answer in answers)
    return {
        "streams": streams,
        "tokens_each": TOKENS,
        "kinds": kinds,
        "kills": kills,
        "moved": fleet.count_moved() - before,
        "broken": sum(answer.error is not None or answer.reason is None for answer in answers),
        "equal": sum(a.text == text for a, text in zip(answers, unbroken, strict=True)),
        "longest_pause_s": round(gaps_s[-1], 3),
        "median_longest_pause_s": round(statistics.median(gaps_s), 3),
    }


def routing(fleet: Fleet, urls: dict[str, str]) -> dict[str, Any]:
    """Return what is reused by conversations, and by questions that are asked twice."""
    figures: dict[str, Any] = {}
    for name, url in urls.items():
        time.sleep(SETTLE_S)
        before = fleet.counters()
        converse(url, name, 5, 4)
        time.sleep(SETTLE_S)
        talked = again = after = fleet.counters()
        for _ in range(2):
            again = after
            for number in range(10):
                text = f"{name} {number}. " + f"The story of the {WORDS[number]}. " * 10
                body = {**chat(number, "seeded", 48), "max_tokens": 48}
                ask(url, {**body, "messages": [{"role": "user", "content": text}]})
            time.sleep(SETTLE_S)
            after = fleet.counters()
        figures[name] = {
            "reused_blocks": int(talked["reused"] - before["reused"]),
            "asked_blocks": int(talked["asked"] - before["asked"]),
            "tokens_a_step_second_time": round(
                (after["emitted"] - again["emitted"]) / (after["steps"] - again["steps"]), 2
            ),
        }
    return figures


def main() -> None:
    """Run all three and write the record, after each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--requests", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        fleet = Fleet(Path(folder))
        try:
            for _ in range(options.replicas):
                fleet.add()
            for replica in fleet.replicas:
                replica.wait()
            in_turn = fleet.front_end("--router-mode", "round-robin", "--migration-limit", "10")
            by_kv = fleet.front_end("--router-mode", "kv")
            record: dict[str, Any] = {
                "replicas": options.replicas,
            }
            parts: dict[str, Callable[[], dict[str, Any]]] = {
                "overhead": lambda: overhead(
                    fleet.replicas[0].url, in_turn, options.requests, OVERHEAD_TOKENS
                ),
                "routing": lambda: routing(fleet, {"round robin": in_turn, "kv": by_kv}),
                "survival": lambda: survive(fleet, in_turn, options.streams),
            }
            for name, measure in parts.items():
                record[name] = measure()
                records.write(options.out, record)
                print(name, record[name], flush=True)
        finally:
            fleet.close()


if __name__ == "__main__":
    main()
