"""The engine process's command, and how often it is started."""

import sys
import threading
import time

import pytest

from backend import PROJECT_ROOT
from backend.triton_adapter.engine_child import EngineChild, engine_environment

LIMIT_S = 30.0


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """A child whose engine ends at once, having counted its start; its end sets the event."""
    starts, python = tmp_path / "starts", tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = backend.engine_process ]; then echo x >> {starts}; exit 3; fi\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("SPINDLE_PYTHON", str(python))
    given_up, children = threading.Event(), []

    def child(**limits):
        paths = tmp_path / "serving.json", tmp_path / "engine.sock"
        children.append(EngineChild(*paths, given_up.set, first_backoff_s=0.001, **limits))
        return children[-1]

    yield child, given_up, lambda: starts.read_text().count("x") if starts.exists() else 0
    children[0].stop(1.0)


def test_an_engine_that_never_was_ready_is_not_restarted(failing):
    make, given_up, starts = failing
    child = make()
    child.start()
    child.join(LIMIT_S)
    assert child.failed_to_start
    assert (starts(), child.take_restarts(), given_up.is_set()) == (1, 0, False)


def test_restarts_in_quick_succession_are_bounded(failing, caplog):
    make, given_up, starts = failing
    child = make()
    child.ready()
    child.start()
    assert given_up.wait(LIMIT_S)
    child.join(LIMIT_S)
    assert (starts(), child.take_restarts(), child.take_restarts()) == (5, 4, 0)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert lines == [
        *(
            f"the engine process ended with status 3: restarting in {0.001 * 2**i:g} s"
            for i in range(4)
        ),
        "the engine process ended with status 3; failure 5 in quick succession: giving up",
    ]


def test_an_engine_that_served_for_a_while_is_restarted_however_often(failing):
    make, given_up, starts = failing
    child = make(stable_s=0.0)
    child.ready()
    child.start()
    deadline_s = time.monotonic() + LIMIT_S
    while starts() < 8 and time.monotonic() < deadline_s:
        child.ready()
    assert starts() >= 8
    assert not given_up.is_set()


def test_the_policys_matrices_run_on_one_thread_unless_the_operator_says_otherwise(monkeypatch):
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert engine_environment()["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    assert engine_environment()["OPENBLAS_NUM_THREADS"] == "3"


def test_the_project_is_on_the_path_and_tritons_own_libraries_are_off_it(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/pytriton/libs:/opt/cuda")
    environment = engine_environment()
    assert environment["PYTHONPATH"] == f"{PROJECT_ROOT}:/elsewhere"
    assert environment["LD_LIBRARY_PATH"] == "/opt/cuda"
