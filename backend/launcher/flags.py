"""Options of tritonserver that every way to start it shares."""

from __future__ import annotations

from backend.launcher.settings import Settings

GRPC_PING_PERIOD_S = 30
GRPC_PING_TIMEOUT_S = 20
"""A client that is frozen or unreachable answers no ping: its connection is closed, which frees the
responses that wait for it.
"""


CLOSED_APIS = "shared-memory,model-repository,logging,trace"
"""Those that no client needs; flaws of Triton before 25.07 need the first (SECURITY.md)."""
API_HEADER = "spindle-run"
"""The header with which the launcher calls them."""


def flags(settings: Settings, api_secret: str) -> list[str]:
    """Return tritonserver's options for its addresses, its gRPC connections and traces, and those
    that close APIs to requests without a secret in ``API_HEADER``.
    """
    is_ipv6 = ":" in settings.bind
    http_address = f"ipv6:{settings.bind}" if is_ipv6 else settings.bind
    options = {
        "http-address": http_address,
        "grpc-address": f"[{settings.bind}]" if is_ipv6 else settings.bind,
        "metrics-address": http_address,
        "http-port": settings.http_port,
        "grpc-port": settings.grpc_port,
        "metrics-port": settings.metrics_port,
        "grpc-keepalive-time": 1000 * GRPC_PING_PERIOD_S,
        "grpc-keepalive-timeout": 1000 * GRPC_PING_TIMEOUT_S,
        "grpc-http2-max-pings-without-data": 0,
        "grpc-http2-max-ping-strikes": 0,  # clients may ping as often as they want to
        "http-restricted-api": f"{CLOSED_APIS}:{API_HEADER}={api_secret}",
        "grpc-restricted-protocol": f"{CLOSED_APIS}:{API_HEADER}={api_secret}",
    }
    return [*(f"--{name}={value}" for name, value in options.items()), *trace_flags(settings)]


def trace_flags(settings: Settings) -> list[str]:
    """Return tritonserver's options for traces: none where they go nowhere."""
    url, rate = settings.trace_url, settings.trace_rate
    traces = "mode=opentelemetry", "level=TIMESTAMPS", f"rate={rate}", f"opentelemetry,url={url}"
    return [f"--trace-config={setting}" for setting in traces] if url else []
