"""Outputs that few requests ask for besides their tokens: logits, and the most likely tokens at
each place. Gathered by steps, sent by replies.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.engines.port import Extras
from backend.sequence import Sequence

FloatArray = npt.NDArray[np.float32]

LEAST_LOG_PROB = -9999.0
"""The log-probability that a banned token is reported with, as OpenAI and vLLM do."""


@dataclass(slots=True)
class ScoredPrompt:
    """The ``tokens`` of a prompt, and of all but the first the log-probability by the model's own
    distribution and the ``top`` most likely there.
    """

    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)

    def read(self, rows: FloatArray, first: int, most: int) -> None:
        """Take the logits [rows, vocab] after the tokens from number ``first`` on, and keep
        ``most`` of the likeliest at each place.
        """
        tokens = self.tokens[first + 1 : first + 1 + len(rows)]
        rows = rows[: len(tokens)]
        if not tokens:
            return
        highest = rows.max(axis=1, keepdims=True)
        log_probs = rows - (highest + np.log(np.exp(rows - highest).sum(axis=1, keepdims=True)))
        self.log_probs += log_probs[np.arange(len(tokens)), tokens].tolist()
        if most:
            best = np.argpartition(-log_probs, most - 1, axis=1)[:, :most]
            for row, ids in zip(log_probs, best, strict=True):
                ranked = ids[np.argsort(-row[ids], kind="stable")]
                self.top.append(list(zip(ranked.tolist(), row[ranked].tolist(), strict=True)))


@dataclass(frozen=True, slots=True)
class GatheredOutputs:
    """The tokens of a reply with the outputs asked for (None: not asked for)."""

    tokens: list[int]
    top: list[list[tuple[int, float]]] | None = None
    """The most likely (token, log-probability) at each token's place, best first."""
    logits: FloatArray | None = None
    """The model's own logits [tokens, vocab] from which the tokens were drawn."""
    context_logits: FloatArray | None = None
    """Logits after every token of the prompt [prompt tokens, vocab]."""
    prompt: ScoredPrompt | None = None


@dataclass(slots=True)
class Gatherer:
    """Keeps one request's extras until a reply takes them."""

    sequence: Sequence
    _tokens: list[int] = field(default_factory=list)
    _top: list[list[tuple[int, float]]] = field(default_factory=list)
    _logits: list[FloatArray] = field(default_factory=list)  # [tokens, vocab] each
    _context: list[FloatArray] = field(default_factory=list)  # [rows, vocab] each
    _context_rows: int = 0
    _context_sent: bool = False
    _prompt: ScoredPrompt | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> Gatherer | None:
        """Return one for a sequence that asks for anything, else None."""
        asks = (
            sequence.sampling.top_log_probs is not None
            or sequence.reads_context
            or sequence.generation_logits
        )
        return cls(sequence) if asks else None

    def add(self, tokens: Seq[int], extras: Extras | None) -> None:
        """Take those of the ``tokens`` that were committed in a step; what a resumed request runs
        again is not taken again.
        """
        self._tokens += tokens
        if extras is None:
            return
        self._top += [
            [(token, max(value, LEAST_LOG_PROB)) for token, value in row]
            for row in extras.top[: len(tokens)]
        ]
        if self.sequence.generation_logits and extras.logits is not None:
            self._logits.append(extras.logits[: len(tokens)])
        if extras.context_logits is not None:
            have, first = self._context_rows, extras.context_first
            rows = extras.context_logits[have - first : self.sequence.prompt_tokens - first]
            if self.sequence.context_logits:
                self._context.append(rows)
            if self.sequence.prompt_log_probs and len(rows):
                if self._prompt is None:
                    self._prompt = ScoredPrompt(self.sequence.tokens[: self.sequence.prompt_tokens])
                self._prompt.read(rows, have, self.sequence.sampling.top_log_probs or 0)
            self._context_rows += len(rows)

    def pop(self) -> GatheredOutputs:
        """Return what has come since the last call."""
        sequence, tokens, top, logits = self.sequence, self._tokens, self._top, self._logits
        self._tokens, self._top, self._logits = [], [], []
        context = None
        if sequence.context_logits and not self._context_sent:
            context, self._context, self._context_sent = np.concatenate(self._context), [], True
        prompt, self._prompt = self._prompt, None
        return GatheredOutputs(
            tokens,
            None if sequence.sampling.top_log_probs is None else top,
            np.concatenate(logits) if sequence.generation_logits and logits else None,
            context,
            prompt,
        )
