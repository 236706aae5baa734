import numpy as np
import pytest

from policy.acceptance import AcceptanceConfig, AcceptanceModel
from policy.loops.acceptance import Chains, set_hazards

K = 8
NONE = np.zeros(0, np.int64)
NOTHING = Chains(NONE, NONE, NONE, NONE, NONE)


def model(drafts=1, **config):
    return AcceptanceModel(drafts, K, AcceptanceConfig(**config))


def chains(rng, hazards, length, count):
    """Accepted tokens of ``count`` chains of a planned length under the true hazards."""
    passed = rng.random((count, length)) < np.asarray(hazards)[:length]
    return np.cumprod(passed, axis=1).sum(axis=1)


def learn(estimator, state, request, draft, accepted, scored, shown=0):
    rows = len(accepted)
    full = lambda value: np.full(rows, value)  # noqa: E731
    scored = np.broadcast_to(scored, rows).copy()
    chains = full(request), full(draft), np.array(accepted), scored, full(shown)
    return estimator.observe(state, NOTHING, NONE, Chains(*chains))[0]


def step(estimator, state, request):
    nothing = np.zeros(1, np.int64)
    chains = Chains(np.array([request]), nothing - 1, nothing, nothing, nothing)
    return estimator.observe(state, chains, nothing + 1, NOTHING)[0]


def admit(estimator, state, request):
    return estimator.admit(state, np.array(request))


def hazards(estimator, state, request=0, shown=0):
    drafts, _, k_max = state.estimates.draft_hazard.shape
    hazard, evidence = np.empty((k_max, drafts, 1)), np.full((1, drafts), shown)
    set_hazards(state.estimates, state.find(np.array([request]))[0], evidence, hazard)
    return hazard[:, :, 0].T


def test_hazards_are_unbiased_under_planned_truncation():
    """accepted / k would say 0.51 at k = 5; hazards counted where reached do not care how lengths
    were planned.
    """
    estimator, rng, truth = model(), np.random.default_rng(1), [0.8, 0.75, 0.7, 0.65, 0.6]
    state = admit(estimator, estimator.start(), [0])
    for length in (5, 1, 3, 5, 2, 5, 5):
        state = learn(estimator, state, 99, 0, chains(rng, truth, length, 2000), length)
    assert hazards(estimator, state)[0][:5] == pytest.approx(truth, abs=0.03)


def test_positions_cut_off_by_an_end_are_no_evidence():
    """Two of eight tokens matched, then the text ended: no rejection was seen."""
    estimator = model()
    state = admit(estimator, estimator.start(), [0])
    for _ in range(100):
        state = learn(estimator, state, 0, 0, [2], 2)
    assert hazards(estimator, state)[0][:2].min() > 0.9
    assert state.estimates.draft_reached[0, 0, 2] == 0


def test_unprobed_positions_inherit_the_last_hazard():
    estimator, rng = model(), np.random.default_rng(2)
    state = admit(estimator, estimator.start(), [0])
    for _ in range(600):
        state = learn(estimator, state, 9, 0, chains(rng, [0.3, 0.3], 2, 5), 2)
    assert hazards(estimator, state)[0] == pytest.approx([0.3] * K, abs=0.06)


def test_many_chains_of_one_step_teach_less_than_those_of_many_steps():
    """A failure of a whole batch at once may be the step's, not the draft's."""
    estimator = model()
    once = admit(estimator, estimator.start(), [0])
    once = learn(estimator, once, 9, 0, np.zeros(128, int), 4)
    often = admit(estimator, estimator.start(), [0])
    for _ in range(128):
        often = learn(estimator, often, 9, 0, np.zeros(1, int), 4)
    assert hazards(estimator, often)[0][0] < 0.5 * hazards(estimator, once)[0][0] < 0.15


def test_survival_of_the_prior_is_the_posterior_product():
    """Beta(a, b): E[rate^j] = prod (a + i) / (a + b + i), more than the power of the mean."""
    estimator = model(prior_hazard=0.6, prior_strength=4.0)
    state = admit(estimator, estimator.start(), [0])
    survival = np.cumprod(hazards(estimator, state)[0])
    expected = np.cumprod([(2.4 + i) / (4.0 + i) for i in range(K)])
    assert survival == pytest.approx(expected)
    assert (survival[1:] > 0.6 ** np.arange(2, K + 1)).all()


def test_each_bin_of_evidence_has_its_own_level():
    estimator, rng = model(), np.random.default_rng(5)
    state = admit(estimator, estimator.start(), [0])
    for shown, rate in ((1, 0.3), (6, 0.9)) * 3:
        state = learn(estimator, state, 99, 0, chains(rng, [rate] * 4, 4, 300), 4, shown)
    weak, strong = (hazards(estimator, state, 0, shown)[0] for shown in (1, 6))
    assert weak[:2] == pytest.approx([0.3] * 2, abs=0.06)
    assert strong[:4] == pytest.approx([0.9] * 4, abs=0.06)
    assert strong[7] > 0.8  # never probed: at the odds of the positions before
    assert weak[0] < hazards(estimator, state, 0, 3)[0][0] < strong[0]  # a bin without chains


def test_what_a_request_shows_in_one_bin_holds_in_all():
    estimator, rng = model(), np.random.default_rng(5)
    state = admit(estimator, estimator.start(), [0, 1])
    for shown, rate in ((1, 0.3), (6, 0.8)) * 3:
        state = learn(estimator, state, 99, 0, chains(rng, [rate] * 4, 4, 300), 4, shown)
    for _ in range(30):
        state = learn(estimator, state, 1, 0, [0], 4, 6)
    for shown in (1, 6):
        usual, hard = (hazards(estimator, state, request, shown)[0][0] for request in (0, 1))
        assert hard < usual - 0.1


def test_evidence_that_says_nothing_changes_nothing():
    estimator, rng = model(), np.random.default_rng(5)
    accepted = [chains(rng, [0.7] * 4, 4, 200) for _ in range(8)]
    states = [admit(estimator, estimator.start(), [0]) for _ in range(2)]
    for turn, some in enumerate(accepted):
        states[0] = learn(estimator, states[0], 99, 0, some, 4)
        states[1] = learn(estimator, states[1], 99, 0, some, 4, 1 + turn % 4)
    alike = hazards(estimator, states[0], 0)[0][:4]
    for shown in range(1, 5):
        assert hazards(estimator, states[1], 0, shown)[0][:4] == pytest.approx(alike, abs=0.06)


def test_a_hard_request_differs_from_an_easy_one_and_a_new_one_lies_between():
    estimator, rng = model(), np.random.default_rng(3)
    state = admit(estimator, estimator.start(), [1, 2, 3])
    for _ in range(40):
        state = learn(estimator, state, 1, 0, chains(rng, [0.9] * 4, 4, 1), 4)
        state = learn(estimator, state, 2, 0, chains(rng, [0.2] * 4, 4, 1), 4)
    easy, hard, new = (hazards(estimator, state, request)[0] for request in (1, 2, 3))
    assert easy[0] > 0.8
    assert hard[0] < 0.35
    assert hard[0] < new[0] < easy[0]


def test_how_fast_a_request_is_believed_follows_from_how_unlike_requests_were():
    """The same four accepted tokens are luck where all requests are alike, and news where they come
    in two kinds.
    """
    alike, unlike = (_news_of_four_accepted(rates) for rates in ((0.6, 0.6), (0.95, 0.25)))
    assert 0 <= alike < 0.08
    assert unlike > 2 * alike
    assert unlike > 0.1


def _news_of_four_accepted(rates):
    """By how much the first hazard of a new request rises with its first chain, after 300 requests
    of alternating rates.
    """
    estimator, rng = model(), np.random.default_rng(6)
    state = estimator.start()
    for request in range(300):
        state = admit(estimator, state, [request])
        for _ in range(6):
            state = learn(
                estimator, state, request, 0, chains(rng, [rates[request % 2]] * 4, 4, 1), 4
            )
        state = estimator.forget(state, [request])
    state = admit(estimator, state, [999])
    return (
        hazards(estimator, learn(estimator, state, 999, 0, [4], 4), 999)[0][0]
        - hazards(estimator, state, 999)[0][0]
    )


def test_difficulty_carries_over_to_positions_the_request_never_reached():
    estimator, rng = model(), np.random.default_rng(4)
    state = admit(estimator, estimator.start(), [1])
    state = learn(estimator, state, 9, 0, chains(rng, [0.7] * 4, 4, 500), 4)
    before = hazards(estimator, state, 1)[0][3]
    state = learn(estimator, state, 1, 0, np.zeros(30, np.int64), 1)
    assert hazards(estimator, state, 1)[0][3] < before - 0.2


def test_zero_acceptance_is_not_absorbing():
    """By steps of the request its estimate comes back to the draft's, and by time that to the
    prior.
    """
    estimator = model(half_life_s=100.0)
    state = estimator.decayed_to(admit(estimator, estimator.start(), [1]), now=0.0)
    state = learn(estimator, state, 1, 0, np.zeros(200, np.int64), 4)
    assert hazards(estimator, state, 1)[0][0] < 0.1
    stepped = state
    for turn in range(1, 2001):
        stepped = estimator.decayed_to(step(estimator, stepped, 1), now=0.01 * turn)
    assert hazards(estimator, stepped, 1)[0][0] == pytest.approx(
        stepped.estimates.draft_hazard[0, 0, 0], rel=0.01
    )
    waited = admit(estimator, estimator.forget(estimator.decayed_to(state, now=2000.0), [1]), [2])
    assert hazards(estimator, waited, 2)[0][0] > 0.55


def test_the_given_state_is_left_alone():
    estimator = model()
    state = admit(estimator, estimator.start(), [1])
    before = [
        getattr(state.estimates, name).copy()
        for name in ("information", "deviation", "draft_accepted", "draft_reached")
    ]
    later = learn(estimator, state, 1, 0, [3], 4)
    later = estimator.forget(step(estimator, estimator.decayed_to(later, 1e6), 1), [1])
    after = [
        getattr(state.estimates, name)
        for name in ("information", "deviation", "draft_accepted", "draft_reached")
    ]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    assert state.slots == {1: 0}
    assert later.slots == {}


def test_slots_are_reused_and_come_back_empty():
    estimator = model()
    state = admit(estimator, estimator.start(), list(range(20)))
    state = learn(estimator, state, 7, 0, np.zeros(30, np.int64), 1)
    state = admit(estimator, estimator.forget(state, [7, 1234]), [50])
    assert state.slots[50] == 7
    assert state.estimates.information[7].sum() == 0
    assert sorted(state.slots.values()) == list(range(20))


def test_a_level_is_not_that_of_the_requests_that_reach_late_positions():
    """Two kinds of requests, each with hazards that do not change by position: pooled counts would
    rise from 0.55 to 0.9.
    """
    estimator, rng = model(), np.random.default_rng(8)
    state = estimator.start()
    for request in range(200):
        state = admit(estimator, state, [request])
        for _ in range(20):
            state = learn(
                estimator, state, request, 0, chains(rng, [(0.8, 0.4)[request % 2]] * 4, 4, 1), 4
            )
        state = estimator.forget(state, [request])
    level = state.estimates.draft_hazard[0, 0]
    assert abs(level[3] - level[0]) < 0.1


def after_a_change(steps, rows=8):
    """Eight requests whose chains of four were accepted whole for 60 steps, then not at all for
    some.
    """
    estimator, ids = model(), np.arange(rows)
    state, zeros = admit(estimator, estimator.start(), ids.tolist()), np.zeros(rows, np.int64)
    for step in range(60 + steps):
        accepted = np.full(rows, 4 if step < 60 else 0)
        chains = Chains(ids, zeros, accepted, np.full(rows, 4), zeros)
        state, _ = estimator.observe(state, chains, accepted + 1, NOTHING)
    return estimator, admit(estimator, state, [100])


def test_a_request_whose_tokens_are_suddenly_rejected_is_reassessed_within_twenty_steps():
    estimator, state = after_a_change(20)
    assert hazards(estimator, state, 0)[0][0] < 0.4


def test_a_change_common_to_all_in_flight_is_the_draft_s_and_newcomers_know_it():
    before, after = (hazards(*after_a_change(steps), 100)[0][0] for steps in (0, 60))
    assert before > 0.9
    assert after < 0.4


def test_one_request_s_change_is_not_the_draft_s():
    assert hazards(*after_a_change(30, rows=1), 100)[0][0] > 0.6
