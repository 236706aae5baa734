"""A cell: one server, n requests in flight all the time, some of the user's own requests.

Only the time in which all n were in flight counts: it ends when a request has been answered and
there is nothing left to send.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.advise import AdviceError
from backend.advise.scrape import Scrape, Window, parse, require
from backend.loopback import open_url

POLL_S = 1.0
_LOCAL = ("localhost", "127.0.0.1", "::1")
_WRAPPERS = ("body", "payload", "raw_payload", "request")
"""Fields of log lines that hold the body."""

Body = dict[str, Any]


@dataclass(frozen=True)
class AnswerCounts:
    """The counts of an answer. ``accepted`` and ``proposed`` have an entry for each step with a
    proposal, in order, if the engine reports them.
    """

    prompt_tokens: int
    output_tokens: int
    accepted: tuple[int, ...] = ()
    proposed: tuple[int, ...] = ()
    histogram: tuple[int, ...] = ()
    """At place j, the steps that accepted j tokens."""


@dataclass(frozen=True)
class Cell:
    """The measurement of one block at one length and number in flight."""

    length: int
    in_flight: int
    window: Window
    replies: tuple[AnswerCounts, ...] = ()
    loaded: bool = True
    """Whether the server has speculation configured."""
    block: int = 0
    sent_requests: int = 0
    """Requests that were sent in the window."""

    @property
    def firsts(self) -> float:
        """First tokens: requests whose prompt was read."""
        return self.window["firsts"] or float(self.sent_requests)

    @property
    def row_steps(self) -> float:
        """Steps of all decoding requests: each emits what was accepted and one token more."""
        w = self.window
        return max(w["row_steps"] or w["generated"] - self.firsts - w["accepted"], 1.0)

    @property
    def steps(self) -> float:
        """Steps of the server."""
        return max(self.window["steps"] or (self.row_steps + self.firsts) / self.in_flight, 1.0)

    @property
    def batch(self) -> float:
        """Requests that a step serves, decoding or reading their prompt."""
        return (self.row_steps + self.firsts) / self.steps

    @property
    def emitted(self) -> float:
        """Tokens that a decoding request gets in a step."""
        return (self.window["generated"] - self.firsts) / self.row_steps

    @property
    def prompt_tokens(self) -> float:
        """Prompt tokens that were computed, not cached."""
        each = sum(r.prompt_tokens for r in self.replies) / max(len(self.replies), 1)
        prompt = self.window.delta.get("prompt", each * self.firsts)
        return max(prompt - self.window["cached"], 0.0)

    def seconds(self, *, by_cpu: bool = False) -> float:
        """Mean seconds of a step, of the clock or of the server's processor time."""
        return (self.window.cpu_s if by_cpu else self.window.wall_s) / self.steps


def read_log(path: Path) -> list[Body]:
    """Read OpenAI request bodies, a JSON object a line, as they are or in a field of a log line."""
    bodies = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as problem:
        raise AdviceError(f"--requests {path}: {problem.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError:
            raise AdviceError(f"{path}, line {number}: not JSON") from None
        for name in _WRAPPERS:
            if isinstance(body, dict) and isinstance(body.get(name), dict):
                body = body[name]
        if not isinstance(body, dict) or not {"messages", "prompt"} & {*body}:
            raise AdviceError(f"{path}, line {number}: no OpenAI body with messages or prompt")
        bodies.append(body)
    if not bodies:
        raise AdviceError(
            f"{path} has no requests: it must have an OpenAI body (messages or prompt) on each line"
        )
    return bodies


def is_local(url: str) -> bool:
    """Return whether a URL is this machine."""
    return (urllib.parse.urlsplit(url).hostname or "") in _LOCAL


@dataclass
class Client:
    """Sends requests to a server and reads its counters."""

    url: str
    timeout_s: float = 600.0
    clock: Callable[[], float] = time.perf_counter
    cpu: Callable[[], float] = lambda: 0.0
    """The server's processor time so far, 0 if it is unknown."""
    allowance: list[int] = field(default_factory=lambda: [1 << 30])
    """How many more requests may be sent, shared by the clients of a run."""

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1").removesuffix("/metrics")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise AdviceError(f"a URL must begin with http:// or https://, got {self.url!r}")

    def get(self, path: str, timeout_s: float = 20.0) -> str:
        """Return a page. Raises AdviceError."""
        return self._open(urllib.request.Request(self.url + path), timeout_s).decode("utf-8")

    def page(self) -> Scrape:
        """Read the counters."""
        before_s, cpu_s = self.clock(), self.cpu()
        text = self.get("/metrics")
        return parse(text, (before_s + self.clock()) / 2, (cpu_s + self.cpu()) / 2)

    def version(self) -> str:
        """Return the server's version if it has a page for that, else an empty text."""
        try:
            return str(json.loads(self.get("/version"))["version"])
        except (AdviceError, ValueError, KeyError, TypeError):
            return ""

    def models(self) -> list[str]:
        """Return the names of the served models; none if the server does not list them."""
        try:
            return [str(one["id"]) for one in json.loads(self.get("/v1/models"))["data"]]
        except (AdviceError, ValueError, KeyError, TypeError):
            return []

    def ask(self, body: Body) -> AnswerCounts:
        """Send a request and read all of the answer. Raises AdviceError."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            return reply_of(json.loads(self._open(request, self.timeout_s)))
        except (ValueError, AttributeError, TypeError, KeyError):
            raise AdviceError(f"{path} answered with something other than a completion") from None

    def _open(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        """Return the body of a response. The error names its status only: more may quote a
        request.
        """
        path = urllib.parse.urlsplit(request.full_url).path
        opener = open_url if is_local(self.url) else _open_remote
        try:
            with opener(request, timeout_s) as response:
                data: bytes = response.read()
                return data
        except urllib.error.HTTPError as problem:
            problem.close()
            cure = {
                429: "it is full or limits its callers; nothing more was sent",
                404: "check the address, and that this is an OpenAI server with /metrics",
                401: "it requires a key, which spindle advise does not send",
            }.get(problem.code, "see the server's log")
            raise AdviceError(
                f"{self.url}{path} answered {problem.code} {problem.reason}: {cure}"
            ) from None
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "reason", problem)
            raise AdviceError(f"{self.url}{path} cannot be reached: {reason}") from None


_PROXIED = urllib.request.build_opener()  # by the environment: of servers elsewhere


def _open_remote(request: urllib.request.Request, timeout_s: float) -> Any:
    return _PROXIED.open(request, timeout=timeout_s)


def reply_of(reply: dict[str, Any]) -> AnswerCounts:
    """Read an answer's sizes and what it says of acceptance: vLLM's metrics or SGLang's."""
    vllm = (reply.get("metrics") or {}).get("speculative_decoding") or {}
    choice = (reply.get("choices") or [{}])[0]
    sglang = (reply.get("sglext") or choice.get("sglext") or {}).get("spec_tokens_details") or {}
    histogram = vllm.get("acceptance_histogram") or sglang.get("spec_correct_drafts_histogram")
    usage = reply.get("usage") or {}
    accepted = tuple(vllm.get("per_step_accepted") or ())
    proposed = tuple(vllm.get("per_step_drafted") or ())
    return AnswerCounts(
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        *((accepted, proposed) if len(accepted) == len(proposed) else ((), ())),
        tuple(histogram or ()),
    )


class QueuedError(AdviceError):
    """More requests are in flight than the server runs at a time."""


def measure(
    client: Client, bodies: Sequence[Body], length: int, in_flight: int, **about: Any
) -> Cell:
    """Serve bodies with n in flight, and return the window in which all n were.

    Stops with AdviceError at an error, a fallen counter or requests of others, with QueuedError at
    requests that wait or are pre-empted.
    """
    first = quiet_page(client)
    client.allowance[0] -= len(bodies)
    if client.allowance[0] < 0:
        raise AdviceError("the limit --most-requests is reached; nothing more was sent")
    queue, replies = deque(bodies), list[AnswerCounts]()
    problems, last = list[AdviceError](), list[Scrape]()
    over, lock = threading.Event(), threading.Lock()

    def work() -> None:
        while not over.is_set():
            try:
                body = queue.popleft()
            except IndexError:
                break
            try:
                replies.append(client.ask(body))
            except AdviceError as problem:
                problems.append(problem)
                over.set()
        with lock:
            if not last and not problems:
                try:
                    last.append(client.page())
                except AdviceError as problem:
                    problems.append(problem)
                    over.set()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(in_flight)]
    for worker in workers:
        worker.start()
    try:
        _watch(client, first, workers, in_flight, last)
    except QueuedError:
        over.set()
        for worker in workers:  # the next cell begins on an idle server
            worker.join()
        raise
    finally:
        over.set()
    if problems:
        raise problems[0]
    window = Window.between(first, last[0])
    if not window["generated"]:
        raise AdviceError(f"{client.url} answered, and its counters show no generated token")
    _check(last[0], window, in_flight, len(bodies))
    cell = Cell(length, in_flight, window, tuple(replies), sent_requests=len(bodies), **about)
    if last[0].gauges.get("waiting", 0) > 0 and cell.batch < _FULL * in_flight:
        raise QueuedError(_QUEUED.format(in_flight))
    return cell


_FULL = 0.85
"""The share of the requests in flight that a step must serve; those that just came may wait."""
_QUEUED = "with {} in flight requests wait: the server runs fewer at a time"


def quiet_page(client: Client) -> Scrape:
    """Return the counters of a server that serves no one else. Raises AdviceError."""
    for _ in range(20):
        page = client.page()
        busy = page.gauges.get("running", 0) + page.gauges.get("waiting", 0)
        if not busy:
            break
        time.sleep(0.1)
    else:
        raise AdviceError(
            f"{client.url} is serving {busy:.0f} requests from other callers: measuring needs a "
            "server of its own. Use --metrics-only on a server in use."
        )
    require(page, "generated")
    return page


def _watch(
    client: Client,
    first: Scrape,
    workers: Sequence[threading.Thread],
    in_flight: int,
    last: list[Scrape],
) -> None:
    """Wait for the workers, and stop early if requests wait for three readings in a row."""
    waited = 0
    next_s = time.monotonic() + POLL_S
    while any(worker.is_alive() for worker in workers):
        for worker in workers:
            worker.join(max(next_s - time.monotonic(), 0.0))
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + POLL_S
        if last:
            continue
        page = client.page()
        _check(page, Window.between(first, page), in_flight, 1 << 30)
        waited = waited + 1 if page.gauges.get("waiting", 0) > 0 else 0
        if waited == 3:
            raise QueuedError(_QUEUED.format(in_flight))


def _check(page: Scrape, window: Window, in_flight: int, requests: int) -> None:
    if page.gauges.get("running", 0) + page.gauges.get("waiting", 0) > in_flight or (
        window["firsts"] > requests
    ):
        raise AdviceError(
            "stopped: the server also answers requests from other callers. Measure on a server of "
            "its own, or use --metrics-only."
        )
    if window["preempted"] > 0:
        raise QueuedError(
            f"with {in_flight} in flight the server pre-empts requests: its KV is full"
        )
