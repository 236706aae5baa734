"""The adaptive planner for engines that can do more than one chain a row: trees, merged chains, cohorts, cut contexts.

The joint choice of chains comes first and stays the fall-back. Under its price the batch is then offered trees and second chains
(``policy.offers``); the better offer is taken if it beats the chains on the real staircase. Cohorts are judged last, by the times of
what was chosen. How contexts are cut depends on nothing that is chosen: it is a part of the step's fixed time.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from .acceptance import AcceptanceState, Expected
from .cohorts import best_cohorts, numbered, together
from .correction import Target
from .decomposition import Decomposition, best_piece
from .goodput import Choice, Score, StepProblem, score
from .latency import VERIFY, LatencyModel
from .learned import restored_ranks
from .offers import Basis, Offer, merge_offer, tree_offer
from .plan import NO_DRAFT, FloatArray, IntArray, Outcome, Plan, TurnShape, View
from .planner import AdaptivePlanner, ready_rows
from .planner_state import PlannerConfig, PlannerState
from .problem import Given, extra_prefill_s
from .ranks import RankModel
from .shapes import (
    CHAINS_ONLY,
    COHORTS,
    MERGED,
    NO_SPECULATION,
    NOT_LONG_ENOUGH,
    OTHER_ARM,
    PAYS_MORE,
    PIECES,
    TREES,
    TWO_CHAINS,
    Shapes,
    does_not_pay,
)


class ShapedPlanner(AdaptivePlanner):
    """``AdaptivePlanner`` with ``Plan.shape`` for an engine of these capabilities; ``notes["why_not"]`` says why each was not used."""

    keeps_chains = False  # shapes are offered anew in every step

    def __init__(
        self, drafts: tuple[str, ...], latency: LatencyModel, config: PlannerConfig | None = None, shapes: Shapes | None = None
    ) -> None:
        """Raise ValueError if ``latency`` does not have as many drafts as there are names."""
        super().__init__(drafts, latency, config)
        self.shapes = shapes or Shapes()
        self._ranks = RankModel(len(drafts), self.config.k_max, self.shapes.tree_width)

    def start(self) -> PlannerState:
        """Return the state before the first step."""
        return replace(super().start(), ranks=self._ranks.start())

    def save(self, state: PlannerState, now: float) -> dict[str, Any]:
        """Return what was learnt, ranks included."""
        data = super().save(state, now)
        assert state.ranks is not None
        return {**data, "ranks": self._ranks.saved(self._ranks.aged(state.ranks, now))} if data else data

    def load(self, data: dict[str, Any], now: float, idle_s: float) -> PlannerState:
        """Return the state of what was saved ``idle_s`` ago, also by a planner of chains. Raises LearnedError naming field and value."""
        state = super().load(data, now, idle_s)
        if "ranks" not in data:
            return state
        return replace(state, ranks=restored_ranks(data["ranks"], self._ranks, now, idle_s))

    # -- plan

    def plan(self, view: View, state: PlannerState, now: float, rng: np.random.Generator) -> tuple[Plan, PlannerState]:
        """Choose chains, then the shape that they get."""
        assert state.ranks is not None
        plan, after = super().plan(view, state, now, rng)
        after = replace(after, ranks=self._ranks.aged(state.ranks, now))
        cut = self._cut(view.context[view.ready])
        why_not = {**CHAINS_ONLY, PIECES: cut.why_not}
        shape = TurnShape(piece_tokens=cut.piece_tokens or None)
        refusal = OTHER_ARM if view.given is not None else NO_SPECULATION if "kept" in plan.notes else ""
        if refusal:
            why_not |= {name: refusal for name in (TREES, MERGED, COHORTS) if self._able(name)}
        else:
            if self._able(TREES) or self._able(MERGED):
                offer, plan, after = self._offered(view, plan, after, why_not)
                if offer is not None:
                    shape = _with_offer(shape, offer, ready_rows(view), len(view), self.config.k_max)
            after = replace(after, overlap_s=state.overlap_s, overlaps=state.overlaps, flying=state.flying)
            plan, shape, after = self._in_cohorts(view, plan, after, shape, why_not)
        notes = {**plan.notes, "why_not": {name: why for name, why in why_not.items() if why}}
        return self._promised(replace(plan, notes=notes, shape=None if _is_empty(shape) else shape), after, state)

    def problem(self, view: View, state: PlannerState, acceptance: AcceptanceState) -> tuple[StepProblem, IntArray, Expected, Given]:
        """Return the planner's choice, padding in its fixed time, and seconds known for as many tokens as trees may have."""
        problem, rows, expected, given = super().problem(view, state, acceptance)
        verify_s, most = problem.verify_s, len(rows) * self.shapes.most_nodes
        if (self.shapes.tree_width > 1 or self.shapes.merges) and most >= len(verify_s):
            known, base = len(verify_s) - 1, view.prefill_tokens + len(rows) + len(given.rows) + given.tokens
            run = self.corrected(state).target.run(base + known, most + 1 - known)
            verify_s = np.concatenate([verify_s, verify_s[known] + state.correction[VERIFY] * (run[1:] - run[0])])
            if view.headroom is not None:
                verify_s[max(view.headroom - given.tokens, 0) + 1 :] = np.inf
        if self.shapes.pads:
            context = view.context[view.ready]
            verify_s = verify_s + state.correction[VERIFY] * self._padding_s(self._cut(context).work_tokens, context)
        return replace(problem, verify_s=verify_s), rows, expected, given

    def _offered(self, view: View, plan: Plan, after: PlannerState, why_not: dict[str, str]) -> tuple[Offer | None, Plan, PlannerState]:
        """Return the best offer that beats the chains, with plan and state as they then are; reasons go to ``why_not``."""
        problem, rows, expected, _ = self.problem(view, after, after.acceptance)
        if not len(rows) or not len(problem.gain) or not plan.price:
            why_not |= {name: NO_SPECULATION for name in (TREES, MERGED) if self._able(name)}
            return None, plan, after
        chosen = Choice(plan.draft[rows], plan.length[rows])
        chains, prefill_s = score(problem, chosen), extra_prefill_s(self.corrected(after), after.correction, view, len(rows))
        probing = bool(plan.notes.get("probe"))
        basis = Basis(problem, view.weight[rows], expected.hazard, chosen, chains, plan.price, self.shapes.most_nodes, probing)
        plain = Score(problem.base_value, problem.plain_s, problem.plain_s)
        best, reasons = self._best_offer(basis, after, view.rule[rows])
        if best is not None:  # what it promises is the better price of its time
            rise = _goodput(best.result, prefill_s) / _goodput(chains, prefill_s)
            basis = basis._replace(price=plan.price * max(rise, 1.0))
            best, reasons = self._best_offer(basis, after, view.rule[rows])
        gain = _goodput(best.result, prefill_s) / _goodput(plain, prefill_s) if best else 0.0
        if best is not None and not chosen.length.any() and gain < 1 + self.config.margin:
            reasons = {name: why or does_not_pay(gain / (1 + self.config.margin)) for name, why in reasons.items()}
            best = None
        why_not |= reasons
        if best is None:
            return None, plan, after
        draft, length = np.full(len(view), NO_DRAFT), np.zeros(len(view), np.int64)
        draft[rows], length[rows] = best.first
        plan = Plan(draft, length, best.result.step_s, best.tokens, basis.price, {**plan.notes, "gain": gain})
        last = replace(after.last, tokens=int(length.sum()))
        return best, plan, replace(after, goodput=_goodput(best.result, prefill_s), kept=None, last=last)

    def _able(self, name: str) -> bool:
        return {TREES: self.shapes.tree_width > 1, MERGED: self.shapes.merges, COHORTS: self.shapes.cohorts > 1}[name]

    def _best_offer(self, basis: Basis, state: PlannerState, rule: IntArray) -> tuple[Offer | None, dict[str, str]]:
        """Return the best of what the engine can do, and by shape why it is not taken (empty for the one that is)."""
        assert state.ranks is not None
        offers: dict[str, tuple[Offer | None, str]] = {}
        if self._able(TREES):
            siblings = self._ranks.siblings(state.ranks, rule)
            siblings[:, list(self.shapes.single_choice)] = 0.0
            offers[TREES] = tree_offer(basis, siblings)
        if self._able(MERGED):
            offers[MERGED] = merge_offer(basis, self._ranks.rescues(state.ranks, rule, basis.hazard[:, :, 0]))
        found = {name: offer for name, (offer, _) in offers.items() if offer is not None}
        if not found:
            return None, {name: why for name, (_, why) in offers.items()}
        best = max(found, key=lambda name: found[name].result.objective(basis.price))
        return found[best], {name: "" if name == best else why or PAYS_MORE[best] for name, (_, why) in offers.items()}

    def _in_cohorts(
        self, view: View, plan: Plan, after: PlannerState, shape: TurnShape, why_not: dict[str, str]
    ) -> tuple[Plan, TurnShape, PlannerState]:
        """Return plan, shape and state with cohorts where they shorten the step, and have or will have paid for their first round.

        What cohorts would save or cost is summed up between 0 and the price of a first round: at that price they begin, at 0 they end.
        A plan for a cohort while others are in flight tells of its share of a step.
        """
        if not self._able(COHORTS):
            return plan, shape, after
        planned, shapes = Choice(plan.draft, plan.length), self.shapes
        choice, nodes, others, flying = together(view, planned, shape.proposed(plan.length), after.flying or {})
        if not choice.length.any() or shape.second_draft is not None:
            why_not[COHORTS] = TWO_CHAINS if choice.length.any() else NO_SPECULATION
            return plan, shape, replace(after, overlap_s=0.0, overlaps=False, flying=None)
        latency, share = self.corrected(after), np.count_nonzero(view.ready) / len(view)
        found = best_cohorts(latency, after.correction, view, choice, shapes.contention, shapes.cohorts, nodes, others)
        overlap_s = min(max(after.overlap_s + share * found.gain_s, 0.0), found.fill_s)
        overlaps = found.cut is not None and overlap_s > 0 and (after.overlaps or overlap_s >= found.fill_s)
        why_not[COHORTS] = "" if overlaps else found.why_not or NOT_LONG_ENOUGH
        if not overlaps or found.cut is None:
            return plan, shape, replace(after, overlap_s=overlap_s, overlaps=False, flying=None)
        flying = flying if others else numbered(view, choice, nodes, found.cut)
        after = replace(after, overlap_s=overlap_s, overlaps=True, flying=flying)
        one_s = found.step_s + (found.gain_s if found.cohorts > 1 else 0.0)
        return replace(plan, predicted_s=share * (one_s - found.gain_s)), replace(shape, cohort=found.cut), after

    # -- padding

    def _cut(self, context: IntArray) -> Decomposition:
        """Return how contexts of rows are cut."""
        return best_piece(context, self.shapes.pads, self.shapes.merge_tokens, self.shapes.block_tokens)

    def _padding_s(self, work_tokens: float, context: IntArray) -> float:
        """Return the uncorrected seconds that reading so many tokens takes longer than reading the contexts."""
        return self.latency.target.context_s * (work_tokens - float(context.sum()))

    # -- observe

    def observe(self, outcome: Outcome, state: PlannerState, now: float) -> PlannerState:
        """Learn what chains teach, and what only siblings and second chains do."""
        assert state.ranks is not None
        return replace(super().observe(outcome, state, now), ranks=self._ranks.observe(state.ranks, outcome, now))

    def _predicted_s(self, outcome: Outcome, view: View) -> tuple[FloatArray, Target]:
        """Return the uncorrected seconds by part: busy times of all cohorts, side by side; contexts padded or cut as they were."""
        shape = outcome.shape
        if shape is None or shape.cohort is None:
            predicted, target = super()._predicted_s(outcome, view)
        else:
            predicted, target = self._predicted_cohorts_s(outcome, shape, shape.cohort, view)
        if not self.shapes.pads:
            return predicted, target
        context = view.context[np.isin(view.request, outcome.request)]
        padding_s = self._padding_s(self._work_tokens(context, shape.piece_tokens if shape else None), context)
        predicted[VERIFY] += padding_s
        return predicted, target._replace(other_s=target.other_s + padding_s)

    def _predicted_cohorts_s(self, outcome: Outcome, shape: TurnShape, cohort: IntArray, view: View) -> tuple[FloatArray, Target]:
        """Return the busy seconds of all cohorts; the target's forwards are told by the tokens of the first."""
        contention = self.shapes.contention or 1.0
        parts = [_part(outcome, shape, np.flatnonzero(cohort == c), c) for c in range(int(cohort.max()) + 1)]
        seconds, targets = zip(*(AdaptivePlanner._predicted_s(self, part, view) for part in parts), strict=True)
        base_s, other_s = (contention * sum(column) for column in zip(*(target[1:] for target in targets), strict=True))
        return contention * np.sum(seconds, axis=0), Target(targets[0].tokens, base_s, other_s)

    def _work_tokens(self, context: IntArray, piece_tokens: int | None) -> float:
        """Return the tokens read for contexts in pieces of a length, or padded (None)."""
        if piece_tokens is None:
            return float(len(context) * context.max(initial=0))
        return (piece_tokens + self.shapes.merge_tokens) * float((-(-context // piece_tokens)).sum())


def _is_empty(shape: TurnShape) -> bool:
    return all(getattr(shape, item.name) is None for item in fields(shape))


def _goodput(result: Score, prefill_s: float) -> float:
    return result.value / (result.charged_s - prefill_s)


def _with_offer(shape: TurnShape, offer: Offer, rows: IntArray, n: int, k_max: int) -> TurnShape:
    """Return the shape of all n rows of a view, whose ``rows`` an offer is for."""
    if offer.width is not None:
        width = np.zeros((n, k_max), np.int64)
        width[rows, : offer.width.shape[1]] = offer.width
        return replace(shape, width=width)
    assert offer.second is not None
    draft, length = np.full(n, NO_DRAFT), np.zeros(n, np.int64)
    draft[rows], length[rows] = offer.second
    return replace(shape, second_draft=draft, second_length=length)


def _part(outcome: Outcome, shape: TurnShape, rows: IntArray, cohort: int) -> Outcome:
    """Return the outcome of one cohort, as far as its time depends on it; prompts go with the first."""
    width = None if shape.width is None else shape.width[rows]
    columns = {name: getattr(outcome, name)[rows] for name in ("request", "draft", "length", "accepted", "emitted", "scored", "rule")}
    return replace(outcome, **columns, prefill_tokens=outcome.prefill_tokens if cohort == 0 else 0, shape=TurnShape(width))
