"""Guided decoding: which tokens a grammar allows at each place of a text.

``llguidance`` parses; a ``GrammarGuide`` keeps its matcher at the place that an engine asks about.
A matcher walks along proposed tokens and back again, so that target and drafts share one, and a
text never depends on what was proposed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backend.request import ErrorCode, RequestError
from backend.sampling import reading
from backend.sampling.reading import Read, TryAgainError, one_line
from backend.tokenizer import Tokenizer

# imported where it is needed: TensorRT-LLM's container has another version, and guides are refused
# there
if TYPE_CHECKING:
    import llguidance

BoolArray = npt.NDArray[np.bool_]

KNOWN_GRAMMARS = 16
"""Grammars that are kept, in order of their last use."""
COPIED_FROM_S = 0.005
"""Processor time from which on a grammar is compiled once for several requests."""
_KEPT_MASKS = 64
_TOO_LARGE = "it is too large"
_DEAD_END = "no token may come next"
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""llguidance's names for it."""


@dataclass(slots=True)
class _Grammar:
    """A grammar that has been read, or the ``reason`` why it cannot be served."""

    grammar: str = ""
    reason: str = ""
    matcher: llguidance.LLMatcher | None = None
    """At its beginning, to copy from; only of a grammar that takes long to compile, because copies
    share the parser's limits.
    """


class Grammars:
    """Makes the guides of one tokenizer; its first guide takes half a second. ``rows``: the model
    knows no more token ids than that. ``read`` reads what has not been read lately.
    """

    def __init__(
        self, tokenizer: Tokenizer, rows: int | None = None, read: Read = reading.convert
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        self._read = read
        self._tokens: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[tuple[str, str, str], _Grammar] = OrderedDict()

    def knows(self, kind: str, text: str, salt: str = "") -> bool:
        """Return whether a guide would be made at once."""
        return (kind, text, salt) in self._grammars

    def guide(self, kind: str, text: str, end_ids: frozenset[int], salt: str = "") -> GrammarGuide:
        """Return the guide of one request, whose text may end by ``end_ids``; only requests of one
        ``salt`` share anything. Raises RequestError naming what is wrong with a grammar.
        """
        # not those that only a model's padded vocabulary has
        end_ids = frozenset(token for token in end_ids if token < self._vocab_size)
        if not end_ids:
            raise _invalid(
                "end_id must not be -1 with guided_decoding_guide_type: nothing could end the text"
            )
        key = kind, text, salt
        with self._lock:
            grammar = self._grammars.get(key)
        if grammar is None:
            grammar = self._reading(kind, text)
        with self._lock:
            self._grammars[key] = grammar
            self._grammars.move_to_end(key)
            if len(self._grammars) > KNOWN_GRAMMARS:
                self._grammars.popitem(last=False)
        matcher = None if grammar.reason else self._matcher(kind, grammar)
        if matcher is None or self._tokens is None:
            raise _invalid(
                f"guided_decoding_guide is no {kind} that can be served: {grammar.reason}"
            )
        guide = GrammarGuide(matcher, self._vocab_size, end_ids, self._tokens.eos_token, grammar)
        guide.mask([])
        return guide

    def _reading(self, kind: str, text: str) -> _Grammar:
        try:
            return _Grammar(self._read(kind, text))
        except ValueError as error:
            return _Grammar(reason=str(error))
        except TryAgainError as error:
            raise RequestError(ErrorCode.UNAVAILABLE, str(error)) from None

    def _matcher(self, kind: str, grammar: _Grammar) -> llguidance.LLMatcher | None:
        """Return a matcher at the beginning of a grammar; None, with the reason, where there is
        none.
        """
        import llguidance

        with self._lock:
            if self._tokens is None:
                self._tokens = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(_GuideVocabulary(self._tokenizer))
                )
            if (matcher := grammar.matcher) is not None:
                return matcher.deep_copy()
        begin_s, limits = thread_time(), reading.limits(kind)
        matcher = llguidance.LLMatcher(self._tokens, grammar.grammar, log_level=0, limits=limits)
        if matcher.is_error():
            grammar.reason = one_line(matcher.get_error())
            return None
        matcher.compute_bitmask()  # it may take a while, which is not to be the loop's
        if matcher.is_error():
            reason = _reason(matcher)
            grammar.reason = "it allows no text" if reason == _DEAD_END else reason
            return None
        if thread_time() - begin_s < COPIED_FROM_S:
            return matcher
        grammar.matcher = matcher
        return matcher.deep_copy()


class _ParserError(Exception):
    """The parser gave up."""


class GrammarGuide:
    """One request's grammar. ``failure`` is set when the parser gives up, because the grammar is
    too large or leads nowhere; from then on nothing but an end is allowed.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocab_size: int,
        end_ids: frozenset[int],
        end_bit: int,
        grammar: _Grammar,
    ) -> None:
        self.failure: str | None = None
        self._grammar = grammar
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._end_ids = end_ids
        self._end_bit = end_bit
        self._trail: list[int] = []  # what the matcher has taken
        self._masks: dict[int, BoolArray] = {}  # by place, along the trail

    def mask(self, output: Seq[int]) -> BoolArray | None:
        """Return what may follow ``output``, bool[vocab]; None where it has left the grammar, as a
        draft may do that lacks a token.
        """
        if self.failure is None:
            try:
                return self._mask() if self._move_after(output) else None
            except _ParserError as error:
                self._fail(error)
        ends = np.zeros(self._vocab_size, np.bool_)
        ends[list(self._end_ids)] = True
        return ends

    def count_allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
        """Return how many of the proposed tokens the grammar takes; a token that ends the text is
        the last of them.
        """
        try:
            return self._count_allowed(output, proposed) if self.failure is None else 0
        except _ParserError as error:
            self._fail(error)
            return 0

    def _fail(self, error: _ParserError) -> None:
        self.failure = str(error)
        self._grammar.matcher = None  # its copies have reached the limits, too

    def _count_allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
        if not self._move_after(output):
            return 0
        count = next(
            (count for count, token in enumerate(proposed) if not self._consume(token)),
            len(proposed),
        )
        ends = (
            count < len(proposed)
            and proposed[count] in self._end_ids
            and bool(self._mask()[proposed[count]])
        )
        return count + ends

    def _move_after(self, output: Seq[int]) -> bool:
        """Move the matcher to the end of ``output``; False where that is impossible."""
        trail = self._trail
        common = min(len(trail), len(output))
        if trail[:common] != list(output[:common]):
            common = next(
                at for at, (a, b) in enumerate(zip(trail, output, strict=False)) if a != b
            )
        if common < len(trail):
            self._matcher.rollback(len(trail) - common)
            del trail[common:]
            self._masks = {place: mask for place, mask in self._masks.items() if place <= common}
        return all(self._consume(token) for token in output[common:])

    def _consume(self, token: int) -> bool:
        if token in self._end_ids:
            return False
        if self._matcher.try_consume_tokens([token]) == 0:
            self._check()
            mask = self._masks.get(len(self._trail))
            if mask is not None and mask[token]:
                # rolled back from its limits, a matcher takes nothing and reports no error
                raise _ParserError(_TOO_LARGE)
            return False
        self._trail.append(token)
        return True

    def _check(self) -> None:
        """Raise _ParserError where the matcher has given up, which is for good."""
        if self._matcher.is_error():
            raise _ParserError(_reason(self._matcher))

    def _mask(self) -> BoolArray:
        place = len(self._trail)
        if place not in self._masks:
            if len(self._masks) >= _KEPT_MASKS:
                del self._masks[min(self._masks)]
            self._masks[place] = self._made_mask()
        return self._masks[place]

    def _made_mask(self) -> BoolArray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        ends = bool(mask[self._end_bit])
        mask[self._end_bit] = False
        mask[list(self._end_ids)] |= ends
        return mask


class _GuideVocabulary:
    """A tokenizer as llguidance reads it. Tokens without text can only be its end token, or
    nothing.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.end_id
        self.tokens = [
            token or b"\xff[%d]" % index for index, token in enumerate(tokenizer.token_bytes)
        ]
        self.special_token_ids = [
            index for index, token in enumerate(tokenizer.token_bytes) if not token
        ]

    def __call__(self, text: bytes | str) -> list[int]:
        """Encode a text."""
        return self._tokenizer.encode(
            text if isinstance(text, str) else text.decode("utf-8", "replace"),
            add_special_tokens=False,
        )


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Return why a matcher has given up, which is for good."""
    line = one_line(matcher.get_error())
    return _DEAD_END if line in _DEAD_ENDS else f"{_TOO_LARGE}: {line}"


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
