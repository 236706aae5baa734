"""The engine process (``python -m backend.engine_process``): load, warm up, serve the socket until
SIGTERM. After SIGUSR1 it refuses new requests; a second one ends the others at once.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from types import FrameType

from backend.app import App, build
from backend.config import LogConfig, ServingConfig, load_config, own_folders
from backend.core.session import Delta
from backend.ipc.messages import SWITCHES_SUFFIX
from backend.ipc.server import Server
from backend.log_format import set_up_logging
from backend.ops.stats import Usage
from backend.request import ErrorCode, FinishReason, GenerationRequest
from backend.storage import cache

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 24


class _WarmUpSink:
    """Takes the warm-up request's replies."""

    cancelled = False

    def __init__(self) -> None:
        self.failure: str | None = None

    def chunk(self, delta: Delta) -> None:
        """Ignore a delta."""

    def final(self, delta: Delta, reason: FinishReason, usage: Usage) -> None:
        """Ignore the text."""

    def error(self, code: ErrorCode, message: str) -> None:
        """Keep the message."""
        self.failure = f"{code.value}: {message}"


def warm_up(app: App) -> None:
    """Serve a greedy and a sampled request, so that the first client pays for no allocation. Raises
    RuntimeError when one fails.
    """
    for temperature in (0.0, 0.8):
        sink = _WarmUpSink()
        request = GenerationRequest(
            "Spindle warms up. Spindle warms up.",
            WARM_UP_TOKENS,
            temperature=temperature,
            end_id=-1,
            seed=0,
            remember=False,
        )
        app.loop.submit(app.session(request, sink))
        while app.loop.step():
            pass
        if sink.failure is not None:
            raise RuntimeError(f"warm-up failed: {sink.failure}")
    app.stats.drain()


def spare_the_collector() -> None:
    """Let Python's garbage collector pass over what is there to stay, and look less often at what
    is new: with 128 requests in flight it took half of the host's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def policy_folders(config: ServingConfig, file: Path) -> list[str]:
    """Return the last folders on sys.path where a user's policy may be; none without such a policy,
    so that no other module is found there.
    """
    return own_folders(file.absolute().parent) if config.policy.is_custom else []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine process; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    arguments = parser.parse_args(argv)
    set_up_logging("engine", LogConfig())
    # read when torch loads: spinning threads starve the stubs of their cores
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # a terminal's Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started = perf_counter()
    try:
        config = load_config(arguments.config)
        sys.path += policy_folders(config, arguments.config)
        set_up_logging("engine", config.log)
        app = build(config)
        app.switches.keep_in(arguments.socket.with_suffix(SWITCHES_SUFFIX))
        warm_up(app)
        app.learned_state.restore()
        server = Server(app, arguments.socket, arguments.config)
        spare_the_collector()
    except (cache.CacheError, OSError, ValueError, RuntimeError) as error:
        logger.error("cannot start: %s", error)
        return 1

    def drain(number: int, _frame: FrameType | None) -> None:
        is_second = number == signal.SIGUSR1 and server.drains
        server.drain(0.0 if is_second else config.limits.drain_s, ends=number == signal.SIGTERM)

    signal.signal(signal.SIGTERM, drain)
    signal.signal(signal.SIGUSR1, drain)
    app.learned_state.start()
    logger.info("ready after %.1f s", perf_counter() - started)
    if not server.serve():
        logger.error("the loop ended: exiting, so that this process is restarted")
        return 1
    app.learned_state.close()
    app.close()
    return 0
