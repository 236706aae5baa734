"""Replicas after a router: the event loop of the simulation, which goes from one step's end or
arrival to the next.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from policy.plan import AnyPolicy, FloatArray

from .deployment import Deployment
from .replica import Progress, SimulatedReplica, StepRecord
from .workload import Workload

Router = Callable[[list[int], int], int]
"""Maps the outstanding requests by replica and a request's number to the replica that gets it."""


def least_outstanding(outstanding: list[int], request: int) -> int:
    """Return the replica with the fewest requests; ties go round, so that an idle fleet is used
    evenly.
    """
    n = len(outstanding)
    return min(range(n), key=lambda r: (outstanding[r], (r - request) % n))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The result of a simulation.

    Per request ``latency_s`` and ``first_token_s`` from its arrival; all steps, the time of the
    end, how often a request lost its KV.
    """

    workload: Workload
    latency_s: FloatArray  # [N]
    first_token_s: FloatArray  # [N]
    steps: list[StepRecord]
    end_s: float
    preemptions: int

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second while requests were waiting for a place: the capacity, if they
        were all the time.
        """
        busy = [step for step in self.steps if step.queued > 0]
        seconds = sum(step.seconds for step in busy)
        return sum(step.emitted for step in busy) / seconds if seconds else 0.0

    @property
    def mean_latency_s(self) -> float:
        """Mean time from arrival to the last token."""
        return float(self.latency_s.mean())


def simulate(
    deployment: Deployment,
    workload: Workload,
    make_policy: Callable[[], AnyPolicy],
    seed: int,
    replicas: int = 1,
    router: Router = least_outstanding,
    until_s: float = math.inf,
) -> Run:
    """Serve every request to its end, or all there is until a time, and return what happened.

    Idle time is skipped; nothing but the seed is random. Times of requests that did not end are
    NaN.
    """
    steps: list[StepRecord] = []
    progress = Progress.of(len(workload), len(deployment.drafts))
    fleet = [
        SimulatedReplica(
            deployment, workload, progress, make_policy(), seed + 1000 * r, steps.append
        )
        for r in range(replicas)
    ]
    events: list[tuple[float, int]] = []
    idle = [True] * replicas
    arrivals = workload.arrival_s.tolist()
    now, request = 0.0, 0
    while request < len(arrivals) or events:
        if request < len(arrivals) and (not events or arrivals[request] <= events[0][0]):
            now = arrivals[request]
            number = router([replica.outstanding for replica in fleet], request)
            fleet[number].offer(request)
            if idle[number]:
                idle[number] = False
                heapq.heappush(events, (now, number))
            request += 1
            continue
        now, number = heapq.heappop(events)
        if now >= until_s:
            break
        until = fleet[number].advance(now)
        idle[number] = until is None
        if until is not None:
            heapq.heappush(events, (until, number))
    arrived = workload.arrival_s
    return Run(
        workload,
        progress.finish_s - arrived,
        progress.first_token_s - arrived,
        steps,
        now,
        sum(r.preemptions for r in fleet),
    )


def simulate_closed(
    deployment: Deployment,
    workload: Workload,
    policy: AnyPolicy,
    seed: int,
    in_flight: int,
    way_s: float = 0.0,
) -> Run:
    """Serve the requests in order, a fixed number at a time, on one replica, whatever their
    arrivals.

    When one ends the next is sent, and is there ``way_s`` later; times count from its sending.
    """
    steps: list[StepRecord] = []
    progress = Progress.of(len(workload), len(deployment.drafts))
    replica = SimulatedReplica(deployment, workload, progress, policy, seed, steps.append)
    sent_s = np.full(len(workload), np.nan)
    coming: deque[tuple[float, int]] = deque()
    ends_s: float | None = None
    now, next_request, room = 0.0, 0, in_flight
    while True:
        while room and next_request < len(workload):
            sent_s[next_request] = now
            coming.append((now + way_s, next_request))
            next_request, room = next_request + 1, room - 1
        if coming and (ends_s is None or coming[0][0] <= ends_s):
            now, request = coming.popleft()
            replica.offer(request)
            ends_s = now if ends_s is None else ends_s
            continue
        if ends_s is None:
            return Run(
                workload,
                progress.finish_s - sent_s,
                progress.first_token_s - sent_s,
                steps,
                now,
                replica.preemptions,
            )
        now, before = ends_s, replica.outstanding
        ends_s = replica.advance(now)
        room += before - replica.outstanding
