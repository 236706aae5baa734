import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backend import PROJECT_ROOT
from backend.config import parse_config
from backend.launcher import processes, serving
from backend.launcher import run_folder as run_folder_module
from backend.launcher import server as server_module
from backend.launcher.checks import (
    check_machine,
    check_ports,
    check_temporary,
    python_library_folder,
    raise_open_files,
)
from backend.launcher.environment import (
    DEFAULT_CONFIG,
    LaunchError,
    read_settings,
)
from backend.launcher.output import open_log, reasons
from backend.launcher.overrides import Overrides, folder_of
from backend.launcher.processes import (
    command_line,
    descendants,
    end,
    is_running,
    kill_all,
)
from backend.launcher.processes import run as run_command
from backend.launcher.run_folder import (
    run_folder,
    write_backend,
    write_model_repository,
)
from backend.launcher.server import StopSignal, trace_flags
from backend.triton_adapter.fields import MODELS
from backend.triton_adapter.stub import config_path, socket_path
from tests.fakes.machine import FakeMachine
from tests.fakes.waiting import wait_until
from tests.unit.test_convert import checkpoint, write_gguf


def test_the_defaults_are_triton_s_ports_on_loopback():
    settings = read_settings({"HTTP_PORT": ""})
    assert (settings.bind, settings.http_port, settings.grpc_port, settings.metrics_port) == (
        "127.0.0.1",
        8000,
        8001,
        8002,
    )
    assert (settings.openai_port, read_settings({"OPENAI_PORT": "0"}).openai_port) == (9000, 0)
    assert settings.config == DEFAULT_CONFIG


def test_traces_go_nowhere_unless_asked_for_and_then_at_triton_s_rate():
    settings = read_settings({"TRACE_URL": "", "TRACE_RATE": ""})
    assert (settings.trace_url, trace_flags(settings)) == ("", [])
    url = "http://collector:4318/v1/traces"
    assert (
        read_settings({"TRACE_URL": url}).trace_url,
        read_settings({"TRACE_URL": url}).trace_rate,
    ) == (url, 1000)
    assert read_settings({"TRACE_URL": url, "TRACE_RATE": "0"}).trace_rate == 0


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"TRACE_URL": "collector:4318"}, "TRACE_URL .*'collector:4318'"),
        ({"TRACE_URL": "http://collector:4318"}, "TRACE_URL .*/v1/traces.*'http://collector:4318'"),
        ({"TRACE_URL": "http://c/v1/traces", "TRACE_RATE": "-1"}, "TRACE_RATE .*'-1'"),
        ({"TRACE_RATE": "5"}, "TRACE_RATE 5 has no effect without TRACE_URL"),
    ],
)
def test_trace_settings_that_cannot_work_are_refused(variables, words):
    with pytest.raises(LaunchError, match=words):
        read_settings(variables)


def test_an_open_service_is_reached_by_loopback():
    assert read_settings({"BIND": "0.0.0.0"}).client_host == "127.0.0.1"
    assert read_settings({"BIND": "127.0.0.2"}).client_host == "127.0.0.2"


@pytest.mark.parametrize("value", ["0", "65536", "-1", "http", "80.5"])
def test_a_bad_port_is_refused_by_name_and_value(value):
    with pytest.raises(LaunchError, match=f"GRPC_PORT .*{value}"):
        read_settings({"GRPC_PORT": value})


def test_equal_ports_are_refused():
    with pytest.raises(LaunchError, match="must differ, got 8000, 8001, 8000 and 9000"):
        read_settings({"METRICS_PORT": "8000"})


def test_a_port_in_use_is_refused_by_name():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f"grpc port {port} cannot be used on 127.0.0.1: .*, by process {os.getpid()} .py"
        settings = read_settings({"GRPC_PORT": str(port), "HTTP_PORT": "1", "METRICS_PORT": "2"})
        with pytest.raises(LaunchError, match=words):
            check_ports(settings)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (FakeMachine(os_and_cpu=("Linux", "aarch64")), "x86-64, this is Linux on aarch64"),
        (FakeMachine(glibc_version="2.31"), "glibc 2.35 or newer .* has 2.31"),
        (FakeMachine(glibc_version="unknown"), "has unknown"),
        (FakeMachine(has_python_library=False), r"libpython3\.\d+\.so\.1\.0 is missing"),
        (FakeMachine(folder=Path("/tmp/a b")), "TMPDIR '/tmp/a b' cannot hold .*stubs"),
        (FakeMachine(folder=Path("/tmp/é")), "TMPDIR '/tmp/é' cannot hold .*stubs"),
        (FakeMachine(folder=Path("/tmp/$HOME")), r"TMPDIR '/tmp/\$HOME' cannot hold .*stubs"),
        (FakeMachine(folder=Path("/tmp/it's")), "TMPDIR .* cannot hold .*stubs"),
        (FakeMachine(runs_no_programs=True), "TMPDIR .* is mounted noexec"),
        (FakeMachine(most_open_files=64), r"open files \(ulimit -n\) is 64, .* 256 or more"),
    ],
)
def test_an_unfit_machine_is_refused_in_a_sentence(machine, words):
    with pytest.raises(LaunchError, match=words):
        check_machine(machine)


def test_a_folder_with_usual_letters_holds_stubs():
    for folder in ("/tmp", "/var/tmp/user_1/a.b-c", "/run/user/1000/t+=,@%:~#1"):
        machine = FakeMachine(folder=Path(folder))
        machine.is_noexec = lambda folder: False
        assert folder in check_temporary(machine)


def test_as_many_files_are_opened_as_are_allowed():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
        raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(before[1], 65_536), before[1])
        raise_open_files(FakeMachine(most_open_files=1 << 30))  # enough: it stays
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_shared_library_of_this_python_is_found():
    assert python_library_folder().is_dir()


def test_the_run_folder_holds_a_complete_repository_with_the_settings(tmp_path):
    config = parse_config(
        {
            "target": {"engine": "tests.fakes.fake"},
            "triton": {"decoupled_mode": False, "max_batch_size": 3},
        }
    )
    repository = write_model_repository(tmp_path, config)
    assert sorted(path.name for path in repository.iterdir()) == sorted(
        model.name for model in MODELS
    )
    assert all((path / "1" / "model.py").is_file() for path in repository.iterdir())
    text = (repository / "ensemble" / "config.pbtxt").read_text()
    assert "decoupled: false" in text
    assert "max_batch_size: 3" in text
    python_backend = write_backend(tmp_path) / "python"
    assert {path.name for path in python_backend.iterdir()} >= {
        "libtriton_python.so",
        "triton_python_backend_stub",
    }
    assert not any(path.is_symlink() for path in python_backend.iterdir())


def test_a_folder_too_long_for_a_socket_is_refused_by_name():
    folder = Path("/tmp") / ("long" * 25) / "spindle-run-12345678"
    with pytest.raises(LaunchError, match=rf"TMPDIR {folder.parent} is 31 bytes too long"):
        run_folder_module.socket_in(folder)
    assert run_folder_module.socket_in(Path("/tmp/run")) == Path("/tmp/run/engine.sock")


def test_a_run_folder_goes_with_its_shared_memory(tmp_path):
    with run_folder(FakeMachine(folder=tmp_path)) as folder:
        (folder / "file").write_text("")
        region, other = tmp_path / f"{folder.name}_17_ensemble", tmp_path / "someone_else"
        region.touch()
        other.touch()
    assert list(tmp_path.iterdir()) == [other]


def test_a_leftover_folder_of_an_odd_name_takes_no_other_service_s_memory_along(tmp_path):
    (tmp_path / "spindle-run-*").mkdir()
    region = tmp_path / "spindle-run-alive_17_ensemble"
    region.touch()
    with run_folder(FakeMachine(folder=tmp_path)):
        assert region.exists()
        assert not (tmp_path / "spindle-run-*").exists()


def test_another_user_s_folder_is_neither_taken_nor_deleted(tmp_path, monkeypatch):
    theirs = tmp_path / "spindle-run-theirs"
    theirs.mkdir()
    number, seen = theirs.stat().st_ino, os.fstat

    def fstat(handle):
        facts = seen(handle)
        is_theirs = facts.st_ino == number
        return os.stat_result((*facts[:4], facts.st_uid + is_theirs, *facts[5:]))

    monkeypatch.setattr(run_folder_module.os, "fstat", fstat)
    with run_folder(FakeMachine(folder=tmp_path)) as folder:
        assert folder != theirs
        assert theirs.is_dir()


def test_what_a_killed_launcher_left_goes_at_the_next_start_and_what_is_in_use_stays(tmp_path):
    code = "import time; from backend.launcher.run_folder import run_folder; made = run_folder()"
    command = [sys.executable, "-c", f"{code}; print(made.__enter__(), flush=True); time.sleep(60)"]
    options = {
        "cwd": PROJECT_ROOT,
        "env": {**os.environ, "TMPDIR": str(tmp_path)},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    first, second = (subprocess.Popen(command, **options) for _ in range(2))
    killed, alive = (Path(process.stdout.readline().strip()) for process in (first, second))
    region = tmp_path / f"{killed.name}_17_ensemble"
    region.touch()
    first.kill()
    first.wait()
    with run_folder(FakeMachine(folder=tmp_path)) as folder:
        assert sorted(path for path in tmp_path.iterdir()) == sorted([alive, folder])
    second.kill()
    second.wait()


def test_all_models_of_a_repository_agree_on_a_private_socket(monkeypatch, tmp_path):
    monkeypatch.delenv("SPINDLE_SOCKET", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    paths = {
        socket_path({"model_repository": f"/srv/{repository}/{model}"})
        for repository in "ab"
        for model in ("ensemble", "spindle")
    }
    assert len(paths) == 2
    assert (next(iter(paths)).parent.stat().st_mode & 0o777) == 0o700
    next(iter(paths)).parent.chmod(0o755)
    with pytest.raises(PermissionError, match="closed to others"):
        socket_path({"model_repository": "/srv/a/spindle"})


def test_the_configuration_lies_in_the_version_folder_unless_named(monkeypatch):
    args = {"model_repository": "/srv/a/spindle", "model_version": "1"}
    monkeypatch.delenv("SPINDLE_CONFIG", raising=False)
    assert config_path(args) == Path("/srv/a/spindle/1/serving.json")
    monkeypatch.setenv("SPINDLE_CONFIG", "/etc/serving.json")
    assert config_path(args) == Path("/etc/serving.json")


def sleepers(pid):
    return [child for child in descendants(pid) if command_line(child) == ["sleep", "60"]]


def test_the_process_tree_is_found_and_killed():
    parent = subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60 & wait"])
    wait_until(lambda: len(sleepers(parent.pid)) == 2)
    children = descendants(parent.pid)
    assert kill_all([parent.pid, *children]) == []
    assert not is_running(parent.pid)  # a zombie does not run
    parent.wait()


def test_a_child_that_takes_no_notice_is_killed():
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert end(child, 0.01) == -signal.SIGKILL


def test_a_command_ends_when_the_service_is_to_stop():
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    assert run_command([sys.executable, "-c", "import time; time.sleep(60)"], stop) != 0
    assert run_command([sys.executable, "-c", "raise SystemExit(3)"], threading.Event()) == 3


class FakeEngine:
    """Answers the launcher's questions for health: requests run until the engine is hurried."""

    def __init__(self, monkeypatch, stop, *, second_after):
        self.signals = []
        self._stop, self._second_after, self._asked = stop, second_after, 0
        monkeypatch.setattr(server_module, "_health", self.health)
        monkeypatch.setattr(
            server_module.os, "kill", lambda pid, number: self.signals.append(number)
        )

    def health(self, _settings):
        self._asked += 1
        if self._asked == self._second_after:
            self._stop.take_signal()
        left = 0 if len(self.signals) > 1 or self._asked > 5 else 1
        return {"pid": 1, "unanswered": left, "drains_for_s": 30.0}


@pytest.mark.parametrize(("second_after", "signals"), [(3, 2), (0, 1)])
def test_a_second_signal_has_the_engine_end_what_runs(monkeypatch, capsys, second_after, signals):
    stop = StopSignal()
    stop.take_signal()
    assert stop.is_set()
    assert not stop.at_once.is_set()
    engine = FakeEngine(monkeypatch, stop, second_after=second_after)
    server_module.drain(read_settings({}), stop.at_once)
    assert engine.signals == [signal.SIGUSR1] * signals
    assert ("at once" in capsys.readouterr().out) == (signals == 2)


class FakeServer:
    """Plays a script: each start is (becomes ready, the trouble it then has); the last one runs
    until it is asked to stop.
    """

    def __init__(self, script, stop):
        self._script = list(script)
        self._stop = stop
        self.calls = []

    def start(self):
        self.calls.append("start")
        self._ready, self._trouble = self._script.pop(0)
        self._seen_ready = False

    def is_ready(self):
        self._seen_ready = self._ready
        if self._ready and self._trouble is None:
            self._stop.set()
        return self._ready

    def trouble(self):
        return self._trouble if self._seen_ready or not self._ready else None

    def waits_for(self):
        return "tritonserver does not answer on 127.0.0.1:8000"

    def has_crashed(self):
        return str(self._trouble).endswith("status -6")

    def stop(self):
        self.calls.append("stop")

    def kill(self):
        self.calls.append("kill")


class Hurry(threading.Event):
    """An event whose waits are at most a millisecond long."""

    def wait(self, timeout=None):
        return super().wait(min(timeout, 0.001))


@pytest.fixture
def run():
    def supervise(script):
        stop, said, ready = Hurry(), [], []
        server = FakeServer(script, stop)
        try:
            serving.supervise(server, stop, ready.append, said.append)
        finally:
            supervise.said, supervise.calls, supervise.ready = said, server.calls, ready
        return server.calls

    return supervise


def test_why_a_start_failed_is_found_in_the_log(tmp_path):
    triton = [
        "I1123 01:10:41.893 1 server.cc:674] ",
        "+-------+---------+",
        "| Model | Status  |",
        "Error: could not bind",
    ]
    engine = "2026-11-23 01:10:41 engine ERROR __main__: cannot start: no room"
    log = tmp_path / "log"
    log.write_text("\n".join(triton))
    assert reasons(log) == ["Error: could not bind"]
    log.write_text("\n".join([triton[0], engine, *triton[1:]]))
    assert reasons(log) == [engine]
    prefix = "(EngineCore pid=7) ERROR 11-28 20:58:30 [core.py:1510]"
    vllm = [f'{prefix}   File "core.py", line 1', f"{prefix} ValueError: no memory for the cache"]
    log.write_text("\n".join([triton[0], *vllm, engine, *triton[1:]]))
    assert reasons(log) == [vllm[1], engine]


def test_a_log_is_started_again_and_the_last_one_kept(tmp_path):
    for text in (b"first", b"second", b"third"):
        with open_log(tmp_path / "logs" / "serve.log") as log:
            log.write(text)
    kept = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert kept == {"serve.log": "third", "serve.before.log": "second"}


def test_a_model_without_drafts_is_said_to_have_suffix_alone(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    overrides = Overrides(model=str(tmp_path / "mine"))
    settings, config = serving.fill_run_folder(read_settings({}), overrides, tmp_path)
    assert settings.config == tmp_path / "serving.json"
    assert [draft.name for draft in config.drafts] == ["suffix"]
    assert not capsys.readouterr().out  # the model may be missing
    serving.report_only_draft(overrides, config)
    assert "suffix is the only draft" in capsys.readouterr().out


def test_a_gguf_file_is_converted_once_and_other_models_are_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    stop = threading.Event()
    file = tmp_path / "my.gguf"
    assert folder_of(str(file), stop) == str(file)  # there is none
    file.write_bytes(b"no GGUF")
    with pytest.raises(LaunchError, match=r"my\.gguf was not converted"):
        folder_of(str(file), stop)
    weights = checkpoint()
    write_gguf(file, weights)
    folder = Path(folder_of(str(file), stop))
    assert (folder / "model.safetensors").is_file()
    (folder / "mark").touch()
    assert folder_of(str(file), stop) == str(folder)
    assert (folder / "mark").exists()
    assert folder_of(str(folder), stop) == str(folder)
    link = tmp_path / "snapshots" / "linked.gguf"  # a hub's cache calls the file itself by its hash
    link.parent.mkdir()
    link.symlink_to(file.rename(tmp_path / "0123abcd"))
    assert Path(folder_of(str(link), stop)).name.startswith("linked-")


def test_a_log_that_grows_long_is_moved_and_begun_again_under_its_writers(tmp_path):
    path, before = tmp_path / "serve.log", tmp_path / "serve.before.log"
    with open_log(path, most_bytes=9, check_period_s=0.01) as log:
        log.write(b"more than nine")
        wait_until(lambda: not path.stat().st_size)
        log.write(b"new")
        assert (before.read_text(), path.read_text()) == ("more than nine", "new")


def test_a_log_that_cannot_be_written_is_named_with_the_way_out(tmp_path):
    (tmp_path / "file").touch()
    words = r"the log .*file/log cannot be written: .* --verbose prints it instead"
    with pytest.raises(LaunchError, match=words), open_log(tmp_path / "file" / "log"):
        pass


def test_the_example_says_what_speculation_saved():
    reply = {
        "text_output": " four",
        "num_output_tokens": 32,
        "total_draft_tokens": 27,
        "total_accepted_draft_tokens": 26,
    }
    assert serving.summarize(reply) == [
        'its answer: " four"',
        "26 of 27 proposed tokens were accepted: 6 steps instead of 32",
    ]
    reply |= {"total_draft_tokens": 0, "total_accepted_draft_tokens": 0}
    assert serving.summarize(reply) == ['its answer: " four"']


def test_a_server_in_trouble_is_killed_and_started_again(run):
    assert run([(True, "a stub has died"), (True, None)]) == ["start", "kill", "start", "stop"]
    assert any("a stub has died: restarting" in line for line in run.said)
    assert len(run.ready) == 2


def test_a_server_that_never_was_ready_is_an_error(run):
    with pytest.raises(LaunchError, match="ended with status 1 before it was ready"):
        run([(False, "tritonserver ended with status 1")])
    assert run.calls == ["start", "kill"]


def test_a_first_start_that_crashes_is_repeated_once(run):
    crash = (False, "tritonserver ended with status -6")
    assert run([crash, (True, None)]) == ["start", "kill", "start", "stop"]
    assert any("ended with status -6: restarting" in line for line in run.said)
    with pytest.raises(LaunchError, match="ended with status -6 before it was ready"):
        run([crash, crash])
    assert run.calls == ["start", "kill"] * 2


def test_a_start_that_goes_on_says_what_it_waits_for(run, monkeypatch):
    monkeypatch.setattr(serving, "REPORT_PERIOD_S", 0.01)
    monkeypatch.setattr(serving, "START_LIMIT_S", 0.2)
    waits = r"tritonserver does not answer on 127\.0\.0\.1:8000"
    with pytest.raises(LaunchError, match=rf"was not ready after 0 s \({waits}\)"):
        run([(False, None)])
    assert len(run.said) > 2
    assert all(re.fullmatch(rf"still starting after 0 s: {waits}", line) for line in run.said)


def test_a_command_that_goes_on_is_reported(monkeypatch):
    monkeypatch.setattr(processes, "RUN_REPORT_S", 0.05)
    reported, command = [], [sys.executable, "-c", "import time; time.sleep(0.5)"]
    assert run_command(command, threading.Event(), reported.append) == 0
    assert len(reported) > 1
    assert sorted(reported) == reported


def test_a_crash_loop_is_given_up(run):
    with pytest.raises(LaunchError, match="failure 5 in quick succession: giving up"):
        run([(True, "it died")] * 9)
    assert run.calls == ["start", "kill"] * 5
