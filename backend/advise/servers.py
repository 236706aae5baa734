"""Servers that this program starts, one command each, and ends with all their processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend.advise import AdviceError
from backend.advise.goodput import PLAIN, LoadRange
from backend.advise.load import Client

Spec = Mapping[str, Any]
_END_S = 20.0
_LENGTH_KEYS = {
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "max_draft_len",
    "draft_len_schedule",
    "num_steps",
    "num_draft_tokens",
}


def engine_of(command: str) -> str:
    """Return the engine that a command starts, by its words; vLLM if nothing says otherwise."""
    if "sglang" in command:
        return "sglang"
    return "tensorrt_llm" if "trtllm" in command else "vllm"


def speculation(
    engine: str, spec: Spec, table: list[LoadRange], longest: int, folder: Path
) -> list[str]:
    """Return the words that stand for ``{spec}``: a table of lengths, at most ``longest``; a table
    whose only length is ``PLAIN`` is no speculation.
    """
    lengths = {one.length for one in table}
    if lengths == {PLAIN}:
        return []
    other_keys = {name: value for name, value in spec.items() if name not in _LENGTH_KEYS}
    fixed = len(lengths) == 1 and lengths != {0}
    longest = lengths.pop() if fixed else longest
    if engine == "vllm":
        config = {**other_keys, "num_speculative_tokens": longest}
        if not fixed:
            config["num_speculative_tokens_per_batch_size"] = [[*one] for one in table]
        return ["--speculative-config", json.dumps(config)]
    if engine == "sglang":
        words = []
        other_keys = {
            "eagle_topk": 1,
            **other_keys,
            "num_steps": longest,
            "num_draft_tokens": longest + 1,
        }
        for name, value in other_keys.items():
            words += [f"--speculative-{name.replace('_', '-')}", str(value)]
        if not fixed:
            path = folder / "lengths.json"
            path.write_text(
                json.dumps({str(r.first): {"candidate_steps": [r.length]} for r in table})
            )
            words += ["--speculative-adaptive", "--speculative-adaptive-config", str(path)]
        return words
    config = {**other_keys, "max_draft_len": longest}
    if not fixed:
        raise AdviceError(
            "tables for TensorRT-LLM mean the opposite from version to version: measure fixed "
            "lengths (--lengths without 0), and paste model.yaml yourself"
        )
    path = folder / "speculation.yaml"  # JSON is YAML
    path.write_text(json.dumps({"speculative_config": config}))
    return ["--extra_llm_api_options", str(path)]


def free_port() -> int:
    """Return a port that nothing uses now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class StartedServer:
    """A started server."""

    def __init__(self, command: str, words: list[str], client: Callable[..., Client]) -> None:
        port = free_port()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        line: list[str] = []
        try:
            for word in shlex.split(command):
                line += words if word == "{spec}" else [_fill(word, port, words)]
        except ValueError as problem:
            raise AdviceError(f"--serve: {problem}") from None
        try:
            self._process = subprocess.Popen(
                line, stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as problem:
            raise AdviceError(f"--serve: {line[0]} cannot be started: {problem.strerror}") from None
        self.client = client(f"http://127.0.0.1:{port}", cpu=self._cpu_s)

    def wait(self, limit_s: float) -> None:
        """Wait until it answers. Raises AdviceError with the last lines that it wrote."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise AdviceError(
                    f"the server ended with {self._process.returncode} before it answered. Its "
                    f"last lines:\n{self._last_lines()}"
                )
            try:
                self.client.get("/metrics", 5.0)
                self.client.get("/health", 5.0)
                return
            except AdviceError as problem:
                if " 404 " in str(problem) and "/health" in str(problem):
                    return
                time.sleep(0.2)
        raise AdviceError(
            f"the server did not answer within {limit_s:.0f} s (--start-limit). Its last lines:\n"
            f"{self._last_lines()}"
        )

    def _last_lines(self) -> str:
        """Return the end of its output, which nothing was sent before."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size - 4000, 0))
        lines = self._output.read().decode("utf-8", "replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-15:])

    def stop(self) -> None:
        """End it and every process of its group."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(self._process.pid, number):
                break
            until = time.monotonic() + _END_S
            while time.monotonic() < until:
                self._process.poll()
                if not _signal_group(self._process.pid, 0):
                    break
                time.sleep(0.05)
        self._process.wait()
        self._output.close()

    def _cpu_s(self) -> float:
        """Return the processor seconds of its engine processes, or of all if none is called so."""
        engine = total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                name, fields = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
                if int(fields.split()[3]) != self._process.pid:
                    continue
                tasks = (folder / "task").glob("*/schedstat")
                ticks = sum(int(task.read_text().split()[0]) for task in tasks)
            except (OSError, IndexError, ValueError):
                continue
            total += ticks
            engine += ticks if name.startswith("VLLM") else 0
        return (engine or total) / 1e9


def _fill(word: str, port: int, words: list[str]) -> str:
    return word.replace("{port}", str(port)).replace("{spec}", shlex.join(words))


def _signal_group(group: int, number: int) -> bool:
    """Signal a group of processes; returns whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextmanager
def running(
    command: str, words: list[str], client: Callable[..., Client], limit_s: float
) -> Iterator[Client]:
    """Start a server and end it in any case, Ctrl-C included."""
    server = StartedServer(command, words, client)
    try:
        server.wait(limit_s)
        yield server.client
    finally:
        server.stop()
