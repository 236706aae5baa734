"""Guided decoding: which tokens a grammar allows at each place of a text.

``llguidance`` parses; a ``Guide`` keeps its matcher at the place that an engine asks about. A
matcher walks along proposed tokens and back again, so that target and drafts share one, and a text
never depends on what was proposed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backend.request import ErrorCode, RequestError
from backend.sampling.schemas import prepare_schema
from backend.tokenizer import Tokenizer

# imported where it is needed: TensorRT-LLM's container has another version, and guides are refused
# there
if TYPE_CHECKING:
    import llguidance

BoolArray = npt.NDArray[np.bool_]

MOST_REASON_CHARACTERS = 300
_KEPT_MASKS = 64
_TOO_LARGE = "it is too large"
_DEAD_END = "no token may come next"
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""llguidance's names for it."""


class Grammars:
    """Makes the guides of one tokenizer; its first guide takes half a second. ``rows``: the model
    knows no more token ids than that.
    """

    def __init__(self, tokenizer: Tokenizer, rows: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = min(tokenizer.vocab_size, rows or tokenizer.vocab_size)
        self._tokens: llguidance.LLTokenizer | None = None

    def guide(self, kind: str, text: str, end_ids: frozenset[int]) -> Guide:
        """Return the guide of one request, whose text may end by ``end_ids``. Raises RequestError
        naming what is wrong with a grammar.
        """
        import llguidance

        # not those that only a model's padded vocabulary has
        end_ids = frozenset(token for token in end_ids if token < self._vocab_size)
        if not end_ids:
            raise _invalid(
                "end_id must not be -1 with guided_decoding_guide_type: nothing could end the text"
            )
        if self._tokens is None:
            self._tokens = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            )
        try:
            grammar = _grammar(kind, text)
        except Exception as error:  # the converters raise what they like
            raise _unserved(kind, _one_line(error)) from None
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise _unserved(kind, _one_line(matcher.get_error()))
        guide = Guide(matcher, self._vocab_size, end_ids, self._tokens.eos_token)
        guide.mask([])  # the first may take a second, which is not to be the loop's
        if (reason := guide.failure) is not None:
            raise _unserved(kind, "it allows no text" if reason == _DEAD_END else reason)
        return guide


class _ParserError(Exception):
    """The parser gave up."""


class Guide:
    """One request's grammar. ``failure`` is set when the parser gives up, because the grammar is
    too large or leads nowhere; from then on nothing but an end is allowed.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab_size: int, end_ids: frozenset[int], end_bit: int
    ) -> None:
        self.failure: str | None = None
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
                self.failure = str(error)
        ends = np.zeros(self._vocab_size, np.bool_)
        ends[list(self._end_ids)] = True
        return ends

    def allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
        """Return how many of the proposed tokens the grammar takes; a token that ends the text is
        the last of them.
        """
        try:
            return self._allowed(output, proposed) if self.failure is None else 0
        except _ParserError as error:
            self.failure = str(error)
            return 0

    def _allowed(self, output: Seq[int], proposed: Seq[int]) -> int:
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
            line = _one_line(self._matcher.get_error())
            raise _ParserError(_DEAD_END if line in _DEAD_ENDS else f"{_TOO_LARGE}: {line}")

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


class _Vocabulary:
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


def _one_line(error: object) -> str:
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


def _unserved(kind: str, reason: str) -> RequestError:
    return _invalid(f"guided_decoding_guide is no {kind} that can be served: {reason}")


def _invalid(message: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_ARGUMENT, message)
