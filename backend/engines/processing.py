"""What a request's options make of the logits, before a law is made of them; row i of a run sees the proposed tokens before it.

The options and their order are those of TensorRT-LLM's decoder: bias, temperature, repetition, presence and frequency penalty, minimum
length, bad words, grammar; then top-k and top-p. Temperature is divided by later, so what follows it there is multiplied by it here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from backend.request import SamplingParams

IMPOSSIBLE = -1e30
"""The logit of a banned token. Finite, so that a row in which everything is banned still has a law."""
UNGRAMMATICAL = 2 * IMPOSSIBLE
"""The logit of a token that the grammar forbids: where options ban all that it allows, it is the grammar that is kept."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Which token each column of a head's logits stands for: the whole vocabulary in order, or a draft's shortlist (``token_ids`` [S])."""

    token_ids: torch.Tensor | None = None
    _column: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        ids = [] if self.token_ids is None else self.token_ids.tolist()
        object.__setattr__(self, "_column", {token: column for column, token in enumerate(ids)})

    def token(self, column: int) -> int:
        """Return the token of a column."""
        return column if self.token_ids is None else int(self.token_ids[column])

    def of(self, tokens: Seq[int]) -> tuple[list[int], list[int]]:
        """Return the columns of those tokens that have one, and their places in ``tokens``."""
        if self.token_ids is None:
            return list(tokens), list(range(len(tokens)))
        known = [place for place, token in enumerate(tokens) if token in self._column]
        return [self._column[tokens[place]] for place in known], known


WHOLE_VOCABULARY = Columns()


def process(
    logits: torch.Tensor, sampling: SamplingParams, before: Seq[int], output_tokens: int, proposed: Seq[int], columns: Columns
) -> None:
    """Change the logits [len(proposed) + 1, S] of one request in place.

    ``before`` are all tokens in front of the first row, ``output_tokens`` of which are output; row i is also behind ``proposed[:i]``.
    """
    if sampling.bias:
        ids, addends = zip(*sampling.bias, strict=True)
        found, places = columns.of(ids)
        weights = torch.tensor([addends[place] for place in places], dtype=logits.dtype, device=logits.device)
        logits.index_add_(1, torch.tensor(found, dtype=torch.int64, device=logits.device), weights.expand(len(logits), -1))
    if sampling.penalised:
        _penalise(logits, sampling, before, proposed, columns)
    for row in range(min(len(logits), sampling.min_tokens - output_tokens)):
        logits[row, columns.of(sampling.end_ids)[0]] = IMPOSSIBLE
    if sampling.bad_words:
        _ban(logits, sampling, before, proposed, columns)
    if sampling.guide is not None:
        _guide(logits, sampling.guide.masks(before[len(before) - output_tokens :], proposed), columns)


def _penalise(logits: torch.Tensor, sampling: SamplingParams, before: Seq[int], proposed: Seq[int], columns: Columns) -> None:
    """Lower the logits of the tokens that occur before each row, prompt included."""
    ids, first = np.unique(np.array([*before, *proposed], np.int64), return_inverse=True)
    counts = np.zeros((len(logits), len(ids)))
    counts[:] = np.bincount(first[: len(before)], minlength=len(ids))
    for row, token in enumerate(first[len(before) :].tolist(), start=1):
        counts[row:, token] += 1
    found, places = columns.of(ids.tolist())
    occurred = torch.from_numpy(counts[:, places]).to(logits)
    values = logits[:, found]
    factor = sampling.repetition_penalty
    lowered = torch.where(values < 0, values * factor, values / factor)
    lowered -= (sampling.temperature or 1.0) * (sampling.presence_penalty + sampling.frequency_penalty * occurred)
    logits[:, found] = torch.where(occurred > 0, lowered, values)


def _ban(logits: torch.Tensor, sampling: SamplingParams, before: Seq[int], proposed: Seq[int], columns: Columns) -> None:
    """Make the last token of every bad word impossible in the rows that are behind its other tokens."""
    tokens = [*before, *proposed]
    for row in range(len(logits)):
        if banned := sampling.banned(tokens, len(before) + row):
            found, _ = columns.of(banned)
            logits[row].index_fill_(0, torch.tensor(found, dtype=torch.int64, device=logits.device), IMPOSSIBLE)


def _guide(logits: torch.Tensor, masks: Seq[npt.NDArray[np.bool_]], columns: Columns) -> None:
    """Forbid in every row what its mask [vocab] does not allow; rows behind the last mask follow a token that is never accepted."""
    for row, mask in enumerate(masks):
        allowed = torch.from_numpy(mask).to(logits.device)
        if columns.token_ids is not None:
            allowed = allowed[columns.token_ids.long()]
        logits[row, : len(allowed)].masked_fill_(~allowed, UNGRAMMATICAL)
        logits[row, len(allowed) :] = UNGRAMMATICAL  # a vocabulary padded beyond the tokenizer's
