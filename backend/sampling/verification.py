"""The rule of acceptance: the target draws a token at every place, and of a proposal follows what
it has drawn.

Greedy requests take the arg-max, others ``backend.sampling.draw``. Walking from the text, a
proposed token that is the one drawn at its place is accepted; where none is, the token drawn is
emitted all the same, and the run ends. So the text is what the target alone would have written,
whatever was proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from backend.request import SamplingParams
from backend.sampling.distributions import Floats, kth_greatest, likeliest, target_probs
from backend.sampling.draw import ProbsOf, draw, finishers
from backend.sampling.processing import WHOLE_VOCABULARY, Columns, process
from backend.sampling.randomness import Words, word
from backend.sequence import ROOT, Proposal, Sequence, child_of


@dataclass(slots=True)
class VerifyRequest:
    """One sequence's share of a verification, or a place of it where a token is drawn.

    Treat it as immutable: it is not frozen, because that costs microseconds.
    """

    sampling: SamplingParams
    position: int
    """That of the token decided about; ``committed[: position - len(run)]`` and ``run`` are before
    it.
    """
    committed: Seq[int] = ()
    prompt_tokens: int = 0
    """First tokens of ``committed`` that are the prompt."""
    run: Seq[int] = ()
    """Tokens accepted here, or a free run so far."""
    tokens: Seq[int] = ()
    """By node of the proposal; none: a token is drawn, nothing verified."""
    parents: Seq[int] = ()

    @classmethod
    def of(cls, sequence: Sequence, proposal: Proposal | None) -> VerifyRequest:
        """Return what is decided after a sequence's text. Raises ValueError for nodes that are no
        tree.
        """
        text, parents = sequence.tokens, proposal.parents if proposal else ()
        if proposal and not all(ROOT <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"a node's parent must be an earlier node or {ROOT}, got {parents}")
        tokens = proposal.tokens if proposal else ()
        place = (len(text), text, sequence.prompt_tokens)
        return cls(sequence.sampling, *place, (), tokens, parents)

    def after(self, run: Seq[int]) -> VerifyRequest:
        """Return the place after these tokens of a run."""
        position = self.position - len(self.run) + len(run)
        return VerifyRequest(self.sampling, position, self.committed, self.prompt_tokens, run)

    @property
    def rows(self) -> int:
        """Rows of logits: one after the text and one after each proposed token."""
        return len(self.tokens) + 1

    @property
    def before(self) -> list[int]:
        """The tokens before ``position``."""
        return [*self.committed[: self.position - len(self.run)], *self.run]

    @property
    def before_last(self) -> int:
        """The token right before ``position``."""
        return self.run[-1] if self.run else self.committed[self.position - 1]

    @property
    def params(self) -> SamplingParams:
        """How the token at ``position`` is drawn."""
        decays = self.sampling.top_p_decay != 1.0
        return self.sampling.after(self.before[self.prompt_tokens :]) if decays else self.sampling


@dataclass(slots=True)
class Verdict:
    """``path``: the accepted nodes from the text on; ``column`` of the token drawn after them.

    ``log_probs`` are those of all these tokens, ``top`` the most likely (column, log-probability)
    at each of their places, where they are wanted.
    """

    path: list[int]
    column: int
    log_probs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


def verify(
    logits: Floats,  # [rows, columns]
    requests: Seq[VerifyRequest],
    columns: Columns = WHOLE_VOCABULARY,
) -> list[Verdict]:
    """Return the verdict on each request.

    ``logits`` holds ``VerifyRequest.rows`` rows a request, in order: the first is after the text,
    row n + 1 after node n. Only rows on a path are looked at; those of requests that are not plain
    place by place for all of these at once.
    """
    firsts = _firsts(requests)
    verdicts = [Verdict([], -1) for _ in requests]
    walking: list[int] = []
    for index, (verdict, request) in enumerate(zip(verdicts, requests, strict=True)):
        if request.sampling.plain:
            follow(verdict, request, lambda row: int(logits[row].argmax()), firsts[index])
        else:
            walking.append(index)
    while walking:
        rows = [logits[firsts[index] + 1 + _last(verdicts[index].path)] for index in walking]
        places = [_place(requests[index], verdicts[index].path) for index in walking]
        _draw(rows, places, [verdicts[index] for index in walking], columns)
        walking = [index for index in walking if _step(verdicts[index], requests[index])]
    return verdicts


def candidates(
    logits: Floats,  # [places, columns]
    places: Seq[VerifyRequest],
    most: int,
    columns: Columns = WHOLE_VOCABULARY,
) -> list[list[tuple[int, float]]]:
    """Return by place the columns that a draft of these logits holds for likeliest to be what the
    target draws, best first, at most ``most``, with its confidence in each.
    """
    rows = [scores(row, place, columns) for row, place in zip(logits, places, strict=True)]
    by_place = [
        likeliest(row, most) if place.sampling.greedy else []
        for row, place in zip(rows, places, strict=True)
    ]
    if sampled := _sampled_places(places):
        words, probs_of = _words(places, sampled), _probs_of(rows, places, sampled)
        finishes = finishers(probs_of, words, most, columns.token_ids)
        for number, ones in zip(sampled, finishes, strict=True):
            by_place[number] = ones
    return by_place


def scores(logits: Floats, place: VerifyRequest, columns: Columns) -> Floats:
    """Return the logits [columns] at a place with its options applied: a copy where these change
    any.
    """
    if not place.sampling.changes_logits:
        return logits
    changed = logits.copy()
    process(changed, place.sampling, place.before, place.prompt_tokens, columns)
    return changed


def _draw(
    logits: Seq[Floats], places: Seq[VerifyRequest], verdicts: Seq[Verdict], columns: Columns
) -> None:
    """Draw the token of every place from its logits [columns], and note it in its verdict."""
    rows = [scores(row, place, columns) for row, place in zip(logits, places, strict=True)]
    if sampled := _sampled_places(places):
        words, probs_of = _words(places, sampled), _probs_of(rows, places, sampled)
        for number, column in zip(sampled, draw(probs_of, words, columns.token_ids), strict=True):
            verdicts[number].column = column
    for row, place, verdict in zip(rows, places, verdicts, strict=True):
        if place.sampling.greedy:
            verdict.column = int(row.argmax())
        if place.sampling.reads_log_probs:
            _note_log_probs(verdict, row, place.sampling)


def _sampled_places(places: Seq[VerifyRequest]) -> list[int]:
    """Return the numbers of the places whose token is not the likeliest, but drawn."""
    return [number for number, place in enumerate(places) if not place.sampling.greedy]


def _words(places: Seq[VerifyRequest], sampled: Seq[int]) -> Words:
    """Return the noise of these places."""
    rows = [places[number] for number in sampled]
    return np.array([word(place.sampling.seed, place.position) for place in rows], np.uint64)


def _probs_of(rows: Seq[Floats], places: Seq[VerifyRequest], sampled: Seq[int]) -> ProbsOf:
    """Return the distributions at these places, each made of its logits [columns] when it is asked
    for.
    """
    params = [places[number].params for number in sampled]
    return lambda number: target_probs(rows[sampled[number]], params[number])


def _note_log_probs(verdict: Verdict, row: Floats, sampling: SamplingParams) -> None:
    """Add log p of the token drawn: p with options and temperature, of the logits ``row[columns]``
    before top-k and top-p.
    """
    with np.errstate(over="ignore"):  # of a token that is banned
        log_probs = row / (sampling.temperature or 1.0)
    log_probs -= log_probs.max()
    if sampling.top_log_probs:
        most = min(sampling.top_log_probs, len(row))
        best = np.flatnonzero(log_probs >= kth_greatest(log_probs, most))
        best = best[np.argsort(-log_probs[best], kind="stable")[:most]]
    log_probs -= np.log(np.exp(log_probs).sum())
    verdict.log_probs.append(float(log_probs[verdict.column]))
    if sampling.top_log_probs:
        verdict.top.append(list(zip(best.tolist(), log_probs[best].tolist(), strict=True)))


def follow(
    verdict: Verdict, request: VerifyRequest, draw: Callable[[int], int], first: int = 0
) -> None:
    """Walk along the columns ``drawn`` at a request's rows from ``first`` on."""
    verdict.column = draw(first)
    while _step(verdict, request):
        verdict.column = draw(first + 1 + verdict.path[-1])


def _step(verdict: Verdict, request: VerifyRequest) -> bool:
    """Accept the node that is the token drawn; return whether there is one."""
    last = _last(verdict.path)
    if (node := child_of(request.tokens, request.parents, last, verdict.column)) == ROOT:
        return False
    verdict.path.append(node)
    return True


def _last(path: Seq[int]) -> int:
    return path[-1] if path else ROOT


def _place(request: VerifyRequest, path: Seq[int]) -> VerifyRequest:
    """Return the place after the accepted nodes."""
    if not path:
        return request
    return request.after([*request.run, *(request.tokens[node] for node in path)])


def _firsts(requests: Seq[VerifyRequest]) -> list[int]:
    """Return the first row of each request among rows that hold theirs in order."""
    firsts, row = [], 0
    for request in requests:
        firsts.append(row)
        row += len(request.tokens) + 1
    return firsts
