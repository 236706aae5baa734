"""SPIN: a draft for each request, chosen by trials."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.random import Generator as Rng

from policy.baselines import Baseline
from policy.latency import LatencyModel
from policy.plan import NO_DRAFT, FloatArray, Outcome, Plan, Policy, View

_EPOCH_STEPS, _EXPLORE_STEPS, _SLOT_STEPS = 200, 20, 5
_MEMORY = 0.99  # of the workload, in a step


class SpinState(NamedTuple):
    """``step`` of the epoch, and the draft ``assigned`` to each request.

    ``by_request``, and ``workload`` for all of them, are accepted tokens and seconds by draft,
    float64[2, drafts].
    """

    step: int
    assigned: dict[int, int]
    by_request: dict[int, FloatArray]  # [2, drafts] each
    workload: FloatArray  # [2, drafts]

    def best(self, request: int) -> int:
        """Return a request's draft of most tokens a second; the workload's until it tried two."""
        sums = self.by_request.get(request)
        accepted, seconds = self.workload if sums is None or (sums[1] > 0).sum() < 2 else sums
        rate = np.divide(accepted, seconds, out=np.zeros_like(accepted), where=seconds > 0)
        return int(np.argmax(rate))


class SpinSelection(Policy[SpinState]):
    """SPIN's selection alone: explore then commit, in epochs, with a fixed length.

    An epoch of 200 steps begins with 4 slots of 5 in which every request gets a random draft; for
    its rest a request keeps the draft by which most of its tokens were accepted per second of
    drafting and verifying. How long SPIN's own epochs are is not public.
    """

    def __init__(
        self, drafts: tuple[str, ...], latency: LatencyModel, k_max: int, *, length: int
    ) -> None:
        self.drafts, self.length = drafts, length

    def start(self) -> SpinState:
        return SpinState(0, {}, {}, np.zeros((2, len(self.drafts))))

    def plan(self, view: View, state: SpinState, now: float, rng: Rng) -> tuple[Plan, SpinState]:
        """Assign drafts where a slot or an epoch's second part begins, and to newcomers."""
        exploring = state.step < _EXPLORE_STEPS
        restarts = state.step == _EXPLORE_STEPS or (exploring and state.step % _SLOT_STEPS == 0)
        assigned = {} if restarts else dict(state.assigned)
        requests = view.request.tolist()
        for request in requests:
            if request not in assigned:
                drafts = len(self.drafts)
                assigned[request] = int(rng.integers(drafts)) if exploring else state.best(request)
        draft = np.array([assigned[request] for request in requests], np.int64)
        after = state._replace(step=(state.step + 1) % _EPOCH_STEPS, assigned=assigned)
        return Plan.within(view, draft, self.length), after

    def observe(self, outcome: Outcome, state: SpinState, now: float) -> SpinState:
        gone = set(outcome.finished.tolist())
        assigned = {request: d for request, d in state.assigned.items() if request not in gone}
        by_request, workload = dict(state.by_request), _MEMORY * state.workload
        rows, parts_s = outcome.rows, outcome.times.parts_s
        verify_s = parts_s.get("verify", outcome.times.measured_s)
        seconds = [verify_s + parts_s.get(f"draft:{name}", 0.0) for name in self.drafts]
        columns = rows.request.tolist(), rows.draft.tolist(), rows.accepted.tolist()
        for request, draft, accepted in zip(*columns, strict=True):
            if draft != NO_DRAFT:
                evidence = np.zeros_like(workload)
                evidence[:, draft] = accepted, seconds[draft]
                by_request[request] = by_request.get(request, 0.0) + evidence
                workload += evidence
        by_request = {request: sums for request, sums in by_request.items() if request not in gone}
        return SpinState(state.step, assigned, by_request, workload)


ENTRIES = {
    "spin": Baseline.by_path(
        SpinSelection,
        "SPIN's selection",
        needs=("length",),
        colour="#8a4fb0",
        marker="P",
    ),
}
