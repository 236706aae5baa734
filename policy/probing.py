"""Where it may pay to look: the probe that optimism favours most, and what it costs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .goodput import Choice, Score, StepProblem, score
from .plan import FloatArray, IntArray

_PROBE_TOKENS = 2
PROBE_FLOOR = 0.1  # of a step's time: what a probe costs at least, since estimates flatter what looks free


class Probe(NamedTuple):
    """A choice with ``rows`` rows probing, its score, and the seconds that it costs; 0 rows: nothing is affordable, at ``cost_s``."""

    choice: Choice
    result: Score
    rows: int
    cost_s: float


def affordable_probe(
    problem: StepProblem, weight: FloatArray, hopeful: FloatArray, choice: Choice, result: Score, price: float, credit_s: float
) -> Probe | None:
    """Return the choice with as many rows as ``credit_s`` affords on the draft that optimism favours most; None if it favours
    none, or there is no room for one.

    A probe costs what the objective loses by it at mean estimates, whole catch-up included.
    """
    probe = _probe(problem, weight, hopeful, choice, price)
    if probe is None:
        return None
    order, draft, length = probe
    cost_s = 0.0
    for count in sorted({max(1, len(order) // 2), max(1, len(order) // 8), 1}, reverse=True):
        chosen = order[:count]
        candidate = Choice(choice.draft.copy(), choice.length.copy())
        candidate.draft[chosen], candidate.length[chosen] = draft, length[chosen]
        full = problem.limit is not None and (candidate.draft == draft).sum() > problem.limit[draft]
        if full or candidate.length.sum() > problem.last_total():
            continue
        outcome = score(problem, candidate)
        cost_s = max(PROBE_FLOOR * result.step_s, (result.value - outcome.value) / price + outcome.step_s - result.step_s)
        if cost_s <= credit_s and outcome.step_s <= problem.limit_s:
            return Probe(candidate, outcome, count, cost_s)
    return Probe(choice, result, 0, cost_s) if cost_s else None


def _probe(
    problem: StepProblem, weight: FloatArray, hopeful: FloatArray, choice: Choice, price: float
) -> tuple[IntArray, int, IntArray] | None:
    """Return (rows in order of promise, draft, length by row) of a probe, or None if even optimism sees no gain.

    The upside of (row, draft) is its best net gain at hazards ``hopeful[n, D, K]`` over the row's present one, the draft's forwards shared
    by all rows (it may pay only if all use it). The draft of the largest upside is probed, on the rows of the most upside by cost, at
    most ``_PROBE_TOKENS`` beyond the chain that the row has with that draft.
    """
    k_max, drafts, n = problem.gain.shape
    if k_max == 0 or n == 0:
        return None
    last, row = max(problem.last_total(), 1), np.arange(n)
    token_s = (problem.verify_s[min(last, len(problem.verify_s) - 1)] - problem.verify_s[0]) / last
    shared = price * (token_s + problem.forward_s[:, [n]] / n + problem.row_s)  # [D, n]
    depth = np.arange(1, k_max + 1)[:, None, None]
    hope = np.cumsum(np.cumprod(hopeful[:, :, :k_max].transpose(2, 1, 0), axis=0), axis=0) * weight
    net = np.where(depth <= problem.ceiling, hope - depth * shared, -np.inf) - price * problem.charge_s
    present = np.cumsum(problem.gain, axis=0)[choice.length - 1, choice.draft, row]
    present = np.where(choice.length > 0, present - choice.length * shared[choice.draft, row], 0.0)
    own_length = np.where(choice.draft == np.arange(drafts)[:, None], choice.length, 0)
    length = np.minimum(net.argmax(0) + 1, own_length + _PROBE_TOKENS)
    upside = np.where(length == own_length, 0.0, np.maximum(net.max(0) - present, 0.0))
    draft = int(upside.sum(1).argmax())
    promise = upside[draft] / (problem.forward_s[draft, 1] + problem.switch_s[draft] + 1e-9)
    order = np.argsort(-promise, kind="stable")
    order = order[promise[order] > 0]
    return (order, draft, length[draft]) if len(order) else None
