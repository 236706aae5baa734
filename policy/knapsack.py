"""The choice for a few rows: a draft beside those that are free to open, its longest chain, and every total of tokens, by a table.

A draft's forward is taken to cost a line's worth, so much to open its depth and so much a token (``ascent.Terms``). With the longest chains
fixed, only the total of tokens couples rows: a knapsack out of which every row takes one of its options. Dynamic programming fills it for
all totals at once (the multiple-choice knapsack: Kellerer, Pferschy and Pisinger, Knapsack Problems, 2004, chapter 11), here for all
longest chains of a draft side by side; the real staircase is scanned at the end.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .ascent import Terms, over_rows
from .goodput import TIE, Choice, StepProblem, no_speculation, summed
from .plan import FloatArray, IntArray

_FREE = 1e-3  # tokens: drafts whose depths cost no more to open than this are open


def by_totals(problem: StepProblem, price: float) -> Choice:
    """Return the best choice that changing the longest chain of one draft at a time comes to, from the free drafts alone.

    Best as far as forwards cost what their lines say, and a draft that takes no more rows is for those that have most of it.
    """
    terms = Terms.of(problem, price)
    k_max, drafts, rows = terms.net.shape
    worth = summed(terms.net)
    worth -= terms.charge
    worth[_depths(k_max) >= problem.ceiling] = -np.inf
    _limited(worth, problem.limit)
    verify = terms.verify.copy()
    verify[1:] += price * problem.speculation_s
    longest = [k_max if costs <= _FREE else 0 for costs in terms.chains[-1].tolist()]
    chains, opening = _chains(terms, longest), np.concatenate([np.zeros((1, drafts)), terms.chains])
    choice, best, cases = no_speculation(rows), -verify.item(0), [longest]
    while cases := cases + [[*longest[:d], k, *longest[d + 1 :]] for d, k in chains if k != longest[d]]:
        options = _options(worth, np.array(cases))
        totals = _totals(options, len(verify) - 1)
        objective = totals[-1][:, : len(verify)] - verify
        objective -= opening[cases, np.arange(drafts)].sum(1)[:, None]
        case, total = divmod(int(objective.argmax()), len(verify))
        if objective.item(case, total) <= best + TIE:
            break
        best, longest = objective.item(case, total), cases[case]
        choice = _traced(worth, longest, [values[case] for values in totals], options[case], total)
        cases = []
    return choice


def _chains(terms: Terms, longest: list[int]) -> list[tuple[int, int]]:
    """Return the chains that drafts which are not open yet may be given: none, and those that end where it is worth opening a depth.

    One that ends elsewhere is no better than a shorter one.
    """
    wanted = over_rows(np.maximum(terms.net, 0.0)) > terms.opening
    ends = ((d, [k for k, is_end in enumerate(column, 1) if is_end]) for d, column in enumerate(wanted.T.tolist()) if not longest[d])
    return [(d, k) for d, those in ends if those for k in (0, *those)]


def _limited(worth: FloatArray, limit: IntArray | None) -> None:
    """Leave a draft to the rows that have most of it, as many as it takes."""
    rows = worth.shape[2]
    for d, most in enumerate([] if limit is None else limit.tolist()):
        if most < rows:
            worth[:, d, np.argsort(-worth[:, d].max(0), kind="stable")[most:]] = -np.inf


def _options(worth: FloatArray, longest: IntArray) -> FloatArray:
    """Return what each row has of 0..K tokens from drafts with chains ``longest[cases, D]``, float64[cases, n, K + 1]."""
    k_max, _, rows = worth.shape
    options = np.zeros((len(longest), rows, k_max + 1))
    allowed = np.where(_depths(k_max) < longest[:, None, :, None], worth, -np.inf)
    options[:, :, 1:] = np.maximum.reduce(allowed, axis=2).transpose(0, 2, 1)
    return options


def _totals(options: FloatArray, most: int) -> list[FloatArray]:
    """Return what the first 0..n rows have of 0..``most`` tokens in all, float64[cases, most + K + 1] each; -inf behind those."""
    cases, rows, width = options.shape
    best = np.full((cases, most + width), -np.inf)
    best[:, 0] = 0.0
    totals = [best]
    for row in range(rows):
        shared = best.take(_rest(min(most, (row + 1) * (width - 1)), width, most), axis=1)
        shared += options[:, row, :, None]
        best = np.full_like(best, -np.inf)
        np.maximum.reduce(shared, axis=1, out=best[:, : shared.shape[2]])
        totals.append(best)
    return totals


@lru_cache(maxsize=512)
def _rest(last: int, width: int, most: int) -> IntArray:
    """Return the tokens left of each total 0..last after 0..width - 1 of them; ``most + 1``, a place out of reach, where too few are."""
    rest = np.arange(last + 1) - np.arange(width)[:, None]
    return np.where(rest >= 0, rest, most + 1)


@lru_cache(maxsize=64)
def _depths(k_max: int) -> IntArray:
    return np.arange(k_max)[:, None, None]


def _traced(worth: FloatArray, longest: list[int], totals: list[FloatArray], options: FloatArray, total: int) -> Choice:
    """Return the choice that a total of tokens came from."""
    rows = len(options)
    draft, length = no_speculation(rows)
    for row in range(rows - 1, -1, -1):
        before = totals[row][total - min(total, options.shape[1] - 1) : total + 1]
        k = int((before[::-1] + options[row, : len(before)]).argmax())
        total -= k
        if k:
            draft[row], length[row] = np.where(np.array(longest) >= k, worth[k - 1, :, row], -np.inf).argmax(), k
    return Choice(draft, length)
