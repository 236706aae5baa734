"""A host that pads: in a step in which any row speculates, every row runs as many tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from policy import Outcome, View
from policy.latency import Predicted, Times
from policy.problem import StepProblem, predicted_parts


class Padded:
    """How such a host executes a plan (``policy.extensions.Execution``): speculating costs a row's
    ``length`` tokens for each row, whatever it proposes.
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def prepare(self, problem: StepProblem, view: View, times: Times) -> None:
        """Price any number of proposed tokens above 0 as the padded step."""
        plain = view.prefill_tokens + len(view)
        padded_s = times.verify_at(plain + self._length * len(view)) - times.verify_at(plain)
        problem.undrafted_s[1:] = problem.undrafted_s[0] + max(padded_s, 0.0)

    def predicted(self, times: Times, outcome: Outcome, view: View) -> Predicted:
        """Return the seconds that the padded step should have taken."""
        rows = outcome.rows
        if rows.verified.any():
            whole = np.full_like(rows.verified, self._length)
            outcome = replace(outcome, rows=replace(rows, verified=whole))
        return predicted_parts(times, outcome, view)
