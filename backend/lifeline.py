"""Every process ends with its parent, however that ends.

A child that we start reads a pipe that only its parent can write: the lifeline. It closes when the
parent has gone, and the kernel then kills the child (``F_SETSIG`` of fcntl(2)). Threads that end,
an interpreter lock that native code holds, and the exec of another program make no difference.
tritonserver starts its stubs itself and has no such pipe, so a stub watches its parent.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

WATCH_PERIOD_S = 1.0
STUCK_LIMIT_S = 10.0
"""Longest time without the interpreter lock before a stub ends."""
SHARED_MEMORY = Path("/dev/shm")


def start(python: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a child that is killed when this process ends, or drops the returned object.

    ``python`` is any interpreter, ``options`` are those of ``subprocess.Popen``.
    """
    reader, writer = os.pipe()
    try:
        wrapped = [python, "-I", "-S", __file__, str(reader), *command]
        process = subprocess.Popen(wrapped, pass_fds=(reader,), **options)
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    weakref.finalize(process, os.close, writer)
    return process


def spawn(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str
) -> tuple[BaseProcess, Connection]:
    """Start ``target(pipe, *arguments)`` in another interpreter, which is killed as those of
    ``start`` are; return the process and this end of the pipe.
    """
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(
        target=_run, args=(reader, target, child_end, *arguments), name=name, daemon=True
    )
    process.start()
    child_end.close()
    reader.close()
    weakref.finalize(process, writer.close)
    return process, parent_end


def end_group() -> None:
    """Have all processes of this one's group killed when it ends, however it ends: those that a
    library has started, too. Only the leader of a group does it.
    """
    if os.getpgrp() == os.getpid():
        command = [sys.executable, "-I", "-S", "-c", _END_GROUP, str(os.getpid())]
        subprocess.Popen(command, start_new_session=True)


_END_GROUP = """
import os, select, signal, sys
leader = int(sys.argv[1])
try:
    select.select([os.pidfd_open(leader)], [], [])
except ProcessLookupError:
    pass
try:
    os.killpg(leader, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


def _run(reader: Connection, target: Callable[..., None], *arguments: Any) -> None:
    _die_when_closed(reader.fileno())
    target(*arguments)


def _die_when_closed(reader: int) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed.

    Nothing may be written to the pipe.
    """
    fcntl.fcntl(reader, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(reader, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reader, fcntl.F_SETFL, fcntl.fcntl(reader, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([reader], [], [], 0)[0]:  # it was closed before
        die()


def die() -> NoReturn:
    """End this process at once, and with it all that it has started."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def watch_parent() -> None:
    """End this process, a stub, once its parent has gone or its interpreter is stuck."""
    region, parent = _stub_arguments()
    _limit_stuckness()  # now: the thread may never get the lock again, once it has let go of it
    threading.Thread(target=_watch, args=(parent, region), name="lifeline", daemon=True).start()


def close_memory() -> None:
    """Close this stub's shared memory, which prompts and answers pass through, to other users:
    tritonserver makes it readable, whatever the umask. Raises OSError.
    """
    region, _ = _stub_arguments()
    region.chmod(0o600)


def _stub_arguments() -> tuple[Path, int]:
    """Return the shared memory and the parent that tritonserver tells a stub."""
    arguments = Path("/proc/self/cmdline").read_text("utf-8", errors="replace").split("\0")
    return SHARED_MEMORY / arguments[2], int(arguments[5])


def _watch(parent: int, region: Path) -> NoReturn:
    """Wait for the parent's end; ``faulthandler`` ends a process that cannot.

    Calls into the server (a metric, ``is_cancelled``) hold the interpreter lock while they wait for
    an answer, and a killed server gives none.
    """
    ended = select.poll()
    with contextlib.suppress(OSError):  # without a pidfd the next look tells
        ended.register(os.pidfd_open(parent))
    while os.getppid() == parent:
        _limit_stuckness()
        ended.poll(1000 * WATCH_PERIOD_S)
    with contextlib.suppress(OSError):
        region.unlink()  # tritonserver would have done it
    die()


def _limit_stuckness() -> None:
    """Let ``faulthandler`` end this process unless this is called again soon."""
    faulthandler.dump_traceback_later(STUCK_LIMIT_S, exit=True, file=sys.__stderr__ or sys.stderr)


if __name__ == "__main__":
    _die_when_closed(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
