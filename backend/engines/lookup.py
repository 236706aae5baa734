"""Prompt lookup: a draft without a model, which proposes what followed the last earlier occurrence of the text's end.

For n from ``max_ngram`` down to ``min_ngram``, the last n tokens are looked up among the earlier n-grams of prompt and output (Saxena,
"Prompt Lookup Decoding", 2023); the most recent occurrence of the longest match wins. An index per sequence makes a step cost its new
tokens, not its context.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from backend.ports import Completion, EngineLimits, Sequence, Turn

_UNLIMITED = 2**31 - 1


class LookupEngine:
    """A point-mass draft over n-gram matches; it keeps no KV and can verify nothing.

    A match that runs into the end of the text is read on into its own proposal: text that repeats itself goes on repeating.
    """

    def __init__(self, name: str, *, max_draft_tokens: int, min_ngram: int = 2, max_ngram: int = 4, vocab_size: int = _UNLIMITED) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be from 1 to max_ngram {max_ngram}, got {min_ngram}")
        self.name = name
        self.limits = EngineLimits(vocab_size, _UNLIMITED, max_draft_tokens, max_draft_tokens, kv_blocks=0, free=True)
        self._ngrams = (min_ngram, max_ngram)
        self._indices: dict[int, _Index] = {}
        self._completions: list[Completion] = []

    def submit(self, turns: Seq[Turn]) -> None:
        """Look up a proposal of up to ``run`` tokens for every turn. A turn with a proposal to verify completes with an error."""
        for turn in turns:
            error = None if turn.proposal is None else f"engine {self.name!r} (lookup) cannot verify a proposal"
            tokens = [] if error else _grammatical(turn.sequence, self._propose(turn.sequence, turn.run))
            self._completions.append(Completion(turn.sequence.id, tokens, error=error))

    def poll(self, timeout_s: float) -> list[Completion]:
        """Return the completions of everything submitted."""
        del timeout_s  # a step engine never waits
        completions, self._completions = self._completions, []
        return completions

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Forget the sequences' indices and turns."""
        gone = set(sequence_ids)
        for sequence_id in gone:
            self._indices.pop(sequence_id, None)
        self._completions = [completion for completion in self._completions if completion.sequence_id not in gone]

    def unseen(self, sequence: Sequence) -> int:
        """Return 0: looking up costs no forward pass, however much text is new."""
        del sequence
        return 0

    def available(self, sequence: Sequence, length: int) -> int:
        """Return ``length`` (at most ``max_draft_tokens``) where the end of the text occurred before, else 0."""
        return 0 if self._match(sequence) is None else min(length, self.limits.max_draft_tokens)

    def close(self) -> None:
        """Forget everything."""
        self._indices.clear()
        self._completions.clear()

    def _match(self, sequence: Sequence) -> int | None:
        index = self._indices.get(sequence.id)
        if index is None:
            index = self._indices[sequence.id] = _Index(*self._ngrams)
        return index.match(sequence.tokens)

    def _propose(self, sequence: Sequence, run: int) -> list[int]:
        length = min(run, self.limits.max_draft_tokens)
        start = self._match(sequence) if length > 0 else None
        if start is None:
            return []
        proposal = sequence.tokens[start : start + length]
        period = len(proposal)
        return [proposal[i % period] for i in range(length)]


def _grammatical(sequence: Sequence, proposal: list[int]) -> list[int]:
    """Cut a proposal before the first token that the request's grammar forbids; a point mass may be cut without moving any law."""
    guide = sequence.sampling.guide
    return proposal if guide is None else proposal[: guide.allowed(sequence.tokens[sequence.prompt_tokens :], proposal)]


class _Index:
    """Where each n-gram of one sequence last occurred, as the position of the token after it.

    The n-grams at the very end are left out until a token follows them, so a look-up never finds the end itself.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams ending before this position are in the index
        self._found: int | None = None

    def match(self, tokens: list[int]) -> int | None:
        """Return the position after the most recent earlier occurrence of the longest known suffix; None without one."""
        end = len(tokens)
        if end > self._indexed + 1:
            for position in range(self._indexed + 1, end):
                for size in self._sizes:
                    if size <= position:
                        self._after[tuple(tokens[position - size : position])] = position
            self._indexed = end - 1
            self._found = self._look_up(tokens)
        return self._found

    def _look_up(self, tokens: list[int]) -> int | None:
        for size in self._sizes:
            if size < len(tokens):
                position = self._after.get(tuple(tokens[-size:]))
                if position is not None:
                    return position
        return None
