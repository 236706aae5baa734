"""One request from admission to its single final reply. ``commit`` is the only way by which its
tokens grow.

Stop words are matched in the text, wherever token borders fall; text that could still grow into a
stop word is held back, and a stop word itself is not part of the output. A request of token ids
gets every token that it took: an end id, and the stop word that ended it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from backend.core.extras import LEAST_LOG_PROB, GatheredOutputs, Gatherer
from backend.core.stop_words import StopWords
from backend.engines.port import Extras
from backend.ops.request_trace import RequestTrace
from backend.ops.stats import Usage
from backend.request import (
    ErrorCode,
    FinishReason,
    GenerationRequest,
    RequestError,
    tenant_id,
)
from backend.sequence import Proposal, Sequence

NO_SPECIAL_TOKENS: Mapping[str, int] = MappingProxyType({})


class TextDecoder(Protocol):
    """Turns token ids into text, one at a time, holding back incomplete UTF-8."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


@dataclass(slots=True)
class Delta:
    """Output of a request since its last reply.

    A request for log-probabilities gets those of the tokens committed since then (text may lag
    after them), and the sum over all so far. A request of token ids gets ``tokens`` and no text.
    ``extras`` are those of all tokens committed since then, where asked for.
    """

    text: str
    log_probs: list[float] | None = None
    cum_log_prob: float | None = None
    tokens: list[int] | None = None
    extras: GatheredOutputs | None = None


class ReplySink(Protocol):
    """Receiver of a request's replies. ``cancelled`` is set from outside; exactly one of ``final``
    and ``error`` is ever called.
    """

    cancelled: bool

    def chunk(self, delta: Delta) -> None:
        """Send what is new of a streaming request."""
        ...

    def final(self, delta: Delta, reason: FinishReason, usage: Usage) -> None:
        """Send the last reply of a request that succeeded."""
        ...

    def error(self, code: ErrorCode, message: str) -> None:
        """Send the last reply of a request that did not."""
        ...


class Session:
    """A request's state machine: it takes tokens one by one until it is finished.

    ``end_ids`` end the generation without text. A stop word that names ``special_tokens`` (ids by
    name) matches these tokens.
    """

    def __init__(
        self,
        sequence: Sequence,
        request: GenerationRequest,
        end_ids: frozenset[int],
        decoder: TextDecoder,
        sink: ReplySink,
        special_tokens: Mapping[str, int] = NO_SPECIAL_TOKENS,
    ) -> None:
        self.id = sequence.id
        self.sequence = sequence
        self.request = request
        self.sink = sink
        self.trace: RequestTrace | None = None
        self.finish_reason: FinishReason | None = None
        self.output_tokens = 0
        self.drafts: dict[str, tuple[int, int]] = {}  # (proposed, accepted)
        self.verified_steps: list[tuple[int, int]] = []  # (proposed, accepted) of each, in order
        self.k_max = 0  # the longest proposal of any request, in tokens
        self.logits_bytes = 0  # of those that it keeps until they are sent, at the most
        self.control = False  # of a canary's two arms the one that takes the fixed choice
        self.tenant = tenant_id(request.cache_salt)
        self.arrived_s = 0.0
        self.deadline_s = math.inf
        self.admitted_s: float | None = None
        self.first_commit_s: float | None = None
        self.last_commit_s: float | None = None
        self._end_ids = end_ids
        self._decoder = decoder
        self._stop_words = StopWords(request.stop_words, special_tokens, end_ids)
        self._withheld = (
            "" if request.stream or request.exclude_input_in_output else request.text_input
        )
        # no stop word begins before here: the prompt is never searched
        self._searched = len(self._withheld)
        self._tokens: list[int] | None = None
        if request.input_ids is not None:
            self._tokens = (
                [] if request.stream or request.exclude_input_in_output else list(request.input_ids)
            )
        self._log_probs: list[float] | None = [] if sequence.sampling.log_probs else None
        self._cum_log_prob = 0.0
        self._extras = Gatherer.of(sequence)
        self._resume()

    def _resume(self) -> None:
        """Read the tokens that were generated before, and forget the text that was sent of them.
        Raises RequestError where the text ends among them.
        """
        tokens, first = self.sequence.tokens, self.sequence.prompt_tokens
        if first == len(tokens):
            return
        for end in range(first + 1, len(tokens) + 1):
            self._read(tokens[end - 1], end)
            if self.finish_reason is not None:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"resumed_tokens {len(tokens) - first}: the text ends after {end - first} of "
                    f"them ({self.finish_reason.value})",
                )
        guide = self.sequence.sampling.guide
        if guide is not None and guide.mask(tokens[first:]) is None:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"resumed_tokens {len(tokens) - first}: they do not follow guided_decoding_guide",
            )
        self._pop_text()

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_tokens - self.output_tokens

    def commit(
        self, tokens: Seq[int], log_probs: Seq[float] | None = None, extras: Extras | None = None
    ) -> int:
        """Take the tokens of one step in order and return how many were taken; fewer than given
        means finished.

        Raises RequestError where the request's grammar is beyond its parser's limits.
        """
        count = 0
        for token in tokens:
            self._append(token)
            count += 1
            if self.finish_reason is not None:
                break
        if self._log_probs is not None and log_probs is not None:
            bounded = [max(value, LEAST_LOG_PROB) for value in log_probs[:count]]
            self._log_probs += bounded
            self._cum_log_prob = sum(bounded, self._cum_log_prob)
        if self._extras is not None:
            self._extras.add(tokens[:count], extras)
        guide = self.sequence.sampling.guide
        if (
            guide is not None
            and guide.failure is not None
            and self.finish_reason in (None, FinishReason.END_ID)
        ):
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"guided_decoding_guide cannot be followed any further: {guide.failure}",
            )
        return count

    def count_speculated(self, proposal: Proposal, accepted: int) -> None:
        """Count a verified proposal and its committed tokens."""
        self.verified_steps.append((len(proposal), accepted))
        proposed, before = self.drafts.get(proposal.draft, (0, 0))
        self.drafts[proposal.draft] = proposed + len(proposal), before + accepted

    @property
    def drafted(self) -> int:
        """Tokens proposed so far."""
        return sum(proposed for proposed, _ in self.drafts.values())

    @property
    def accepted(self) -> int:
        """Proposed tokens accepted so far."""
        return sum(accepted for _, accepted in self.drafts.values())

    def pop_delta(self) -> Delta:
        """Return (and forget) what is safe to send now; everything once finished."""
        text, log_probs, tokens = self._pop_text(), self._log_probs, self._tokens
        if log_probs is None and tokens is None and self._extras is None:
            return Delta(text)
        extras = None
        # else there will be no reply to carry them
        if text or tokens or self.finish_reason is not None:
            self._log_probs = None if log_probs is None else []
            self._tokens = None if tokens is None else []
            extras = self._extras.pop() if self._extras else None
        return Delta(
            text, log_probs, None if log_probs is None else self._cum_log_prob, tokens, extras
        )

    def _pop_text(self) -> str:
        keep = 0
        if self._stop_words and self.finish_reason is None:
            keep = self._stop_words.most_at_end(self._withheld, self._searched)
        cut = len(self._withheld) - keep
        text, self._withheld = self._withheld[:cut], self._withheld[cut:]
        self._searched = max(0, self._searched - cut)
        self._stop_words.cut(cut)
        return text

    def usage(self) -> Usage:
        """Return the token counts so far."""
        arrived_s, sequence = self.arrived_s, self.sequence
        times_s = tuple(
            arrived_s if at is None else at
            for at in (arrived_s, self.admitted_s, self.first_commit_s, self.last_commit_s)
        )
        counts = (sequence.prompt_tokens, self.output_tokens, self.drafted, self.accepted)
        blocks = (sequence.new_blocks, sequence.reused_blocks)
        seed = None if sequence.sampling.greedy else sequence.sampling.seed
        steps = self.verified_steps, self.k_max
        return Usage(*counts, times_s, *blocks, dict(self.drafts), seed, *steps)

    def _append(self, token: int) -> None:
        self.sequence.tokens.append(token)
        self.output_tokens += 1
        if self._tokens is not None:
            self._tokens.append(token)
        self._read(token, len(self.sequence.tokens))

    def _read(self, token: int, end: int) -> None:
        """Decode a token, the text's last of ``end``, and finish where it ends the text."""
        ends = token in self._end_ids
        if ends:  # an incomplete character before it stays incomplete
            self._withheld += self._decoder.finish()
        if self._stop_words.marks:
            self._stop_words.note(token, len(self._withheld))
        if ends:
            self._end(FinishReason.END_ID)
            return
        if self._tokens is None:
            self._withheld += self._decoder.push(token)
        if self._stop_words and self._cut_at_stop_word():
            return
        if self.request.stop_word_ids and self._ends_in_stop_ids(end):
            return
        if self.remaining == 0:
            self._end(FinishReason.LENGTH)

    def _end(self, reason: FinishReason) -> None:
        """Finish; the decoder's held-back bytes may still complete a stop word."""
        self._withheld += self._decoder.finish()
        if not self._cut_at_stop_word():
            self.finish_reason = reason

    def _ends_in_stop_ids(self, end: int) -> bool:
        tokens, first = self.sequence.tokens, self.sequence.prompt_tokens
        for word in self.request.stop_word_ids:
            start = end - len(word)
            if start >= first and tokens[start:end] == list(word):
                self.finish_reason = FinishReason.STOP_WORDS
                return True
        return False

    def _cut_at_stop_word(self) -> bool:
        if not self._stop_words:
            return False
        at = self._stop_words.find(self._withheld, self._searched)
        if at < 0:
            self._searched = max(self._searched, self._stop_words.first_place(self._withheld))
            return False
        self._withheld = self._withheld[:at]
        self.finish_reason = FinishReason.STOP_WORDS
        return True
