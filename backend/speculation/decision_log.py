"""Logs a line when the planner changes the draft or the length of most rows; never one a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backend.log_format import fields
from policy import NO_DRAFT, Plan

logger = logging.getLogger(__name__)

WINDOW_S = 2.0
"""Plans are summed up by the window, and a window logs at most one line."""
NEW_DRAFT_SHARE = 0.2
"""Share of all rows by which another draft must lead the one last logged."""
NEW_LENGTH_TOKENS = 1.0
"""Least difference of the mean length from the one last logged."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The choice that most rows of a window got."""

    draft: str
    """``none``: no speculation."""
    length: float
    """The mean of the rows that the draft speculated for."""


class DecisionLog:
    """Gets every plan. A step costs an ``append``, the end of a window some numpy calls."""

    def __init__(self, drafts: tuple[str, ...]) -> None:
        self._names = ("none", *drafts)
        self._regime: Regime | None = None
        self._plans: list[Plan] = []
        self._started_s = 0.0
        self._changes_since_log = 0

    def note(self, plan: Plan, now_s: float, drift: Callable[[], dict[str, float]]) -> None:
        """Note a step's plan, made at ``now_s`` of a monotonic clock. ``drift`` returns that of
        ``Policy.drift``; it is called only for a line.
        """
        if not len(plan.length):
            return
        if not self._plans:
            self._started_s = now_s
        self._plans.append(plan)
        if now_s - self._started_s >= WINDOW_S:
            plans, self._plans = self._plans, []
            self._sum_up(plans, drift)

    def _sum_up(self, plans: list[Plan], drift: Callable[[], dict[str, float]]) -> None:
        length = np.concatenate([plan.length for plan in plans])
        draft = np.where(length > 0, np.concatenate([plan.draft for plan in plans]), NO_DRAFT)
        rows = np.bincount(draft + 1, minlength=len(self._names))
        self._changes_since_log += _changes(plans)
        before = self._regime
        main = int(rows.argmax())
        if before is not None and rows[main] - rows[
            self._names.index(before.draft)
        ] <= NEW_DRAFT_SHARE * len(length):
            main = self._names.index(before.draft)
        mean = float(length[draft == main - 1].mean()) if rows[main] else 0.0
        regime = Regime(self._names[main], mean)
        if (
            before is not None
            and regime.draft == before.draft
            and abs(regime.length - before.length) < NEW_LENGTH_TOKENS
        ):
            return
        self._regime = regime
        figures = _figures(plans, drift())
        self._log_change(
            before,
            regime,
            {"batch_size": round(len(length) / len(plans), 1), **figures},
            rows / len(length),
        )

    def _log_change(
        self, before: Regime | None, regime: Regime, figures: dict[str, Any], share: Any
    ) -> None:
        """Log the change. ``step_changes`` counts the steps since the last line with another mean
        length than the step before.
        """
        previous = (
            {}
            if before is None
            else {"before_draft": before.draft, "before_length": round(before.length, 1)}
        )
        shares = {
            name: round(float(part), 2)
            for name, part in zip(self._names, share, strict=True)
            if part
        }
        latest = {
            "draft": regime.draft,
            "length": round(regime.length, 1),
            **previous,
            "row_share": shares,
        }
        logger.info(
            "speculation changed",
            extra=fields(**latest, **figures, step_changes=self._changes_since_log),
        )
        self._changes_since_log = 0


def _changes(plans: list[Plan]) -> int:
    """Return the number of steps with another mean length, in whole tokens, than the step
    before.
    """
    means = np.array([plan.length.sum() / len(plan.length) for plan in plans]).round()
    return int(np.count_nonzero(np.diff(means)))


def _figures(plans: list[Plan], drift: dict[str, float]) -> dict[str, Any]:
    """Return the policy's reasons: mean step time, price (tokens/s), gain over not speculating,
    what the guard applies, and drift.
    """
    priced = [plan for plan in plans if "gain" in plan.notes]  # only where the policy predicts it
    figures: dict[str, Any] = {}
    if predicted_s := np.mean([plan.predicted_s for plan in plans]):
        figures["predicted_s"] = round(float(predicted_s), 5)
    if priced:
        figures["price"] = round(float(np.mean([plan.price for plan in priced])), 1)
        figures["gain"] = round(float(np.mean([plan.notes["gain"] for plan in priced])), 3)
    if (level := plans[-1].notes.get("guard", "planned")) != "planned":
        figures["guard"] = level
    if drift:
        figures["drift"] = {part: round(ratio, 2) for part, ratio in drift.items()}
    return figures
