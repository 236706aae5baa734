"""Whether the service lives: the engine process's word on its loop, an answer of each text model,
and a live stub process for every other.

Exit 0 or 1. Nothing here waits in the queue or can be refused for a full one: a busy service is
healthy. Triton's own readiness is not enough: it goes on calling a model ready whose stub process
has died. Under the launcher, which watches the stubs itself, they are of other folders and not
looked for.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
MODELS = ("ensemble", "tensorrt_llm_bls")
TIMEOUT_S = 6.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs without the proxies that the environment names."""
REFUSED = {"text_input": "a", "max_tokens": 0}
"""A request that a stub refuses by itself: that it does shows that it lives."""


def answer(url: str, model: str, request: dict[str, Any]) -> tuple[int, str]:
    """Return the status and body of a model's answer. Raises OSError where there is none."""
    try:
        with DIRECT.open(
            f"{url}/v2/models/{model}/generate", json.dumps(request).encode(), timeout=TIMEOUT_S
        ) as reply:
            return reply.status, reply.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def trouble(url: str) -> str | None:
    """Return what is wrong with the service at a URL, None if nothing is."""
    try:
        status, text = answer(url, "spindle", {"command": "health"})
        if status != 200 or json.loads(json.loads(text)["reply"]).get("status") != "ok":
            return f"the engine answered {status}: {text[:200]}"
        for model in MODELS:
            status, text = answer(url, model, REFUSED)
            if "max_tokens" not in text:
                return f"{model} answered {status}: {text[:200]}"
    except OSError as error:
        return f"the service does not answer: {error}"
    return None


def without_stub() -> list[str]:
    """Return the models of this folder's repository that have no stub process, none where none of
    them has one.
    """
    served = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if Path(arguments[0]).name == "triton_python_backend_stub":
            served |= {
                path.parts[-3]
                for path in map(Path, arguments)
                if path.name == "model.py" and REPOSITORY in path.parents
            }
    models = {path.parts[-3] for path in REPOSITORY.glob("*/1/model.py")}
    return sorted(models - served) if served else []


def url() -> str:
    """Return where the service listens, by ``BIND`` and ``HTTP_PORT``."""
    bind = os.environ.get("BIND") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind).strip("[]")
    port = os.environ.get("HTTP_PORT") or 8000
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def main() -> None:
    """Ask the service on this machine."""
    if found := trouble(url()):
        sys.exit(found)
    if dead := without_stub():
        sys.exit(f"no stub process serves {', '.join(dead)}")


if __name__ == "__main__":
    main()
