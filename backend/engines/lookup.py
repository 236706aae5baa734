"""Prompt lookup: a draft without a model, which proposes what followed the text's end before.

For n from ``max_ngram`` down to ``min_ngram``, the last n tokens are looked up among the earlier
n-grams of prompt and output (Saxena, "Prompt Lookup Decoding", 2023). The most recent occurrences
are read on together, as one tree, those first before which most of the text is alike. An index per
sequence makes a step cost its new tokens, not its context.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from backend.engine_config import EngineConfig
from backend.engines.port import EngineLimits, Turn
from backend.engines.proposer import UNLIMITED, Proposer
from backend.engines.registry import Service
from backend.sequence import ROOT, Proposal, Sequence
from policy.evidence import MATCH_EDGES, bin_of_match

MATCHES = 4
"""How many occurrences are read on, and kept of each n-gram: the most recent ones."""
DOUBT = 2
"""Votes for a token that no match has (fitted)."""
LONGEST_MATCH = MATCH_EDGES[-1]
"""Tokens of a match that are counted."""


class Match(NamedTuple):
    """An earlier occurrence of the text's last ``size`` tokens, which ends before ``position``."""

    position: int
    size: int


class Continuation(NamedTuple):
    """The tokens that followed ``matches`` occurrences, whose lengths add up to ``size``."""

    size: int
    matches: int
    tokens: list[int]


class LookupEngine(Proposer):
    """A draft over n-gram matches; it keeps no KV."""

    def __init__(
        self,
        name: str,
        *,
        max_draft_tokens: int,
        min_ngram: int = 2,
        max_ngram: int = 4,
        vocab_size: int = UNLIMITED,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram must be from 1 to max_ngram {max_ngram}, got {min_ngram}")
        most = max_draft_tokens, max_draft_tokens
        super().__init__(name, EngineLimits(vocab_size, UNLIMITED, *most, kv_blocks=0, free=True))
        self._ngrams = (min_ngram, max_ngram)
        self._indices: dict[int, _Index] = {}

    def available(self, sequence: Sequence, length: int) -> int:
        """Return ``length``, at most ``max_draft_tokens``, where the end has a match, else 0."""
        return super().available(sequence, length) if self._has_match(sequence) else 0

    def evidence(self, sequence: Sequence) -> int:
        """Return the bin of the longest match's tokens, and of whether all places with as long an
        n-gram go on alike.
        """
        tokens = sequence.tokens
        matches = self._index(sequence).matches(tokens)
        if not matches:
            return 0
        size = matches[0].size
        least = min(size, self._ngrams[1])
        following = {tokens[match.position] for match in matches if match.size >= least}
        return bin_of_match(size, agree=len(following) == 1)

    def close(self) -> None:
        """Forget everything."""
        super().close()
        self._indices.clear()

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indices.pop(sequence_id, None)

    def _index(self, sequence: Sequence) -> _Index:
        index = self._indices.get(sequence.id)
        if index is None:
            index = self._indices[sequence.id] = _Index(*self._ngrams)
        return index

    def _has_match(self, sequence: Sequence) -> bool:
        return bool(self._index(sequence).matches(sequence.tokens))

    def _paths(self, sequence: Sequence, length: int) -> list[Continuation]:
        """Return up to ``length`` tokens after each match."""
        tokens, matches = sequence.tokens, self._index(sequence).matches(sequence.tokens)
        return [Continuation(m.size, 1, continuation(tokens, m.position, length)) for m in matches]

    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        return map(self._proposal, turns)

    def _proposal(self, turn: Turn) -> Proposal:
        sequence, length = turn.sequence, min(turn.run, self.limits.max_draft_tokens)
        paths = self._paths(sequence, length)
        if (guide := sequence.sampling.guide) is not None:
            output = sequence.tokens[sequence.prompt_tokens :]
            paths = [  # each to the first token that the request's grammar forbids
                path._replace(tokens=path.tokens[: guide.count_allowed(output, path.tokens)])
                for path in paths
            ]
        return Proposal.best(self.name, _merge(paths), turn.nodes)


def continuation(tokens: list[int], position: int, length: int) -> list[int]:
    """Return what follows ``position``. At the end of the text it is read on in the continuation
    itself: text that repeats itself goes on repeating.
    """
    following = tokens[position : position + length]
    period = len(following)
    return following if period == length else [following[i % period] for i in range(length)]


def reach(tokens: list[int], position: int, most: int) -> int:
    """Return how many tokens before ``position`` are a text's last ones, at most ``most``."""
    size, most = 0, min(most, position)
    if tokens[position - most : position] == tokens[len(tokens) - most :]:
        return most
    while size < most and tokens[position - 1 - size] == tokens[-1 - size]:
        size += 1
    return size


def _merge(paths: Iterable[Continuation]) -> list[tuple[int, int, float]]:
    """Return the nodes (token, parent, confidence) of paths.

    A match votes for each of its path's tokens by its length, which every token before it has made
    longer; two votes are for a token that no path has. So a single path's token has the confidence
    n / (n + 2), and confidence rises with length and agreement and falls with depth. On source text
    that was about how often it was right; what it is on other texts is for the policy to learn.
    """
    nodes: list[tuple[int, int]] = []
    children: dict[tuple[int, int], int] = {}
    votes: list[int] = []
    cast = [DOUBT]  # after the text, then after each node
    for size, matches, tokens in paths:
        at, vote = ROOT, size
        for token in tokens:
            edge = token, at
            node = children.get(edge)
            if node is None:
                node = children[edge] = len(nodes)
                nodes.append(edge)
                votes.append(0)
                cast.append(DOUBT)
            votes[node] += vote
            cast[at + 1] += vote
            vote += matches
            at = node
    chance = [1.0]
    for (_, parent), count in zip(nodes, votes, strict=True):
        chance.append(chance[parent + 1] * count / cast[parent + 1])
    return [(*node, confidence) for node, confidence in zip(nodes, chance[1:], strict=True)]


class _Index:
    """The last place of each n-gram of one sequence, as the position of the token after it.

    The n-grams at the very end are left out until a token follows them, so a look-up never finds
    the end itself.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._after: dict[tuple[int, ...], tuple[int, ...]] = {}  # the most recent first
        self._indexed = 0  # n-grams ending before this position are in the index
        self._matches: tuple[int, list[Match]] = (0, [])  # of the text of that length

    def matches(self, tokens: list[int]) -> list[Match]:
        """Return the last occurrences of the end, the longest first, then the most recent."""
        length, matches = self._matches
        if length != len(tokens):
            self._grow(tokens)
            matches = self._search(tokens)
            self._matches = len(tokens), matches
        return matches

    def _search(self, tokens: list[int]) -> list[Match]:
        if tuple(tokens[-self._sizes[-1] :]) not in self._after:
            return []  # a longer match would be one of the shortest n-gram, too
        positions: dict[int, int] = {}
        for size in self._sizes:
            if size < len(tokens) and len(positions) < MATCHES:
                for position in self._after.get(tuple(tokens[-size:]), ()):
                    positions.setdefault(position, size)
        matches = [Match(*pair) for pair in positions.items()][:MATCHES]
        longest = self._sizes[0]
        whole = [
            Match(at, reach(tokens, at, LONGEST_MATCH)) if size == longest else Match(at, size)
            for at, size in matches
        ]
        return sorted(whole, key=lambda match: -match.size)  # stable: the most recent first

    def _grow(self, tokens: list[int]) -> None:
        end = len(tokens)
        for position in range(self._indexed + 1, end):
            for size in self._sizes:
                if size <= position:
                    ngram = tuple(tokens[position - size : position])
                    before = self._after.get(ngram)
                    positions = (position, *before[: MATCHES - 1]) if before else (position,)
                    self._after[ngram] = positions
        self._indexed = max(self._indexed, end - 1)


def make(engine: EngineConfig, service: Service) -> LookupEngine:
    """Make an engine of this kind (``backend.engines.registry``)."""
    return LookupEngine(
        engine.name,
        min_ngram=engine.min_ngram,
        max_ngram=engine.max_ngram,
        max_draft_tokens=service.sizes["max_draft_tokens"],
    )
