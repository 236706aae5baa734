"""The set-up that every stub process needs first: its log, private memory, and an end with its
parent.
"""

from __future__ import annotations

from backend import lifeline
from backend.config import LogConfig, load_config
from backend.log_format import set_up_logging
from backend.triton_adapter.paths import config_path


def set_up_stub(args: dict[str, str]) -> None:
    """Have this stub end with tritonserver, keep its texts from other users, and send its log
    lines to the server's log, as ``serving.json`` says. Raises ConfigError, OSError.
    """
    lifeline.watch_parent()
    lifeline.close_memory()
    path = config_path(args)
    log = load_config(path, plans=False).log if path.exists() else LogConfig()
    set_up_logging(args["model_name"], log)
