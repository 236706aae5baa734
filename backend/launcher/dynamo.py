"""The Dynamo worker's process next to tritonserver, in an environment of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import IO

from backend.config import ServingConfig
from backend.launcher.names import model_names
from backend.launcher.settings import LaunchError, Settings
from backend.launcher.side_process import SideProcess
from backend.sequence import BLOCK_TOKENS
from backend.triton_adapter.paths import PROJECT_ROOT

DEFAULT_PYTHON = PROJECT_ROOT / ".venv-fleet" / "bin" / "python"
LEAVE_S = 1.0
"""Seconds in which Dynamo's front ends learn that a worker takes no more requests."""
STOP_LIMIT_S = 10.0
"""Longest time for a worker to end once its server has ended, in seconds."""


class DynamoWorker(SideProcess):
    """Registers the server with Dynamo from ``start`` to ``leave``."""

    def __init__(
        self,
        settings: Settings,
        config: ServingConfig,
        folder: Path,
        output: IO[bytes] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Run it in a folder that has the package ``backend``. Raises LaunchError."""
        if not config.target.model:
            raise LaunchError("--dynamo needs a model with a tokenizer, got the fake engine")
        if not config.limits.kv_cache_tokens:
            raise LaunchError(
                "--dynamo announces the KV before the engine is there: set limits.kv_cache_tokens, "
                "such as 32768"
            )
        python = environment.get("DYNAMO_PYTHON") or str(DEFAULT_PYTHON)
        if not os.access(python, os.X_OK):
            raise LaunchError(
                f"--dynamo needs a Python with ai-dynamo, which {python} lacks: make fleet, or "
                "DYNAMO_PYTHON (docs/how-to/fleet.md)"
            )
        from backend.model_folders import model_path  # it imports the policy's compiler

        model, limits = model_path(config.target), config.limits
        options = {
            "address": settings.at(settings.grpc_port),
            "folder": model,
            "name": model_names(settings, config)[0],
            "namespace": settings.dynamo_namespace,
            "block-tokens": BLOCK_TOKENS,
            "kv-blocks": limits.kv_cache_tokens // BLOCK_TOKENS,
            "max-requests": limits.max_active_requests,
            "drain-s": limits.drain_s,
            "kv-events": settings.kv_events.replace("*", "127.0.0.1"),
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        super().__init__(
            "the Dynamo worker",
            [python, "-m", "backend.fleet", *arguments],
            folder=folder,
            environment={"DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": str(LEAVE_S)},
            stop_limit_s=STOP_LIMIT_S,
            output=output,
        )

    def leave(self) -> None:
        """Take no more requests; those in flight may end. ``stop`` waits for that."""
        self.signal(signal.SIGTERM)
        sleep(LEAVE_S)


def import_folder(folder: Path) -> Path:
    """Return a folder in ``folder`` that has the package ``backend`` and no others: where this is
    installed its neighbours are of another environment than the worker's.
    """
    made = folder / "worker"
    made.mkdir()
    (made / "backend").symlink_to(PROJECT_ROOT / "backend")
    return made
