import json

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.ops.stats import Stats, StepStats
from backend.ops.switches import SwitchBoard
from policy import Switches

FAKE = {
    "target": {"engine": "tests.fakes.fake"},
    "drafts": [{"name": "d0", "engine": "tests.fakes.fake"}, {"name": "8", "engine": "lookup"}],
}


def board(stats=None, **switches):
    return SwitchBoard(parse_config({**FAKE, "switches": switches}), StepStats(stats or Stats()))


def test_it_starts_as_configured_and_sets_several_at_once():
    it = board(speculation="shadow")
    assert it.current() == Switches(speculation="shadow")
    shown = it.set(
        [
            "speculation=on",
            "canary_share=0.1",
            "fixed_draft=8",
            "fixed_length=2",
            "inter_token_cap_s=0.05",
        ]
    )
    assert it.current() == Switches("on", 0.1, "8", 2, 0.05)
    assert shown == it.show()
    assert it.set(["canary_share=1", "fixed_draft=", "fixed_length=0"])["canary_share"] == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["key=value"]),
        (["off"], ["key=value", "off"]),
        (["speculations=off"], ["switches.speculations", "did you mean 'speculation'"]),
        (["speculation=maybe"], ["switches.speculation", "maybe"]),
        (["canary_share=1.5"], ["switches.canary_share", "1.5"]),
        (["canary_share=nan"], ["switches.canary_share", "nan"]),
        (["canary_share=some"], ["switches.canary_share", "some"]),
        (["fixed_length=1.5", "fixed_draft=d0"], ["switches.fixed_length", "1.5"]),
        (["fixed_length=9", "fixed_draft=d0"], ["switches.fixed_length", "9", "k_max 8"]),
        (["fixed_length=2"], ["switches.fixed_draft", "d0"]),
        (["fixed_draft=d1"], ["switches.fixed_draft", "d1"]),
        (["inter_token_cap_s=-1"], ["switches.inter_token_cap_s", "-1"]),
        (["inter_token_cap_s=inf"], ["switches.inter_token_cap_s", "inf"]),
    ],
)
def test_a_bad_switch_is_refused_by_key_and_value_and_nothing_is_set(words, said):
    it = board()
    with pytest.raises(ConfigError) as error:
        it.set(["speculation=off", *words] if words else [])
    assert all(part in str(error.value) for part in said)
    assert it.current() == Switches()


def test_a_bad_switch_in_the_file_is_an_error_at_start():
    with pytest.raises(ConfigError, match=r"switches\.fixed_draft .*'d9'"):
        board(fixed_draft="d9", fixed_length=1)


def test_what_was_set_outlasts_the_process(tmp_path):
    file = tmp_path / "engine.switches"
    (it := board()).keep_in(file)
    it.set(["speculation=off"])
    (again := board()).keep_in(file)
    assert again.current() == Switches(speculation="off")


@pytest.mark.parametrize(
    "text", ["{", "[]", json.dumps({"speculation": "perhaps"}), json.dumps({"fixed_length": 60})]
)
def test_a_file_that_does_not_fit_is_counted_and_the_configured_switches_hold(tmp_path, text):
    file, stats = tmp_path / "engine.switches", Stats()
    file.write_text(text)
    (it := board(stats, canary_share=0.5)).keep_in(file)
    assert it.current() == Switches(canary_share=0.5)
    assert ("spindle_fallback_total", {"reason": "switches_not_kept"}, 1) in stats.drain().counters


def test_a_file_that_cannot_be_written_costs_a_metric_not_the_switch(tmp_path):
    stats = Stats()
    (it := board(stats)).keep_in(tmp_path / "absent" / "engine.switches")
    it.set(["speculation=off"])
    assert it.current().speculation == "off"
    assert ("spindle_fallback_total", {"reason": "switches_not_kept"}, 1) in stats.drain().counters


def test_the_gauges_say_how_the_switches_stand():
    stats = Stats()
    board(stats).set(["speculation=off", "canary_share=0.25", "inter_token_cap_s=0.1"])
    gauges = {(name, *labels.values()): value for name, labels, value in stats.drain().gauges}
    assert gauges["spindle_speculation_mode", "off"] == 1
    assert gauges["spindle_speculation_mode", "on"] == 0
    assert gauges["spindle_canary_share",] == 0.25
    assert gauges["spindle_inter_token_cap_seconds",] == 0.1
