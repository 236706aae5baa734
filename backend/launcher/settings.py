"""Settings from the environment, and whether this machine can serve them. Every refusal is a
``LaunchError`` with a sentence to act on.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from backend.config import DEFAULT_CONFIG
from backend.launcher.package import packaged_stub
from backend.machine import Machine, machine

MINIMUM_GLIBC = (2, 35)
PYTHONS = ((3, 11), (3, 12))
DEFAULT_TRACE_RATE = 1000
RUN_PREFIX = "spindle-run-"
"""The names of the folders that running services live in begin with it."""
PORTS = (
    ("HTTP_PORT", "--port", 8000),
    ("GRPC_PORT", "--grpc-port", 8001),
    ("METRICS_PORT", "--metrics-port", 8002),
    ("OPENAI_PORT", "--openai-port", 9000),
)
"""Environment variable, option of the command line and default of each port."""
SPEC_DECODE_METRICS = ("summary", "detailed", "none")
"""Levels of ``metrics.speculative_decoding`` in OpenAI responses; the first is the default."""


class LaunchError(Exception):
    """Why the service cannot start."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Addresses to listen on, the model to serve, and the receiver of traces ('' = nowhere).
    ``openai_port`` 0: no OpenAI front end.
    """

    bind: str
    http_port: int
    grpc_port: int
    metrics_port: int
    config: Path
    trace_url: str = ""
    trace_rate: int = DEFAULT_TRACE_RATE
    openai_port: int = 0
    spec_decode_metrics: str = SPEC_DECODE_METRICS[0]
    escape_special_tokens: bool = False
    split_reasoning: bool = True
    kv_events: str = ""
    """The ZeroMQ endpoint at which the engine publishes KV events; empty: none."""
    dynamo_namespace: str = ""
    """Namespace of NVIDIA Dynamo's fleet that this server is a replica of; empty: none."""

    @property
    def client_host(self) -> str:
        """The address by which this machine reaches the service."""
        return "127.0.0.1" if self.bind in ("", "0.0.0.0", "::") else self.bind

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports in the order of ``PORTS``."""
        return self.http_port, self.grpc_port, self.metrics_port, self.openai_port


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings of the variables ``*_PORT``, ``BIND``, ``SPINDLE_CONFIG``,
    ``OPENAI_SPEC_DECODE_METRICS``, ``OPENAI_ESCAPE_SPECIAL_TOKENS``, ``OPENAI_SPLIT_REASONING``,
    ``KV_EVENTS``, ``DYNAMO_NAMESPACE`` and ``TRACE_*``. Raises LaunchError.
    """
    ports = [
        _port(name, option, environment.get(name) or str(port)) for name, option, port in PORTS
    ]
    http, grpc, metrics, openai = ports
    if len(set(ports)) < len(ports):
        raise LaunchError(
            f"HTTP_PORT, GRPC_PORT, METRICS_PORT and OPENAI_PORT must differ, got {http}, "
            f"{grpc}, {metrics} and {openai}"
        )
    config = Path(environment.get("SPINDLE_CONFIG") or DEFAULT_CONFIG).absolute()
    trace = _trace(environment.get("TRACE_URL") or "", environment.get("TRACE_RATE") or "")
    level = environment.get("OPENAI_SPEC_DECODE_METRICS") or SPEC_DECODE_METRICS[0]
    if level not in SPEC_DECODE_METRICS:
        choices = ", ".join(SPEC_DECODE_METRICS)
        raise LaunchError(f"OPENAI_SPEC_DECODE_METRICS must be one of {choices}, got {level!r}")
    escape = _switch(environment, "OPENAI_ESCAPE_SPECIAL_TOKENS", "0")
    split = _switch(environment, "OPENAI_SPLIT_REASONING", "1")
    bind = environment.get("BIND") or "127.0.0.1"
    namespace = environment.get("DYNAMO_NAMESPACE") or ""
    if namespace and not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", namespace):
        raise LaunchError(
            f"DYNAMO_NAMESPACE (--dynamo) must be of a-z, 0-9, - and _, got {namespace!r}"
        )
    events = environment.get("KV_EVENTS") or ""
    if events and not re.match(r"(tcp|ipc)://.", events):
        raise LaunchError(
            f"KV_EVENTS (--kv-events) must be an endpoint like tcp://*:5557, got {events!r}"
        )
    return Settings(
        bind, http, grpc, metrics, config, *trace, openai, level, escape, split, events, namespace
    )


def _switch(environment: Mapping[str, str], name: str, default: str) -> bool:
    """Return whether a switch is on. Raises LaunchError."""
    value = environment.get(name) or default
    if value not in ("0", "1"):
        raise LaunchError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


def _trace(url: str, rate: str) -> tuple[str, int]:
    """Return where traces go and of how many requests one is traced (0: only those whose client
    sends a ``traceparent``).
    """
    if rate and not url:
        raise LaunchError(f"TRACE_RATE {rate} has no effect without TRACE_URL")
    parts = urlsplit(url)
    if url and not (parts.scheme in ("http", "https") and parts.hostname and parts.path.strip("/")):
        raise LaunchError(
            f"TRACE_URL must be a collector's OTLP address like http://localhost:4318/v1/traces, "
            f"got {url!r}"
        )
    if rate and not (rate.isascii() and rate.isdigit()):
        raise LaunchError(f"TRACE_RATE must be a number of at least 0, got {rate!r}")
    return url, int(rate) if rate else DEFAULT_TRACE_RATE


def _port(name: str, option: str, value: str) -> int:
    if name == "OPENAI_PORT" and value == "0":
        return 0
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
        raise LaunchError(f"{name} ({option}) must be a port from 1 to 65535, got {value!r}")
    return int(value)


def policy_path(settings: Settings) -> str:
    """Return where a user's policy may lie: next to ``serving.json``, and in the current folder."""
    return os.pathsep.join([str(settings.config.absolute().parent), os.getcwd()])


def check_ports(settings: Settings) -> None:
    """Raise LaunchError when a port is in use or the address is not this machine's."""
    for (name, option, _), port in zip(PORTS, settings.ports, strict=True):
        if why := port_trouble(settings.bind, port):
            text = f"{name} {port} cannot be used on BIND {settings.bind}: {why}"
            raise LaunchError(f"{text}. Choose another with {option}")


def port_trouble(bind: str, port: int) -> str:
    """Return why a port cannot be listened on; nothing where it can, or is 0."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((bind, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def check_machine(machine: Machine = machine) -> None:
    """Raise LaunchError unless the packaged tritonserver runs here."""
    check_system(machine)
    check_python(machine)
    check_triton()


def check_system(machine: Machine) -> str:
    """Return the system and its glibc. Raises LaunchError where tritonserver does not run."""
    if machine.system() != ("Linux", "x86_64"):
        system = " on ".join(machine.system())
        raise LaunchError(f"the packaged tritonserver needs Linux on x86-64, this is {system}")
    version = machine.glibc()
    parts = version.split(".")
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MINIMUM_GLIBC:
        raise LaunchError(
            f"the packaged tritonserver needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12), "
            f"this machine has {version}"
        )
    return f"Linux on x86-64, glibc {version}"


def check_python(machine: Machine) -> str:
    """Return the version of Python and where its shared library is. Raises LaunchError."""
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise LaunchError(
            f"Python 3.11 or 3.12 is needed, this is {platform.python_version()}: "
            "make an environment with one of these (make PYTHON=python3.11 serve)"
        )
    return f"{platform.python_version()}, its shared library in {python_library_folder(machine)}"


def check_triton() -> str:
    """Return the tritonserver's package. Raises LaunchError where it, or its stub, is missing."""
    if importlib.util.find_spec("pytriton") is None:
        text = "the package nvidia-pytriton, which holds tritonserver, is not installed"
        raise LaunchError(f"{text}: pip install nvidia-pytriton==0.7.0")
    if not packaged_stub().is_file():
        text = "nvidia-pytriton has no stub for this Python"
        raise LaunchError(f"{text}: {packaged_stub()} is missing")
    return f"nvidia-pytriton {metadata.version('nvidia-pytriton')}, with its stub for this Python"


def python_library_folder(machine: Machine = machine) -> Path:
    """Return the folder of this Python's shared library, which Triton's stub loads. Raises
    LaunchError when there is none.
    """
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    folder = machine.library_folder(name)
    if folder is None:
        raise LaunchError(
            f"{name} is missing: Triton needs a Python with a shared library (on Debian and "
            f"Ubuntu the package "
            f"libpython{sys.version_info[0]}.{sys.version_info[1]}; with pyenv, "
            f"PYTHON_CONFIGURE_OPTS=--enable-shared)"
        )
    return folder
