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
import torch

from backend.request import SamplingParams
from backend.sampling.distributions import arg_max, likeliest, row_arg_max, target_probs
from backend.sampling.draw import draw, finishers
from backend.sampling.processing import WHOLE_VOCABULARY, Columns, process
from backend.sampling.randomness import Words, word
from backend.sequence import ROOT, Proposal, Sequence, child_of


@dataclass(slots=True)
class Row:
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
    def of(cls, sequence: Sequence, proposal: Proposal | None) -> Row:
        """Return what is decided after a sequence's text. Raises ValueError for nodes that are no
        tree.
        """
        text, parents = sequence.tokens, proposal.parents if proposal else ()
        if proposal and not all(ROOT <= parent < node for node, parent in enumerate(parents)):
            raise ValueError(f"a node's parent must be an earlier node or {ROOT}, got {parents}")
        tokens = proposal.tokens if proposal else ()
        place = (len(text), text, sequence.prompt_tokens)
        return cls(sequence.sampling, *place, (), tokens, parents)

    def after(self, run: Seq[int]) -> Row:
        """Return the place after these tokens of a run."""
        position = self.position - len(self.run) + len(run)
        return Row(self.sampling, position, self.committed, self.prompt_tokens, run)

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
    logits: torch.Tensor, requests: Seq[Row], columns: Columns = WHOLE_VOCABULARY
) -> list[Verdict]:
    """Return the verdict on each request.

    ``logits`` [rows, S] holds ``Row.rows`` rows a request, in order: the first is after the
    text, row n + 1 after node n. Only rows on a path are looked at; those of requests that are not
    plain place by place for all of these at once.
    """
    firsts = _firsts(requests)
    verdicts = [Verdict([], -1) for _ in requests]
    walking = [index for index, request in enumerate(requests) if not request.sampling.plain]
    if len(walking) < len(requests):
        best = row_arg_max(logits, every=len(logits) == len(requests))
        for verdict, request, first in zip(verdicts, requests, firsts, strict=True):
            if request.sampling.plain:
                follow(verdict, request, best, first)
    while walking:
        rows = [firsts[index] + 1 + _last(verdicts[index].path) for index in walking]
        places = [_place(requests[index], verdicts[index].path) for index in walking]
        current = [verdicts[index] for index in walking]
        _draw(_select(logits, rows), places, current, columns)
        walking = [index for index in walking if _step(verdicts[index], requests[index])]
    return verdicts


def candidates(
    logits: torch.Tensor, places: Seq[Row], most: int, columns: Columns = WHOLE_VOCABULARY
) -> list[list[tuple[int, float]]]:
    """Return by place the columns that a draft of these logits [n, S] holds for likeliest to be
    what the target draws, best first, at most ``most``, with its confidence in each.
    """
    rows = scores(logits, places, columns)
    greedy = torch.tensor([place.sampling.greedy for place in places], device=rows.device)
    if greedy.all():
        return likeliest(rows, most)
    found: list[list[tuple[int, float]]] = [[]] * len(places)
    for chosen, drawn in ((greedy, False), (~greedy, True)):
        indices = chosen.nonzero()[:, 0].tolist()
        if not indices:
            continue
        theirs, mine = rows[chosen], [places[index] for index in indices]
        if drawn:
            probs = target_probs(theirs, [place.params for place in mine])
            best = finishers(probs, _words(mine), most, columns.numbers)
        else:
            best = likeliest(theirs, most)
        for index, ones in zip(indices, best, strict=True):
            found[index] = ones
    return found


def scores(logits: torch.Tensor, places: Seq[Row], columns: Columns) -> torch.Tensor:
    """Return the logits [n, S] after these places with their options applied, in fp32 (fp64
    stays).
    """
    changed = [row for row, place in enumerate(places) if place.sampling.changes_logits]
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    wide = logits.to(dtype, copy=bool(changed))
    for row in changed:
        place = places[row]
        process(wide[row], place.sampling, place.before, place.prompt_tokens, columns)
    return wide


def _draw(logits: torch.Tensor, places: Seq[Row], verdicts: Seq[Verdict], columns: Columns) -> None:
    """Draw the token of every place from its row of logits [n, S], and tell each verdict of it."""
    rows = scores(logits, places, columns)
    drawn = [row for row, place in enumerate(places) if not place.sampling.greedy]
    found = arg_max(rows) if len(drawn) < len(places) else [-1] * len(places)
    if drawn:
        chosen = [places[row] for row in drawn]
        theirs = rows if len(drawn) == len(places) else rows[drawn]  # indexing copies
        probs = target_probs(theirs, [place.params for place in chosen])
        for row, column in zip(drawn, draw(probs, _words(chosen), columns.numbers), strict=True):
            found[row] = column
    for row, (place, verdict) in enumerate(zip(places, verdicts, strict=True)):
        verdict.column = found[row]
        if place.sampling.reads_log_probs:
            _tell(verdict, rows[row], place.sampling)


def _tell(verdict: Verdict, row: torch.Tensor, sampling: SamplingParams) -> None:
    """Add log p of the token drawn: p with options and temperature, before top-k and top-p."""
    log_probs = (row / (sampling.temperature or 1.0)).log_softmax(-1)
    verdict.log_probs.append(float(log_probs[verdict.column]))
    if sampling.top_log_probs:
        best = log_probs.topk(min(sampling.top_log_probs, len(log_probs)))
        verdict.top.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))


def follow(verdict: Verdict, request: Row, drawn: Callable[[int], int], first: int = 0) -> None:
    """Walk along the columns ``drawn`` at a request's rows from ``first`` on."""
    verdict.column = drawn(first)
    while _step(verdict, request):
        verdict.column = drawn(first + 1 + verdict.path[-1])


def _select(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Return the rows at ``places``, without a copy where these are all of them."""
    if len(places) == len(rows):
        return rows
    return rows.index_select(0, torch.tensor(places, device=rows.device))


def _step(verdict: Verdict, request: Row) -> bool:
    """Accept the node that is the token drawn; return whether there is one."""
    last = _last(verdict.path)
    if (node := child_of(request.tokens, request.parents, last, verdict.column)) == ROOT:
        return False
    verdict.path.append(node)
    return True


def _last(path: Seq[int]) -> int:
    return path[-1] if path else ROOT


def _place(request: Row, path: Seq[int]) -> Row:
    """Return the place after the accepted nodes."""
    if not path:
        return request
    return request.after([*request.run, *(request.tokens[node] for node in path)])


def _words(places: Seq[Row]) -> Words:
    """Return the noise of every place."""
    return np.array([word(place.sampling.seed, place.position) for place in places], np.uint64)


def _firsts(requests: Seq[Row]) -> list[int]:
    """Return the first row of each request among rows that hold theirs in order."""
    firsts, row = [], 0
    for request in requests:
        firsts.append(row)
        row += len(request.tokens) + 1
    return firsts
