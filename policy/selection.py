"""Which drafts a batch tries beyond what the estimates prefer: three modes of selection under one budget.

``probing`` looks for the one draft of which knowing more is worth most (``policy.probing``). The other two are the cascading semi-bandit's
classics (Kveton et al. 2015): accepted and first rejected positions are the feedback, the hazards the unknown arms, times are known, and
the joint optimiser is the oracle on top. ``ucb`` (CascadeUCB) believes hazards to be some standard deviations above their means, except of
the draft that a request would use anyway; ``thompson`` believes a draw from the posterior of how each request deviates, held for some
steps. What another belief would change is a trial: it costs what the objective loses by it at mean estimates, and is paid like a probe.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .acceptance import AcceptanceModel, AcceptanceState, Expected, shifted
from .goodput import Choice, StepProblem
from .plan import FloatArray, IntArray, View
from .probing import PROBE_TOKENS, Hope, Trial, probe, worth_of_knowing
from .problem import gains
from .search import best_choice

PROBING, UCB, THOMPSON = "probing", "ucb", "thompson"
SELECTIONS = (PROBING, UCB, THOMPSON)
_HOLD_STEPS = 16
_LEAST_REACHED = 5.0  # what a level is known by before any evidence


@dataclass(frozen=True, slots=True)
class Draws:
    """Standard normal numbers by request, one a draft, and for how many steps more they hold; then all are drawn anew."""

    left: int = 0
    normal: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def next_step(self, requests: list[int], drafts: int, rng: np.random.Generator) -> Draws:
        """Return the draws of the next step, in which these requests take part."""
        held = self.normal if self.left else {}
        new = [request for request in requests if request not in held]
        drawn = dict(zip(new, map(tuple, rng.standard_normal((len(new), drafts)).tolist()), strict=True)) if new else {}
        return Draws(self.left - 1 if self.left else _HOLD_STEPS - 1, {**held, **drawn})


@dataclass(frozen=True, slots=True)
class Explorer:
    """How trials are found: a mode of ``SELECTIONS``, by how many standard deviations one hopes, and whether a draft that catches up is
    scored by it.
    """

    selection: str
    optimism: float
    catchup_scored: bool

    def trial(
        self,
        model: AcceptanceModel,
        state: AcceptanceState,
        problem: StepProblem,
        view: View,
        rows: IntArray,
        expected: Expected,
        choice: Choice,
        price: float,
        draws: Draws | None,
    ) -> Trial | None:
        """Return what may be worth trying instead of the ``choice`` for these rows of a view, of which so much is ``expected``.

        None if nothing is. ``draws`` hold numbers for the requests where the mode is ``thompson``.
        """
        hazard = expected.hazard
        hope = self._hope(model, state, view, rows, expected)
        if self.selection == PROBING:
            return probe(problem, hope, choice, price)
        if self.selection == UCB:
            own = choice.draft[:, None, None] == np.arange(hazard.shape[1])[:, None]
            belief = np.where(own, hazard, hope.hazard)
        else:
            assert draws is not None
            normal = np.array([draws.normal[r] for r in view.request[rows].tolist()])
            belief = drawn(state, hazard, model.doubt(state, expected)[1], normal)
        return believed(problem, belief, hope, choice, price)

    def _hope(self, model: AcceptanceModel, state: AcceptanceState, view: View, rows: IntArray, expected: Expected) -> Hope:
        """Return what optimism expects of the rows, and how much of the doubt a look at each draft would settle.

        A draft that catches up reads tokens emitted without it, and can tell of each whether it would have guessed it.
        """
        spread, variance = model.doubt(state, expected)
        tokens: int | IntArray = PROBE_TOKENS
        if self.catchup_scored:
            emitted = state.request_tokens[expected.slot]
            tokens = PROBE_TOKENS + np.minimum(view.catchup[rows] - 1, emitted[:, None].astype(np.int64))
        hazard, first = expected.hazard, expected.hazard[:, :, 0]
        evidence = variance * tokens * first * (1 - first)
        return Hope(np.minimum(hazard + self.optimism * spread, 1.0), self.optimism, evidence / (1 + evidence))


def drawn(
    state: AcceptanceState,
    hazard: FloatArray,
    variance: FloatArray,
    normal: FloatArray,
) -> FloatArray:
    """Return hazards [n, D, K] of requests that deviate from what is expected by a normal draw.

    It is of a ``variance`` [n, D] in logits, by standard normal numbers ``normal`` [n, D]. What is
    not known of a draft's level counts as deviation too.
    """
    level = state.draft_hazard[:, 0]
    doubt = 1 / (level * (1 - level) * (state.draft_reached[:, 0] + _LEAST_REACHED))
    return shifted(hazard, (np.sqrt(variance + doubt) * normal)[:, :, None])


def believed(problem: StepProblem, belief: FloatArray, hope: Hope, choice: Choice, price: float) -> Trial | None:
    """Return the rows that would get another draft or a longer chain if their hazards were ``belief`` [n, D, K], the most hopeful first.

    A row that would get less stays as it is: it would teach nothing.
    """
    k_max, _, n = problem.gain.shape
    if k_max == 0 or n == 0:
        return None
    hopeful = replace(problem, gain=gains(belief, problem.ceiling, k_max))
    draft, length = best_choice(hopeful, price)[0]
    row = np.arange(n)
    changed = (length > 0) & ((draft != choice.draft) | (length > choice.length))
    if not changed.any():
        return None
    value = np.concatenate([np.zeros((1, *hopeful.gain.shape[1:])), np.cumsum(hopeful.gain, axis=0)])
    hoped = value[length, draft, row] - value[choice.length, choice.draft, row]
    order = np.flatnonzero(changed)[np.argsort(-hoped[changed], kind="stable")]
    worth = worth_of_knowing(problem, hope, choice, price).worth[draft, row]
    return Trial(order, draft, length, worth)
