"""What must hold of cohorts besides exactness: one is verified in a thread of its own while the
loop plans and drafts for another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from tests.contract import checks
from tests.contract.deployment import Deployment
from tests.contract.scenarios import BUSY, CRAMPED, in_cohorts, serve


def texts_survive_pre_emption_in_flight() -> None:
    """With and without blocks that others find again, poisoned and in earnest."""
    in_flight = Counter()

    def watch(deployment: Deployment) -> None:
        forget = deployment.loop._in_flight.forget

        def noted(sequence_id: int) -> bool:
            found = forget(sequence_id)
            in_flight[found] += 1
            return found

        deployment.loop._in_flight.forget = noted
        deployment.watchers.clear()

    asks = tuple(replace(ask, arrival=0) for ask in CRAMPED.asks)
    for scenario in (in_cohorts(CRAMPED), replace(CRAMPED, asks=asks, cohorts=(2,))):
        for reuse, poisons in ((True, True), (True, False), (False, True), (False, False)):
            served = serve(replace(scenario, reuse=reuse, poisons=poisons), watch)
            checks.texts(served)
            assert served.deployment.counters()["spindle_preemptions_total",] > 0
    assert in_flight[True] > 0


def every_row_gets_what_was_planned_for_it() -> None:
    """Its own draft and length, once, in the outcome of its own submission; two cohorts have been
    in flight.
    """
    script = ((0, 1), (1, 3), (0, 4), (3, 2), (1, 2))
    _, deployment, sessions = serve(in_cohorts(replace(BUSY, script=script)))
    assert any(not view.ready.all() for view, _ in deployment.loop.planning.policy.planned)
    planned, done = Counter(), Counter()
    for view, plan in deployment.loop.planning.policy.planned:
        rows = np.flatnonzero(view.ready & (plan.length > 0))
        columns = view.request[rows], view.context[rows], plan.draft[rows], plan.length[rows]
        planned.update(zip(*(column.tolist() for column in columns), strict=True))
    context = {session.id: session.sequence.prompt_tokens for session in sessions}
    for o in deployment.policy.outcomes:
        rows = zip(o.request.tolist(), o.draft.tolist(), o.emitted.tolist(), strict=True)
        for request, draft, emitted in rows:
            if draft >= 0:
                done[request, context[request], draft] += 1
            context[request] += emitted
    wanted = Counter((request, at, draft) for request, at, draft, _ in planned.elements())
    assert not done - wanted, "a row that was not planned so"
    assert sum((wanted - done).values()) <= 1, (
        "a row that was planned and not run, beside the one whose client left"
    )


SUITE = (texts_survive_pre_emption_in_flight, every_row_gets_what_was_planned_for_it)
