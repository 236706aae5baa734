"""Whether the service serves: a request of one token through each public model, which a dead stub or engine does not answer. Exit 0 or 1.

Triton's own readiness is not enough: it goes on calling a model ready whose stub process has died.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request

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


def main() -> None:
    """Ask the service on this machine."""
    url = f"http://127.0.0.1:{os.environ.get('HTTP_PORT') or 8000}"
    for model in MODELS:
        if found := trouble(url, model):
            sys.exit(found)


if __name__ == "__main__":
    main()
