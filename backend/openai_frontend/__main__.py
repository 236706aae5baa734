"""``python -m backend.openai_frontend``: serve on ``OPENAI_PORT``, as the launcher does next to
tritonserver.

``openai`` of ``serving.json`` says how it answers. ``BIND``, ``GRPC_PORT``, ``SPINDLE_CONFIG`` and
``SERVED_MODEL_NAME`` are as the launcher has them; ``OPENAI_API_KEY``: the key that callers must
have, or several separated by commas, one for each tenant. SIGUSR1: new requests are refused until
SIGTERM, which ends it once those in flight have ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from backend import PROJECT_ROOT, __version__
from backend.checked_settings import ConfigError
from backend.config import OpenaiConfig, load_config
from backend.engine_config import EMBEDDED_MODEL
from backend.launcher.environment import LaunchSettings, model_names, read_settings
from backend.launcher.output import say
from backend.openai_frontend.access import Hosts, Keys
from backend.openai_frontend.app import create_app
from backend.openai_frontend.connections import Connection, DrainingServer
from backend.openai_frontend.front_end import BODY_BYTES_PER_TOKEN, MIN_BODY_BYTES, FrontEnd
from backend.openai_frontend.template import ChatTemplate, load_template
from backend.special_tokens import special_tokens
from backend.storage import cache
from backend.tokenizer import ByteTokenizer
from backend.triton_adapter import admin_secret


def main() -> None:
    """Serve until a signal comes."""
    settings = read_settings(os.environ)
    config = load_config(settings.config, plans=False)
    model, context = config.target.model, config.limits.max_context_tokens
    folder = None
    if model:
        folder = (
            cache.model_folder(model)
            if model == EMBEDDED_MODEL
            else PROJECT_ROOT / os.path.expanduser(model)
        )
    options = config.openai
    try:
        file = options.chat_template
        template = load_template(folder, Path(file) if file else None)
    except ConfigError as error:
        sys.exit(f"spindle: error: the OpenAI front end cannot start: {error}")
    say(about_tools(template))
    if template is not None and template.reasoning is not None and options.split_reasoning:
        say(f"reasoning ends with {template.reasoning.closing} and is separate from the content")
    keys = keys_of(os.environ)
    front_end = FrontEnd(
        address=settings.at(settings.grpc_port),
        models=model_names(settings, config),
        template=template,
        options=options,
        max_context_tokens=context,
        max_body_bytes=max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * context),
        most_texts=config.limits.max_active_requests,
        keys=keys,
        hosts=hosts_of(settings, options, keys),
        admin_secret=os.environ.get(admin_secret.VARIABLE) or "",
        metrics_url=f"http://{settings.at(settings.metrics_port)}/metrics",
        version=__version__,
        special_tokens=(
            ByteTokenizer().special_tokens if folder is None else special_tokens(folder)
        ),
    )
    draining = threading.Event()
    server = server_config(create_app(front_end, draining), options.keep_alive_s)
    signal.signal(signal.SIGUSR1, lambda *_: draining.set())
    listener = listen(settings.bind, settings.openai_port)
    DrainingServer(server, draining, config.limits.drain_s).run([listener])


def hosts_of(settings: LaunchSettings, options: OpenaiConfig, keys: Keys) -> Hosts:
    """Return by which names requests may call: by any where they need a key, which no foreign page
    has.
    """
    if keys.keys:
        return Hosts()
    names = (*options.allowed_hosts, *filter(None, [settings.bind_name]))
    return Hosts(names, is_open=settings.is_open)


def server_config(app: FastAPI, keep_alive_s: int) -> uvicorn.Config:
    """Return how connections are served."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=1,
    )


def listen(bind: str, port: int) -> socket.socket:
    """Return a socket that listens; on ``::`` it takes IPv4 connections, too."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family, dualstack_ipv6=bind == "::")
    except OSError as error:
        sys.exit(f"spindle: error: OPENAI_PORT {port} on BIND {bind}: {error.strerror}")


def keys_of(environment: Mapping[str, str]) -> Keys:
    """Return the keys of ``OPENAI_API_KEY``, which commas separate."""
    parts = (part.strip() for part in (environment.get("OPENAI_API_KEY") or "").split(","))
    return Keys(tuple(filter(None, parts)))


def about_tools(template: ChatTemplate | None) -> str:
    """Return what becomes of tools that may be called."""
    if template is None:
        return "the model has no chat template: chats are refused"
    if template.has_channels:
        return "reasoning and tool calls are parsed from gpt-oss's channels"
    if template.calls is not None:
        return f"tool calls are parsed as {template.calls.name} models write them"
    if not template.shows_tools:
        return (
            "the chat template shows no tools to the model, so it makes only required calls "
            "(tool_choice)"
        )
    return "the chat template's call format is unknown: with tool_choice auto, calls stay text"


if __name__ == "__main__":
    main()
