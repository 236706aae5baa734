"""What the environment says, and whether this machine can serve it. Every refusal is a ``LaunchError`` with a sentence to act on."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from backend.triton_adapter.paths import PROJECT_ROOT

DEFAULT_CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"
MINIMUM_GLIBC = (2, 35)
PYTHONS = ((3, 10), (3, 12))
DEFAULT_TRACE_RATE = 1000
_PORTS = (("HTTP_PORT", 8000), ("GRPC_PORT", 8001), ("METRICS_PORT", 8002), ("OPENAI_PORT", 9000))


class LaunchError(Exception):
    """Why the service cannot start."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Where to listen, what to serve, and where traces go ('' = nowhere). ``openai_port`` 0: no OpenAI front end."""

    bind: str
    http_port: int
    grpc_port: int
    metrics_port: int
    config: Path
    trace_url: str = ""
    trace_rate: int = DEFAULT_TRACE_RATE
    openai_port: int = 0

    @property
    def client_host(self) -> str:
        """The address by which this machine reaches the service."""
        return "127.0.0.1" if self.bind in ("", "0.0.0.0", "::") else self.bind


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Return the settings of the variables ``*_PORT``, ``BIND``, ``SPINDLE_CONFIG`` and ``TRACE_*``. Raises LaunchError."""
    ports = [_port(name, environment.get(name) or str(default)) for name, default in _PORTS]
    http, grpc, metrics, openai = ports
    if len(set(ports)) < len(ports):
        raise LaunchError(f"HTTP_PORT, GRPC_PORT, METRICS_PORT and OPENAI_PORT must differ, got {http}, {grpc}, {metrics} and {openai}")
    config = Path(environment.get("SPINDLE_CONFIG") or DEFAULT_CONFIG).absolute()
    trace = _trace(environment.get("TRACE_URL") or "", environment.get("TRACE_RATE") or "")
    return Settings(environment.get("BIND") or "127.0.0.1", http, grpc, metrics, config, *trace, openai)


def _trace(url: str, rate: str) -> tuple[str, int]:
    """Return where traces go and of how many requests one is traced (0: only those whose client sends a ``traceparent``)."""
    if rate and not url:
        raise LaunchError(f"TRACE_RATE {rate} has no effect without TRACE_URL")
    parts = urlsplit(url)
    if url and not (parts.scheme in ("http", "https") and parts.hostname and parts.path.strip("/")):
        raise LaunchError(f"TRACE_URL must be a collector's OTLP address like http://localhost:4318/v1/traces, got {url!r}")
    if rate and not (rate.isascii() and rate.isdigit()):
        raise LaunchError(f"TRACE_RATE must be a number of at least 0, got {rate!r}")
    return url, int(rate) if rate else DEFAULT_TRACE_RATE


def _port(name: str, value: str) -> int:
    if name == "OPENAI_PORT" and value == "0":
        return 0
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
        raise LaunchError(f"{name} must be a port from 1 to 65535, got {value!r}")
    return int(value)


def check_ports(settings: Settings) -> None:
    """Raise LaunchError when a port is in use or the address is not this machine's."""
    ports = (settings.http_port, settings.grpc_port, settings.metrics_port, settings.openai_port)
    for (name, _), port in zip(_PORTS, ports, strict=True):
        family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((settings.bind, port))
            except OSError as error:
                raise LaunchError(
                    f"{name} {port} cannot be used on BIND {settings.bind}: {error.strerror}. Set {name} to another"
                ) from error


def check_machine() -> None:
    """Raise LaunchError unless the packaged tritonserver runs here (x86-64 Linux, glibc, a Python with a shared library)."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise LaunchError(f"the packaged tritonserver needs Linux on x86-64, this is {platform.system()} on {platform.machine()}")
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc ")
    parts = version.split(".")
    if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) < MINIMUM_GLIBC:
        raise LaunchError(f"the packaged tritonserver needs glibc 2.35 or newer (Ubuntu 22.04, Debian 12), this machine has {version}")
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        raise LaunchError(f"Python 3.10, 3.11 or 3.12 is needed, this is {platform.python_version()}: set PYTHON and run make again")
    if importlib.util.find_spec("pytriton") is None:
        raise LaunchError("the package nvidia-pytriton, which holds tritonserver, is not installed: run `make serve`, or pip install it")
    python_library_folder()


def python_library_folder() -> Path:
    """Return the folder of this Python's shared library, which Triton's stub loads. Raises LaunchError when there is none."""
    name = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/usr/lib")
    for candidate in (folder, folder / str(sysconfig.get_config_var("MULTIARCH"))):
        if (candidate / name).exists():
            return candidate
    try:
        ctypes.CDLL(name)
    except OSError:
        raise LaunchError(
            f"{name} is missing: Triton needs a Python with a shared library (on Debian and Ubuntu the package "
            f"libpython{sys.version_info[0]}.{sys.version_info[1]}; with pyenv, PYTHON_CONFIGURE_OPTS=--enable-shared)"
        ) from None
    return folder  # the loader's own search path has it
