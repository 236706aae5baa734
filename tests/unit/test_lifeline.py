import os
import signal
import subprocess
import sys

import pytest

from backend import PROJECT_ROOT, lifeline
from backend.launcher.processes import command_line, descendants, is_running
from tests.fakes.waiting import wait_until

HOLDS_THE_LOCK = "import ctypes; ctypes.PyDLL(None).sleep(60)"
CHILDREN = {
    "another program": ["sleep", "60"],
    "python in native code": [sys.executable, "-c", HOLDS_THE_LOCK],
}
START = """
import sys, threading, time
from backend import lifeline
children = []
def start():
    children.extend(lifeline.start(sys.executable, sys.argv[1:]) for _ in range(2))
thread = threading.Thread(target=start)
thread.start()
thread.join()  # children outlive the thread that started them
time.sleep(60)
"""


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=PROJECT_ROOT)


def kill(process):
    process.kill()
    process.wait()


def running(pid, command):
    return [child for child in descendants(pid) if command_line(child) == command]


@pytest.mark.parametrize("command", CHILDREN.values(), ids=CHILDREN)
def test_all_children_die_with_a_killed_parent(command):
    parent = python(START, *command)
    wait_until(lambda: len(running(parent.pid, command)) == 2)
    children = running(parent.pid, command)
    kill(parent)
    wait_until(lambda: not any(map(is_running, children)))


SPAWN = """
import ctypes, os, time
from backend import lifeline
def hang(pipe):
    print(os.getpid(), flush=True)
    ctypes.PyDLL(None).sleep(60)
if __name__ == "__main__":
    child = lifeline.spawn(hang, (), "child")
    time.sleep(60)
"""


def test_a_spawned_child_in_native_code_dies_with_its_parent(tmp_path):
    (tmp_path / "spawn.py").write_text(SPAWN)
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "spawn.py"],
        env=os.environ | {"PYTHONPATH": str(PROJECT_ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(parent.stdout.readline())
    kill(parent)
    wait_until(lambda: not is_running(child))
    parent.stdout.close()


def test_children_of_children_die_too():
    parent = python(START, sys.executable, "-c", START, "sleep", "60")
    wait_until(lambda: len(running(parent.pid, ["sleep", "60"])) == 4)
    tree = descendants(parent.pid)
    kill(parent)
    wait_until(lambda: not any(map(is_running, tree)))


def test_a_child_runs_to_its_own_end():
    child = lifeline.start(sys.executable, ["echo", "out"], stdout=subprocess.PIPE)
    assert child.communicate() == (b"out\n", None)
    assert child.returncode == 0


def test_a_child_of_a_parent_that_is_dead_already_does_not_begin(tmp_path):
    reader, writer = os.pipe()
    os.close(writer)
    command = [sys.executable, lifeline.__file__, str(reader), "touch", str(tmp_path / "begun")]
    assert subprocess.run(command, pass_fds=(reader,), check=False).returncode == -signal.SIGKILL
    os.close(reader)
    assert not (tmp_path / "begun").exists()


def test_a_child_that_is_dropped_is_killed_and_its_pipe_closed():
    open_before = len(os.listdir("/proc/self/fd"))
    child = lifeline.start(sys.executable, ["sleep", "60"])
    pid = child.pid
    child.returncode = 0  # so that Popen does not complain
    del child
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_command_that_cannot_be_started_leaves_no_pipe():
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        lifeline.start("/nowhere/python", ["sleep", "60"])
    assert len(os.listdir("/proc/self/fd")) == open_before


STUB = f"""
import pathlib, sys, time
sys.path.insert(0, {str(PROJECT_ROOT)!r})
from backend import lifeline
lifeline.SHARED_MEMORY = pathlib.Path(sys.argv[7])
lifeline.STUCK_LIMIT_S, lifeline.WATCH_PERIOD_S = 1.0, 0.1
lifeline.watch_parent()
print("watches", flush=True)
"""
PARENT = """
import os, subprocess, sys, time
stub, region, folder, pid = sys.argv[1:]
arguments = [sys.executable, stub, region, "1", "1", pid.replace("mine", str(os.getpid()))]
print(subprocess.Popen([*arguments, "/triton", "336", folder]).pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start_stub(tmp_path):
    parents = []

    def start(code, parent_pid="mine", before=""):
        watches = "lifeline.watch_parent()"
        text = STUB.replace(watches, f"{before}\n{watches}") + code
        (tmp_path / "stub.py").write_text(text)
        (tmp_path / "region").touch()
        command = [sys.executable, "-c", PARENT, str(tmp_path / "stub.py"), "region"]
        parents.append(
            subprocess.Popen(
                [*command, str(tmp_path), parent_pid], stdout=subprocess.PIPE, text=True
            )
        )
        return parents[-1], int(parents[-1].stdout.readline())

    yield start
    for parent in parents:
        kill(parent)
        parent.stdout.close()


def test_a_stub_ends_with_its_parent_and_removes_the_memory_they_shared(start_stub, tmp_path):
    parent, stub = start_stub("time.sleep(60)")
    assert parent.stdout.readline() == "watches\n"
    kill(parent)
    wait_until(lambda: not is_running(stub))
    assert not (tmp_path / "region").exists()


def test_a_stub_that_is_stuck_in_native_code_ends(start_stub):
    _, stub = start_stub(HOLDS_THE_LOCK)
    wait_until(lambda: not is_running(stub))


def test_a_stub_ends_if_its_parent_died_before_it_could_look(start_stub, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    _, stub = start_stub("time.sleep(60)", str(dead.pid))
    wait_until(lambda: not is_running(stub))
    assert not (tmp_path / "region").exists()


def test_a_stub_ends_whose_watch_lets_the_lock_go_and_never_gets_it_again(start_stub):
    """A killed server answers no metric's call, which holds the lock while it waits."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    before = """
import threading
lets_go = threading.Event()
def unlink(path):
    lets_go.set()
    time.sleep(0.2)
pathlib.Path.unlink = unlink
"""
    _, stub = start_stub(f"lets_go.wait(); {HOLDS_THE_LOCK}", str(dead.pid), before)
    wait_until(lambda: not is_running(stub))
