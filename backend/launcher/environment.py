"""The settings of one run, read from environment variables: addresses, names and places. Every
refusal is a ``LaunchError`` with a sentence to act on.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from backend.config import DEFAULT_CONFIG, HOST_NAME, ServingConfig

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
MOVED = (
    "OPENAI_ALLOWED_HOSTS",
    "OPENAI_CHAT_TEMPLATE",
    "OPENAI_CORS_ORIGINS",
    "OPENAI_ESCAPE_SPECIAL_TOKENS",
    "OPENAI_KEEP_ALIVE_S",
    "OPENAI_SPEC_DECODE_METRICS",
    "OPENAI_SPLIT_REASONING",
)
"""Variables of earlier versions, now keys of ``openai`` in ``serving.json``."""


class LaunchError(Exception):
    """Why the service cannot start."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Addresses to listen on, and the names and places of one run."""

    bind: str
    """Numeric address to listen on."""
    http_port: int
    grpc_port: int
    metrics_port: int
    openai_port: int
    """0: no OpenAI front end."""
    config: Path
    trace_url: str = ""
    """Receiver of traces; empty: none."""
    trace_rate: int = DEFAULT_TRACE_RATE
    """One in this many requests is traced; 0: only those that send a ``traceparent``."""
    model_names: tuple[str, ...] = ()
    """Public names of the model, the first in answers; empty: the name of its folder."""
    bind_name: str = ""
    """Name that ``BIND`` gives instead of an address; requests may call it."""
    kv_events: str = ""
    """The ZeroMQ endpoint at which the engine publishes KV events; empty: none."""
    engine_python: str = ""
    """The interpreter of the engine process; empty: this one."""
    dynamo_namespace: str = ""
    """Namespace of NVIDIA Dynamo's fleet that this server is a replica of; empty: none."""

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach the service."""
        return not ip_address(self.bind).is_loopback

    @property
    def client_host(self) -> str:
        """The address by which this machine reaches the service."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)

    def at(self, port: int) -> str:
        """Return where this machine reaches a port of the service, as in a URL."""
        host = self.client_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports in the order of ``PORTS``."""
        return self.http_port, self.grpc_port, self.metrics_port, self.openai_port


def read_settings(environment: Mapping[str, str]) -> LaunchSettings:
    """Return the settings of the variables ``*_PORT``, ``BIND``, ``SPINDLE_CONFIG``,
    ``SERVED_MODEL_NAME``, ``KV_EVENTS``, ``DYNAMO_NAMESPACE`` and ``TRACE_*``. Raises LaunchError.
    """
    config = Path(environment.get("SPINDLE_CONFIG") or DEFAULT_CONFIG).absolute()
    for name in filter(environment.get, MOVED):
        key = name.removeprefix("OPENAI_").lower()
        text = f"{name} is no longer read: unset it, and set the key {key!r} of 'openai'"
        raise LaunchError(f"{text} in {config}")
    ports = [
        _port(name, option, environment.get(name) or str(port)) for name, option, port in PORTS
    ]
    http, grpc, metrics, openai = ports
    if len(set(ports)) < len(ports):
        raise LaunchError(
            f"HTTP_PORT, GRPC_PORT, METRICS_PORT and OPENAI_PORT must differ, got {http}, "
            f"{grpc}, {metrics} and {openai}"
        )
    trace_url, trace_rate = _trace(
        environment.get("TRACE_URL") or "", environment.get("TRACE_RATE") or ""
    )
    namespace = environment.get("DYNAMO_NAMESPACE") or ""
    if namespace and not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", namespace):
        raise LaunchError(
            f"DYNAMO_NAMESPACE (--dynamo) may contain only a-z, 0-9, - and _, got {namespace!r}"
        )
    events = environment.get("KV_EVENTS") or ""
    if events and not re.match(r"(tcp|ipc)://.", events):
        raise LaunchError(
            f"KV_EVENTS (--kv-events) must be an endpoint like tcp://*:5557, got {events!r}"
        )
    bind = environment.get("BIND") or "127.0.0.1"
    address = _address(bind)
    return LaunchSettings(
        bind=address,
        http_port=http,
        grpc_port=grpc,
        metrics_port=metrics,
        openai_port=openai,
        config=config,
        trace_url=trace_url,
        trace_rate=trace_rate,
        model_names=_names(environment.get("SERVED_MODEL_NAME") or ""),
        bind_name=bind if bind != address and HOST_NAME.fullmatch(bind) else "",
        kv_events=events,
        dynamo_namespace=namespace,
    )


def _address(bind: str) -> str:
    """Return a numeric address of this machine for a number or a name, IPv4 before IPv6."""
    text = f"BIND (--bind) must be an address or a name of this machine, got {bind!r}"
    host = bind[1:-1] if re.fullmatch(r"\[.*:.*\]", bind) else bind
    try:
        addresses_found = [
            info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        ]
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"{text}: {getattr(error, 'strerror', None) or error}") from None
    addresses = sorted(
        (ip_address(each) for each in addresses_found), key=lambda each: each.version
    )
    trouble = ""
    for address in addresses:
        plain = getattr(address, "ipv4_mapped", None) or address
        if plain.version == 6 and plain.is_link_local:
            trouble = trouble or "tritonserver takes no link-local address"
        elif plain.is_multicast or str(plain) == "255.255.255.255":
            trouble = trouble or "it is the address of a group"
        elif why := port_trouble(str(plain), 0):
            trouble = trouble or why
        else:
            return str(plain)
    raise LaunchError(f"{text}: {trouble}")


def _names(text: str) -> tuple[str, ...]:
    """Return public names, which commas separate."""
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(name and name.isprintable() for name in names):
        raise LaunchError(
            f"SERVED_MODEL_NAME (--served-model-name) must be names separated by commas, "
            f"got {text!r}"
        )
    return tuple(dict.fromkeys(names))


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
    if re.match(r"(tcp|udp|sctp)://", value):
        service = name.removesuffix("_PORT").lower()
        raise LaunchError(
            f"{name} ({option}) is {value!r}, which Kubernetes sets for a Service named "
            f"{service}: set enableServiceLinks: false for the pod, or {name} to a port"
        )
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
        raise LaunchError(f"{name} ({option}) must be a port from 1 to 65535, got {value!r}")
    return int(value)


def policy_path(settings: LaunchSettings) -> str:
    """Return where a user's policy may lie: next to ``serving.json``, and in the current folder."""
    return os.pathsep.join([str(settings.config.absolute().parent), os.getcwd()])


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


def model_names(settings: LaunchSettings, config: ServingConfig) -> tuple[str, ...]:
    """Return those that are set, else that of the model's folder, or of a user's own engine."""
    engine = config.target.engine.rpartition(".")[2]
    return settings.model_names or (name_of(config.target.model) or engine,)


def name_of(model: str) -> str:
    """Return the name of a model's folder; ``ORG/NAME`` of a snapshot in a hub's cache, where the
    folder is called by its commit.
    """
    hub = re.search(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$", model)
    return hub[1].replace("--", "/", 1) if hub else Path(model).name
