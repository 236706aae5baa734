"""One thread a process: two workers of pytest and the engines they start share the cores. Without a
GPU, Triton's kernels run under its interpreter, which must be chosen before Triton is imported. The
policy's loops are compiled once, before the workers start. Examples of hypothesis have no deadline,
which a busy machine would miss. A job in the background of a script ignores Ctrl-C, and would pass
that on to the processes that tests interrupt.
"""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parent.parent / "build" / "numba"))
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
if find_spec("hypothesis"):  # not in vLLM's environment
    from hypothesis import settings

    settings.register_profile("spindle", deadline=None)
    settings.load_profile("spindle")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        from policy.loops import __main__  # noqa: F401
