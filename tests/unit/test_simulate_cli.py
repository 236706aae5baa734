import json

import numpy as np
import pytest

from policy import simulate
from policy.simulation.statistics import ratio_of_means, ratio_of_rates


def test_a_comparison_prints_a_table_and_writes_results(tmp_path, capsys):
    arms = "none,fixed:eagle:2"
    files = ["--json", str(tmp_path / "a.json")]
    simulate.main(
        [
            "--jobs",
            "1",
            "compare",
            "--rates",
            "8,16",
            "--requests",
            "3",
            "--seeds",
            "0",
            "--arms",
            arms,
            *files,
        ]
    )
    assert "simulated steps a second" in capsys.readouterr().out
    document = json.loads((tmp_path / "a.json").read_text())
    assert [point["load"] for point in document["comparisons"][0]["points"]] == [8.0, 16.0]


def test_recorded_arrivals_are_read_from_json_lines(tmp_path, capsys):
    rows = [
        {"arrival_s": t, "prompt_tokens": 50, "output_tokens": 5, "category": 1}
        for t in (0.0, 1.0, 1.5)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    simulate.main(
        [
            "--jobs",
            "1",
            "compare",
            "--arrivals",
            str(log),
            "--rates",
            "1",
            "--seeds",
            "0",
            "--arms",
            "none",
        ]
    )
    assert "none*" in capsys.readouterr().out
    log.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(ValueError, match="arrival_s"):
        simulate.read_recording(str(log))


def test_paired_intervals_are_narrower_than_what_both_arms_share():
    rng = np.random.default_rng(0)
    common = [rng.exponential(1.0, 200) for _ in range(3)]
    better = [0.9 * run + 0.01 * rng.random(200) for run in common]
    ratio = ratio_of_means(better, common)
    assert 0.9 < ratio.low <= ratio.value <= ratio.high < 0.92
    unlike = ratio_of_means([rng.exponential(1.0, 200) for _ in range(3)], common)
    assert unlike.high - unlike.low > 0.1


def test_an_interval_of_rates_is_student_s_over_the_logarithms():
    ratio = ratio_of_rates([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    half = 4.303 * np.log(2) / 3**0.5
    assert (ratio.value, ratio.high) == pytest.approx((2.0, 2 * np.exp(half)))


@pytest.mark.parametrize(
    ("option", "value"), [("--rates", "3,fast"), ("--rates", "-1"), ("--seeds", "x")]
)
def test_a_list_that_is_none_is_reported_by_its_option_and_value(option, value, capsys):
    with pytest.raises(SystemExit) as ended:
        simulate.main(["compare", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}: invalid {option[2:]} value: '{value}'" in capsys.readouterr().err


def test_a_mix_suits_its_deployment():
    four_heads = simulate.deployments()["llama-8b-4-heads"]
    assert simulate.mix_for(four_heads, None).name == "specialists-0.85"
    assert simulate.mix_for(simulate.deployments()["smollm2-cpu"], None).name == "mix"
    with pytest.raises(ValueError, match=r"--mix chat lacks drafts of .*4-heads: use specialists"):
        simulate.mix_for(four_heads, "chat")
