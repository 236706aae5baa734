"""Each request's acceptance as fixed choices saw it, in the simulator's form: a hazard by request
and draft, and its decay by position.

A request on which ``length`` tokens of a draft were proposed ``n`` times, and ``a`` tokens were
accepted in all, has the hazard ``h`` with n (h c_1 + ... + h^length c_length) = a, where c_j is the
product of the decays up to position j. The decays are those with which these hazards give the
accepted tokens by position that the metrics counted, over all requests.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policy.plan import FloatArray

LEAST, MOST = 0.001, 0.999
_HALVINGS, _ROUNDS = 30, 4
_ACCEPTED = re.compile(
    r'spindle_accepted_tokens_by_position_total\{draft="([^"]*)",position="(\d+)"\}'
)

Key = tuple[str, str, int]
Observed = tuple[Key, str, int, dict[str, Any]]
"""(Block, draft, length, run) of a fixed choice."""


@dataclass(frozen=True, slots=True, eq=False)
class Hazards:
    """The acceptance of the requests of a sweep's blocks, as fixed choices saw it."""

    hazard: FloatArray  # [requests, drafts]
    match_rate: FloatArray  # [requests, drafts], how often a draft that needs a match had one
    decay: FloatArray  # [drafts, positions]
    start: dict[Key, tuple[int, int]]
    """The first request of each block, and the one after its last."""

    def of(self, key: Key) -> tuple[FloatArray, FloatArray]:
        """Return the hazards of a block's requests, and how often drafts found something to
        propose.
        """
        begin, end = self.start[key]
        return self.hazard[begin:end], self.match_rate[begin:end]


def fit(
    observed: Sequence[Observed], drafts: Sequence[str], free: Sequence[bool], k_max: int
) -> Hazards:
    """Fit hazards to the runs of fixed choices, request by request."""
    start: dict[Key, tuple[int, int]] = {}
    count = 0
    for key, _, _, run in observed:
        if key not in start:
            start[key] = (count, count + len(run["replies"]))
            count += len(run["replies"])
    hazard, match_rate = np.full((count, len(drafts)), LEAST), np.ones((count, len(drafts)))
    decay = np.ones((len(drafts), k_max))
    for column, draft in enumerate(drafts):
        runs = [(start[key], length, run) for key, name, length, run in observed if name == draft]
        chances, accepted, steps = _chances(runs, count, k_max)
        places = _by_position([run for _, _, run in runs], draft, k_max)
        hazard[:, column], decay[column] = _solve(chances, accepted, places)
        if free[column]:
            match_rate[:, column] = np.clip(chances[:, 0] / np.maximum(steps, 1), 0.0, 1.0)
    return Hazards(hazard, match_rate, decay, start)


def _chances(
    runs: list[tuple[tuple[int, int], int, dict[str, Any]]], count: int, k_max: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return, by request, how often each position was proposed [requests, k_max], the tokens
    accepted, and the steps that decoded.
    """
    chances, accepted, steps = np.zeros((count, k_max)), np.zeros(count), np.zeros(count)
    for (begin, end), length, run in runs:
        counts = [next(iter(reply["drafts"].values()), (0, 0)) for reply in run["replies"]]
        proposed, matched = np.array(counts, float).reshape(-1, 2).T
        output = np.array([reply["output_tokens"] for reply in run["replies"]])
        chances[begin:end, : min(length, k_max)] += (proposed / length)[:, None]
        accepted[begin:end] += matched
        steps[begin:end] += np.maximum(
            output - 1 - matched, 0
        )  # a step emits what was accepted and one more; the first token is the prefill's
    return chances, accepted, steps


def _by_position(runs: list[dict[str, Any]], draft: str, k_max: int) -> FloatArray:
    """Return the tokens of a draft accepted at each position over all runs."""
    places: dict[int, float] = defaultdict(float)
    for run in runs:
        for name, value in run["counts"].items():
            if (match := _ACCEPTED.match(name)) and match[1] == draft:
                places[int(match[2])] += value
    return np.array([places[position + 1] for position in range(k_max)])


def _solve(
    chances: FloatArray, accepted: FloatArray, places: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the hazards [requests] and the decays [k_max] that agree with each other."""
    powers, factor = np.arange(1, chances.shape[1] + 1), np.ones(chances.shape[1])
    hazard = np.full(len(chances), LEAST)
    for _ in range(_ROUNDS):
        low, high = np.full(len(chances), LEAST), np.full(len(chances), MOST)
        for _ in range(_HALVINGS):
            hazard = (low + high) / 2
            less = (chances * hazard[:, None] ** powers * factor).sum(1) < accepted
            low, high = np.where(less, hazard, low), np.where(less, high, hazard)
        expected = (chances * hazard[:, None] ** powers).sum(0)
        factor = np.where(expected * places > 0, places / np.maximum(expected, 1e-9), 0.0)
        factor = _carry_on(factor / factor[0] if factor[0] > 0 else np.ones(len(factor)))
    return hazard, np.concatenate([[1.0], factor[1:] / factor[:-1]])


def _carry_on(factor: FloatArray) -> FloatArray:
    """Return products of decays with the last decay that was seen carried on."""
    end = int(np.flatnonzero(factor > 0)[-1])
    last = factor[end] / factor[end - 1] if end and factor[end - 1] > 0 else 1.0
    carried = np.where(factor > 0, factor, 1e-9)
    carried[end + 1 :] = factor[end] * last ** np.arange(1, len(factor) - end)
    return carried
