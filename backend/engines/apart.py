"""A draft in a process of its own, so that building it again never stalls the loop.

TensorRT-LLM's executor keeps the interpreter's lock while it is built, for tens of seconds: in a
thread of the loop's process everything would wait for it. The child has the engine and asks it;
turns and completions cross a pipe, of a text only what is new.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any

from backend import lifeline
from backend.config import LogConfig
from backend.engines.port import Completion, Engine, EngineLimits, Turn
from backend.engines.seen import Seen
from backend.log_format import set_up_logging
from backend.request import SamplingParams
from backend.sequence import Sequence

logger = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0

Count = Callable[..., None]


class DraftDiedError(RuntimeError):
    """The process, or the engine in it, is gone or not there yet: its turns are void."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """A turn as it crosses the pipe: ``tokens`` are the text's from ``start`` on, ``first``
    describes a sequence that is new there.
    """

    number: int
    start: int
    tokens: list[int]
    end: int
    run: int
    nodes: int
    first: tuple[int, SamplingParams, str] | None


@dataclass(slots=True)
class _Known:
    """A sequence in the child. No other has had its ``number``, so that answers of one that was
    cancelled are known; ``sent_tokens`` of its text are there.
    """

    number: int
    sent_tokens: int = 0


@dataclass(slots=True)
class _Child:
    process: BaseProcess
    pipe: Connection
    ready: bool = False


class EngineApart:
    """An engine that is made and asked in a child process: ``make(count)`` is called there, and
    again after each death.

    ``make`` has to be picklable. The constructor waits for the engine, so that engines are made one
    after the other; raises DraftDiedError where it cannot be made. ``answer_within_s``: a child
    that is silent for so long with turns in flight is dead.
    """

    limits: EngineLimits

    def __init__(
        self,
        name: str,
        make: Callable[[Count], Engine],
        *,
        answer_within_s: float,
        count: Count | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name = name
        self._make, self._count, self._clock, self._answer_within_s = (
            make,
            count or _uncounted,
            clock,
            answer_within_s,
        )
        self._numbers = 0
        self._known: dict[int, _Known] = {}  # by sequence id
        self._in_flight: dict[int, Turn] = {}  # by number
        self._seen = Seen()
        self._heard_s = 0.0
        self._starting: threading.Thread | None = None
        self._child: _Child | None = self._launch()
        self._hear(self._child, None)

    # -- the port

    def submit(self, turns: Seq[Turn]) -> None:
        """Hand over turns that ask for proposals or run freely. Raises DraftDiedError."""
        if not self._is_ready():
            raise DraftDiedError(f"{self.name} is restarting")
        asks = [self._ask(turn) for turn in turns]
        if not self._in_flight:
            self._heard_s = self._clock()
        self._in_flight |= {ask.number: turn for ask, turn in zip(asks, turns, strict=True)}
        self._send("submit", asks)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return completed turns, waiting for the first. Raises DraftDiedError."""
        done: list[Completion] = []
        while (
            self._in_flight and (message := self._receive(0.0 if done else timeout_s)) is not None
        ):
            kind, *body = message
            if kind != "done":
                self._died(str(body[0]))
            completions, counts = body
            for name, amount, labels in counts:
                self._count(name, amount, **labels)
            done += [
                mine for completion in completions if (mine := self._take(completion)) is not None
            ]
        if self._in_flight and not done and self._clock() - self._heard_s > self._answer_within_s:
            self._died(f"no answer for {self._answer_within_s:g} s")
        return done

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences; a child that has died meanwhile is noticed by the next turn."""
        ids = list(sequence_ids)
        self._seen.forget(ids)
        numbers = [known.number for i in ids if (known := self._known.pop(i, None)) is not None]
        for number in numbers:
            self._in_flight.pop(number, None)
        if numbers and self._child is not None and self._child.ready:
            try:
                self._child.pipe.send(("cancel", numbers))
            except OSError:
                logger.warning("%s exited: its pipe is closed", self.name)

    def unseen(self, sequence: Sequence) -> int:
        """Return the committed tokens that were not run in the last turn."""
        return self._seen.unseen(sequence)

    def available(self, sequence: Sequence, length: int) -> int:
        """Return how many tokens could be proposed now: none while the engine is being created
        again.
        """
        if not self._is_ready():
            return 0
        return max(
            0,
            min(
                length,
                self.limits.max_draft_tokens,
                self.limits.max_context_tokens - len(sequence.tokens),
            ),
        )

    def close(self) -> None:
        """End the process."""
        self._make = _closed
        if self._starting is not None:
            self._starting.join()
        child, self._child = self._child, None
        if child is not None:
            if child.ready:
                try:
                    child.pipe.send(("close", None))
                    child.process.join(CLOSE_LIMIT_S)
                except OSError:
                    pass
            _end(child)

    # -- the child

    def _launch(self) -> _Child:
        return _Child(*lifeline.spawn(serve, (self._make, self.name), self.name))

    def _is_ready(self) -> bool:
        child = self._child
        if child is not None and not child.ready:
            try:
                self._hear(child, 0.0)
            except DraftDiedError:
                logger.exception("%s could not be restarted; it stays disabled", self.name)
                self._child = None
        return child is not None and child.ready

    def _hear(self, child: _Child, timeout_s: float | None) -> None:
        """Learn whether a new child is ready. Raises DraftDiedError where it never will be."""
        try:
            if not child.pipe.poll(timeout_s):
                return
            kind, body = child.pipe.recv()
        except (EOFError, OSError) as error:
            kind, body = "died", error or "its process ended"
        if kind != "ready":
            _end(child)
            raise DraftDiedError(f"{self.name} cannot be created: {body}")
        self.limits, child.ready = body, True

    def _send(self, kind: str, body: Any) -> None:
        try:
            if self._child is not None:
                self._child.pipe.send((kind, body))
        except OSError as error:
            self._died(str(error))

    def _receive(self, timeout_s: float) -> tuple[Any, ...] | None:
        if self._child is None:
            raise DraftDiedError(f"{self.name} is restarting")
        try:
            if not self._child.pipe.poll(timeout_s):
                return None
            message: tuple[Any, ...] = self._child.pipe.recv()
        except (EOFError, OSError):
            return "died", "its process ended"
        self._heard_s = self._clock()
        return message

    def _died(self, reason: str) -> None:
        """Void everything and have another made while the loop goes on. Raises DraftDiedError."""
        self._in_flight.clear()
        self._known.clear()
        self._seen.clear()
        child, self._child = self._child, None
        self._count("spindle_engine_deaths_total", engine=self.name)

        def again() -> None:
            if child is not None:
                _end(child)  # its memory is the next one's
            if self._make is not _closed:
                self._child = self._launch()

        self._starting = threading.Thread(target=again, name=f"create {self.name}", daemon=True)
        self._starting.start()
        raise DraftDiedError(f"{self.name} died: {reason}")

    # -- turns

    def _ask(self, turn: Turn) -> _Ask:
        sequence = turn.sequence
        known, first = self._known.get(sequence.id), None
        if known is None:
            self._numbers += 1
            known = self._known[sequence.id] = _Known(self._numbers)
            first = sequence.prompt_tokens, sequence.sampling, sequence.salt
        start, known.sent_tokens = known.sent_tokens, turn.end
        new = sequence.tokens[start : turn.end]
        return _Ask(known.number, start, new, turn.end, turn.run, turn.nodes, first)

    def _take(self, completion: Completion) -> Completion | None:
        """Return a completion under its sequence's own id; None where that was cancelled."""
        turn = self._in_flight.pop(completion.sequence_id, None)
        if turn is None:
            return None
        if completion.error is None:
            proposal = completion.proposal
            ran = completion.tokens if proposal is None else proposal.spine().tokens
            self._seen.ran(turn.sequence.id, turn.end, ran[:-1])
        return replace(completion, sequence_id=turn.sequence.id)


def serve(pipe: Connection, make: Callable[[Count], Engine], name: str) -> None:
    """Make an engine and ask it what comes through the pipe, until that is closed (the child's
    only function).
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's Ctrl-C reaches the whole group; the parent decides
    set_up_logging(name, LogConfig())
    counts: list[tuple[str, float, dict[str, str]]] = []

    def count(metric: str, amount: float = 1, **labels: str) -> None:
        counts.append((metric, amount, labels))

    try:
        engine = make(count)
        pipe.send(("ready", engine.limits))
        _ask_until_closed(pipe, engine, counts)
        engine.close()
    except (EOFError, BrokenPipeError):
        return  # the parent is gone
    except Exception as error:
        logger.exception("%s ends", name)
        pipe.send(("died", str(error)))


def _ask_until_closed(pipe: Connection, engine: Engine, counts: list[Any]) -> None:
    sequences: dict[int, Sequence] = {}
    while True:
        kind, body = pipe.recv()
        if kind == "close":
            return
        if kind == "cancel":
            engine.cancel(body)
            for number in body:
                sequences.pop(number, None)
            continue
        engine.submit([_turn(sequences, ask) for ask in body])
        pipe.send(("done", engine.poll(timeout_s=1.0), counts[:]))
        counts.clear()


def _turn(sequences: dict[int, Sequence], ask: _Ask) -> Turn:
    if ask.first is not None:
        prompt_tokens, sampling, salt = ask.first
        sequences[ask.number] = Sequence(ask.number, [], prompt_tokens, sampling, salt=salt)
    sequence = sequences[ask.number]
    sequence.tokens[ask.start :] = ask.tokens
    return Turn(sequence, ask.end, run=ask.run, nodes=ask.nodes)


def _end(child: _Child) -> None:
    child.process.kill()
    child.process.join()
    child.pipe.close()


def _closed(_count: Count) -> Engine:
    raise DraftDiedError("it was closed")


def _uncounted(name: str, amount: float = 1, **labels: str) -> None:
    del name, amount, labels
