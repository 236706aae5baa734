"""Turns that run on: how many tokens a row without a proposal runs where a turn is a request of its
own (TensorRT-LLM's executor).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .latency import Predicted, Times
from .plan import Outcome, Plan, View
from .problem import StepProblem, predicted_parts

_MISSED_SHARE = 0.03 / 4  # of a token's time, by each token that a plan comes later


@dataclass(frozen=True, slots=True)
class FreeRuns:
    """How plans are executed where a turn is a request of its own (TensorRT-LLM's executor): rows
    without a proposal run up to ``most`` tokens in one turn (``policy.extensions.Execution``).
    """

    most: int

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Take from the seconds of no speculation what each token of a longer turn saves."""
        plans = [plan for plan in (view.control_plan, view.in_flight) if plan is not None]
        if not any(plan.length.any() for plan in plans):
            problem.undrafted_s[0] -= self._run(view, times)[1]

    def execute(self, plan: Plan, view: View, times: Times) -> Plan:
        """Return the plan with ``Plan.run``."""
        return replace(plan, run=np.full(len(view), self._run(view, times)[0]))

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds by part."""
        return predicted_parts(times, outcome, view)

    def _run(self, view: View, times: Times) -> tuple[int, float]:
        """Return the tokens of a turn, and the seconds that each saves of a step."""
        rows, turn_s = len(view), times.turn_s + times.overhead_s
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
