"""The advice of cells whose server has a known step time and acceptance, without HTTP."""

import json
import subprocess
import sys
import zipfile
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest

from backend.advise import AdviceError, artifacts, formats
from backend.advise.acceptance import StepTokens, geometric, reaches, replay
from backend.advise.advice import advise
from backend.advise.cli import main
from backend.advise.goodput import PLAIN, LoadRange, length_at, lengths_by_load
from backend.advise.load import AnswerCounts, Cell
from backend.advise.scrape import Window, parse
from policy import simulate
from policy.simulation.advised import read_advice
from tests.fakes.speculating import (
    Machine,
    bent,
    cells_of,
    linear,
    padded,
    true_speed,
    useless,
)

ARMS, LOADS = [PLAIN, 0, 3, 6], [1, 4, 16, 64]


def loss(advice, machine, loads, **sizes):
    """Return how much slower than the best choice the advice is at its worst load."""
    worst = 0.0
    for n in loads:
        speed = {k: true_speed(machine(), k, n, **sizes) for k in range(7)}
        none = true_speed(machine(), PLAIN, n, **sizes)
        chosen = speed[length_at(advice.table, n)] if advice.speculate else none
        best = max(speed.values()) if advice.speculate else max(none, *speed.values())
        worst = max(worst, 1 - chosen / best)
    return worst


@pytest.mark.parametrize(
    ("seconds", "acceptance", "fades", "details", "prompt"),
    [
        (bent, 0.7, False, True, 300),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (linear, 0.7, False, True, 30),
                (padded, 0.5, True, False, 30),
                (linear, 0.9, True, False, 300),
                (padded, 0.9, False, True, 30),
                (padded, 0.7, False, False, 300),
                (bent, 0.9, True, True, 30),
                (bent, 0.5, True, False, 300),
            )
        ),
    ],
)
def test_the_table_is_within_2_percent_of_the_best_length_at_every_load(
    seconds, acceptance, fades, details, prompt
):
    def machine():
        return Machine(seconds, acceptance, fades, details=details)

    cells = cells_of(lambda _: machine(), ARMS, LOADS, prompt=prompt)
    advice = advise(cells, now=5)
    advised = {one.length for one in advice.table} - {0, 3, 6}
    cells += cells_of(lambda _: machine(), sorted(advised), LOADS, prompt=prompt)
    advice = advise(cells, now=5)
    assert advice.speculate
    assert advice.held_out.off < 0.1
    assert loss(advice, machine, (1, 3, 10, 24, 48), prompt=prompt) <= 0.02


def test_no_speculation_is_an_advice():
    advice = advise(cells_of(lambda _: Machine(useless, 0.5), ARMS, [1, 4, 16]), now=5)
    assert not advice.speculate
    assert advice.table == [LoadRange(1, 16, 0)]
    assert all(row.over_now.low > 1.2 for row in advice.rows)


def test_length_0_with_a_draft_loaded_is_not_the_plain_server():
    def heavy(rows, length, prompt, loaded):
        return linear(rows, length, prompt, loaded) + 8e-3 * loaded

    advice = advise(cells_of(lambda _: Machine(heavy, 0.3), ARMS, [1, 4, 16]), now=5)
    assert not advice.speculate  # length 1 is faster than length 0, and neither than none


def test_equal_settings_under_noise_show_no_difference():
    def flat(rows, length, prompt, loaded):
        return 0.01 + 4e-3 * length

    # At 0.4 a token more each step costs as much as it brings.
    def machine(arm):
        return Machine(flat, 0.4, noise=0.1, rng=np.random.default_rng(arm + 5))

    advice = advise(cells_of(machine, [PLAIN, 0, 1, 2], [1, 4, 16]), now=1)
    assert advice.verdict == "no difference shown"
    assert not advice.speculate


def test_runs_are_replayed_from_any_place():
    steps = [(4, 4), (4, 1), (0, 0), (4, 0)]
    assert reaches(steps)[0] == [6, 5, 4, 3, 2, 1, 0, 0, 0, 0][: len(reaches(steps)[0])]
    assert replay(steps, 4)[:2] == (9, 4)
    tokens, count, drafted, proposals = replay(steps, 1)
    assert tokens == 9
    assert drafted == proposals < count
    assert replay(steps, 0) == (9, 9, 0, 0)


def test_shorter_lengths_are_replayed_within_3_percent_where_the_text_decides():
    cells = cells_of(lambda _: Machine(linear, 0.75), [6], [8], output=96)
    expected = StepTokens(cells).expect()
    for length in (1, 2, 3, 4):
        cells = cells_of(lambda _: Machine(linear, 0.75), [length], [8], output=96)
        tokens = sum(cell.emitted * cell.row_steps for cell in cells)
        measured = tokens / sum(cell.row_steps for cell in cells)
        assert expected[length].emitted == pytest.approx(measured, rel=0.03)


def test_a_measured_length_shows_that_chances_fall_by_position():
    cells = cells_of(lambda _: Machine(linear, 0.8, fades=True), [3, 6], [16], output=96)
    expected = StepTokens(cells).expect()
    assert expected[1].emitted == pytest.approx(1.8, rel=0.02)


def test_totals_alone_give_a_geometric_fall():
    shares = geometric(1.75, 3)
    assert sum(shares) == pytest.approx(1.75)
    assert shares[1] / shares[0] == pytest.approx(shares[0])


def test_ranges_are_few_and_ties_go_to_the_shorter_length():
    speed = {0: np.array([90, 98, 100, 100.0]), 2: np.array([100, 100, 99.9, 90.0])}
    assert lengths_by_load(speed, [1, 2, 3, 4]) == [LoadRange(1, 3, 2), LoadRange(4, 4, 0)]
    assert lengths_by_load({1: np.ones(2), 5: np.ones(2)}, [1, 2]) == [LoadRange(1, 2, 1)]


TABLE = [LoadRange(1, 4, 5), LoadRange(5, 16, 2), LoadRange(17, 64, 0)]
SPEC = {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 4}


def test_vllm_s_options_have_the_table_of_versions_that_heed_it():
    text = formats.vllm(TABLE, SPEC, (0, 32), 2)
    config = json.loads(text.splitlines()[-1].split(" ", 1)[1].strip("'"))
    assert config["num_speculative_tokens"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 16, 2], [17, 64, 0]]
    old = formats.vllm(TABLE, SPEC, (0, 26), 2)
    assert '"num_speculative_tokens": 2}' in old
    assert "per_batch_size" not in old
    assert formats.vllm([LoadRange(1, 64, 0)], SPEC, (0, 32), 2).startswith("# no --spec")


def schedule(text):
    rows = text.partition("draft_len_schedule:\n")[2].splitlines()
    return {int(key): int(value) for key, value in (row.split(":") for row in rows)}


@pytest.mark.parametrize("batch", [1, 4, 5, 16, 17, 64])
def test_tensorrt_llm_s_schedules_mean_the_same_in_both_versions(batch):
    least = schedule(formats.tensorrt_llm(TABLE, (1, 2)))
    most = schedule(formats.tensorrt_llm(TABLE, (1, 3)))
    by_least = least[max(key for key in least if key <= batch)]
    by_most = next((most[key] for key in sorted(most) if batch <= key), 0)
    assert by_least == by_most == length_at(TABLE, batch)


def test_tensorrt_llm_1_2_has_the_longest_length_at_batch_1():
    text = formats.tensorrt_llm([LoadRange(1, 4, 1), LoadRange(5, 64, 3)], (1, 2))
    assert schedule(text) == {1: 3, 5: 3}
    assert "needs the longest length" in text


def test_sglang_s_file_and_aiconfigurator_s_options():
    assert json.loads(formats.sglang(TABLE)) == {
        "1": {"candidate_steps": [5]},
        "5": {"candidate_steps": [2]},
        "17": {"candidate_steps": [0]},
    }
    assert formats.aiconfigurator(2.3339, 2) == "--nextn 2 --nextn-accepted 1.333\n"


def test_counters_of_all_engines_are_read():
    trtllm = parse(
        'trtllm_spec_decode_accepted_tokens_total{token_position="0"} 8\n'
        'trtllm_spec_decode_accepted_tokens_total{token_position="1"} 4\n'
        'trtllm_spec_decode_drafted_tokens_total{token_position="0"} 10\n'
        'trtllm_spec_decode_drafted_tokens_total{token_position="1"} 10\n',
        0.0,
    )
    assert trtllm.engine == "tensorrt_llm"
    assert (trtllm.values["drafts"], trtllm.values["drafted"], trtllm.accepted) == (10, 20, (8, 4))
    two = 'vllm:generation_tokens_total{engine="0"} 5\nvllm:generation_tokens_total{engine="1"} 7\n'
    assert parse(two, 0.0).values["generated"] == 12


def test_a_fallen_counter_is_an_error():
    before, after = (parse(f"vllm:generation_tokens_total {n}\n", 0.0) for n in (9, 3))
    with pytest.raises(AdviceError, match=r"generation_tokens fell .* restarted"):
        Window.between(before, after)


def test_steps_follow_from_tokens_if_the_server_does_not_count_them():
    machine = Machine(linear, 0.7)
    (whole,) = cells_of(lambda _: machine, [3], [4], 1)
    few = {k: whole.window[k] for k in ("generated", "accepted", "drafts", "drafted")}
    cell = Cell(
        3,
        4,
        Window(whole.window.wall_s, few, whole.window.accepted),
        whole.replies,
        sent_requests=8,
    )
    assert cell.row_steps == pytest.approx(whole.row_steps, rel=0.02)
    assert cell.steps == pytest.approx(whole.steps, rel=0.1)
    assert cell.emitted == pytest.approx(whole.emitted, rel=0.02)


def test_bare_histograms_are_enough_for_acceptance():
    replies = (AnswerCounts(10, 41, histogram=(10, 5, 5)),)
    cell = Cell(2, 1, Window(1.0, {"generated": 41.0}), replies, sent_requests=1)
    survival, fired = StepTokens([cell]).survival()
    assert survival == [0.5, 0.25]
    assert fired == pytest.approx(20 / 25)


def aiperf_run(folder, machine, arm, n):
    """Write what AIPerf writes of a run."""
    (cell,) = cells_of(lambda _: machine, [arm], [n], 1)
    folder.mkdir()
    end_ns = int(1e9 * cell.window.wall_s)
    record = {"metadata": {"request_start_ns": 0, "request_end_ns": end_ns}, "error": None}
    lines, raw = [], []
    done = cell.window["generated"]
    for reply in cell.replies:
        tokens = {"value": reply.output_tokens, "unit": "tokens"}
        prompt = {"value": reply.prompt_tokens, "unit": "tokens"}
        metrics = {"input_sequence_length": prompt, "output_sequence_length": tokens}
        lines.append(json.dumps(record | {"metrics": metrics}))
        counts = {"per_step_accepted": reply.accepted, "per_step_drafted": reply.proposed}
        usage = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens}
        answer = {"usage": usage, "metrics": {"speculative_decoding": counts}}
        raw.append(json.dumps({"responses": [{"text": json.dumps(answer)}]}))
    (folder / artifacts.RECORDS).write_text("\n".join(lines))
    (folder / artifacts.RAW).write_text("\n".join(raw))
    config = {"input_config": {"loadgen": {"concurrency": n}}}
    (folder / artifacts.SUMMARY).write_text(json.dumps(config))
    return done


def test_aiperf_s_runs_are_an_advice(tmp_path, capsys):
    folders = []
    for arm in (PLAIN, 3, 6):
        for n in (1, 4, 16):
            folders.append(tmp_path / f"{arm}-{n}")
            aiperf_run(folders[-1], Machine(linear, 0.7), arm, n)
    assert main(["--from", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    data = json.loads((tmp_path / "out/advice.json").read_text())
    assert data["speculate"]
    assert data["table"][0][2] >= 3
    assert "AIPerf" in capsys.readouterr().out


def test_it_needs_no_triton_torch_or_openvino():
    code = """
import sys
import zipfile
from types import ModuleType
from unittest.mock import MagicMock
for name in ("torch", "openvino", "tritonclient", "transformers", "msgspec", "fastapi", "vllm"):
    sys.modules[name] = None
import backend.advise.cli
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_simulator_runs_policies_on_the_measured_server(tmp_path, capsys):
    machine = lambda _: Machine(linear, 0.8)  # noqa: E731
    advice = advise(cells_of(machine, ARMS, [1, 4, 16]), now=5)
    about = {"engine": "vllm", "date": "2026-11-28"}
    path = tmp_path / "advice.json"
    path.write_text(json.dumps(about | advice.to_dict()))
    deployment, mix = read_advice(path)
    assert deployment.k_max == 6
    work_s = deployment.latency.target.seconds(16 * 4, 16)
    assert work_s == pytest.approx(linear(16, 3, 0, True) - 3 * (4e-4 + 2e-6 * 16), rel=0.15)
    assert mix.categories[0].hazard["draft"] == pytest.approx(0.8, abs=0.03)
    words = ["--from", str(path), "--arms", "none,fixed:draft:5", "--requests", "8"]
    assert simulate.main([*words, "--rates", "backlog", "--seeds", "3"]) == 0
    assert "fixed:draft:5" in capsys.readouterr().out
    path.write_text("{}")
    assert simulate.main(words) == 2
    assert "has no fit of spindle advise" in capsys.readouterr().err


@pytest.mark.slow
def test_sglang_s_own_reader_takes_the_file_as_it_was_meant(tmp_path, monkeypatch):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path]
    subprocess.run([*map(str, command), "sglang==0.5.23"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        source = package.read("sglang/srt/speculative/adaptive_spec_params.py").decode()
    for name in ("arg_groups.overrides", "runtime_context", "speculative.spec_info", "utils"):
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", MagicMock())
    reader = ModuleType("adaptive_spec_params")
    monkeypatch.setitem(sys.modules, reader.__name__, reader)
    exec(compile(source, reader.__name__, "exec"), reader.__dict__)
    path = tmp_path / "sglang.json"
    path.write_text(formats.sglang(TABLE))
    lengths = reader.AdaptiveSpeculativeParams(5, str(path))
    batches = range(1, 100)
    meant = [length_at(TABLE, n) for n in batches]
    assert [lengths.get_steps_for_batch(n) for n in batches] == meant
    lengths.on_verify_complete([5] * 4, 4)  # one candidate: nothing to adapt
    assert lengths.get_steps_for_batch(4) == 5
