"""The composition of the launcher: check, prepare, start, watch, clean up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO

from backend.config import ServingConfig
from backend.launcher import example
from backend.launcher.checks import OPEN_TRITON, check_machine, check_ports, raise_open_files
from backend.launcher.draining import Stop
from backend.launcher.dynamo import DynamoWorker, import_folder
from backend.launcher.front_end import FrontEnd
from backend.launcher.gguf import folder_of
from backend.launcher.log_file import log_path, open_log, reasons
from backend.launcher.names import model_names
from backend.launcher.overrides import DEFAULT_DRAFT, Overrides, write_overridden
from backend.launcher.processes import run
from backend.launcher.run_folder import (
    run_folder,
    socket_in,
    write_backend,
    write_model_repository,
)
from backend.launcher.say import give_up_unwritten, say
from backend.launcher.server import TritonServer
from backend.launcher.settings import LaunchError, Settings, policy_path, read_settings
from backend.launcher.supervisor import supervise
from backend.settings import ConfigError
from backend.storage import cache
from backend.triton_adapter.admin_secret import ensure_secret

FRONT_END_LIMIT_S = 30.0


class StoppedError(Exception):
    """The service is not to start, and the caller knows why."""


def serve(overrides: Overrides, arguments: list[str], *, verbose: bool) -> int:
    """Serve until a signal ends it; ``arguments`` are tritonserver's. Returns the exit status."""
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop.signalled)
    ensure_secret()
    os.environ["SPINDLE_CACHE"] = str(cache.root().absolute())  # others have another current folder
    status = 0
    try:
        _run(stop, overrides, arguments, verbose)
    except StoppedError:
        status = 0 if stop.is_set() else 1
    except (LaunchError, ConfigError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        status = 1
    if stop.is_set():
        say("stopped")
    give_up_unwritten()
    return status


def _run(stop: Stop, overrides: Overrides, arguments: list[str], verbose: bool) -> None:
    """Serve until ``stop`` is set. Raises StoppedError, LaunchError or ConfigError."""
    settings = read_settings(os.environ)
    os.environ["SPINDLE_POLICY_PATH"] = policy_path(settings)
    check_machine()
    check_ports(settings)
    raise_open_files()
    if overrides.model and (model := folder_of(overrides.model, stop)) != overrides.model:
        names = settings.model_names or (Path(overrides.model).stem,)  # the folder's has a hash
        settings = replace(settings, model_names=names)
        overrides = replace(overrides, model=model)
    if stop.is_set():
        raise StoppedError
    with run_folder() as folder:
        settings, config = fill_run_folder(settings, overrides, folder)
        _prepare(settings, config, stop, verbose)
        log = None if verbose else log_path(settings)
        with open_log(log) if log else contextlib.nullcontext() as output:
            try:
                _supervise(settings, config, folder, arguments, stop, output)
            except LaunchError as error:
                if log is None or stop.is_set():
                    raise
                lines = [f"{error}. Its log says:", *reasons(log), f"All of it: {log}"]
                raise LaunchError("\n".join(lines)) from None


def fill_run_folder(
    settings: Settings,
    overrides: Overrides,
    folder: Path,
) -> tuple[Settings, ServingConfig]:
    """Fill the run folder; return the settings and configuration of what is in it. Raises
    LaunchError, ConfigError.
    """
    try:
        config, path = write_overridden(settings.config, overrides, folder)
        socket_in(folder)
        write_backend(folder)
        write_model_repository(folder, config)
    except OSError as error:
        text = f"the run folder {folder} cannot be written: {error.strerror}"
        raise LaunchError(f"{text}. TMPDIR chooses another place") from error
    if settings.dynamo_namespace and not settings.kv_events:
        settings = replace(settings, kv_events=f"ipc://{folder}/kv-events")
    names = [draft.name for draft in config.drafts]
    if overrides.model and not overrides.drafts and names == [DEFAULT_DRAFT]:
        text = "the shipped ones fit only the shipped model (see --drafts)"
        say(f"{DEFAULT_DRAFT} is the only draft: {text}")
    return replace(settings, config=path), config


def _prepare(
    settings: Settings,
    config: ServingConfig,
    stop: threading.Event,
    verbose: bool,
) -> None:
    """Make what a configuration needs, where it is missing. Raises StoppedError, LaunchError."""
    if not any(engine.kind.checkpoint for engine in (config.target, *config.drafts)):
        return
    command = [sys.executable, "-m", "engines_build.prepare", "--config", str(settings.config)]
    if verbose:
        command.append("--verbose")
    status = run(command, stop)
    if stop.is_set() or status == 1:  # it has said why
        raise StoppedError
    if status != 0:
        text = f"preparing the models ended with status {status}"
        raise LaunchError(f"{text}: the lines above say why")


def _supervise(
    settings: Settings,
    config: ServingConfig,
    folder: Path,
    arguments: list[str],
    stop: Stop,
    output: IO[bytes] | None,
) -> None:
    say("starting" if output is None else f"starting; the log is {output.name}")
    server = TritonServer(settings, folder, arguments, stop, output)
    front_end = FrontEnd(settings, output)
    worker = None
    if settings.dynamo_namespace:
        worker = DynamoWorker(settings, config, import_folder(folder), output)
    starts = 0

    def on_ready(start_s: float) -> None:
        nonlocal starts
        starts += 1
        front_end.start()
        if worker is not None:
            worker.start()
        if settings.openai_port and starts == 1:
            front_end.wait(stop, FRONT_END_LIMIT_S)
        announce(settings, config, start_s, front_end, first=starts == 1)

    def on_stop(text: str) -> None:
        say(text)
        if stop.is_set():
            front_end.refuse()
        if worker is not None:
            worker.leave() if stop.is_set() else worker.stop()

    try:
        supervise(server, stop, on_ready, on_stop)
    finally:
        front_end.stop()
        server.kill()
        if worker is not None:
            worker.stop()


def announce(
    settings: Settings,
    config: ServingConfig,
    start_s: float,
    front_end: FrontEnd,
    *,
    first: bool,
) -> None:
    """Say that the service answers and how to ask it; at its ``first`` start show an answer."""
    target = ", ".join(model_names(settings, config))
    if config.target.model:
        target += f" in {config.target.dtype}"
    drafts = ", ".join(draft.name for draft in config.drafts) or "none"
    say(f"ready after {start_s:.1f} s: {target}, drafts {drafts}")
    http, grpc, metrics, _ = settings.ports
    say(f"HTTP {http}, gRPC {grpc}, metrics {metrics} on {settings.bind}")
    if settings.is_open:
        say(f"warning: BIND {settings.bind} {OPEN_TRITON}")
    if settings.openai_port:
        late = "" if front_end.listens else " (still starting)"
        say(f"OpenAI API {front_end.url}/v1, status page {front_end.url}{late}")
    if settings.dynamo_namespace:
        say(f"Dynamo worker in the namespace {settings.dynamo_namespace}")
    shown = example.results(settings) if first and config.target.kind.model else []
    say(f"try: {example.command(settings)}")
    for line in shown:
        say(line)
