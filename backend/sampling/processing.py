"""Changes that a request's options make to the logits after a text, before a distribution is made
of them.

The options and their order are those of TensorRT-LLM's decoder: bias, temperature, repetition,
presence and frequency penalty, minimum length, bad words, grammar; then top-k and top-p.
Temperature is divided by later, so what follows it there is multiplied by it here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backend.request import IMPOSSIBLE, SamplingParams
from backend.sampling.distributions import Floats

UNGRAMMATICAL = 2 * IMPOSSIBLE
"""The logit of a token that the grammar forbids: where options ban all that it allows, it is the
grammar that is kept.
"""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which token each column of a head's logits stands for."""

    token_ids: npt.NDArray[np.int64] | None = None  # [S], a shortlist; None: all, in order
    size: int = 2**31 - 1
    """Columns of a whole vocabulary."""
    _tokens: list[int] = field(init=False)
    _column: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        ids = [] if self.token_ids is None else self.token_ids.tolist()
        object.__setattr__(self, "_tokens", ids)
        object.__setattr__(self, "_column", {token: column for column, token in enumerate(ids)})

    def token(self, column: int) -> int:
        """Return the token of a column."""
        return self._tokens[column] if self._tokens else column

    def of(self, tokens: Seq[int]) -> tuple[list[int], list[int]]:
        """Return the columns of those tokens that have one, and their places in ``tokens``."""
        if self.token_ids is None:
            if max(tokens, default=0) < self.size:
                return list(tokens), list(range(len(tokens)))
            places = [place for place, token in enumerate(tokens) if token < self.size]
            return [tokens[place] for place in places], places
        places = [place for place, token in enumerate(tokens) if token in self._column]
        return [self._column[tokens[place]] for place in places], places

    def __contains__(self, token: int) -> bool:
        return token < self.size if self.token_ids is None else token in self._column

    def more(self, tokens: Seq[int]) -> Columns:
        """Return a shortlist's columns with one more for each of ``tokens``, which have none."""
        assert self.token_ids is not None, "a whole vocabulary has no more"
        return Columns(np.concatenate((self.token_ids, np.array(tokens, np.int64))))


WHOLE_VOCABULARY = Columns()


def process(
    logits: Floats,  # [columns]
    sampling: SamplingParams,
    before: Seq[int],
    prompt_tokens: int,
    columns: Columns,
) -> None:
    """Change the logits after the tokens ``before`` in place; the first of these are the prompt."""
    if sampling.bias:
        ids, addends = zip(*sampling.bias, strict=True)
        at, places = columns.of(ids)
        np.add.at(logits, at, [addends[place] for place in places])
    if sampling.penalised:
        _penalise(logits, sampling, before, prompt_tokens, columns)
    if len(before) - prompt_tokens < sampling.min_tokens:
        logits[columns.of(sampling.end_ids)[0]] = IMPOSSIBLE
    if sampling.bad_words:
        logits[columns.of(sampling.find_banned(before, len(before)))[0]] = IMPOSSIBLE
    if sampling.guide is not None:
        mask = sampling.guide.mask(before[prompt_tokens:])
        if mask is not None:
            _forbid(logits, mask, columns)


def _penalise(
    logits: Floats, sampling: SamplingParams, before: Seq[int], prompt_tokens: int, columns: Columns
) -> None:
    """Lower the logits [columns] of the tokens that occur in the text."""
    if (factor := sampling.repetition_penalty) != 1.0:
        at, _ = columns.of(sorted(set(before)))
        values = logits[at]
        logits[at] = np.where(values < 0, values * factor, values / factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        counted = before[min(sampling.prompt_ignore_length, prompt_tokens) :]
        ids, counts = np.unique(np.array(counted, np.int64), return_counts=True)
        at, places = columns.of(ids.tolist())
        occurred = counts[places].astype(logits.dtype)
        each = sampling.presence_penalty + sampling.frequency_penalty * occurred
        logits[at] -= (sampling.temperature or 1.0) * each


def _forbid(
    logits: Floats,  # [columns]
    mask: npt.NDArray[np.bool_],  # [vocab]
    columns: Columns,
) -> None:
    """Forbid what a grammar's ``mask`` does not allow."""
    allowed = mask
    if (ids := columns.token_ids) is not None:
        allowed = mask[np.minimum(ids, len(mask) - 1)] & (ids < len(mask))
    allowed = allowed[: len(logits)]  # a draft may have fewer columns
    np.copyto(logits[: len(allowed)], UNGRAMMATICAL, where=~allowed)
    logits[len(allowed) :] = UNGRAMMATICAL  # a vocabulary padded beyond the tokenizer's
