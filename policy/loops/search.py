"""One search for a step's choice, and the one price of time that it is made at.

Drafts open one by one, as long as what the rows gain by one more pays for its forwards, whose cost
is taken as linear in rows here: the greedy rule of facility location (Cornuejols, Fisher and
Nemhauser, 1977). Then tokens join in the order of their worth, and the best depth and total win by
the real staircases of drafting and verification. In small batches the choice is improved by changes
of one row at a time, which is exact for a single row.
"""

import numpy as np

from .arrays import Floats, Ints
from .compiling import FLOATS, INTS, entry, helper, unordered_helper
from .problem import STEP_PROBLEM, TIE, StepProblem, charge_s, limit_s, pass_s, score

FEW_ROWS = 16
"""Rows above which moving a single one hardly changes the objective."""

# Rounds of pricing, and the change of price that ends them: what a price a little off loses is
# smaller still, and the next step goes on from it.
_COLD_ROUNDS, _COLD_TOLERANCE = 4, 0.01
_WARM_ROUNDS, _WARM_TOLERANCE = 2, 0.05
_SLOPES = 2  # slopes of verification tried at most from each start
_SLOPE_TOLERANCE = 0.05  # tokens: no new round for a slope that moves less
_STAIR = 4.0  # mean steps of the curve in one step that make it a staircase
_NOTHING = 1e-300


@helper
def descending(value: Floats, order: Ints) -> None:
    """Sort places by ``value[n]``, the highest first and equal ones as they are, into ``order[n]``.

    A counting sort, finished by insertion: of many values in one bin only the nearest are compared.
    """
    n = len(value)
    if n == 0:
        return
    low, high = value[0], value[0]
    for p in range(n):
        low, high = min(low, value[p]), max(high, value[p])
    bins = 2 * n
    scale = (bins - 1) / (high - low) if high > low else 0.0
    start = np.zeros(bins + 1, np.int64)
    for p in range(n):
        start[bins - int((value[p] - low) * scale)] += 1
    for b in range(bins):
        start[b + 1] += start[b]
    for p in range(n):
        b = bins - 1 - int((value[p] - low) * scale)
        order[start[b]] = p
        start[b] += 1
    for p in range(1, n):
        item, at = order[p], p
        while at > 0 and p - at < 64 and value[order[at - 1]] < value[item]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = item


@unordered_helper
def _total_of_higher(
    one: Floats,  # [n]
    other: Floats,  # [n]
) -> float:
    total = 0.0
    for i in range(len(one)):
        total += one[i] if one[i] > other[i] else other[i]
    return total


@helper
def _open_drafts(worth: Floats, chains: Floats, longest: Ints) -> bool:
    """Open drafts greedily, and return whether any: ``longest[D]`` becomes their longest chains.

    ``worth[K, D, n]`` is what a row gains by a draft with chains of k + 1 tokens, ``chains[K, D]``
    what the forwards of these cost all rows together.
    """
    k_max, drafts, n = worth.shape
    best = np.zeros(n)
    total, any_open = 0.0, False
    longest[:] = 0
    for _ in range(2 * drafts):
        highest, at_k, at_d = -1.0, -1, -1
        for k in range(k_max):  # of equal ones the shortest
            for d in range(drafts):
                paid = chains[longest[d] - 1, d] if longest[d] else 0.0
                gained = _total_of_higher(worth[k, d], best) - max(chains[k, d] - paid, 0.0)
                if gained > highest + TIE:
                    highest, at_k, at_d = gained, k, d
        if not highest > total + TIE:
            break
        total, any_open = 0.0, True
        longest[at_d] = at_k + 1
        for i in range(n):
            best[i] = max(best[i], worth[at_k, at_d, i])
            total += best[i]
    return any_open


@helper
def _fill(
    problem: StepProblem,
    price: float,
    pick: Ints,  # [n]
    longest: Ints,  # [D]
    gains: Floats,  # [K, n]
    most_s: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> int:
    """Let tokens join in the order of their worth, ``gains``; the best depth and total win by the
    exact objective. ``draft, length`` become that choice; return its nodes.
    """
    gain, row_s, first_tokens = problem.gain, problem.draft_row_s, problem.first_tokens
    forward_s, undrafted_s, switch_s = problem.forward_s, problem.undrafted_s, problem.switch_s
    speculation_s = problem.speculation_s
    n = gain.shape[2]
    length[:] = 0
    draft[:] = -1
    deepest = longest.max()
    row, depth = np.empty(n * deepest, np.int64), np.empty(n * deepest, np.int64)
    value, size = np.empty(n * deepest), 0
    for j in range(deepest):
        for i in range(n):
            if gains[j, i] > 0:
                row[size], depth[size], value[size] = i, j, gains[j, i]
                size += 1
    order = np.empty(size, np.int64)
    descending(value[:size], order)
    count = problem.occupied.copy()
    objective, seconds = np.zeros(deepest), np.zeros(deepest)
    best, best_at, nodes = np.full(deepest, -np.inf), np.zeros(deepest, np.int64), 0.0
    within = np.zeros(deepest)
    for at in range(size):
        i, j = row[order[at]], depth[order[at]]
        d = pick[i]
        more = first_tokens[d, i] if j == 0 else 1
        alone_s = forward_s[d, count[d, j] + more] - forward_s[d, count[d, j]]
        alone_s += row_s[j, d, i]
        count[d, j] += more
        passing_s = alone_s
        if j == 0:
            alone_s += charge_s(problem, d, i)
            passing_s += switch_s[d, i]
        gained = gain[j, d, i] - price * alone_s
        for cap in range(j, deepest):
            objective[cap] += gained
            seconds[cap] += passing_s
            within[cap] += problem.nodes[j, d, i]
            shared_s = pass_s(undrafted_s, within[cap]) + speculation_s
            now = objective[cap] - price * shared_s
            if now > best[cap] and seconds[cap] + shared_s <= most_s:
                best[cap], best_at[cap] = now, at
    deep = best.argmax()
    if best[deep] == -np.inf:
        return 0
    for at in range(best_at[deep] + 1):
        if depth[order[at]] <= deep:
            i = row[order[at]]
            length[i] += 1
            draft[i] = pick[i]
            nodes += problem.nodes[depth[order[at]], pick[i], i]
    return int(nodes + 0.5)


@helper
def _improve(
    problem: StepProblem,
    price: float,
    most_s: float,
    count: Ints,  # [D, K] tokens of the choice's forwards
    step_s: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> None:
    """Change in place, one at a time, the row whose change gains most, until none gains. The
    choice's step takes ``step_s``.
    """
    p = problem
    drafts, n = p.ceiling.shape
    total = length.sum()
    for _ in range(2 * n - 1):
        best, best_i, best_d, best_k, best_s = TIE * (p.base_value + 1), -1, -1, 0, 0.0
        nodes = 0.0
        for i in range(n):
            nodes += p.nodes[: length[i], draft[i], i].sum()
        now_s = pass_s(p.undrafted_s, nodes) + (p.speculation_s if total else 0.0)
        for i in range(n):
            d0, k0 = draft[i], length[i]
            rest = total - k0
            others = max(nodes - p.nodes[:k0, d0, i].sum(), 0.0) if rest else 0.0
            old, old_s = -price * now_s, now_s  # what the row and the pass add now
            for j in range(k0):
                more = p.first_tokens[d0, i] if j == 0 else 1
                count[d0, j] -= more
                took_s = p.forward_s[d0, count[d0, j] + more] - p.forward_s[d0, count[d0, j]]
                took_s += p.draft_row_s[j, d0, i]
                old += p.gain[j, d0, i] - price * took_s
                old_s += took_s
            if k0:
                old -= price * charge_s(p, d0, i)
                old_s += p.switch_s[d0, i]
                rest_s = pass_s(p.undrafted_s, others) + (p.speculation_s if rest else 0.0)
                if -price * rest_s - old > best:
                    best, best_i, best_d, best_k = -price * rest_s - old, i, -1, 0
                    best_s = rest_s - old_s
            for d in range(drafts):
                alone, alone_s = -price * charge_s(p, d, i) - old, p.switch_s[d, i] - old_s
                with_row = others
                for j in range(p.ceiling[d, i]):
                    more = p.first_tokens[d, i] if j == 0 else 1
                    took_s = p.forward_s[d, count[d, j] + more] - p.forward_s[d, count[d, j]]
                    took_s += p.draft_row_s[j, d, i]
                    alone += p.gain[j, d, i] - price * took_s
                    alone_s += took_s
                    with_row += p.nodes[j, d, i]
                    shared_s = pass_s(p.undrafted_s, with_row) + p.speculation_s
                    gained = alone - price * shared_s
                    if gained > best and step_s + alone_s + shared_s <= most_s:
                        best, best_i, best_d, best_k = gained, i, d, j + 1
                        best_s = alone_s + shared_s
            for j in range(k0):
                count[d0, j] += p.first_tokens[d0, i] if j == 0 else 1
        if best_i < 0:
            break
        i = best_i
        for j in range(length[i]):
            count[draft[i], j] -= p.first_tokens[draft[i], i] if j == 0 else 1
        for j in range(best_k):
            count[best_d, j] += p.first_tokens[best_d, i] if j == 0 else 1
        total += best_k - length[i]
        step_s += best_s
        draft[i], length[i] = best_d, best_k


@helper
def _slope_s(undrafted_s: Floats, total: int) -> float:
    """Return the mean seconds of a verified node within a quarter of a total, by
    ``undrafted_s[m]``.
    """
    near, last = total // 4 + 1, len(undrafted_s) - 1
    low, high = max(min(total, last) - near, 0), min(total + near, last)
    return (undrafted_s[high] - undrafted_s[low]) / (high - low)


@helper
def _has_stairs(undrafted_s: Floats) -> bool:
    """Return whether verification takes its time, ``undrafted_s[m]``, in jumps, as passes of padded
    widths do.
    """
    last = len(undrafted_s) - 1
    mean_s = (undrafted_s[last] - undrafted_s[0]) / last
    for m in range(last):
        if undrafted_s[m + 1] - undrafted_s[m] > _STAIR * mean_s:
            return True
    return False


@entry(STEP_PROBLEM, FLOATS[0], INTS[1], INTS[1])
def best_at_price(
    problem: StepProblem, price: float, draft: Ints, length: Ints
) -> tuple[float, float, float]:
    """Find the best choice at a price, into ``draft[n], length[n]``, and return its score.

    It is never worse than no speculation, and no longer than the limit.
    """
    p = problem
    k_max, drafts, n = p.gain.shape
    draft[:] = -1
    length[:] = 0
    plain_s = p.undrafted_s[0]
    if p.ceiling.size == 0 or p.ceiling.max() == 0:
        return p.base_value, plain_s, plain_s
    most_s = limit_s(p)
    count = np.empty((drafts, k_max), np.int64)
    if n > 1:
        _fill_all(p, price, most_s, count, draft, length)
    result = score(p, draft, length, count)
    if n <= FEW_ROWS:
        _improve(p, price, most_s, count, result[2], draft, length)
        result = score(p, draft, length, count)
    return result


@helper
def _fill_all(
    problem: StepProblem,
    price: float,
    most_s: float,
    count: Ints,  # [D, K]
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> None:
    """Find the best choice for all rows at once, into ``draft, length``.

    A token's place in the order depends on what a verified node costs, and that on the choice:
    first it costs nothing, so that a staircase is looked at to its end, or for many rows what it
    does around two tokens a row, then what it does around the choice. On a staircase that first
    slope says little, so both starts are tried. Under a cap, where seconds are scarcer than their
    price, the order is also made at higher ones.
    """
    p = problem
    k_max, drafts, n = p.gain.shape
    token_s, chain_s = np.empty((k_max, drafts)), np.empty((k_max, drafts))
    for d in range(drafts):
        opening_s = 0.0
        for k in range(k_max):
            at = p.occupied[d, k]
            one_s = p.forward_s[d, at + 1] - p.forward_s[d, at]
            more_s = p.forward_s[d, at + n] - p.forward_s[d, at] - one_s
            token_s[k, d] = min(more_s / (n - 1), one_s)
            opening_s += one_s - token_s[k, d]
            chain_s[k, d] = opening_s
    value, charged_s, _ = score(p, draft, length, count)
    new_draft, new_length = np.empty(n, np.int64), np.empty(n, np.int64)
    worth, gains, pick = np.empty((k_max, drafts, n)), np.empty((k_max, n)), np.empty(n, np.int64)
    longest = np.empty(drafts, np.int64)
    many = n > FEW_ROWS
    scarcity = 1.0
    while True:
        dear = price * scarcity
        for start in range(2 if many and _has_stairs(p.undrafted_s) else 1):
            slope = dear * _slope_s(p.undrafted_s, 2 * n) if many and start == 0 else 0.0
            for _ in range(_SLOPES):
                _set_worth(p, dear, slope, token_s, worth)
                if not _open_drafts(worth, dear * chain_s, longest):
                    break
                _pick_drafts(p, dear, slope, token_s, worth, longest, pick, gains)
                total = _fill(p, price, pick, longest, gains, most_s, new_draft, new_length)
                v, c, s = score(p, new_draft, new_length, count)
                if s <= most_s and (v - price * c) - (value - price * charged_s) > TIE * (
                    value + 1
                ):
                    draft[:] = new_draft
                    length[:] = new_length
                    value, charged_s = v, c
                before, slope = slope, dear * _slope_s(p.undrafted_s, total)
                if abs(slope - before) <= _SLOPE_TOLERANCE:
                    break
        if p.cap_s == np.inf or scarcity > 8:
            break
        scarcity *= 3.0


@helper
def _set_worth(
    problem: StepProblem,
    dear: float,
    slope: float,
    token_s: Floats,  # [K, D]
    worth: Floats,  # [K, D, n]
) -> None:
    """Compute what each row gains by each draft and longest chain, ``worth``."""
    k_max, drafts, n = worth.shape
    gain, row_s, first_tokens = problem.gain, problem.draft_row_s, problem.first_tokens
    for d in range(drafts):
        for i in range(n):
            charge = charge_s(problem, d, i) + (first_tokens[d, i] - 1) * token_s[0, d]
            before = -dear * charge
            for k in range(k_max):
                cost = dear * (token_s[k, d] + row_s[k, d, i]) + slope * problem.nodes[k, d, i]
                before += max(gain[k, d, i] - max(cost, 0.0), 0.0)
                worth[k, d, i] = before


@helper
def _pick_drafts(
    problem: StepProblem,
    dear: float,
    slope: float,
    token_s: Floats,  # [K, D]
    worth: Floats,  # [K, D, n]
    longest: Ints,  # [D]
    pick: Ints,  # [n]
    gains: Floats,  # [K, n]
) -> None:
    """Give each row the open draft that gains it most, and its tokens their worth, ``own``.

    A token is worth no more than the one before it. A charge is deducted in proportion to what a
    row's tokens are worth, so that they stay in order.
    """
    gain, row_s, first_tokens = problem.gain, problem.draft_row_s, problem.first_tokens
    _, drafts, n = worth.shape
    gains[:] = 0.0
    for i in range(n):
        top, d = -np.inf, 0
        for other in range(drafts):
            if longest[other] and worth[longest[other] - 1, other, i] > top:
                top, d = worth[longest[other] - 1, other, i], other
        pick[i] = d
        total, least = 0.0, np.inf
        for j in range(longest[d]):
            cost = dear * (token_s[j, d] + row_s[j, d, i])
            cost = max(cost + slope * (problem.nodes[j, d, i] - 1), 0.0)
            least = min(least, max(gain[j, d, i] - cost, 0.0))
            gains[j, i] = least
            total += least
        charge = dear * (charge_s(problem, d, i) + (first_tokens[d, i] - 1) * token_s[0, d])
        share = max(1 - charge / max(total, _NOTHING), 0.0)
        for j in range(longest[d]):
            gains[j, i] *= share


@entry(STEP_PROBLEM, FLOATS[0], FLOATS[0], FLOATS[0], INTS[1], INTS[1])
def best_priced(
    problem: StepProblem,
    known_goodput: float,
    waiting: float,
    prefill_s: float,
    draft: Ints,  # [n]
    length: Ints,  # [n]
) -> tuple[float, float, float, float, float]:
    """Find the best choice at the price of time, into ``draft, length``. Return the price, the
    goodput, and the choice's score.

    Dinkelbach's iteration (1967) finds the goodput that prices itself, from the ``known`` one (0:
    none) on. A second of the step delays all admitted requests by one, and is worth what they would
    emit in it: the price is ``waiting`` times the goodput, the number of admitted requests for each
    row that decodes. ``prefill_s`` is how much longer the step takes for its prefill.
    """
    plain_s = problem.undrafted_s[0]
    value, charged_s, step_s = problem.base_value, plain_s, plain_s
    goodput = value / (plain_s - prefill_s) if value else known_goodput
    price = 0.0
    if len(draft) == 0:
        return price, goodput, value, charged_s, step_s
    rounds, tolerance = _COLD_ROUNDS, _COLD_TOLERANCE
    if known_goodput:
        goodput, rounds, tolerance = known_goodput, _WARM_ROUNDS, _WARM_TOLERANCE
    for _ in range(rounds):
        price = waiting * goodput
        value, charged_s, step_s = best_at_price(problem, price, draft, length)
        before, goodput = goodput, value / (charged_s - prefill_s)
        if abs(goodput - before) <= tolerance * before:
            break
    return price, goodput, value, charged_s, step_s
