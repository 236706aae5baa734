import numpy as np
import pytest

from bench.sweep.hazards import fit

KEY = ("mix", "closed-1", 1)


def observed(hazard, decay, lengths, steps=1000.0):
    """Return runs in which every position is accepted as often as hazards [requests] and decays
    have it.
    """
    runs = []
    for length in lengths:
        factor = np.cumprod(decay[:length])
        by_position = hazard[:, None] ** np.arange(1, length + 1) * factor * steps
        replies = [
            {"drafts": {"d": [length * steps, accepted]}, "output_tokens": 1 + steps + accepted}
            for accepted in by_position.sum(1)
        ]
        counts = {
            f'spindle_accepted_tokens_by_position_total{{draft="d",position="{place}"}}': total
            for place, total in enumerate(by_position.sum(0), 1)
        }
        runs.append((KEY, "d", length, {"replies": replies, "counts": counts}))
    return runs


def test_hazards_and_decay_are_those_that_the_counts_were_made_of():
    hazard, decay = np.array([0.2, 0.5, 0.9]), np.array([1.0, 0.9, 0.8, 0.7])
    found = fit(observed(hazard, decay, [2, 4]), ["d"], [False], 4)
    assert found.of(KEY)[0][:, 0] == pytest.approx(hazard, abs=0.01)
    assert found.decay[0] == pytest.approx(decay, abs=0.03)


def test_positions_that_were_never_proposed_go_on_as_the_last():
    found = fit(observed(np.array([0.5]), np.array([1.0, 0.9]), [2]), ["d"], [False], 4)
    assert found.decay[0, 1:] == pytest.approx([0.9] * 3, abs=0.02)


def test_how_often_a_draft_finds_something_is_fitted_and_one_without_runs_accepts_nothing():
    ((_, _, _, run),) = observed(np.array([0.5]), np.ones(1), [1], steps=100.0)
    run["replies"][0]["output_tokens"] += 100
    found = fit([(KEY, "d", 1, run)], ["d", "other"], [True, False], 2)
    hazard, share = found.of(KEY)
    assert share[0, 0] == pytest.approx(0.5)
    assert hazard[0, 0] == pytest.approx(0.5, abs=0.01)
    assert hazard[0, 1] < 0.01
