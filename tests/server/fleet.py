"""Replicas of the tiny model, each a real server with its Dynamo worker, and Dynamo's front end."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from backend.launcher.dynamo import DEFAULT_PYTHON
from backend.triton_adapter.paths import PROJECT_ROOT
from tests.server.harness import Service, free_ports

MODEL = "tiny-target"
TOKENS = 500
START_LIMIT_S = 180.0
SERVING = {
    "target": {"model": str(PROJECT_ROOT / "engines_build" / "drafts" / MODEL)},
    "drafts": [{"name": "suffix", "engine": "suffix"}],
    "policy": {"kind": "fixed", "draft": "suffix", "length": 4},
    "threads": 1,
    "limits": {"max_context_tokens": 2048, "kv_cache_tokens": 16384, "max_active_requests": 16},
}
OPTIONS: dict[str, dict] = {
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


@dataclass
class Answer:
    """What a client got of a stream."""

    text: str = ""
    reason: str | None = None
    error: str | None = None
    chunks: int = 0
    first_s: float = 0.0  # from the request to the first text
    longest_gap_s: float = 0.0  # between two chunks of text


class Fleet:
    """Replicas that find each other through files in ``folder``."""

    def __init__(self, folder: Path, serving=SERVING, python: str = str(DEFAULT_PYTHON)) -> None:
        self.folder = folder
        self._python = python
        self.config = folder / "serving.json"
        self.config.write_text(json.dumps(serving))
        self.replicas: list[Service] = []
        self._front_ends: list[subprocess.Popen] = []
        self._environment = {
            "DYNAMO_PYTHON": python,
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "discovery"),
            "DYN_REQUEST_PLANE": "tcp",
            "DYN_EVENT_PLANE": "zmq",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }

    def add(self) -> Service:
        """Start a replica."""
        home = self.folder / str(len(self.replicas))
        home.mkdir()
        self.replicas.append(
            Service(
                home / "log",
                self.config,
                DYNAMO_NAMESPACE="test",
                SPINDLE_CACHE=str(self.folder / "cache"),
                **self._environment,
            )
        )
        return self.replicas[-1]

    def front_end(self, *arguments: str) -> str:
        """Start a front end of Dynamo and return its URL once it serves."""
        (port,) = free_ports(1)
        command = [self._python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
        command += ["--http-port", str(port), "--discovery-backend", "file", *arguments]
        with (self.folder / f"front-end-{port}").open("wb") as log:
            environment = {**os.environ, **self._environment}
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._front_ends.append(process)
        url = f"http://127.0.0.1:{port}"
        wait(lambda: models(url) == [MODEL], f"{url} lists no model")
        return url

    def close(self) -> None:
        """End everything."""
        running = [r.process for r in self.replicas if r.process.poll() is None]
        for process in [*self._front_ends, *running]:
            process.terminate()
        for process in [*self._front_ends, *running]:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # noqa: PERF203 (a few processes)
                process.kill()


def wait(condition, what: str, limit_s: float = START_LIMIT_S):
    """Return the first true value of a condition; fails after the limit."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"after {limit_s:.0f} s: {what}")


def models(url: str) -> list[str]:
    """Return the models that a front end serves; none where it does not answer."""
    with suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5) as reply:
        return [model["id"] for model in json.load(reply)["data"]]
    return []


def chat(number: int, kind: str, tokens: int = TOKENS) -> dict:
    """Return the body of a chat of this number that goes on to ``tokens``."""
    word = WORDS[number % len(WORDS)]
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Say {number} things of the {word}."}],
        "max_tokens": tokens,
        "ignore_eos": kind != "grammar",
    }
    return {**body, **OPTIONS[kind]}


def ask(url: str, body: dict, path: str = "chat/completions", started=lambda: None) -> Answer:
    """Send a request whose answer is streamed and return the whole of it."""
    data = json.dumps({**body, "stream": True}).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", data, {"Content-Type": "application/json"})
    answer, last_s = Answer(), time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=180) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event.get("choices", ()):
                    text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    answer.reason = choice.get("finish_reason") or answer.reason
                    if not text:
                        continue
                    now_s = time.monotonic()
                    gap_s, last_s = now_s - last_s, now_s
                    if answer.chunks:
                        answer.longest_gap_s = max(answer.longest_gap_s, gap_s)
                    else:
                        answer.first_s = gap_s
                    answer.text += text
                    answer.chunks += 1
                    if answer.chunks == 8:
                        started()
                if "error" in event:
                    answer.error = str(event)
    except (OSError, ValueError) as error:
        answer.error = repr(error)
    return answer


def ask_all(url: str, bodies: list[dict], when_started=lambda: None) -> list[Answer]:
    """Send requests at once; call ``when_started`` once each has some text."""
    every = threading.Semaphore(0)
    with ThreadPoolExecutor(len(bodies)) as pool:
        pending = [pool.submit(ask, url, body, started=every.release) for body in bodies]
        for _ in bodies:
            if not every.acquire(timeout=60):
                break
        when_started()
        return [answer.result() for answer in pending]
