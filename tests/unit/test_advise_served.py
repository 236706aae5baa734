"""``spindle advise`` against servers over HTTP: its modes, its limits, and what it does not say."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from backend.advise import AdviceError, passive, verify
from backend.advise import cli as advise_cli
from backend.advise.cli import main
from backend.advise.goodput import LoadRange, length_at
from backend.advise.load import Client
from backend.advise.scrape import parse
from backend.advise.verify import AdviceFile, Proof
from tests.fakes.speculating import Machine, Serving, linear, requests, useless
from tests.fakes.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
SECRET = "xylophone"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    bodies = [
        {
            "messages": [{"role": "user", "content": f"{SECRET} {number} write a poem"}],
            "max_tokens": 24 + number % 16,
        }
        for number in range(24)
    ]
    path.write_text("".join(json.dumps({"body": body}) + "\n" for body in bodies))
    return path


@pytest.fixture
def virtual(monkeypatch):
    """Clients read the clocks of the servers that are in this list."""
    servings = []

    def client(url, **options):
        clocks = [serving.clock for serving in servings if serving.url == url]
        return Client(url, clock=clocks[0] if clocks else time.perf_counter, **options)

    monkeypatch.setattr(advise_cli, "Client", client)
    yield servings
    for serving in servings:
        serving.close()


def probed(virtual, seconds=linear, acceptance=0.8, **serving):
    virtual.append(Serving(Machine(seconds, acceptance, longest=5), **serving))
    return virtual[-1].url


def plain(virtual, seconds=linear):
    virtual.append(Serving(Machine(seconds, loaded=False)))
    return virtual[-1].url


def test_a_running_server_is_measured_by_the_probe_and_no_body_is_kept(
    virtual, log, tmp_path, capsys
):
    urls = ["--url", probed(virtual), "--plain-url", plain(virtual)]
    words = [*urls, "--requests", str(log), "--in-flight", "1,4,12", "--lengths", "0,1,5"]
    out = tmp_path / "out"
    assert main([*words, "--out", str(out)]) == 0
    data = json.loads((out / "advice.json").read_text())
    assert data["speculate"]
    assert {row["verdict"] for row in (one["over_none"] for one in data["intervals"])} == {"faster"}
    assert data["versions"]["engine"] == "0.32.0"
    assert data["engine"] == "vllm"
    assert length_at([LoadRange(*one) for one in data["table"]], 1) >= 4
    first = virtual[0].bodies[0]
    assert first["stream"] is False
    assert first["max_tokens"] <= 40
    said = capsys.readouterr()
    assert said.err.startswith("sends ")
    texts = [said.out, said.err, *(path.read_text() for path in out.glob("*.*"))]
    assert not any(SECRET in text for text in texts)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"missing": ["generated"]}, "no vllm:generation_tokens"),
        ({"missing": ["drafts", "drafted", "accepted"]}, "--speculative-config"),
        ({"fail_with": 429, "fail_after": 5}, "429 Too Many Requests"),
        ({"fail_with": 500, "fail_after": 3}, "500 Internal Server Error"),
    ],
)
def test_a_server_that_cannot_be_measured_is_named_with_a_cure(
    virtual, log, options, error, capsys
):
    url = probed(virtual, **options)
    assert main(["--url", url, "--requests", str(log), "--in-flight", "1,2"]) == 1
    said = capsys.readouterr().err
    assert error in said
    assert SECRET not in said
    assert len(virtual[0].bodies) <= options.get("fail_after", 0) + 3


def test_a_server_that_ignores_the_probe_is_noticed(virtual, log, capsys):
    url = probed(virtual)
    virtual[0].machine.length_of = lambda: 5
    words = ["--url", url, "--requests", str(log), "--in-flight", "1,2", "--lengths", "3,5"]
    assert main(words) == 1
    assert "asked for length 3, the server drafts 5.0 tokens" in capsys.readouterr().err


def test_others_requests_stop_it(virtual, log, capsys):
    url = probed(virtual)
    virtual[0].machine.most_rows = 0
    virtual[0].machine.waiting = requests(1, 0)
    assert main(["--url", url, "--requests", str(log), "--in-flight", "1,2"]) == 1
    assert "other callers" in capsys.readouterr().err


def test_loads_beyond_the_server_s_most_are_left_out(virtual, log, capsys):
    url = probed(virtual)
    virtual[0].machine.most_rows = 4
    words = ["--url", url, "--requests", str(log), "--in-flight", "1,4,12", "--lengths", "0,2,5"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "loads above 4 are left out" in said.err
    assert "\n12 " not in said.out


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("\n\n", "has no requests"),
        ("{oops\n", "line 1: not JSON"),
        ('{"a": 1}\n', "no OpenAI body"),
    ],
)
def test_a_log_without_requests_is_an_error(tmp_path, text, error, capsys):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    assert main(["--url", "http://127.0.0.1:9", "--requests", str(path)]) == 1
    assert error in capsys.readouterr().err


def test_nothing_is_sent_to_another_machine_or_beyond_the_limit_without_leave(virtual, log, capsys):
    assert main(["--url", "http://192.0.2.1:8000", "--requests", str(log)]) == 1
    assert "add --yes" in capsys.readouterr().err
    words = ["--url", probed(virtual), "--requests", str(log), "--most-requests", "9"]
    assert main(words) == 1
    assert "above --most-requests 9" in capsys.readouterr().err
    assert not virtual[0].bodies


def replica(machine, loads, url="http://a"):
    """Return readings of a server in use, whose load changes."""
    shown = passive.WatchedServer(url)
    shown.add(page_of(machine))
    for block in range(2):
        for n in loads:
            machine.cell(0, n, requests(max(8, 2 * n), 10 * n + block), block)
            machine.now_s += 60.0  # idle
            shown.add(page_of(machine))
    return shown


def page_of(machine):
    return parse(machine.metrics(), machine.now_s)


OPTIONS = argparse.Namespace(now=None, out=None, spec={})


def test_one_server_in_use_shows_bounds_and_the_missing_measurement(capsys):
    fading = Machine(linear, 0.6, fades=True, longest=6)
    shown = replica(fading, [1, 4]).describe()
    assert shown["length"] == 6
    assert shown["survival"][0] == pytest.approx(0.6, abs=0.05)
    assert shown["positions_to_drop"][-1] == 6
    (_, load) = shown["loads"]
    bound_s = load["loses_if_plain_step_s_below"]
    assert bound_s == pytest.approx(load["step_s"] / load["emitted"], rel=1e-3)
    passive.finish(OPTIONS, [replica(Machine(linear, 0.6, longest=6), [1, 4])])
    assert "Run one replica without speculation" in capsys.readouterr().out


def test_two_servers_of_different_lengths_are_a_full_advice(tmp_path, capsys):
    options = argparse.Namespace(now=None, out=tmp_path, spec={})
    loads = [1, 2, 4, 8, 16]
    both = [replica(Machine(linear, 0.8, longest=4), loads)]
    both.append(replica(Machine(linear, loaded=False), loads, "http://b"))
    assert passive.finish(options, both) == 0
    data = json.loads((tmp_path / "advice.json").read_text())
    assert data["speculate"]
    assert data["intervals"][0]["over_none"]["low"] > 1.5
    assert "Missing" not in capsys.readouterr().out


def test_alarms_of_servers_in_use():
    machine = Machine(linear, 0.8, longest=4)
    shown = replica(machine, [2, 4])
    assert not shown.alarms()
    machine.acceptance = 0.0
    machine.counts["generated"] = 0.0
    shown.add(page_of(machine))
    machine.cell(0, 2, requests(8, 3), 0)
    shown.add(page_of(machine))
    restarted, nothing = shown.alarms()[0], shown.alarms()[-1]
    assert "restarted 1 times" in restarted
    assert "does the draft fit" in nothing


def test_servers_in_use_are_only_read(virtual, capsys):
    url = probed(virtual)
    assert main(["--metrics-only", url, "--minutes", "0.001"]) == 0
    assert not virtual[0].bodies
    assert "Missing: traffic" in capsys.readouterr().out


def proof(after, before, plain_speed=(100.0,) * 5, drafted=(3.0, 0.0)):
    """Return a proof of these speeds at 1 in flight, and half of them at 16."""
    table = [LoadRange(1, 8, 3), LoadRange(9, 64, 0)]
    made = Proof(AdviceFile(table, True, 5, {}, "vllm"))
    for name, speeds in {"after": after, "before": before, "plain": plain_speed}.items():
        made.speeds[name, 1] = list(speeds)
        made.speeds[name, 16] = [speed / 2 for speed in speeds]
    made.drafted = {1: [drafted[0]] * 5, 16: [drafted[1]] * 5}
    made.proposing = {(arm, n): [1.0] * 5 for arm in ("before", "after") for n in (1, 16)}
    if not drafted[1]:
        made.proposing["after", 16] = [0.02] * 5
    return made


SAME = (150.0, 151.0, 149.0, 150.0, 152.0)
FASTER = (170.0, 172.0, 169.0, 173.0, 171.0)


@pytest.mark.parametrize(
    ("made", "status", "reason"),
    [
        (proof(FASTER, SAME), verify.PROVEN, "faster than before"),
        (proof(SAME, FASTER), verify.REFUTED, "slower than before"),
        (proof(SAME, SAME[::-1]), verify.NOT_SHOWN, "no difference shown"),
        (proof(FASTER, SAME, (200.0,) * 5), verify.REFUTED, "slower than a plain server"),
        (proof(FASTER, SAME, drafted=(3.0, 5.0)), verify.REFUTED, "says 0, the engine drafts 5"),
    ],
)
def test_a_proof_is_proven_refuted_or_not_shown(made, status, reason):
    assert made.outcome()[0] == status
    assert reason in made.outcome()[1]
    assert reason.split(",")[0] in made.text()


FAKE = f"{sys.executable} -m tests.fakes.speculating --port {{port}} --dilation 0.3"


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def advice_file(tmp_path, table, now=1):
    path = tmp_path / "advice.json"
    spec = {"method": "ngram", "num_speculative_tokens": now}
    data = {"table": table, "speculate": True, "now": now, "spec": spec, "engine": "vllm"}
    path.write_text(json.dumps(data))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("ignores", "status"), [("", 0), (" --ignores-table", 3)])
def test_started_servers_prove_a_table_or_show_that_it_is_ignored(
    in_root, tmp_path, log, ignores, status, capsys
):
    advice = advice_file(tmp_path, [[1, 2, 5], [3, 64, 3]])
    words = ["verify", "--advice", str(advice), "--requests", str(log), "--in-flight", "1,4"]
    words += ["--serve", FAKE + ignores + " {spec}", "--together", "--blocks", "3"]
    assert main([*words, "--out", str(tmp_path / "proof.json")]) == status
    said = capsys.readouterr().out
    assert ("ignores the table" in said) == bool(status)
    assert json.loads((tmp_path / "proof.json").read_text())["outcome"] in ("proven", "refuted")


@pytest.mark.slow
def test_servers_are_started_by_length_and_end_with_it(in_root, tmp_path, log):
    words = [sys.executable, "-m", "backend.advise.cli", "--serve", FAKE + " {spec}"]
    words += ["--spec", '{"method": "ngram", "num_speculative_tokens": 4}', "--requests", log]
    words += ["--in-flight", "1,2,6", "--lengths", "0,2,4", "--blocks", "1"]
    done = subprocess.run(
        [*map(str, words), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out/advice.json").read_text())
    assert data["speculate"]
    assert data["now"] == 4
    assert data["spec"]["method"] == "ngram"
    assert str(ROOT) not in (tmp_path / "out/advice.md").read_text()


def test_ctrl_c_ends_the_servers_with_all_their_processes(in_root, tmp_path, log):
    marker = tmp_path / "pids"
    shell = f"sh -c '{FAKE} --dilation 50 & echo $$ $! > {marker}; wait' {{spec}}"
    words = [sys.executable, "-m", "backend.advise.cli", "--serve", shell, "--spec", '{"m": 1}']
    process = subprocess.Popen(
        [*words, "--requests", str(log), "--lengths", "0,4"], stderr=subprocess.PIPE, text=True
    )
    wait_until(marker.exists)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    with process.stderr:
        assert process.wait(20) == 130
    for pid in marker.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_server_that_does_not_start_shows_its_last_lines(capsys, log):
    command = f"{sys.executable} -c 'raise SystemExit(\"no such model\")' {{port}} {{spec}}"
    words = ["--serve", command, "--spec", '{"method": "ngram"}', "--requests", str(log)]
    assert main(words) == 1
    assert "no such model" in capsys.readouterr().err


def test_a_fallen_counter_stops_a_cell(virtual, log, capsys):
    url = probed(virtual)
    machine = virtual[0].machine

    def restart():
        while len(virtual[0].bodies) < 4:
            time.sleep(0.005)
        with virtual[0].arrived:
            machine.counts["generated"] = -500.0

    threading.Thread(target=restart, daemon=True).start()
    assert main(["--url", url, "--requests", str(log), "--in-flight", "1,2"]) == 1
    assert "fell between two readings" in capsys.readouterr().err


def test_an_advice_of_no_speculation_compares_the_plain_server():
    advised = AdviceFile([LoadRange(1, 64, 0)], False, 5, {}, "vllm")
    assert {*advised.arms()} == {"plain", "before"}
    assert Proof(advised).after == "plain"


def test_no_speculation_is_advised_over_http(virtual, log, capsys):
    urls = ["--url", probed(virtual, useless, 0.4), "--plain-url", plain(virtual, useless)]
    words = [*urls, "--requests", str(log), "--in-flight", "1,3,6", "--lengths", "0,2,5"]
    assert main(words) == 0
    assert "no speculation" in capsys.readouterr().out


def test_a_wrong_advice_file_is_named(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(AdviceError, match="is not advice"):
        AdviceFile.read(tmp_path / "a.json")
