"""What the estimator learns of a single request, by plain numbers: a few chains of a few positions are quicker without arrays.

Each function does to one slot of a state what its namesake of ``policy.acceptance`` does to many.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .counting import Chains
from .deviation import posterior_of_one
from .shifts import RECENT_KEEP, is_abrupt

if TYPE_CHECKING:
    from .acceptance import AcceptanceState

MOST_CHAINS = 12  # beyond that arrays are quicker


def count(after: AcceptanceState, chains: Chains, own_share: float) -> list[int]:
    """Count the chains of one request that has a slot in a state's tables, in place.

    Return the drafts that they were of. ``own_share`` is how much of what a request deviates is
    held to be its own.
    """
    slot = chains.slot.item(0)
    levels, shifts = after.draft_hazard.tolist(), after.request_shift[slot].tolist()
    told: dict[int, list[float]] = {}
    for draft, held, seen in zip(chains.draft.tolist(), chains.held.tolist(), chains.seen.tolist(), strict=True):
        ratio, own = math.exp(shifts[draft]), told.setdefault(draft, [0.0, 0.0, 0.0, 0])
        evidence = []
        for position, level in enumerate(levels[draft][:seen]):
            odds = ratio * level
            expected = odds / (odds + (1 - level))
            own[2] += expected
            evidence.append((position < held) + own_share * (level - expected))
        own[0] += held
        own[1] += seen
        own[3] += 1
        after.draft_accepted[draft, :seen] += evidence
        after.draft_reached[draft, :seen] += 1.0
        after.request_accepted[slot, draft, :held] += 1.0
        after.request_reached[slot, draft, :seen] += 1.0
    for draft, own in told.items():
        accepted, reached = after.draft_accepted[draft], after.draft_reached[draft].tolist()
        accepted[:] = [min(max(a, 0.0), r) for a, r in zip(accepted.tolist(), reached, strict=True)]
        _follow(after, slot, draft, own[:3], RECENT_KEEP ** own[3])
    return list(told)


def _follow(after: AcceptanceState, slot: int, draft: int, told: list[float], keep: float) -> None:
    """Do what ``counting.follow`` does."""
    recent = after.request_recent[slot, draft]
    now = [keep * before + new for before, new in zip(recent.tolist(), told, strict=True)]
    if is_abrupt(*now):
        for counts, first in ((after.request_accepted, now[0]), (after.request_reached, now[1])):
            counts[slot, draft] = 0.0
            counts[slot, draft, 0] = first
        now = [0.0, 0.0, 0.0]
    recent[:] = now


def believe(after: AcceptanceState, slot: int, most_step: float) -> None:
    """Fill in ``request_shift`` of one slot as its counts have it; it moves by ``most_step`` (logits) at the most."""
    levels = after.draft_hazard.tolist()
    before = after.request_shift[slot].tolist()
    counts = zip(after.request_accepted[slot].tolist(), after.request_reached[slot].tolist(), strict=True)
    weights, pulls = [], []
    for chain, shift, (accepted, reached) in zip(levels, before, counts, strict=True):
        ratio, weight, surprise = math.exp(shift), 0.0, 0.0
        for level, held, seen in zip(chain, accepted, reached, strict=True):
            if seen or held:
                odds = ratio * level
                hazard = odds / (odds + (1 - level))
                weight += seen * hazard * (1 - hazard)
                surprise += held - seen * hazard
        weights.append(weight)
        pulls.append(weight * shift + surprise)
    found = posterior_of_one(after.request_doubt[slot].tolist(), weights, pulls, after.request_mean[slot].tolist())
    after.request_shift[slot] = [old + min(max(row[-1] - old, -most_step), most_step) for old, row in zip(before, found, strict=True)]
