"""``spindle serve``: check, prepare, start, watch, clean up. It starts a service that died or
hangs again, until that is pointless.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import IO, Any

from backend import PROJECT_ROOT
from backend.checked_settings import ConfigError
from backend.config import ServingConfig
from backend.launcher.checks import OPEN_TRITON, check_machine, check_ports, raise_open_files
from backend.launcher.environment import (
    LaunchError,
    LaunchSettings,
    model_names,
    policy_path,
    read_settings,
)
from backend.launcher.output import give_up_unwritten, log_path, open_log, reasons, say
from backend.launcher.overrides import DEFAULT_DRAFT, Overrides, folder_of, write_overridden
from backend.launcher.processes import DynamoWorker, FrontEndProcess, import_folder, run
from backend.launcher.run_folder import (
    run_folder,
    socket_in,
    write_backend,
    write_model_repository,
)
from backend.launcher.server import StopSignal, TritonServer
from backend.loopback import open_url
from backend.storage import cache
from backend.triton_adapter.admin_secret import ensure_secret

WATCH_PERIOD_S = 0.5
START_LIMIT_S = 600.0
REPORT_PERIOD_S = 5.0
"""Seconds between two lines about a start that goes on."""
STABLE_S = 60.0
"""A service that ran this long has not failed quickly."""
QUICK_FAILURES = 5
FIRST_BACKOFF_S = 0.5
FRONT_END_LIMIT_S = 30.0
EXAMPLE: dict[str, Any] = {
    "text_input": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,",
    "max_tokens": 32,
    "temperature": 0,
    "exclude_input_in_output": True,
    "return_num_output_tokens": True,
    "return_perf_metrics": True,
}
EXAMPLE_LIMIT_S = 60.0


class StoppedError(Exception):
    """The service is not to start, and the caller knows why."""


def serve(overrides: Overrides, arguments: list[str], *, verbose: bool) -> int:
    """Serve until a signal ends it; ``arguments`` are tritonserver's. Returns the exit status."""
    stop = StopSignal()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop.take_signal)
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


def _run(stop: StopSignal, overrides: Overrides, arguments: list[str], verbose: bool) -> None:
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
        report_only_draft(overrides, config)
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
    settings: LaunchSettings,
    overrides: Overrides,
    folder: Path,
) -> tuple[LaunchSettings, ServingConfig]:
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
        raise LaunchError(f"{text}. Set TMPDIR to another folder") from error
    if settings.dynamo_namespace and not settings.kv_events:
        settings = replace(settings, kv_events=f"ipc://{folder}/kv-events")
    return replace(settings, config=path, engine_python=_engine_python(config)), config


def report_only_draft(overrides: Overrides, config: ServingConfig) -> None:
    """Say that a model named without drafts has only the default one."""
    names = [draft.name for draft in config.drafts]
    if overrides.model and not overrides.drafts and names == [DEFAULT_DRAFT]:
        text = "the shipped ones fit only the shipped model (see --drafts)"
        say(f"{DEFAULT_DRAFT} is the only draft: {text}")


def _engine_python(config: ServingConfig) -> str:
    """Return the interpreter of the engine process: ``SPINDLE_PYTHON``, or that of the environment
    which the target's engine has for itself; empty: this one. Raises LaunchError.
    """
    named = os.environ.get("SPINDLE_PYTHON", "")
    folder = config.target.kind.answer("ENVIRONMENT", "")
    if named or not folder:
        return named
    python = PROJECT_ROOT / folder / "bin" / "python"
    if not python.exists():
        raise LaunchError(
            f"the engine {config.target.engine!r} runs in {python.parent.parent}, which is "
            f"missing: make {config.target.engine}, or name an interpreter that has its packages "
            f"in SPINDLE_PYTHON"
        )
    return str(python)


def _prepare(
    settings: LaunchSettings,
    config: ServingConfig,
    stop: threading.Event,
    verbose: bool,
) -> None:
    """Make what a configuration needs, where it is missing. Raises StoppedError, LaunchError."""
    if not any(engine.kind.checkpoint for engine in config.engines):
        return
    command = [sys.executable, "-m", "engines_build.prepare", "--config", str(settings.config)]
    if verbose:
        command.append("--verbose")
    status = run(command, stop, lambda passed_s: say(f"still preparing after {passed_s:.0f} s"))
    if stop.is_set() or status == 1:  # it has said why
        raise StoppedError
    if status != 0:
        text = f"preparing the models ended with status {status}"
        raise LaunchError(f"{text}: the lines above say why")


def _supervise(
    settings: LaunchSettings,
    config: ServingConfig,
    folder: Path,
    arguments: list[str],
    stop: StopSignal,
    output: IO[bytes] | None,
) -> None:
    say("starting" if output is None else f"starting; the log is {output.name}")
    server = TritonServer(settings, folder, arguments, stop, output)
    front_end = FrontEndProcess(settings, output)
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
    settings: LaunchSettings,
    config: ServingConfig,
    start_s: float,
    front_end: FrontEndProcess,
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
    example = example_reply(settings) if first and config.target.kind.model else []
    say(f"try: {example_command(settings)}")
    for line in example:
        say(line)


def supervise(
    server: TritonServer,
    stop: threading.Event,
    on_ready: Callable[[float], None],
    say: Callable[[str], None],
) -> None:
    """Run the service until ``stop`` is set; ``on_ready`` gets each start's time in seconds.

    Raises LaunchError when it does not start, or fails ``QUICK_FAILURES`` times in a row. A first
    start that crashes is repeated once: Triton's stubs sometimes fail to lock their shared memory.
    """
    failures, was_ready = 0, False
    while not stop.is_set():
        ready_s, trouble = _run_once(server, stop, on_ready, say)
        if trouble is None:
            break
        has_crashed = server.has_crashed()
        server.kill()
        was_ready = was_ready or ready_s is not None
        if not was_ready and (failures or not has_crashed):
            raise LaunchError(f"{trouble} before it was ready")
        failures = 1 if ready_s is not None and monotonic() - ready_s >= STABLE_S else failures + 1
        if failures >= QUICK_FAILURES:
            raise LaunchError(
                f"{trouble}; that was failure {failures} in quick succession: giving up"
            )
        backoff_s = FIRST_BACKOFF_S * 2 ** (failures - 1)
        say(f"{trouble}: restarting in {backoff_s:g} s")
        stop.wait(backoff_s)
    say("stopping: running requests may finish; a second signal ends them at once")
    server.stop()


def _run_once(
    server: TritonServer,
    stop: threading.Event,
    on_ready: Callable[[float], None],
    say: Callable[[str], None],
) -> tuple[float | None, str | None]:
    """Start the service and watch it; return when it became ready (seconds) and its trouble, None
    when asked to stop.
    """
    server.start()
    started_s, ready_s = monotonic(), None
    report_s = started_s + REPORT_PERIOD_S
    while not stop.wait(WATCH_PERIOD_S if ready_s is not None else 0.1):
        if (trouble := server.trouble()) is not None:
            return ready_s, trouble
        if ready_s is None and server.is_ready():
            ready_s = monotonic()
            on_ready(ready_s - started_s)
        if ready_s is not None:
            continue
        passed_s = monotonic() - started_s
        if passed_s > START_LIMIT_S:
            limit = f"the service was not ready after {START_LIMIT_S:.0f} s"
            return None, f"{limit} ({server.waits_for()})"
        if monotonic() >= report_s:
            report_s += REPORT_PERIOD_S
            say(f"still starting after {passed_s:.0f} s: {server.waits_for()}")
    return ready_s, None


def example_command(settings: LaunchSettings) -> str:
    """Return the command line that sends the request; curl would send it to a proxy, too."""
    direct = " --noproxy '*'" if urllib.request.getproxies().keys() & {"http", "all"} else ""
    return f"curl -s{direct} {shlex.quote(_example_url(settings))} -d '{json.dumps(EXAMPLE)}'"


def example_reply(settings: LaunchSettings) -> list[str]:
    """Send the request and return its answer in lines; none if it fails."""
    body, headers = json.dumps(EXAMPLE).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(_example_url(settings), body, headers)
    try:
        with open_url(request, EXAMPLE_LIMIT_S) as response:
            return summarize(json.load(response))
    except (OSError, ValueError):
        return []


def summarize(reply: dict[str, Any]) -> list[str]:
    """Return a reply in lines: its text, and how many steps speculation saved.

    Every step adds one token to those it accepts.
    """
    emitted, proposed = int(reply["num_output_tokens"]), int(reply["total_draft_tokens"])
    accepted = int(reply["total_accepted_draft_tokens"])
    lines = [f"its answer: {json.dumps(reply['text_output'], ensure_ascii=False)}"]
    if proposed:
        steps = emitted - accepted
        saved = f"{steps} steps instead of {emitted}"
        lines += [f"{accepted} of {proposed} proposed tokens were accepted: {saved}"]
    return lines


def _example_url(settings: LaunchSettings) -> str:
    return f"http://{settings.at(settings.http_port)}/v2/models/ensemble/generate"
