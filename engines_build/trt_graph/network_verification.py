"""Verification as network layers: logits and a proposal in, accepted tokens and their number out. The rules are those of
``backend.engines.verification``; the random numbers come in as inputs, because a network has no state.

Row 0 of a sequence's ``rows`` decides about what follows its text. In a chain, row i is behind i proposed tokens and ``proposal[i]`` is the
token that it decides about. In a tree, row n + 1 is node n, ``proposal[n + 1]`` its token, and ``children`` [rows, width] are the rows of
the candidates that a row decides about, in the order of their test (0: none).
"""

from __future__ import annotations

from backend.engines.trt_graph.inputs import GREEDY, SAMPLED, Verification
from engines_build.trt_graph.network_graph import BOOL, I32, Graph, Tensor, concatenated, where
from engines_build.trt_graph.network_laws import Options, Vocabulary, normalised


def verify(graph: Graph, logits: Tensor, vocabulary: Vocabulary, kind: Verification) -> None:
    """Declare what the verification of ``logits`` [batch, rows, vocab] needs beside them, and its outputs.

    Outputs, i32: ``accepted`` [batch]; ``tokens`` [batch, rows or depth + 1], those accepted and the one emitted behind them; of a tree
    ``path`` [batch, depth], the accepted rows. What is behind them means nothing.
    """
    proposal = graph.input("proposal", I32, "batch", "rows").reshape(0, 0, 1)
    places = _Chain(graph, proposal) if not kind.width else _Tree(graph, proposal, kind)
    if kind.mode == SAMPLED:
        accepted, emitted = _sampled(graph, logits, vocabulary, places, kind)
    else:
        own = vocabulary.arg_max(logits if kind.mode == GREEDY else _race(graph, logits, vocabulary))
        accepted, emitted = places.follow(own)
    graph.output("accepted", accepted.reshape(-1))
    places.finish(graph, accepted, emitted)


def _race(graph: Graph, logits: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Return each column's speed in its row's race: mass over a standard exponential (``noise``; ones where a sequence is greedy)."""
    laws = vocabulary.laws(logits, Options.declare(graph, vocabulary.dtype))
    return laws / graph.input("noise", vocabulary.dtype, "batch", "rows", vocabulary.size)


def _sampled(graph: Graph, logits: Tensor, vocabulary: Vocabulary, places: _Chain | _Tree, kind: Verification) -> tuple[Tensor, Tensor]:
    """``draft_probs[r]`` is the law that row r's candidates were drawn from (any positive mass), unless they are ``point`` masses."""
    dtype, ranks = vocabulary.dtype, max(1, kind.width)
    laws = vocabulary.laws(logits, Options.declare(graph, dtype))
    point = graph.input("point", BOOL, "batch", "rows", ranks)
    drawn_from = graph.input("draft_probs", dtype, "batch", "rows", vocabulary.size)
    mass = drawn_from.sum(-1)
    drawn_from = drawn_from / where(mass > 0.0, mass, 1.0)
    accept = graph.input("accept", dtype, "batch", "rows", ranks)
    emit = graph.input("emit", dtype, "batch", "rows").reshape(0, 0, 1)
    for rank in range(ranks):
        tokens, exists = places.candidates(rank)
        q = where(point.slice(-1, rank, 1), vocabulary.one_hot(tokens), drawn_from)
        passed = exists & (accept.slice(-1, rank, 1) < laws.pick(tokens, -1) / q.pick(tokens, -1))
        places.decide(rank, passed)
        laws = where(exists & ~passed & ~places.decided, vocabulary.residual(laws, q), laws)
    accepted, final = places.end()
    law = normalised(_row(laws, final, places.numbers))
    return accepted, vocabulary.draw(law, emit.pick(final, 1))


class _Chain:
    """One candidate for every row but the last: accepted is what passes before the first that does not."""

    def __init__(self, graph: Graph, proposal: Tensor) -> None:
        self._proposal = proposal
        self.numbers = (proposal * 0 + 1).cumsum(1) - 1
        self._exists = self.numbers < graph.input("lengths", I32, "batch").reshape(0, 1, 1)
        self.decided = ~self._exists & self._exists
        self._passed = self.decided

    def candidates(self, rank: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002 (as a tree's)
        return self._proposal, self._exists

    def decide(self, rank: int, passed: Tensor) -> None:  # noqa: ARG002
        self._passed = passed

    def end(self) -> tuple[Tensor, Tensor]:
        """Return the number accepted and the last row reached, the same [batch, 1, 1]."""
        failed = (~self._passed).to(I32).cumsum(1)
        accepted = failed.equals(0).to(I32).sum(1)
        return accepted, accepted

    def follow(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Accept what equals each row's own token."""
        self._passed = self._exists & self._proposal.equals(own)
        accepted, final = self.end()
        return accepted, own.pick(final, 1)

    def finish(self, graph: Graph, accepted: Tensor, emitted: Tensor) -> None:
        graph.output("tokens", where(self.numbers < accepted, self._proposal, emitted).reshape(0, 0))


class _Tree:
    """Candidates in turn for every row, whether it is reached or not; then the walk from row 0 along what was accepted."""

    def __init__(self, graph: Graph, proposal: Tensor, kind: Verification) -> None:
        self._proposal, self._kind = proposal, kind
        self.numbers = (proposal * 0 + 1).cumsum(1) - 1
        self._children = graph.input("children", I32, "batch", "rows", kind.width)
        self._next = proposal * 0
        self._path: list[Tensor] = []

    @property
    def decided(self) -> Tensor:
        return self._next > 0

    def candidates(self, rank: int) -> tuple[Tensor, Tensor]:
        child = self._children.slice(-1, rank, 1)
        return self._proposal.pick(child, 1), (child > 0) & ~self.decided

    def decide(self, rank: int, passed: Tensor) -> None:
        self._next = where(passed, self._children.slice(-1, rank, 1), self._next)

    def end(self) -> tuple[Tensor, Tensor]:
        """Return the number accepted and the last row reached, [batch, 1, 1]."""
        row = self._next.slice(1, 0, 1) * 0
        accepted = row
        for _ in range(self._kind.depth):
            child = self._next.pick(row, 1)
            accepted = accepted + (child > 0).to(I32)
            row = where(child > 0, child, row)
            self._path.append(child)
        return accepted, row

    def follow(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Accept what equals each row's own token."""
        for rank in range(self._kind.width):
            tokens, exists = self.candidates(rank)
            self.decide(rank, exists & tokens.equals(own))
        accepted, final = self.end()
        return accepted, own.pick(final, 1)

    def finish(self, graph: Graph, accepted: Tensor, emitted: Tensor) -> None:  # noqa: ARG002
        path = concatenated(self._path, 1)
        graph.output("path", path.reshape(0, 0))
        tokens = concatenated([where(path > 0, self._proposal.pick(path, 1), emitted), emitted], 1)
        graph.output("tokens", tokens.reshape(0, 0))


def _row(values: Tensor, row: Tensor, numbers: Tensor) -> Tensor:
    """Return one row [batch, 1, any] of each sequence's ``values`` [batch, rows, any]."""
    return where(numbers.equals(row), values, 0.0).sum(1)
