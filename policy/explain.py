"""Why a plan is what it is, one line per request: what its choice brings and costs beside the others', and the next best."""

from __future__ import annotations

import numpy as np

from .goodput import Choice, Score, StepProblem, score
from .plan import NO_DRAFT, Plan, View
from .planner import AdaptivePlanner, PlannerState


def explain(planner: AdaptivePlanner, view: View, state: PlannerState, plan: Plan, now: float) -> list[str]:
    """Return a line for every row of a view, in order, about the plan that ``planner.plan(view, state, now, ...)`` made.

    Tokens and seconds are marginal: with the row's choice against without it, all other rows' choices as they are. The price turns the
    seconds, catch-up spread over its horizon, into tokens.
    """
    lines = [f"request {request}: " for request in view.request.tolist()]
    problem, rows, _, given = planner.problem(view, state, planner.admitted(view, state, now))
    for row in range(len(view)):
        if not view.ready[row]:
            lines[row] += "none: it takes no part in this step"
        elif row in given.rows:
            lines[row] += "its choice is given, not planned"
        elif "rest" in plan.notes:
            lines[row] += f"none: the batch rests after a plan without speculation, {plan.notes['rest']} steps to go"
    if "rest" not in plan.notes:
        chosen = Choice(plan.draft[rows], plan.length[rows])
        for i, row in enumerate(rows.tolist()):
            lines[row] += _why(problem, view.drafts, chosen, i, plan)
    return lines


def _why(problem: StepProblem, drafts: tuple[str, ...], chosen: Choice, i: int, plan: Plan) -> str:
    """Return why row i of a problem has its choice."""
    present, price = (int(chosen.draft[i]), int(chosen.length[i])), plan.price
    without = score(problem, _with(chosen, i, (NO_DRAFT, 0)))
    options = [(d, k) for d in range(len(drafts)) for k in range(1, int(problem.ceiling[d, i]) + 1)]
    scores = {option: score(problem, _with(chosen, i, option)) for option in options if _allowed(problem, chosen, i, option)}
    gains = {option: result.objective(price) - without.objective(price) for option, result in scores.items()}
    others = {option: gain for option, gain in gains.items() if option != present}
    next_best = max(others, key=lambda option: others[option], default=None)
    if not present[1]:
        if next_best is None:
            return "none: no draft can propose anything"
        margin = "the whole batch gains less than the margin by speculating; " if others[next_best] > 0 else ""
        return f"none: {margin}at best {_account(drafts, next_best, scores[next_best], without, price)}"
    text = _account(drafts, present, scores[present], without, price)
    if next_best is None or others[next_best] <= 0:
        text += f"; next best none, {gains[present]:.3f} less" if gains[present] >= 0 else "; none would be better"
    else:
        text += f"; next best {_name(drafts, next_best)}, {gains[present] - others[next_best]:.3f} less"
    if present[1] == problem.ceiling[present[0], i]:
        text += "; its ceiling"
    probes = plan.notes.get("probe") and gains[present] < max([0.0, *others.values()])
    return text + ("; a probe" if probes else "")


def _account(drafts: tuple[str, ...], option: tuple[int, int], result: Score, without: Score, price: float) -> str:
    tokens, seconds = result.value - without.value, result.charged_s - without.charged_s
    return f"{_name(drafts, option)}: +{tokens:.3f} tokens for {1e3 * seconds:+.3f} ms, worth {price * seconds:.3f} at {price:.1f} tokens/s"


def _name(drafts: tuple[str, ...], option: tuple[int, int]) -> str:
    return f"{drafts[option[0]]} x {option[1]}"


def _allowed(problem: StepProblem, chosen: Choice, i: int, option: tuple[int, int]) -> bool:
    """Return whether there is a place with the draft, and room for the tokens."""
    others = np.delete(chosen.draft, i)
    free = problem.limit is None or int((others == option[0]).sum()) < problem.limit[option[0]]
    return bool(free and int(chosen.length.sum()) - int(chosen.length[i]) + option[1] <= problem.last_total())


def _with(choice: Choice, i: int, option: tuple[int, int]) -> Choice:
    changed = Choice(choice.draft.copy(), choice.length.copy())
    changed.draft[i], changed.length[i] = option
    return changed
