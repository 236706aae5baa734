"""Why a plan is what it is, one line per request: what its choice brings and costs beside the others', and the next best."""

from __future__ import annotations

from .goodput import Choice, Score, StepProblem, score
from .plan import NO_DRAFT, Plan, TurnShape, View
from .planner import AdaptivePlanner
from .planner_state import PlannerState

_CAP = "the cap on the step's time"


def explain(planner: AdaptivePlanner, view: View, state: PlannerState, plan: Plan, now: float) -> list[str]:
    """Return a line for every row of a view, in order, about the plan that ``planner.plan(view, state, now, ...)`` made.

    Tokens and seconds are marginal: with the row's chain against without it, all other rows' chains as they are. The price turns the
    seconds, catch-up spread over its horizon, into tokens. Of a shape only what the row got is told; ``explain_batch`` has the rest.
    """
    lines = [f"request {request}: " for request in view.request.tolist()]
    problem, rows, _, given = planner.problem(view, state, planner.admitted(view, state, now))
    for row in range(len(view)):
        if not view.ready[row]:
            lines[row] += "none: it takes no part in this step"
        elif row in given.rows:
            lines[row] += "its choice is given, not planned"
        elif rests(plan):
            lines[row] += "none: a plan without speculation is kept for some steps"
    if not rests(plan):
        chosen = Choice(plan.draft[rows], plan.length[rows])
        for i, row in enumerate(rows.tolist()):
            lines[row] += _why(problem, view.drafts, chosen, i, plan) + _cohort(plan.shape, row)
    return lines


def explain_batch(plan: Plan) -> str:
    """Return a line about the whole step: its figures, and why each shape was not used."""
    text = f"{len(plan.length)} requests, {int(plan.length.sum())} tokens proposed, {plan.predicted_tokens:.2f} expected in "
    text += f"{1e3 * plan.predicted_s:.2f} ms, at {plan.price:.1f} tokens/s"
    if plan.shape is not None and plan.shape.cohort is not None:
        text += f"; {int(plan.shape.cohort.max()) + 1} cohorts"
    if plan.shape is not None and plan.shape.piece_tokens is not None:
        text += f"; contexts cut into pieces of {plan.shape.piece_tokens} tokens"
    return text + "".join(f"; no {name}: {why}" for name, why in plan.notes.get("why_not", {}).items())


def rests(plan: Plan) -> bool:
    """Return whether it is kept from a step that found no gain in speculating."""
    return "kept" in plan.notes and not plan.length.any()


def _cohort(shape: TurnShape | None, row: int) -> str:
    """Return in which cohort a row is, if it is in one."""
    return "" if shape is None or shape.cohort is None else f"; in cohort {shape.cohort[row]}"


def _why(problem: StepProblem, drafts: tuple[str, ...], chosen: Choice, i: int, plan: Plan) -> str:
    """Return why row i of a problem has its choice."""
    present, price = (int(chosen.draft[i]), int(chosen.length[i])), plan.price
    without = score(problem, _with(chosen, i, (NO_DRAFT, 0)))
    options = [(d, k) for d in range(len(drafts)) for k in range(1, int(problem.ceiling[d, i]) + 1)]
    able = [it for it in options if it == present or not _over_cap(problem, chosen, i, it)]
    scores = {option: score(problem, _with(chosen, i, option)) for option in able}
    gains = {option: result.objective(price) - without.objective(price) for option, result in scores.items()}
    others = {option: gain for option, gain in gains.items() if option != present}
    next_best = max(others, key=lambda option: others[option], default=None)
    if not present[1]:
        if next_best is None:
            return f"none: {_CAP if options else 'no draft can propose anything'}"
        margin = "the whole batch gains less than the margin by speculating; " if others[next_best] > 0 else ""
        return f"none: {margin}at best {_account(drafts, next_best, scores[next_best], without, price)}"
    text = _account(drafts, present, scores[present], without, price)
    if next_best is None or others[next_best] <= 0:
        text += f"; next best none, {gains[present]:.3f} less" if gains[present] >= 0 else "; none would be better"
    else:
        text += f"; next best {_name(drafts, next_best)}, {gains[present] - others[next_best]:.3f} less"
    text += _limit(problem, chosen, i)
    probes = plan.notes.get("probe") and gains[present] < max([0.0, *others.values()])
    return text + ("; a probe" if probes else "")


def _limit(problem: StepProblem, chosen: Choice, i: int) -> str:
    """Return what keeps row i from a longer chain of its draft, if that is not its worth."""
    draft, length = int(chosen.draft[i]), int(chosen.length[i])
    if length == problem.ceiling[draft, i]:
        return "; its ceiling"
    return f"; longer: {_CAP}" if _over_cap(problem, chosen, i, (draft, length + 1)) else ""


def _account(drafts: tuple[str, ...], option: tuple[int, int], result: Score, without: Score, price: float) -> str:
    tokens, seconds = result.value - without.value, result.charged_s - without.charged_s
    return f"{_name(drafts, option)}: +{tokens:.3f} tokens for {1e3 * seconds:+.3f} ms, worth {price * seconds:.3f} at {price:.1f} tokens/s"


def _name(drafts: tuple[str, ...], option: tuple[int, int]) -> str:
    return f"{drafts[option[0]]} x {option[1]}"


def _over_cap(problem: StepProblem, chosen: Choice, i: int, option: tuple[int, int]) -> bool:
    """Return whether the step would be too long with an option of row i, all other rows' choices as
    they are.
    """
    return score(problem, _with(chosen, i, option)).step_s > problem.limit_s


def _with(choice: Choice, i: int, option: tuple[int, int]) -> Choice:
    changed = Choice(choice.draft.copy(), choice.length.copy())
    changed.draft[i], changed.length[i] = option
    return changed
