"""Pipelined speculation and verification (SPIN, arXiv 2503.15921): a batch cut into cohorts, one of
which is drafted for while another is verified.

Where both phases are bound by reading weights, half a batch takes as long as a whole one, and two
cohorts can only lose; where they scale with the rows, they gain up to twice. So the measured times
decide, with the measured price of running both at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .latency import Predicted, Times
from .plan import NO_DRAFT, FloatArray, IntArray, Outcome, Plan, View
from .problem import Choice, StepProblem, drafting_s, predicted_parts

_MISSED_SHARE = 0.03 / 4  # of a token's time, by each token that a plan comes later


@dataclass(frozen=True, slots=True)
class Overlap:
    """What is remembered of cohorts: ``saved_s`` that they would have saved so far, and what is
    ``in_flight``, by request the number of its cohort, its draft and its length (empty: no
    cohorts).
    """

    saved_s: float = 0.0
    in_flight: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class Cut(NamedTuple):
    """The best cut: ``cohort[n]`` of the view's rows (-1: not ready; None: it cannot be cut), the
    seconds of a step of the whole batch uncut and cut, those of a first round, which overlaps with
    nothing, and why it cannot pay (empty: it does).
    """

    cohort: IntArray | None
    one_s: float
    cut_s: float = 0.0
    fill_s: float = 0.0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """How plans are executed in up to ``most`` cohorts (``policy.extensions.Execution``).

    ``contention`` >= 1 is how much longer drafting and verifying take side by side than alone, as
    measured on the machine; None, not measured, means no cohorts. Raises ValueError naming the
    value that is out of range.
    """

    most: int
    contention: float | None

    def __post_init__(self) -> None:
        for name in ("most", "contention"):
            if (value := getattr(self, name)) is not None and not value >= 1:
                raise ValueError(f"{name} must be >= 1, got {value}")

    def start(self) -> Overlap:
        """Return what is remembered before the first step."""
        return Overlap()

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Change nothing: drafts and lengths are chosen first."""

    def execute(
        self, plan: Plan, view: View, times: Times, memory: Overlap
    ) -> tuple[Plan, Overlap]:
        """Return the plan with ``Plan.flight`` where cohorts shorten the step, and the memory.

        What cohorts would save or cost is summed up between 0 and the price of a first round: at
        that price they begin, at 0 they end. ``notes["why_not"]`` says why there are none.
        """
        if view.control_plan is not None:
            return _uncut(plan, "rows of another arm"), Overlap()
        choice, others, in_flight = _together(view, plan, memory)
        if not choice.length.any():
            return _uncut(plan, "no speculation"), Overlap()
        cut = self.best_cut(times, view, choice, others)
        share = np.count_nonzero(view.ready) / len(view)
        saved_s = min(max(memory.saved_s + share * (cut.one_s - cut.cut_s), 0.0), cut.fill_s)
        runs = saved_s > 0 and (bool(memory.in_flight) or saved_s >= cut.fill_s)
        if cut.cohort is None or not runs:
            return _uncut(plan, cut.why_not or "not yet for long enough"), Overlap(saved_s)
        if not others:
            in_flight = _cohorts_of(view, plan, cut.cohort)
        plan = replace(plan, flight=cut.cohort, predicted_s=share * cut.cut_s)
        return plan, Overlap(saved_s, in_flight)

    def best_cut(
        self, times: Times, view: View, choice: Choice, others: list[IntArray] | None = None
    ) -> Cut:
        """Return the cut that makes the step of the whole batch shortest.

        ``choice`` has a draft and a length for every row of the view. Rows are dealt in the view's
        order, so that a batch that stays keeps its cohorts; prompt tokens go with the first. Beside
        ``others``, the rows of cohorts in flight, the ready ones are another cohort, and the only
        question is whether to go on so.
        """
        others = others or []
        ready = view.ready.nonzero()[0]
        rows = np.concatenate([ready, *others])
        one_s = pipelined_s(*_phases_s(times, view, choice, [rows]))
        if self.contention is None:
            return Cut(None, one_s, one_s, why_not="contention is not measured")
        if len(rows) <= 1 or self.most == 1:
            return Cut(None, one_s, one_s, why_not="one row" if self.most > 1 else "one cohort")
        counts = range(2, min(self.most, len(rows)) + 1)
        cuts = [[ready, *others]] if others else [np.array_split(rows, m) for m in counts]
        phases = [_phases_s(times, view, choice, cut) for cut in cuts]
        seconds = [pipelined_s(*phase, self.contention) for phase in phases]
        best = seconds.index(min(seconds))
        cohort = np.full(len(view), -1, np.int64)
        for number, members in enumerate([ready] if others else cuts[best]):
            cohort[members] = number
        draft_s = phases[best][0]
        fill_s = float(draft_s.max() if others else draft_s[0])
        why_not = "" if seconds[best] < one_s else f"does not pay: {one_s / seconds[best]:.2f}"
        return Cut(cohort, one_s, seconds[best], fill_s, why_not)

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the busy seconds of all cohorts, side by side; the target's passes are counted by
        the tokens of the first.
        """
        if outcome.flight is None:
            return predicted_parts(times, outcome, view)
        parts = []
        for number in range(int(outcome.flight.max(initial=0)) + 1):
            rows, names = outcome.flight == number, ("request", "draft", "length", "verified")
            columns = {name: getattr(outcome, name)[rows] for name in names}
            prompts = 0 if number else outcome.prefill_tokens
            part = replace(outcome, **columns, prefill_tokens=prompts)
            parts.append(predicted_parts(times, part, view))
        contention = self.contention or 1.0
        base_s = contention * sum(part.base_s for part in parts)
        seconds: FloatArray = contention * np.sum([part.parts for part in parts], axis=0)
        return Predicted(parts[0].tokens, base_s, seconds)


def pipelined_s(draft_s: FloatArray, verify_s: FloatArray, contention: float = 1.0) -> float:
    """Return the seconds of one step of all cohorts, once running.

    ``draft_s[M]``, ``verify_s[M]`` by cohort, alone. Neither resource does more than one cohort at
    a time, and none is drafted for before it is verified: the longest of these three cycles, which
    is M max(D, V) for equal cohorts. One cohort takes D + V and contends with none.
    """
    together_s = float((draft_s + verify_s).max())
    if len(draft_s) == 1:
        return together_s
    return contention * max(float(draft_s.sum()), float(verify_s.sum()), together_s)


def _phases_s(
    times: Times, view: View, choice: Choice, cohorts: list[IntArray]
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of drafting, the step's overhead with them, and of verifying by cohort."""
    draft_s, verify_s = np.zeros((2, len(cohorts)))
    for c, rows in enumerate(cohorts):
        length = choice.length[rows]
        tokens = len(rows) + int(length.sum()) + (0 if c else view.prefill_tokens)
        verify_s[c] = times.verify_at(tokens) + len(rows) * times.row_s
        verify_s[c] += int(view.context[rows].sum()) * times.context_s
        draft_s[c] = drafting_s(times, view, rows, Choice(choice.draft[rows], length)).sum()
        draft_s[c] += times.overhead_s + times.speculation_s * bool(length.any())
    return draft_s, verify_s


def _together(
    view: View, plan: Plan, memory: Overlap
) -> tuple[Choice, list[IntArray], dict[int, tuple[int, int, int]]]:
    """Return the choice of all rows, those in flight as they were planned, the rows of each cohort
    in flight, and what is in flight once the ready rows are, as a cohort of their own.
    """
    choice = Choice(plan.draft.copy(), plan.length.copy())
    cohorts: dict[int, list[int]] = {}
    in_flight = {}
    requests = view.request.tolist()
    for row in np.flatnonzero(~view.ready).tolist():
        if (known := memory.in_flight.get(requests[row])) is not None:
            in_flight[requests[row]] = known
            number, choice.draft[row], choice.length[row] = known
            cohorts.setdefault(number, []).append(row)
    own = next(number for number in range(len(cohorts) + 1) if number not in cohorts)
    in_flight |= _cohorts_of(view, plan, np.where(view.ready, own, NO_DRAFT))
    return choice, [np.array(rows) for rows in cohorts.values()], in_flight


def _cohorts_of(view: View, plan: Plan, cohort: IntArray) -> dict[int, tuple[int, int, int]]:
    """Return ``Overlap.in_flight`` of the ready rows."""
    rows = np.flatnonzero(view.ready)
    columns = (column[rows].tolist() for column in (cohort, plan.draft, plan.length))
    return dict(zip(view.request[rows].tolist(), zip(*columns, strict=True), strict=True))


def _uncut(plan: Plan, why_not: str) -> Plan:
    return replace(plan, notes={**plan.notes, "why_not": {"cohorts": why_not}})


@dataclass(frozen=True, slots=True)
class FreeRuns:
    """How plans are executed where a turn is a request of its own (TensorRT-LLM's executor): rows
    without a proposal run up to ``most`` tokens in one turn (``policy.extensions.Execution``).
    """

    most: int

    def start(self) -> None:
        """Remember nothing."""

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Take from the seconds of no speculation what each token of a longer turn saves."""
        plans = [plan for plan in (view.control_plan, view.in_flight) if plan is not None]
        if not any(plan.length.any() for plan in plans):
            problem.undrafted_s[0] -= self._run(view, times)[1]

    def execute(self, plan: Plan, view: View, times: Times, memory: None) -> tuple[Plan, None]:
        """Return the plan with ``Plan.run``."""
        del memory
        return replace(plan, run=np.full(len(view), self._run(view, times)[0])), None

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds by part."""
        return predicted_parts(times, outcome, view)

    def _run(self, view: View, times: Times) -> tuple[int, float]:
        """Return the tokens of a turn, and the seconds that each saves of a step."""
        rows, turn_s = view.decoding, times.turn_s + times.overhead_s
        step_s = times.verify_at(view.prefill_tokens + rows) + times.overhead_s
        step_s += rows * times.row_s + int(view.context.sum()) * times.context_s
        token_s = max(step_s - turn_s, 0.0)
        wait_s = token_s if rows + view.prefilling > 1 else 0.0
        tokens = free_run_tokens(turn_s, token_s, wait_s, self.most)
        return tokens, turn_s - (turn_s + wait_s * (tokens > 1)) / tokens


def free_run_tokens(turn_s: float, token_s: float, wait_s: float, most: int) -> int:
    """Return the tokens, 1..``most``, of a turn that does not speculate: the longer, the rarer its
    overhead, and the later the next plan.

    A turn of m tokens takes ``turn_s`` + m ``token_s``. Turns of one token end together; of longer
    ones, who comes back while others run waits ``wait_s`` for their iteration. A turn under way
    misses a gain that a plan would have found, taken as 3 % of the time once in four tokens, for
    (m - 1) / 2 tokens in the mean. So a token costs, beside its iteration,

        turn_s for m = 1,   (turn_s + wait_s) / m + h (m - 1) / 2 else,   h = 0.03 / 4 token_s,

    the latter least at m = sqrt(2 (turn_s + wait_s) / h), the economic lot size (Harris 1913).
    """
    delay_s = _MISSED_SHARE * token_s
    if turn_s <= 0:
        return 1
    tokens = most
    if delay_s > 0:
        tokens = max(1, min(most, round(math.sqrt(2 * (turn_s + wait_s) / delay_s))))
    return tokens if (turn_s + wait_s) / tokens + delay_s * (tokens - 1) / 2 < turn_s else 1
