"""Whether the service serves: a request of one token through each text model, and a live stub process for every other. Exit 0 or 1.

Triton's own readiness is not enough: it goes on calling a model ready whose stub process has died. Under the launcher, which watches the
stubs itself, they are of other folders and not looked for.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent / "model_repository"
MODELS = ("ensemble", "tensorrt_llm_bls")
TIMEOUT_S = 9.0


def trouble(url: str, model: str, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return what is wrong with a model, None where it answers."""
    body = json.dumps({"text_input": "a", "max_tokens": 1, "num_draft_tokens": 0}).encode()
    try:
        with urllib.request.urlopen(f"{url}/v2/models/{model}/generate", body, timeout=timeout_s) as reply:
            reply.read()
    except urllib.error.HTTPError as error:
        return f"{model} answered {error.code}: {error.read().decode(errors='replace')[:200]}"
    except OSError as error:
        return f"{model} does not answer: {error}"
    return None


def without_stub() -> list[str]:
    """Return the models of this folder's repository that have no stub process, none where none of them has one."""
    served = set()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if Path(arguments[0]).name == "triton_python_backend_stub":
            served |= {path.parts[-3] for path in map(Path, arguments) if path.name == "model.py" and REPOSITORY in path.parents}
    models = {path.parts[-3] for path in REPOSITORY.glob("*/1/model.py")}
    return sorted(models - served) if served else []


def main() -> None:
    """Ask the service on this machine."""
    url = f"http://127.0.0.1:{os.environ.get('HTTP_PORT') or 8000}"
    for model in MODELS:
        if found := trouble(url, model):
            sys.exit(found)
    if dead := without_stub():
        sys.exit(f"no stub process serves {', '.join(dead)}")


if __name__ == "__main__":
    main()
