"""The client's end of a session: sinks of its replies, and decoders of its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from backend.core.extras import GatheredOutputs
from backend.core.session import Delta
from backend.ops.stats import Usage
from backend.request import ErrorCode, FinishReason


class RequestFailed(Exception):
    """A request ended with an error that its client did not expect.

    No AssertionError: a mutant must be noticed by what it does, not because it cannot run.
    """


@dataclass
class Sink:
    """A client that records its replies and refuses any after the final one."""

    cancelled: bool = False
    text: str = ""
    deltas: list[Delta] = field(default_factory=list)
    ends: list[tuple[str | ErrorCode, Usage | str]] = field(default_factory=list)
    """Reason and usage, or code and message, of each final reply: one, once it has ended."""
    on_end: Callable[[], object] = lambda: None

    def chunk(self, delta: Delta) -> None:
        assert not self.ends, f"a chunk after the final reply {self.ends}"
        self.text += delta.text
        self.deltas.append(delta)

    def final(self, delta: Delta, reason: FinishReason, usage: Usage) -> None:
        self.chunk(delta)
        self._end(reason.value, usage)

    def error(self, code: ErrorCode, message: str) -> None:
        self._end(code, message)

    def _end(self, reason: str | ErrorCode, usage: Usage | str) -> None:
        assert not self.ends, f"a second final reply: {reason} after {self.ends}"
        self.ends.append((reason, usage))
        self.on_end()

    @property
    def has_ended(self) -> bool:
        """Whether the final reply has come."""
        return bool(self.ends)

    @property
    def reason(self) -> str | ErrorCode | None:
        """Why the request ended, None before that."""
        return self.ends[0][0] if self.ends else None

    @property
    def usage(self) -> Usage | None:
        """The usage of a request that succeeded, else None."""
        usage = self.ends[0][1] if self.ends else None
        return usage if isinstance(usage, Usage) else None

    @property
    def log_probs(self) -> list[float] | None:
        """The log-probabilities of the last reply."""
        return self.deltas[-1].log_probs

    @property
    def extras(self) -> GatheredOutputs | None:
        """The extras of the last reply."""
        return self.deltas[-1].extras


class SureSink(Sink):
    """A client that raises when its request ends with an error and it has not cancelled it."""

    def error(self, code: ErrorCode, message: str) -> None:
        if not self.cancelled:
            raise RequestFailed(f"{code}: {message}")
        super().error(code, message)


class NoText:
    """A decoder of tokens that have no text."""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class Characters:
    """A decoder for which a token is the number of its character."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""
