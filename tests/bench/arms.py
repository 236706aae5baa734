"""The two ways to serve a benchmark's requests: the real server over gRPC, and the loop in this process without Triton."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT_ROOT = Path(__file__).resolve().parents[2]
READY_LIMIT_S = 600.0
"""A first start converts the model and measures latency tables."""
STOP_LIMIT_S = 30.0
REPLY_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One served request; ``first_s`` and ``total_s`` count from its submission."""

    text: str
    output_tokens: int
    drafted: int
    accepted: int
    finish_reason: str
    first_s: float
    total_s: float


class Arm(Protocol):
    """Something that serves texts, ``concurrency`` at a time."""

    def serve(self, texts: Sequence[str], max_tokens: int, concurrency: int) -> list[Reply]:
        """Serve all texts greedily to their natural end and return the replies in order."""
        ...

    def close(self) -> None:
        """Stop serving."""
        ...


class ServerArm:
    """A tritonserver of its own, started by the launcher, and gRPC streaming clients of the model ``ensemble``."""

    def __init__(self, config: Path, log: Path) -> None:
        http, grpc, metrics = _free_ports(3)
        ports = {"HTTP_PORT": str(http), "GRPC_PORT": str(grpc), "METRICS_PORT": str(metrics)}
        self._log = log.open("w")
        self._address = f"127.0.0.1:{grpc}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "backend.triton_adapter.launcher"],
            cwd=PROJECT_ROOT,
            env={**os.environ, **ports, "SPINDLE_CONFIG": str(config)},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_until_ready(log)
        except BaseException:
            self.close()
            raise

    def serve(self, texts: Sequence[str], max_tokens: int, concurrency: int) -> list[Reply]:
        """Serve by ``concurrency`` workers, each with one stream and one request in flight (closed loop)."""
        waiting = deque(enumerate(texts))
        replies: dict[int, Reply] = {}
        errors: list[Exception] = []

        def work() -> None:
            try:
                with _stream(self._address) as ask:
                    while True:
                        number, text = waiting.popleft()
                        replies[number] = ask(text, max_tokens)
            except IndexError:
                pass  # nothing is waiting any more
            except Exception as error:
                errors.append(error)

        workers = [threading.Thread(target=work) for _ in range(concurrency)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        return [replies[number] for number in range(len(texts))]

    def close(self) -> None:
        """End the launcher, and by it the server."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self, log: Path) -> None:
        import tritonclient.grpc as triton

        deadline = time.monotonic() + READY_LIMIT_S
        with triton.InferenceServerClient(self._address) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the launcher ended with status {self._process.returncode}: {log.read_text()[-2000:]}")
                with contextlib.suppress(triton.InferenceServerException):
                    if client.is_server_ready() and client.is_model_ready("ensemble"):
                        return
                time.sleep(0.5)
        raise RuntimeError(f"the server was not ready after {READY_LIMIT_S:.0f} s: {log.read_text()[-2000:]}")


class InProcessArm:
    """The composition root's loop, stepped here: what the engines and the policy do, without Triton and sockets."""

    def __init__(self, config: Path, log: Path) -> None:
        del log
        from backend.app import build
        from backend.config import load_config

        self._app = build(load_config(config))

    def serve(self, texts: Sequence[str], max_tokens: int, concurrency: int) -> list[Reply]:
        """Serve with up to ``concurrency`` requests in the loop at a time."""
        from backend.request import GenerationRequest

        waiting = deque(texts)
        sinks: list[_Sink] = []
        while waiting or any(sink.reply is None for sink in sinks):
            while waiting and sum(sink.reply is None for sink in sinks) < concurrency:
                sinks.append(_Sink())
                request = GenerationRequest(waiting.popleft(), max_tokens, stream=True, exclude_input_in_output=True)
                self._app.orchestrator.submit(self._app.session(request, sinks[-1]))
            self._app.orchestrator.step()
        return [sink.reply for sink in sinks if sink.reply is not None]

    def close(self) -> None:
        """Release the engines."""
        self._app.close()


class _Sink:
    """Collects one request's replies."""

    cancelled = False

    def __init__(self) -> None:
        self.reply: Reply | None = None
        self._parts: list[str] = []
        self._started_s = time.perf_counter()
        self._first_s: float | None = None

    def chunk(self, delta: Any) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._started_s
        self._parts.append(delta.text)

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        total_s = time.perf_counter() - self._started_s
        first_s = total_s if self._first_s is None else self._first_s
        whole = "".join([*self._parts, delta.text])
        self.reply = Reply(whole, usage.output_tokens, usage.drafted, usage.accepted, reason.value, first_s, total_s)

    def error(self, code: Any, message: str) -> None:
        raise RuntimeError(f"{code}: {message}")


@contextlib.contextmanager
def _stream(address: str) -> Iterator[Any]:
    """Open one gRPC stream and give a function (text, max_tokens) -> Reply over it."""
    import queue

    import tritonclient.grpc as triton

    arrived: queue.Queue[tuple[float, Any, Any]] = queue.Queue()

    def ask(text: str, max_tokens: int) -> Reply:
        started_s = time.perf_counter()
        client.async_stream_infer("ensemble", _inputs(text, max_tokens), enable_empty_final_response=True)
        parts: list[str] = []
        numbers: dict[str, Any] = {}
        first_s = None
        while True:
            at_s, result, error = arrived.get(timeout=REPLY_LIMIT_S)
            if error is not None:
                raise error
            response = result.get_response()
            for output in response.outputs:
                value = result.as_numpy(output.name).flatten()[0]
                if output.name == "text_output":
                    parts.append(value.decode("utf-8"))
                else:
                    numbers[output.name] = value
            first_s = at_s - started_s if first_s is None and response.outputs else first_s
            if response.parameters["triton_final_response"].bool_param:
                break
        total_s = time.perf_counter() - started_s
        return Reply(
            "".join(parts),
            int(numbers["num_output_tokens"]),
            int(numbers["total_draft_tokens"]),
            int(numbers["total_accepted_draft_tokens"]),
            numbers["finish_reason"].decode(),
            total_s if first_s is None else first_s,
            total_s,
        )

    with triton.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: arrived.put((time.perf_counter(), result, error)))
        try:
            yield ask
        finally:
            client.stop_stream()


def _inputs(text: str, max_tokens: int) -> list[Any]:
    """Return a greedy streaming request's tensors."""
    import numpy as np
    import tritonclient.grpc as triton

    def tensor(name: str, dtype: str, value: Any) -> Any:
        made = triton.InferInput(name, [1, 1], dtype)
        made.set_data_from_numpy(value)
        return made

    flags = ("stream", "exclude_input_in_output", "return_num_output_tokens", "return_perf_metrics")
    return [
        tensor("text_input", "BYTES", np.array([[text.encode("utf-8")]], np.object_)),
        tensor("max_tokens", "INT32", np.array([[max_tokens]], np.int32)),
        *(tensor(name, "BOOL", np.array([[True]])) for name in flags),
    ]


def _free_ports(count: int) -> list[int]:
    """Return ports that were free a moment ago, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [made.getsockname()[1] for made in sockets]
    for made in sockets:
        made.close()
    return ports
