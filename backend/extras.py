"""What few requests ask for beside their tokens: logits, and the most likely tokens at each place. Gathered by steps, sent by replies."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backend.ports import Extras, Sequence

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What a reply carries: its ``tokens``, at each of them the most likely (token, log-probability), best first, the model's own
    ``logits`` [tokens, vocab] behind which they were drawn, and those behind every token of the prompt [prompt tokens, vocab]. None: not
    asked for.
    """

    tokens: list[int]
    top: list[list[tuple[int, float]]] | None = None
    logits: FloatArray | None = None
    context_logits: FloatArray | None = None


@dataclass(slots=True)
class Gatherer:
    """Keeps one request's extras until a reply takes them."""

    sequence: Sequence
    _tokens: list[int] = field(default_factory=list)
    _top: list[list[tuple[int, float]]] = field(default_factory=list)
    _logits: list[FloatArray] = field(default_factory=list)
    _context: list[FloatArray] = field(default_factory=list)
    _context_rows: int = 0
    _context_sent: bool = False

    @classmethod
    def of(cls, sequence: Sequence) -> Gatherer | None:
        """Return one for a sequence that asks for anything, else None."""
        asks = sequence.sampling.top_log_probs is not None or sequence.context_logits or sequence.generation_logits
        return cls(sequence) if asks else None

    def add(self, tokens: Seq[int], extras: Extras | None) -> None:
        """Take those of the ``tokens`` that were committed in a step; what a resumed request runs again is not taken again."""
        self._tokens += tokens
        if extras is None:
            return
        self._top += extras.top[: len(tokens)]
        if self.sequence.generation_logits and extras.logits is not None:
            self._logits.append(extras.logits[: len(tokens)])
        if self.sequence.context_logits and extras.context_logits is not None:
            have, first = self._context_rows, extras.context_first
            rows = extras.context_logits[have - first : self.sequence.prompt_tokens - first]
            self._context.append(rows)
            self._context_rows += len(rows)

    def take(self) -> Gathered:
        """Return what has come since the last call."""
        sequence, tokens, top, logits = self.sequence, self._tokens, self._top, self._logits
        self._tokens, self._top, self._logits = [], [], []
        context = None
        if sequence.context_logits and not self._context_sent:
            context, self._context, self._context_sent = np.concatenate(self._context), [], True
        return Gathered(
            tokens,
            None if sequence.sampling.top_log_probs is None else top,
            np.concatenate(logits) if sequence.generation_logits and logits else None,
            context,
        )


class ExtrasFiles:
    """Puts extras into messages. Logits are too large for the wire: they go by files in ``folder``, which their reader removes."""

    def __init__(self, folder: Path, token_bytes: Seq[bytes]) -> None:
        self._folder = folder
        self._token_bytes = token_bytes
        self._numbers = itertools.count()
        shutil.rmtree(folder, ignore_errors=True)  # an earlier process's

    def message(self, extras: Gathered) -> dict[str, Any]:
        """Return the extras' part of a message (bytes as Latin-1 text), logits as the names of their files."""
        body: dict[str, Any] = {}
        if extras.top is not None:
            body["bytes"] = [self._text(token) for token in extras.tokens]
            body["top"] = [[(self._text(token), log_prob) for token, log_prob in row] for row in extras.top]
        for name, array in (("generation_logits", extras.logits), ("context_logits", extras.context_logits)):
            if array is not None:
                body[name] = self._written(array)
        return body

    def close(self) -> None:
        """Remove what nobody has read."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _written(self, array: FloatArray) -> str:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{next(self._numbers)}.npy"
        np.save(path, array)
        return str(path)

    def _text(self, token: int) -> str:
        return (self._token_bytes[token] if token < len(self._token_bytes) else b"").decode("latin-1")
