"""What every stub process of ours needs first: its log, and an end when its interpreter is
stuck.
"""

from __future__ import annotations

import faulthandler
import sys
import threading

from backend.config import LogConfig, load_config
from backend.log_format import set_up_logging
from backend.triton_adapter.paths import config_path

STUCK_LIMIT_S = 10.0
HEARTBEAT_S = 1.0


def set_up_stub(args: dict[str, str]) -> None:
    """Send this stub's log lines to the server's log, as ``serving.json`` says, and start its
    watchdog. Raises ConfigError.
    """
    path = config_path(args)
    set_up_logging(args["model_name"], load_config(path).log if path.exists() else LogConfig())
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()


def _beat() -> None:
    """Put off the stub's end again and again; ``faulthandler`` ends it from a thread that needs no
    interpreter lock.

    Calls into the server (a metric, ``is_cancelled``) hold the interpreter lock while they wait for
    its answer, for ever when the server was killed in the middle of one: no Python code could then
    notice that the parent has gone.
    """
    never = threading.Event()
    while True:
        faulthandler.dump_traceback_later(
            STUCK_LIMIT_S, exit=True, file=sys.__stderr__ or sys.stderr
        )
        never.wait(HEARTBEAT_S)
