"""A server with speculation whose step time and acceptance are known functions: steps in virtual
time, as an object or over HTTP with vLLM's counters.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from backend.advise.load import AnswerCounts, Cell
from backend.advise.scrape import Window, parse

Seconds = Callable[[int, int, int, bool], float]
"""Seconds of a step by rows, length, prompt tokens, and whether a draft is loaded."""


def linear(rows: int, length: int, prompt: int, loaded: bool) -> float:
    """Seconds inside the model's family: a memory-bound floor, then compute."""
    tokens = rows * (1 + length) + prompt
    draft = (4e-4 + 2e-6 * rows) * length + 3e-4 * loaded
    return 8e-3 + 2e-5 * tokens + 6e-5 * max(tokens - 64, 0) + draft


def padded(rows: int, length: int, prompt: int, loaded: bool) -> float:
    """The same with passes padded to the widths of CUDA graphs."""
    tokens = rows * (1 + length)
    width = next((w for w in (1, 2, 4, *range(8, 513, 8)) if w >= tokens), tokens)
    return linear(width, 0, prompt, loaded) + 5e-4 * length


def bent(rows: int, length: int, prompt: int, loaded: bool) -> float:
    """A smooth bend, with a draft that costs more with more rows."""
    tokens = rows * (1 + length) + prompt
    draft = (6e-4 + 1e-5 * rows**0.8) * length + 5e-4 * loaded
    return float(np.hypot(9e-3, 1.1e-4 * tokens)) + draft


def useless(rows: int, length: int, prompt: int, loaded: bool) -> float:
    """Compute-bound from the first token on."""
    return 1e-3 + 1e-3 * (rows * (1 + length)) + 1e-5 * prompt + 5e-4 * loaded


FUNCTIONS: dict[str, Seconds] = {f.__name__: f for f in (linear, padded, bent, useless)}


NAMES = {
    "steps": "vllm:iteration_tokens_total_count",
    "generated": "vllm:generation_tokens_total",
    "prompt": "vllm:prompt_tokens_total",
    "row_steps": "vllm:inter_token_latency_seconds_count",
    "row_step_s": "vllm:inter_token_latency_seconds_sum",
    "firsts": "vllm:time_to_first_token_seconds_count",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


@dataclass
class Request:
    """A request: its tokens left and where its text is hard for the draft."""

    prompt: int
    output: int
    seed: int
    length: int | None = None
    written: int = 0
    accepted: list[int] = field(default_factory=list)
    proposed: list[int] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def draws(self) -> list[float]:
        """A number for each place of the text and position of a proposal."""
        return np.random.default_rng(self.seed).random(self.output + 64).tolist()


@dataclass
class Machine:
    """The server's loop."""

    seconds: Seconds = linear
    acceptance: float = 0.8
    fades: bool = False
    """Whether a token's chance falls with its place in the proposal, instead of with the text."""
    longest: int = 6
    table: Sequence[Sequence[int]] = ()
    loaded: bool = True
    noise: float = 0.0
    """Standard deviation of the logarithm of a cell's times."""
    factor: float = 1.0
    most_rows: int = 1 << 30
    ignores_table: bool = False
    details: bool = True
    """Whether answers have their steps."""
    now_s: float = 0.0
    active: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    by_position: list[float] = field(default_factory=lambda: [0.0] * 16)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def length_of(self) -> int:
        asked = [r.length for r in self.active if r.length is not None]
        if not self.loaded:
            return 0
        if asked:
            return min(max(asked), self.longest)
        length = self.longest
        for first, _, value in [] if self.ignores_table else self.table:
            length = min(value, self.longest) if len(self.active) >= first else length
        return length

    def accepts(self, request: Request, length: int) -> int:
        """Return how many of the proposed tokens are right."""
        for place in range(length):
            chance = self.acceptance * (0.85**place if self.fades else 1.0)
            at = 7 * request.written + 101 * place if self.fades else request.written + place
            if request.draws[at % len(request.draws)] >= chance:
                return place
        return length

    def step(self) -> list[Request]:
        """Run a step; returns the requests that are over."""
        while self.waiting and len(self.active) < self.most_rows:
            self.active.append(self.waiting.pop(0))
        new = [r for r in self.active if not r.written]
        rows = [r for r in self.active if r.written]
        length, prompt = self.length_of(), sum(r.prompt for r in new)
        taken_s = self.seconds(len(rows) + len(new), length, prompt, self.loaded) * self.factor
        self.now_s += taken_s
        self._count(steps=1, prompt=prompt, firsts=len(new), row_steps=len(rows))
        self._count(row_step_s=len(rows) * taken_s)
        for request in new:
            request.written = 1
        for request in rows:
            proposed = min(length, request.output - request.written - 1)
            right = self.accepts(request, max(proposed, 0))
            if proposed > 0:
                request.accepted.append(right)
                request.proposed.append(proposed)
                self._count(drafts=1, drafted=proposed, accepted=right)
                for place in range(right):
                    self.by_position[place] += 1
            request.written += right + 1
            self._count(generated=right + 1)
        self._count(generated=len(new))
        over = [r for r in self.active if r.written >= r.output]
        self.active = [r for r in self.active if r.written < r.output]
        return over

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self.counts[name] = self.counts.get(name, 0.0) + value

    def metrics(self, missing: Sequence[str] = ()) -> str:
        """Return the page of counters."""
        speculates = ("drafts", "drafted", "accepted")
        lines = [
            f'{name}{{engine="0"}} {self.counts.get(key, 0.0)}'
            for key, name in NAMES.items()
            if key not in missing and (self.loaded or key not in speculates)
        ]
        if self.loaded and "accepted" not in missing:
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [
                f'{name}{{position="{place}"}} {self.by_position[place]}'
                for place in range(self.longest)
            ]
        lines += [
            f"vllm:num_requests_running {len(self.active)}",
            f"vllm:num_requests_waiting {len(self.waiting)}",
        ]
        return "\n".join(lines) + "\n"

    def cell(self, length: int, in_flight: int, requests: Sequence[Request], block: int) -> Cell:
        """Measure a cell as ``backend.advise.load.measure`` does, without HTTP."""
        self.factor = float(np.exp(self.noise * self.rng.standard_normal()))
        first, queue = parse(self.metrics(), self.now_s), list(requests)
        replies, last = [], None
        self.active = [queue.pop(0) for _ in range(in_flight)]
        while last is None:
            over = self.step()
            replies += [reply_of(request, self.details) for request in over]
            for _ in over:
                if queue:
                    self.active.append(queue.pop(0))
                elif last is None:
                    last = parse(self.metrics(), self.now_s)
        while self.active:
            replies += [reply_of(request, self.details) for request in self.step()]
        window = Window.between(first, last)
        return Cell(length, in_flight, window, tuple(replies), self.loaded, block, len(requests))


def reply_of(request: Request, details: bool = True) -> AnswerCounts:
    steps = (tuple(request.accepted), tuple(request.proposed)) if details else ((), ())
    return AnswerCounts(request.prompt, request.output, *steps)


def requests(count: int, seed: int, prompt: int = 30, output: int = 48) -> list[Request]:
    """Return requests of unequal lengths."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(output // 2, output * 3 // 2, count)
    return [Request(prompt, int(size), seed * 1000 + i) for i, size in enumerate(sizes)]


def cells_of(
    machine: Callable[[int], Machine],
    arms: Sequence[int],
    loads: Sequence[int],
    blocks: int = 2,
    **sizes: int,
) -> list[Cell]:
    """Measure cells of machines by arm: a length, or -1 without a draft."""
    cells = []
    for arm in arms:
        server = machine(arm)
        server.loaded, server.table = arm >= 0, [[1, 1 << 16, max(arm, 0)]]
        for block in range(blocks):
            for n in loads:
                sent = requests(max(8, n + (n + 1) // 2), 10 * n + block, **sizes)
                cells.append(server.cell(max(arm, 0), n, sent, block))
    return cells


def true_speed(machine: Machine, length: int, n: int, **sizes: int) -> float:
    """Return tokens a second at a length, or -1 without a draft, by a long run."""
    machine.loaded, machine.table = length >= 0, [[1, 1 << 16, max(length, 0)]]
    sent = requests(max(4 * n, 240), 999, **sizes)
    cell = machine.cell(max(length, 0), n, sent, 0)
    return cell.window["generated"] / cell.window.wall_s


class Serving:
    """A machine over HTTP. Its clock is virtual unless ``dilation`` says how many real seconds
    one of its seconds takes; a step waits until as many requests are in flight as before, or for
    ``patience_s``, so that what is measured does not depend on threads.
    """

    def __init__(
        self,
        machine: Machine,
        port: int = 0,
        dilation: float = 0.0,
        patience_s: float = 0.02,
        missing: Sequence[str] = (),
        fail_with: int = 0,
        fail_after: int = 0,
        version: str = "0.32.0",
    ) -> None:
        self.machine, self.dilation, self.patience_s = machine, dilation, patience_s
        self.missing, self.fail_with, self.fail_after = missing, fail_with, fail_after
        self.version = version
        self.bodies: list[dict[str, Any]] = []
        self.arrived = threading.Condition()
        self._over = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"

            def log_message(self, *arguments: object) -> None:
                pass

            def do_GET(self) -> None:
                with outer.arrived:
                    pages = {
                        "/metrics": machine.metrics(outer.missing),
                        "/health": "",
                        "/version": json.dumps({"version": outer.version}),
                        "/v1/models": json.dumps({"data": [{"id": "m"}]}),
                    }
                self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                status, text = outer.answer(json.loads(data))
                self.answer(status, text)

            def answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self._threads = [
            threading.Thread(target=f, daemon=True)
            for f in (lambda: self.http.serve_forever(0.02), self._loop)
        ]
        for thread in self._threads:
            thread.start()

    def clock(self) -> float:
        with self.arrived:
            return self.machine.now_s

    def answer(self, body: dict[str, Any]) -> tuple[int, str]:
        with self.arrived:
            self.bodies.append(body)
            if self.fail_with and len(self.bodies) > self.fail_after:
                return self.fail_with, json.dumps({"error": body})
            text = json.dumps(body.get("messages") or body.get("prompt"))
            length = (body.get("vllm_xargs") or {}).get("probe_k")
            seed = zlib.crc32(text.encode())
            request = Request(len(text.split()), int(body["max_tokens"]), seed, length)
            self.machine.waiting.append(request)
            self.arrived.notify_all()
        request.over.wait()
        counts = {"per_step_accepted": request.accepted, "per_step_drafted": request.proposed}
        metrics = {"speculative_decoding": counts} if self.machine.details else {}
        usage = {"prompt_tokens": request.prompt, "completion_tokens": request.output}
        return 200, json.dumps({"choices": [{}], "usage": usage, "metrics": metrics})

    def _loop(self) -> None:
        before = 0
        machine = self.machine
        while not self._over:
            with self.arrived:
                count = len(machine.active) + len(machine.waiting)
                if not count:
                    before = 0
                    self.arrived.wait(0.05)
                    continue
                if count < before or not before:
                    if self.arrived.wait(self.patience_s):
                        continue
                    count = len(machine.active) + len(machine.waiting)
                before = count
                started_s = machine.now_s
                over = machine.step()
                taken_s = machine.now_s - started_s
                for request in over:
                    request.over.set()
            if self.dilation:
                time.sleep(taken_s * self.dilation)

    def close(self) -> None:
        self._over = True
        self.http.shutdown()
        self.http.server_close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def main() -> None:
    """Serve a function by real time, with vLLM's option ``--speculative-config``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads)
    parser.add_argument("--function", default="linear")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--dilation", type=float, default=1.0)
    parser.add_argument("--ignores-table", action="store_true")
    options = parser.parse_args()
    spec = options.speculative_config
    machine = Machine(FUNCTIONS[options.function], options.acceptance, loaded=spec is not None)
    machine.ignores_table = options.ignores_table
    if spec:
        machine.longest = spec["num_speculative_tokens"]
        machine.table = spec.get("num_speculative_tokens_per_batch_size", ())
    serving = Serving(machine, options.port, options.dilation, patience_s=0.0)
    try:
        threading.Event().wait()
    finally:
        serving.close()


if __name__ == "__main__":
    main()
