"""Deliberate faults in the loop's cohorts, as in ``tests.contract.mutants``."""

from __future__ import annotations

import numpy as np

from backend.core.drafting import Proposals
from backend.core.in_flight import InFlight
from policy import Plan
from tests.contract import checks, cohort_checks
from tests.contract.mutants import MUTANTS, Patch, killed_by, wrap
from tests.contract.scenarios import BUSY, in_cohorts

__all__ = ["MUTANTS"]


@killed_by(cohort_checks.every_row_gets_what_was_planned_for_it)
def give_a_cohort_the_plan_of_the_first(patch: Patch) -> None:
    wrap(patch, Plan, "of_rows", lambda original, plan, rows: original(plan, np.arange(len(rows))))


@killed_by(cohort_checks.every_row_gets_what_was_planned_for_it)
def hide_what_is_in_flight_from_the_policy(patch: Patch) -> None:
    patch.setattr(InFlight, "decoding", [])


@killed_by(checks.counts, in_cohorts(BUSY))
def lose_the_proposals_of_a_second_flight(patch: Patch) -> None:
    """They are verified, but what was proposed is counted nowhere."""

    def submit(original, in_flight, submission, proposals):
        original(in_flight, submission, proposals)
        if len(in_flight) > 1:
            in_flight.proposals.update({sequence_id: Proposals() for sequence_id in proposals})

    wrap(patch, InFlight, "submit", submit)
