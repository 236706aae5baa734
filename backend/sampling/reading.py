"""Reading of grammars: the parser's own limits do not bound its time.

A schema of sixty letters may keep it for minutes (``multipleOf`` a large prime, many patterns for
one string), and native code cannot be interrupted. So each grammar is read by a child process
first, which is killed when it takes too long; what passes is read again in the engine's.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING

from backend import lifeline
from backend.sampling.schemas import prepare_schema

# imported where it is needed: TensorRT-LLM's container has another version, and guides are refused
# there
if TYPE_CHECKING:
    import llguidance

logger = logging.getLogger(__name__)

LONGEST_READ_S = 5
"""Processor time of one grammar, in seconds."""
LONGEST_WAIT_S = 60.0
"""Time on a busy machine."""
MOST_MEMORY_BYTES = 1 << 30
"""Address space that reading may take, besides what the child begins with."""
MOST_SYMBOLS = 60_000
"""Symbols of a grammar, which take up to 50 MB."""
MOST_ITEMS, MOST_ITEMS_AT_ONCE = 10_000, 500
"""Items of the parser for one mask, and after one byte, of a grammar that its author writes. Those
of an ambiguous one took 35 ms; with the parser's own limits over 600 ms. Schemas and regular
expressions take at most 15 ms.
"""
DEEP_STACK_BYTES = 256 * 1024 * 1024
"""Address space for the stack of a thread that reads grammars, by recursion: rules that refer to
each other overflow the usual 8 MiB from a depth of 1,000 on, which ends the process. The longest
grammar took 100 MB.
"""
MOST_REASON_CHARACTERS = 300

Read = Callable[[str, str], str]
"""Makes of a kind and a text what the parser takes. Raises ValueError with the reason."""


class TryAgainError(Exception):
    """A grammar could not be read, for no reason of its own."""


def limits(kind: str) -> llguidance.LLParserLimits:
    """Return the parser's limits for a kind of grammar: counts, so that a text does not depend on
    how fast the machine is.
    """
    import llguidance

    if kind != "ebnf_grammar":
        return llguidance.LLParserLimits(max_grammar_size=MOST_SYMBOLS)
    return llguidance.LLParserLimits(
        step_max_items=MOST_ITEMS,
        max_items_in_row=MOST_ITEMS_AT_ONCE,
        max_grammar_size=MOST_SYMBOLS,
    )


def convert(kind: str, text: str) -> str:
    """Return what the parser takes. Raises ValueError with the reason."""
    try:
        return _grammar(kind, text)
    except Exception as error:  # the converters raise what they like
        raise ValueError(one_line(error)) from None


class GrammarProcess:
    """The child process; it starts with the first grammar, and again after it has died. ``rows``
    are the token ids that grammars may name, ``longest_s`` the processor time of each grammar.
    """

    def __init__(self, rows: int, longest_s: int = LONGEST_READ_S) -> None:
        self._rows, self._longest_s = rows, longest_s
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, kind: str, text: str) -> str:
        """Read a grammar in the child. Raises ValueError, or TryAgainError."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([kind, text]).encode() + b"\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], LONGEST_WAIT_S)[0]:
                raise TimeoutError
            grammar, reason = json.loads(process.stdout.readline())
        except (OSError, ValueError):  # no answer is no JSON
            raise self._failure(len(text)) from None
        if reason:
            raise ValueError(reason)
        return str(grammar)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = lifeline.start(
                sys.executable,
                [sys.executable, "-m", __name__, str(self._rows), str(self._longest_s)],
                cwd=Path(__file__).resolve().parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # of a parser that panics
            )
        return self._process

    def _failure(self, characters: int) -> Exception:
        """Return why there was no answer."""
        process, status = self._process, None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process and process.wait(1.0)
        self.close()
        logger.warning("a grammar of %d characters ended its reader: %s", characters, status)
        if status == -signal.SIGXCPU:
            return ValueError(f"it takes over {self._longest_s} s to read")
        if status in (-signal.SIGABRT, -signal.SIGSEGV):
            return ValueError("it is too large")
        return TryAgainError("the grammar could not be parsed: try again later")


def one_line(error: object) -> str:
    """Return an error in one line, without the excerpts of source and state below it.

    The reason often comes last, so that a long one is cut in its middle.
    """
    reason, *_ = re.split(r"^\s*\d+ \| |<state>", str(error), maxsplit=1, flags=re.MULTILINE)
    line = " ".join(reason.split()) or type(error).__name__
    return (
        line
        if len(line) <= MOST_REASON_CHARACTERS
        else f"{line[: MOST_REASON_CHARACTERS // 2]} ... {line[-MOST_REASON_CHARACTERS // 2 :]}"
    )


def _grammar(kind: str, text: str) -> str:
    """Return what llguidance makes of a guide."""
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark

    matcher = llguidance.LLMatcher
    if kind in ("json", "json_schema"):
        schema = json.loads(text) if kind == "json_schema" else {}
        if not isinstance(schema, (dict, bool)):
            raise ValueError("a schema must be an object or a boolean")
        return matcher.grammar_from_json_schema(json.dumps(prepare_schema(schema)))
    return (
        matcher.grammar_from_regex(text)
        if kind == "regex"
        else matcher.grammar_from_lark(any_to_lark(text))
    )


class _Bytes:
    """A vocabulary of bytes, with as many token ids as the model's."""

    bos_token_id = None

    def __init__(self, rows: int) -> None:
        self.eos_token_id = max(rows, 256)
        ids = range(self.eos_token_id + 1)
        self.tokens = [bytes([n]) if n < 256 else b"\xff[%d]" % n for n in ids]
        self.special_token_ids = [*ids[256:]]

    def __call__(self, text: bytes) -> list[int]:
        """Encode a text."""
        return list(text)


def _answer_all(rows: int, longest_s: int) -> None:
    """Answer the grammars that come as lines, until there are no more."""
    import llguidance

    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(rows)))
    for line in sys.stdin.buffer:
        used_s = math.ceil(process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + longest_s, resource.RLIM_INFINITY))
        grammar = reason = ""
        try:
            kind, text = json.loads(line)
            grammar = convert(kind, text)
            matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits(kind))
            reason = one_line(matcher.get_error()) if matcher.is_error() else ""
        except ValueError as error:
            reason = str(error)
        sys.stdout.write(json.dumps([grammar, reason]) + "\n")
        sys.stdout.flush()


def _serve(rows: int, longest_s: int) -> None:
    """Be the child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + DEEP_STACK_BYTES + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    threading.stack_size(DEEP_STACK_BYTES)
    thread = threading.Thread(target=_answer_all, args=(rows, longest_s))
    thread.start()
    thread.join()


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
