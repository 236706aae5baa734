"""``python -m backend.triton_adapter.tied PARENT COMMAND...``: become a command that the kernel
kills when its parent dies.

"Parent" is the very thread that started it (prctl(2), PR_SET_PDEATHSIG), so that thread must live
as long as the command is wanted. Doing it in a process of its own spares the threaded parent a
``preexec_fn``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(python: str, command: Sequence[str]) -> list[str]:
    """Return the command line that runs ``command`` tied to the calling thread."""
    return [python, "-m", "backend.triton_adapter.tied", str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Tie this process to its parent and become the command."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it died before it could be tied to
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
