"""An OTLP/HTTP collector for tests: it keeps the spans that it is sent as JSON."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    def __init__(self, server):
        self.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        self.spans = []

    def take(self, body):
        for resource in body["resourceSpans"]:
            service = attributes(resource["resource"])["service.name"]
            self.spans += [
                {**span, "service": service}
                for scope in resource["scopeSpans"]
                for span in scope["spans"]
            ]

    def trace(self, trace_id):
        """Return a trace's spans by name, in order of their start."""
        found: dict[str, list[dict[str, Any]]] = {}
        for span in sorted(self.spans, key=lambda span: int(span["startTimeUnixNano"])):
            if span["traceId"] == trace_id:
                found.setdefault(span["name"], []).append(span)
        return found

    def wait_for_any(self, wanted, limit_s=30):
        """Return the first trace, as ``trace`` gives it, that is as wanted."""
        deadline = time.monotonic() + limit_s
        while True:
            for trace_id in {span["traceId"] for span in list(self.spans)}:
                if wanted(found := self.trace(trace_id)):
                    return found
            assert time.monotonic() < deadline, "no trace is as wanted"
            time.sleep(0.05)

    def wait_for(self, trace_id, *names, limit_s=30):
        """Return a trace by name once it has all the names."""
        deadline = time.monotonic() + limit_s
        while not set(names) <= set(found := self.trace(trace_id)):
            assert time.monotonic() < deadline, (sorted(found), names)
            time.sleep(0.02)
        return found


def attributes(holder):
    """Return a span's or resource's attributes as plain values."""
    return {item["key"]: _plain(item["value"]) for item in holder.get("attributes", ())}


def _plain(value):
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_plain(item) for item in content["values"]]
    return int(content) if kind == "intValue" else content


@contextmanager
def collecting():
    """Run a collector on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            collector.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield collector
        server.shutdown()
