import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from backend.config import parse_config
from backend.engine_config import EMBEDDED_MODEL
from backend.launcher import doctor
from backend.machine import Machine
from backend.model_folders import model_path
from backend.speculation.learned_state import learned_key
from backend.storage import cache
from backend.storage.tables import table_file, timed_engines
from engines_build import prepare, progress
from policy.latency import SYNTHETIC, LatencyTable

PROJECT_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))


MANIFEST = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "vocabulary_sha256": "0" * 64,
}


class Work:
    """Converts and measures in no time, and keeps the order in ``calls``."""

    def __init__(self):
        self.calls = []

    def make_model(self, folder):
        self.calls.append("convert")
        with cache.publish(folder, {"source": "model.gguf"}) as fresh:
            (fresh / "config.json").write_text(json.dumps(MANIFEST))
            save_file({"weight": torch.zeros(1)}, fresh / "model.safetensors")

    def measure(self, config, folders, names):
        self.calls.append("measure")
        for engine in timed_engines(config):
            table = LatencyTable(engine.name, (1,), (1,), (0,), (1e-3,), SYNTHETIC)
            path = table_file(engine, folders[engine.name], config.threads)
            cache.publish_file(path, json.dumps(table.to_dict()))

    def prepare(self, config):
        prepare.prepare(config, self.make_model, self.measure)


@pytest.fixture
def work():
    return Work()


EMBEDDED = parse_config(
    {
        "target": {"engine": "torch", "model": EMBEDDED_MODEL},
        "drafts": [{"engine": "lookup", "name": "lookup"}],
    }
)


def keep_pace(config, pace):
    folders = {engine.name: model_path(engine) for engine in timed_engines(config)}
    state = {"target": {"factor": pace}}
    file = cache.learned_file(learned_key(config, folders))
    cache.publish_file(file, json.dumps({"state": state}))


def test_tables_of_a_busy_machine_are_measured_again(work, capsys):
    work.prepare(EMBEDDED)
    capsys.readouterr()
    keep_pace(EMBEDDED, 0.9)
    work.prepare(EMBEDDED)
    assert capsys.readouterr().out == ""
    keep_pace(EMBEDDED, 0.6)
    work.prepare(replace(EMBEDDED, policy=replace(EMBEDDED.policy, keep_learned=False)))
    assert work.calls == ["convert", "measure"]
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure", "measure"]
    assert "0.60 times" in capsys.readouterr().out


@pytest.mark.parametrize("is_busy_now", [False, True])
def test_tables_measured_next_to_other_programs_are_measured_again_without_them(
    work, capsys, monkeypatch, is_busy_now
):
    work.prepare(EMBEDDED)
    file = next(cache.table_file("x").parent.glob("*.json"))
    table = json.loads(file.read_text())
    table["provenance"]["busy"] = True
    cache.publish_file(file, json.dumps(table))
    found = doctor.tables(EMBEDDED)
    assert (found.state, "quiet machine" in found.text) == (doctor.WARNING, True)
    monkeypatch.setattr(Machine, "is_busy", lambda self: is_busy_now)
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure"] + ["measure"] * (not is_busy_now)
    assert ("busy when it was measured" in capsys.readouterr().out) is not is_busy_now


def test_a_learned_state_that_cannot_be_read_leaves_tables_alone(work):
    work.prepare(EMBEDDED)
    keep_pace(EMBEDDED, [])
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure"]


def test_what_is_missing_is_converted_then_measured_and_a_second_run_does_nothing(work, capsys):
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure"]
    assert re.search(r"about 2 min and 0\.7 GB of disk, 0\.53 GB", capsys.readouterr().out)
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure"]
    assert capsys.readouterr().out == ""


def test_a_damaged_model_is_converted_again(work, caplog):
    work.prepare(EMBEDDED)
    weights = cache.model_folder(EMBEDDED_MODEL) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"z")
    work.prepare(EMBEDDED)
    assert work.calls == ["convert", "measure", "convert"]
    assert "model.safetensors has SHA-256" in caplog.text
    cache.check(cache.model_folder(EMBEDDED_MODEL), hashes=True)


def test_a_model_in_a_folder_is_measured_but_not_converted(work):
    model = PROJECT_ROOT / "engines_build" / "drafts" / "tiny-target"
    work.prepare(parse_config({"target": {"engine": "torch", "model": str(model)}}))
    assert work.calls == ["measure"]


def test_a_fake_target_needs_nothing_not_even_torch(tmp_path):
    config = tmp_path / "serving.json"
    config.write_text(
        json.dumps(
            {
                "target": {"engine": "tests.fakes.fake"},
                "drafts": [{"engine": "lookup", "name": "lookup"}],
            }
        )
    )
    code = (
        "import sys; from engines_build import prepare; sys.argv[1:] = ['--config', "
        "sys.argv[1]]; prepare.main(); "
        "sys.exit(len({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)],
        cwd=PROJECT_ROOT,
        env=os.environ,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert not cache.root().exists()


def test_a_policy_that_is_not_there_is_said_before_anything_is_made(tmp_path, monkeypatch):
    config = tmp_path / "serving.json"
    target = {"engine": "torch", "model": EMBEDDED_MODEL}
    config.write_text(json.dumps({"target": target, "policy": {"kind": "nowhere.Mine"}}))
    monkeypatch.setattr(sys, "argv", ["prepare", "--config", str(config)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(
        SystemExit, match=r"policy.kind 'nowhere.Mine': there is no module 'nowhere'"
    ):
        prepare.main()
    assert not cache.root().exists()


def test_a_model_that_cannot_be_converted_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, capsys
):
    config = tmp_path / "serving.json"
    config.write_text(json.dumps({"target": {"engine": "torch", "model": EMBEDDED_MODEL}}))
    monkeypatch.setattr(sys, "argv", ["prepare", "--config", str(config)])
    monkeypatch.setattr(Machine, "package_version", lambda self, name: None)
    with pytest.raises(SystemExit, match=r"needs the package torch: install spindle\["):
        prepare.main()
    assert capsys.readouterr().out == ""
    assert not cache.root().exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_compiler_that_swallows_exceptions_ends_with_a_signal(tmp_path, number):
    code = """
import time
from engines_build import prepare
def compile_planner(say):
    print("compiles", flush=True)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
prepare.compile_planner = compile_planner
prepare.main()
"""
    config = tmp_path / "serving.json"
    config.write_text('{"target": {"engine": "tests.fakes.fake"}}')
    command = [sys.executable, "-c", code, "--config", str(config)]
    with subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"compiles\n"
        process.send_signal(number)
        try:
            assert process.wait(30) == -number
        finally:
            process.kill()


def test_a_bad_setting_ends_the_command_with_one_sentence(tmp_path):
    config = tmp_path / "serving.json"
    config.write_text(json.dumps({"target": {"engine": "torch", "model": "absent/folder"}}))
    command = [sys.executable, "-m", "engines_build.prepare", "--config", str(config)]
    done = subprocess.run(
        command, cwd=PROJECT_ROOT, env=os.environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "target.model must be a folder, got 'absent/folder'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_stage_is_a_bar_on_a_terminal_and_a_line_elsewhere(monkeypatch, terminal):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    progress.set_up_messages(verbose=False)
    with progress.stage("measuring small") as report:
        report(1.0, 4.0)
        logging.getLogger(__name__).warning("the machine is busy")
        report(3.0, 4.0)
    if terminal:
        assert re.search(r"measuring small 100% \|.*\| 00:\d\d, 00:00 left", shown.getvalue())
        assert re.search(
            r"\r\s*\rspindle: the machine is busy\n", shown.getvalue()
        )  # a line of its own
    else:
        assert shown.getvalue() == "spindle: measuring small\nspindle: the machine is busy\n"
