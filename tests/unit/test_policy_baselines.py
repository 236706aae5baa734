import numpy as np
import pytest

from policy import NO_DRAFT, FixedLength, NoSpeculation, Plan, RandomChoice, View
from tests.fakes import policies as fakes
from tests.fakes.outcomes import outcome_of

RNG = np.random.default_rng(0)
NOTHING = np.zeros(0, np.int64)


def view(ceiling, drafts=fakes.DRAFTS):
    """Rows where each draft may propose up to ``ceiling`` tokens."""
    return fakes.view(len(ceiling), drafts, k=np.array(ceiling).reshape(-1, len(drafts)))


def planned(policy, seen, rng=RNG) -> Plan:
    return policy.plan(seen, policy.start(), 0.0, rng)[0]


def test_no_speculation_never_drafts():
    plan = planned(NoSpeculation(), view([[8, 8], [8, 8]]))
    assert plan.draft.tolist() == [NO_DRAFT, NO_DRAFT]
    assert plan.length.tolist() == [0, 0]


def test_a_fixed_choice_keeps_to_each_row_s_ceiling():
    plan = planned(FixedLength("large", 4), view([[8, 8], [8, 3], [8, 0]]))
    assert plan.length.tolist() == [4, 3, 0]
    assert plan.draft.tolist() == [1, 1, NO_DRAFT]


def test_a_fixed_choice_of_an_unknown_draft_or_length_is_refused():
    with pytest.raises(ValueError, match="medium"):
        planned(FixedLength("medium", 4), view([[1, 1]]))
    with pytest.raises(ValueError, match="-1"):
        FixedLength("small", -1)


def test_random_choices_reach_every_draft_and_every_length_up_to_the_ceiling():
    seen, rng = view([[2, 3], [0, 0]]), np.random.default_rng(1)
    plans = [planned(RandomChoice(), seen, rng) for _ in range(300)]
    first = {(int(plan.draft[0]), int(plan.length[0])) for plan in plans}
    assert first == {(NO_DRAFT, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3)}
    assert {int(plan.length[1]) for plan in plans} == {0}


def test_a_random_choice_follows_its_generator_and_nothing_else():
    seen = view([[8, 8]] * 20)
    again = [planned(RandomChoice(), seen, np.random.default_rng(7)) for _ in range(2)]
    assert again[0].length.tolist() == again[1].length.tolist()
    assert (
        planned(RandomChoice(), seen, np.random.default_rng(8)).length.tolist()
        != again[0].length.tolist()
    )


@pytest.mark.parametrize("policy", [NoSpeculation(), FixedLength("small", 2), RandomChoice()])
def test_an_empty_batch_is_planned_and_nothing_is_learnt(policy):
    assert len(planned(policy, view([])).length) == 0
    outcome = outcome_of(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, 1.0)
    assert policy.observe(outcome, policy.start(), 0.0) is None


def test_a_random_choice_among_no_drafts_is_none():
    nothing = np.zeros((2, 0), np.int64)
    full = np.full(2, 9)
    seen = View((), np.arange(2), full, full, nothing, nothing)
    assert planned(RandomChoice(), seen).draft.tolist() == [NO_DRAFT, NO_DRAFT]
