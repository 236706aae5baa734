"""The shipped tiny family on the CUDA engine with a turn of lookahead, in one process and without a
server: ``python -m bench.cuda.served --out FILE``.

Each text is written alone without speculation, alone with it, and among sixteen; greedy, sampled
and with top-p, and once more while another request wants log-probabilities. All must be equal: the
exit status is 1 where one differs. The step with such a request should take at most 1.3 times as
long.
``--rehearse`` runs on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from backend import PROJECT_ROOT
from backend.app import App, build
from backend.config import parse_config
from backend.machine import machine
from backend.request import GenerationRequest
from bench import records
from bench.cuda import PLANNER
from bench.in_process import SilentSink
from policy import LatencyTable

SEED = 7
IN_FLIGHT = 16
PROMPTS = (
    "What is a window?",
    "Explain what an index of a database is good for.",
    "Name three things about the sea.",
    "Write a list of animals.",
    "Water is made of",
    "One, two, three, four,",
    "My favourite meal is soup, because",
    "Who wrote it?",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}


def app_of(*, rehearse: bool) -> App:
    """Load the family, with tables that are made up: texts do not depend on them."""
    where = {"device": "cpu", "dtype": "fp32"} if rehearse else {"device": "cuda", "dtype": "bf16"}
    family = PROJECT_ROOT / "engines_build/drafts"
    config = parse_config(
        {
            "target": {
                "name": "target",
                "engine": "cuda",
                "model": str(family / "tiny-target"),
                "lookahead": 1,
                **where,
            },
            "drafts": [
                {"name": "head", "engine": "head", "model": str(family / "tiny-head"), **where},
                {"name": "suffix", "engine": "suffix"},
            ],
            "policy": {"kind": "adaptive", "k_max": 8, "keep_learned": False},
            "limits": {"max_active_requests": IN_FLIGHT, "kv_cache_tokens": 16384},
            "threads": 1,
        }
    )
    return build(
        config,
        {
            "target": LatencyTable.synthetic("target", {1: 0.004, 8: 0.0042, 64: 0.006}),
            "head": LatencyTable.synthetic("head", {1: 0.0002, 64: 0.0003}),
        },
    )


def serve(
    app: App, asks: list[tuple[str, dict[str, Any]]], tokens: int, *, together: bool
) -> tuple[list[list[int]], float]:
    """Return the texts of prompts with their options, and the median of a step's milliseconds."""
    texts: list[list[int]] = []
    steps_ms: list[float] = []
    for batch in [asks] if together else [[ask] for ask in asks]:
        sessions = []
        for prompt, options in batch:
            request = GenerationRequest(
                f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n",
                tokens,
                seed=SEED,
                end_id=-1,
                remember=False,
                **options,
            )
            sessions.append(app.session(request, SilentSink()))
            app.orchestrator.submit(sessions[-1])
        while True:
            start_s = time.perf_counter()
            if not app.orchestrator.step():
                break
            steps_ms.append(1e3 * (time.perf_counter() - start_s))
        sequences = [session.sequence for session in sessions]
        texts += [each.tokens[each.prompt_tokens :] for each in sequences]
    return texts, median(steps_ms)


def compare(app: App, tokens: int, prompts: tuple[str, ...]) -> tuple[dict[str, Any], int]:
    """Write every text in every way; return what was the same and how long steps took, and how many
    texts differ.
    """
    results: dict[str, Any] = {}
    differ = 0
    for name, options in OPTIONS.items():
        asks = [(prompt, options) for prompt in prompts]
        expected, _ = serve(
            app, [(p, o | {"num_draft_tokens": 0}) for p, o in asks], tokens, together=False
        )
        many = list(itertools.islice(itertools.cycle(asks), IN_FLIGHT))
        mixed = [*many[:-1], (prompts[0], options | {"return_log_probs": True})]
        ways = {"alone": (asks, False), "among 16": (many, True), "with log-probs": (mixed, True)}
        for way, (requests, together) in ways.items():
            texts, step_ms = serve(app, requests, tokens, together=together)
            wrong = [
                n
                for n, (text, (prompt, _)) in enumerate(zip(texts, requests, strict=True))
                if text != expected[prompts.index(prompt)]
            ]
            if way == "with log-probs":  # its own row is drawn by the host
                wrong = [n for n in wrong if n < len(requests) - 1]
            differ += len(wrong)
            results[f"{name}, {way}"] = {
                "texts": len(texts),
                "differ": wrong,
                "step_ms": round(step_ms, 3),
            }
            print(name, way, results[f"{name}, {way}"], flush=True)
        plain, slow = (
            results[f"{name}, {way}"]["step_ms"] for way in ("among 16", "with log-probs")
        )
        results[f"{name}, with log-probs"]["over_without"] = round(slow / plain, 3)
    return results, differ


def main() -> int:
    """Compare, and write the record; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    app = app_of(rehearse=args.rehearse)
    record: dict[str, Any] = {
        "gpu": [str(gpu) for gpu in machine.gpus()],
        "planner": PLANNER,
        "seed": SEED,
        "rehearsal": args.rehearse,
        "ready_s": round(time.monotonic() - started, 1),
    }
    prompts = PROMPTS[:2] if args.rehearse else PROMPTS
    record["found"], differ = compare(app, 12 if args.rehearse else 120, prompts)
    record["differ"] = differ
    app.close()
    records.write(args.out, record)
    print(f"{differ} texts differ" if differ else "all texts are equal", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
