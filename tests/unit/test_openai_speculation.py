"""``metrics.speculative_decoding``: the counts of an answer as vLLM sends and AIPerf reads them."""

import pytest

from backend.openai_frontend.answers import TokenCounts
from backend.openai_frontend.app import VLLM_COUNTERS, with_vllm_counters
from backend.openai_frontend.triton import Piece

ONE = {
    "draft_tokens": 7,
    "acceptance_histogram": [1, 0, 1, 0],
    "per_step_drafted": [3, 4],
    "per_step_accepted": [2, 0],
}
NONE = {"acceptance_histogram": [0, 0, 0, 0]}


def counts(*texts, level="summary"):
    """Return the counts of an answer of these texts, each of two pieces."""
    added = TokenCounts(level)
    for number, text in enumerate(texts):
        added.add(Piece(0, number, "some"))
        added.add(Piece(0, number, "", "length", **text))
    metrics = added.metrics()
    return metrics and metrics["metrics"]["speculative_decoding"]


def test_the_counts_are_those_of_the_histogram():
    assert counts(ONE) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 2 / 7,
        "acceptance_histogram": [1, 0, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 7,
        "num_spec_tokens": 3,
    }


def test_a_text_without_speculation_has_zeros_and_a_length_of_one():
    zero = counts(NONE, level="detailed")
    assert (zero["mean_acceptance_length"], zero["draft_acceptance_rate"]) == (1.0, 0.0)
    assert (zero["acceptance_histogram"], zero["num_spec_tokens"]) == ([0, 0, 0, 0], 3)
    assert zero["num_spec_steps"] == zero["num_draft_tokens"] == 0
    assert zero["per_step_accepted"] == zero["per_step_drafted"] == []


def test_several_texts_are_added_up():
    added = counts(ONE, ONE | {"acceptance_histogram": [0, 1, 0, 1], "draft_tokens": 6}, NONE)
    assert added["acceptance_histogram"] == [1, 1, 1, 1]
    assert (added["num_spec_steps"], added["num_accepted_draft_tokens"]) == (4, 6)
    assert (added["num_draft_tokens"], added["mean_acceptance_length"]) == (13, 2.5)


def test_steps_are_listed_in_detail_where_there_is_one_text():
    detailed = counts(ONE, level="detailed")
    assert (detailed["per_step_accepted"], detailed["per_step_drafted"]) == ([2, 0], [3, 4])
    assert detailed == counts(ONE) | {name: ONE[name] for name in ONE if "step" in name}
    assert "per_step_accepted" not in counts(ONE, ONE, level="detailed")


@pytest.mark.parametrize(("texts", "level"), [((ONE,), "none"), ((), "summary")])
def test_nothing_is_sent_where_it_is_off_or_nothing_has_ended(texts, level):
    assert counts(*texts, level=level) == {}


def test_vllm_s_counters_are_sums_over_drafts_and_arms():
    metrics = """# TYPE spindle_draft_tokens_total counter
spindle_draft_tokens_total{arm="planner",draft="a b"} 5
spindle_draft_tokens_total{arm="fixed",draft="suffix"} 1234567890
spindle_draft_tokens_by_position_total{draft="suffix",position="1"} 7
spindle_accepted_tokens_total{arm="planner",draft="suffix"} 3
"""
    shown = with_vllm_counters(metrics)
    assert shown.startswith(metrics)
    samples = [line for line in shown[len(metrics) :].splitlines() if line[0] != "#"]
    assert samples == [
        "vllm:spec_decode_num_drafts_total 0",
        "vllm:spec_decode_num_draft_tokens_total 1234567895",
        "vllm:spec_decode_num_accepted_tokens_total 3",
    ]
    for name in VLLM_COUNTERS.values():
        assert f"# TYPE {name} counter\n" in shown
