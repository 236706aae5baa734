"""A draft that proposes from the target's hidden states, in the place of the draft ``near``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from backend.engines.port import Engine
from backend.engines.stepping.engine import StepEngine
from policy import NO_DRAFT
from tests.contract import scenarios
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED, MIXED, UNEVEN, Scenario, Served

HEAD = 1
"""Its column."""

SCRIPT = ((HEAD, 4), (HEAD, 2), (7, 4), (4, 3), (HEAD, 3), (NO_DRAFT, 0), (HEAD, 1), (0, 3))
SCENARIOS = {
    "busy": BUSY,
    "options": MIXED,
    "alike": ALIKE,
    "crowded": CROWDED,
    "pre-empted": CRAMPED,
    "uneven": UNEVEN,
    "chains only": replace(MIXED, nodes=0),
}


def serve(scenario: Scenario, make: Callable[[], Engine]) -> Served:
    """Run a scenario with a head."""
    with pytest.MonkeyPatch.context() as patch:
        patch_in(patch, make)
        return scenarios.serve(replace(scenario, script=SCRIPT))


def patch_in(patch: pytest.MonkeyPatch, make: Callable[[], Engine]) -> None:
    """Give every scenario a head among its drafts."""
    new_drafts = scenarios.new_drafts

    def drafts() -> list[Engine]:
        made = new_drafts()
        made[HEAD] = make()
        return made

    patch.setattr(scenarios, "new_drafts", drafts)


def absorb_another_row(patch: pytest.MonkeyPatch) -> None:
    """A fault: a head is given the state of a token that was not accepted."""
    take = StepEngine._take_hidden_states

    def taken(running, states):
        paths = [(job, job.path) for job, _ in running]
        for job, path in paths:
            job.path = [0] * len(path)
        take(running, states)
        for job, path in paths:
            job.path = path

    patch.setattr(StepEngine, "_take_hidden_states", staticmethod(taken))
