"""Whether to cut the batch into cohorts, so that one drafts while another is verified; one cohort is an ordinary answer.

Where both phases are bound by reading weights, half a batch takes as long as a whole one and two cohorts can only lose; where they scale
with the rows they can gain up to twice. So the measured times decide, with the measured price of running both at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from .goodput import Choice
from .latency import FIRST_DRAFT, OVERHEAD, VERIFY, LatencyModel
from .plan import FloatArray, IntArray, View
from .problem import drafting_s
from .shapes import CHAINS_ONLY, COHORTS, NOT_MEASURED, ONE_ROW, does_not_pay


class CohortDecision(NamedTuple):
    """``cohort[n]`` of every row of the view (-1: not ready), how many there are, seconds for one step of the whole batch, and why not
    more than one (empty: there are). ``gain_s`` is what the best cut saves in a step (below 0: costs), ``fill_s`` what its first round
    takes longer, which has nothing to overlap with; ``cut`` is its cohorts.
    """

    cohort: IntArray
    cohorts: int
    step_s: float
    why_not: str
    gain_s: float = 0.0
    fill_s: float = 0.0
    cut: IntArray | None = None


def pipelined_s(draft_s: FloatArray, verify_s: FloatArray, contention: float = 1.0) -> float:
    """Return the seconds for one step of all cohorts, drafting and verifying side by side in a fixed order, once running.

    ``draft_s[M]``, ``verify_s[M]`` by cohort, alone. Neither resource can do more than one cohort at a time, and a cohort cannot be drafted
    for before it is verified: the longest of the three cycles. M max(D, V) for equal cohorts; one takes D + V and contends with none.
    """
    together_s = float((draft_s + verify_s).max())
    return together_s if len(draft_s) == 1 else contention * max(float(draft_s.sum()), float(verify_s.sum()), together_s)


def best_cohorts(
    latency: LatencyModel,
    correction: FloatArray,
    view: View,
    choice: Choice,
    contention: float | None,
    most: int,
    flying: Seq[IntArray] = (),
) -> CohortDecision:
    """Return the cohorts that a planned batch is to be cut into: M only where it makes the step of the whole batch shorter.

    ``choice`` has a draft and a length for every row of the view. ``contention`` is how much longer
    both phases take side by side than alone, as measured on the machine (None: not measured, hence
    never more than one cohort); ``most`` is what the engine can run (1: no cohorts). Rows are dealt
    in the view's order, so that a batch that stays keeps its cohorts; prompt tokens go with the
    first. Where cohorts are ``flying`` (their rows, which are not ready), the ready ones are
    another, and the only question is whether to go on so. Raises ValueError for a contention below
    1.
    """
    if contention is not None and not contention >= 1:
        raise ValueError(f"contention must be >= 1, got {contention}")
    ready = view.ready.nonzero()[0]
    rows = np.concatenate([ready, *flying])
    one_s = pipelined_s(*_phases_s(latency, correction, view, choice, [rows]))
    for missing, why in ((most <= 1, CHAINS_ONLY[COHORTS]), (contention is None, NOT_MEASURED), (len(rows) <= 1, ONE_ROW)):
        if missing:
            return CohortDecision(_numbered(view, [rows]), 1, one_s, why)
    assert contention is not None
    cuts = {m: np.array_split(rows, m) for m in range(2, min(most, len(rows)) + 1)} if not flying else {1 + len(flying): [ready, *flying]}
    phases = {m: _phases_s(latency, correction, view, choice, cut) for m, cut in cuts.items()}
    seconds = {m: pipelined_s(*phases[m], contention) for m in cuts}
    best = min(seconds, key=lambda m: (seconds[m], m))
    draft_s = phases[best][0]
    gain_s, fill_s = one_s - seconds[best], float(draft_s.max() if flying else draft_s[0])
    cut = _numbered(view, [ready] if flying else cuts[best])
    if gain_s > 0:
        return CohortDecision(cut, best, seconds[best], "", gain_s, fill_s, cut)
    return CohortDecision(_numbered(view, [rows]), 1, one_s, does_not_pay(one_s / seconds[best]), gain_s, fill_s, cut)


def _phases_s(
    latency: LatencyModel,
    correction: FloatArray,
    view: View,
    choice: Choice,
    cohorts: list[IntArray],
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of drafting and of verifying by cohort; the step's overhead is spent by who drafts."""
    draft_s, verify_s = np.zeros(len(cohorts)), np.zeros(len(cohorts))
    for c, rows in enumerate(cohorts):
        length = choice.length[rows]
        tokens = len(rows) + int(length.sum()) + (view.prefill_tokens if c == 0 else 0)
        draft_s[c] = drafting_s(latency, view, rows, Choice(choice.draft[rows], length)) @ correction[FIRST_DRAFT:]
        verify_s[c] = correction[VERIFY] * latency.target.seconds(tokens, len(rows), int(view.context[rows].sum()))
        draft_s[c] += correction[OVERHEAD] * (latency.overhead_s + latency.speculation_s * bool(length.any()))
    return draft_s, verify_s


def _numbered(view: View, cohorts: list[IntArray]) -> IntArray:
    cohort = np.full(len(view), -1, np.int64)
    for c, rows in enumerate(cohorts):
        cohort[rows] = c
    return cohort


Flying = dict[int, tuple[int, int, int]]
"""By request the number of its cohort, draft and length, as planned when it was ready last."""


def together(view: View, choice: Choice, flying: Flying) -> tuple[Choice, list[IntArray], Flying]:
    """Return the choice of all rows of a view, those in flight as they were planned.

    With it the rows of each cohort in flight, and what is in flight once the ready rows are, in a
    cohort of their own.
    """
    draft, length = choice.draft.copy(), choice.length.copy()
    cohorts: dict[int, list[int]] = {}
    after: Flying = {}
    requests = view.request.tolist()
    for row in np.flatnonzero(~view.ready).tolist():
        known = flying.get(requests[row])
        if known is not None:
            after[requests[row]] = known
            number, draft[row], length[row] = known
            cohorts.setdefault(number, []).append(row)
    own = next(number for number in range(len(cohorts) + 1) if number not in cohorts)
    after |= numbered(view, choice, np.where(view.ready, own, -1))
    return Choice(draft, length), [np.array(rows) for rows in cohorts.values()], after


def numbered(view: View, choice: Choice, cohort: IntArray) -> Flying:
    """Return what will be in flight of the ready rows, ``cohort[n]`` their numbers."""
    rows = np.flatnonzero(view.ready)
    columns = (column[rows].tolist() for column in (cohort, choice.draft, choice.length))
    return dict(zip(view.request[rows].tolist(), zip(*columns, strict=True), strict=True))
