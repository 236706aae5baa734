"""How often greedy text in bf16 survives speculation, and how near the ties are where it does not.

    python -m tests.bench.bench_identity --config model_repository/spindle/1/serving.json

bf16 keeps 8 bits, so that logits between 16 and 32 are 0.125 apart and rows of another batch shape may round a tie the other way. For
every prompt of ``tests.bench.prompts`` the adaptive text is compared with the text of ``num_draft_tokens = 0``; at a first difference the
gap between the two tokens' logits is taken in fp64. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from backend import machine
from backend.app import App, build, model_path
from backend.config import load_config
from backend.request import GenerationRequest
from tests.bench.prompts import PROMPTS
from tests.bench.workloads import render


class _Sink:
    cancelled = False

    def final(self, delta: Any, reason: Any, usage: Any) -> None:
        """Ignore the text: token ids are compared."""

    def error(self, code: Any, message: str) -> None:
        """Raise what should not happen."""
        raise RuntimeError(f"{code}: {message}")


def generate(app: App, prompt: str, max_tokens: int, **options: Any) -> list[int]:
    """Return prompt and output token ids of one request served alone."""
    session = app.session(GenerationRequest(prompt, max_tokens, **options), _Sink())
    app.orchestrator.submit(session)
    while app.orchestrator.step():
        pass
    return session.sequence.tokens


def first_difference(plain: list[int], adaptive: list[int]) -> int | None:
    """Return the index of the first token that differs, None for equal texts."""
    return next((i for i, pair in enumerate(zip(plain, adaptive, strict=False)) if pair[0] != pair[1]), None)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    app, folder = build(config), model_path(config.target)
    prompts = [render(message, folder) for messages in PROMPTS.values() for message in messages]
    texts = [(generate(app, p, arguments.max_tokens, num_draft_tokens=0), generate(app, p, arguments.max_tokens)) for p in prompts]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    differences = []
    for number, (plain, adaptive) in enumerate(texts):
        at = first_difference(plain, adaptive)
        if at is not None:
            with torch.inference_mode():
                logits = model(torch.tensor([plain[:at]])).logits[0, -1]
            gap = abs(float(logits[plain[at]] - logits[adaptive[at]]))
            differences.append({"prompt": number, "position": at, "logit_gap": round(gap, 4), "top_logit": round(float(logits.max()), 2)})
    command = ["python", "-m", "tests.bench.bench_identity", *sys.argv[1:]]
    record = {"machine": machine.describe(), "command": command, "dtype": config.target.dtype, "prompts": len(prompts)}
    print(json.dumps({**record, "equal": len(prompts) - len(differences), "differences": differences}, indent=1))


if __name__ == "__main__":
    main()
