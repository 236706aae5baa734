"""The composition of the launcher: check, prepare, start, watch, clean up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

from backend.config import ConfigError, ServingConfig, load_config
from backend.triton_adapter.launcher.front_end import FrontEnd
from backend.triton_adapter.launcher.run_folder import run_folder, write_backend, write_model_repository
from backend.triton_adapter.launcher.say import give_up_unwritten, say
from backend.triton_adapter.launcher.server import TritonServer
from backend.triton_adapter.launcher.settings import LaunchError, Settings, check_machine, check_ports, read_settings
from backend.triton_adapter.launcher.supervisor import supervise
from backend.triton_adapter.paths import PROJECT_ROOT


def prepare(settings: Settings, config: ServingConfig, stop: threading.Event) -> None:
    """Make the engines' files that a configuration needs, if they are missing. Raises LaunchError."""
    if not any(engine.engine == "torch" for engine in (config.target, *config.drafts)):
        return
    say(f"preparing the models of {settings.config}")
    command = [sys.executable, "-m", "engines_build.prepare", "--config", str(settings.config)]
    process = subprocess.Popen(command, cwd=PROJECT_ROOT)
    while process.poll() is None:
        if stop.wait(0.1):
            process.terminate()
            process.wait()
    if process.returncode != 0 and not stop.is_set():
        raise LaunchError(f"the models could not be prepared (status {process.returncode}): the lines above say why")


def announce(settings: Settings, config: ServingConfig, start_s: float) -> None:
    """Say that the service answers, and how to ask it."""
    drafts = ", ".join(draft.name for draft in config.drafts) or "none"
    url = f"http://{settings.client_host}:{settings.http_port}/v2/models/ensemble/generate"
    say(f"ready after {start_s:.1f} s: target {config.target.model or config.target.engine}, drafts {drafts}")
    say(f"HTTP {settings.http_port}, gRPC {settings.grpc_port}, metrics {settings.metrics_port} on {settings.bind}")
    say(f"try: curl -s {url} -d '{json.dumps({'text_input': 'The capital of France is', 'max_tokens': 32})}'")


def run(stop: threading.Event, arguments: list[str]) -> None:
    """Serve until ``stop`` is set. Raises LaunchError or ConfigError when that is not possible."""
    settings = read_settings(os.environ)
    config = load_config(settings.config)
    check_machine()
    check_ports(settings)
    prepare(settings, config, stop)
    if stop.is_set():
        return
    with run_folder() as folder:
        try:
            write_backend(folder)
            write_model_repository(folder, config)
        except OSError as error:
            raise LaunchError(f"the run folder {folder} cannot be written: {error.strerror}. TMPDIR chooses another place") from error
        say(f"starting tritonserver with {settings.config}")
        server = TritonServer(settings, folder, arguments)
        front_end = FrontEnd(settings)

        def on_ready(start_s: float) -> None:
            front_end.start()
            announce(settings, config, start_s)

        def on_stop(text: str) -> None:
            say(text)
            if stop.is_set():
                front_end.stop()

        try:
            supervise(server, stop, on_ready, on_stop)
        finally:
            front_end.kill()
            server.kill()


def main() -> int:
    """Run the launcher; its arguments are passed on to tritonserver. Returns the exit status."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(stop, sys.argv[1:])
    except (LaunchError, ConfigError, OSError) as error:
        say(f"error: {error}", sys.stderr)
        return 1
    say("stopped")
    return 0


if __name__ == "__main__":
    status = main()
    give_up_unwritten()
    sys.exit(status)
