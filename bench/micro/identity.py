"""How far texts stay the same under speculation on a real model, and what sameness costs. Prints
JSON.

    python -m bench.micro.identity greedy     --config model_repository/spindle/1/serving.json
    python -m bench.micro.identity seeded --config model_repository/spindle/1/serving.json
        --dtype fp32

``greedy`` compares, for every prompt of ``bench.prompts``, the adaptive text with that of
``num_draft_tokens = 0``. ``seeded`` does so for sampled texts under ``--variations`` draws of
policy, load, batch mix and prefill chunk. Where two texts part, the gap between the two tokens is
taken in fp64: bf16 keeps 8 bits, so that logits between 16 and 32 are 0.125 apart, and rows of
another batch shape may round a tie the other way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend import machine
from backend.app import App, build
from backend.config import load_config
from backend.core.session import Session
from backend.model_folders import model_path
from backend.request import GenerationRequest
from bench.in_process import Witness, first_difference, generate
from bench.prompts import PROMPTS
from bench.workloads import render
from policy import FixedLength, NoSpeculation, Policy, RandomChoice

SEEDED = {"temperature": 0.8, "top_p": 0.95}


def main() -> None:
    """Run one of the comparisons and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("comparison", choices=["greedy", "seeded"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument(
        "--dtype",
        choices=["bf16", "fp32"],
        help="of target and drafts, instead of the configured one",
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--variations", type=int, default=20, help="of a seeded text")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    if arguments.dtype:
        typed = [
            replace(engine, dtype=arguments.dtype) for engine in (config.target, *config.drafts)
        ]
        config = replace(config, target=typed[0], drafts=tuple(typed[1:]))
    app, folder = build(config), model_path(config.target)
    prompts = {
        name: [render(message, folder) for message in messages]
        for name, messages in PROMPTS.items()
    }
    run = {"greedy": greedy, "seeded": seeded}[arguments.comparison]
    record = {
        "machine": machine.describe(),
        "command": ["python", "-m", "bench.micro.identity", *sys.argv[1:]],
        "dtype": config.target.dtype,
        "max_tokens": arguments.max_tokens,
    }
    print(json.dumps({**record, **run(app, prompts, Witness(folder), arguments)}, indent=1))


def greedy(
    app: App, prompts: dict[str, list[str]], witness: Witness, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Adaptive texts, one request at a time, against those without speculation."""
    asked = [prompt for texts in prompts.values() for prompt in texts]
    plain = generate(
        app,
        [GenerationRequest(prompt, arguments.max_tokens, num_draft_tokens=0) for prompt in asked],
    )
    adaptive = generate(app, [GenerationRequest(prompt, arguments.max_tokens) for prompt in asked])
    return compared(
        [(number, *pair) for number, pair in enumerate(zip(plain, adaptive, strict=True))], witness
    )


def seeded(
    app: App, prompts: dict[str, list[str]], witness: Witness, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Plan-invariant texts of half of the prompts, alone and without speculation, against the same
    under varied plans and loads.
    """
    rng = random.Random(arguments.seed)
    asked = [prompt for texts in prompts.values() for prompt in texts[:2]]
    others = [prompt for texts in prompts.values() for prompt in texts[2:]]
    requests = [
        GenerationRequest(p, arguments.max_tokens, seed=arguments.seed + n, **SEEDED)
        for n, p in enumerate(asked)
    ]
    plain = generate(app, requests, policy=NoSpeculation())
    pairs, varied = [], []
    for number in range(arguments.variations):
        name, policy = _policies(app)[number % len(_policies(app))]
        together, strangers, chunk_tokens = (
            rng.choice([1, 2, 3, 5, 8, 16]),
            rng.choice([0, 2, 4, 8]),
            rng.choice([16, 64, 256]),
        )
        app.orchestrator._prefill_chunk_tokens = chunk_tokens
        crowd = [
            GenerationRequest(
                rng.choice(others), rng.randint(1, arguments.max_tokens), temperature=1.0
            )
            for _ in range(strangers)
        ]
        order = rng.sample(range(len(requests) + strangers), len(requests) + strangers)
        sessions = generate(app, [[*requests, *crowd][place] for place in order], together, policy)
        served = dict(zip(order, sessions, strict=True))
        mine = [served[place] for place in range(len(requests))]
        pairs += [(f"{number}/{n}", *pair) for n, pair in enumerate(zip(plain, mine, strict=True))]
        figures = {
            "drafted": sum(s.drafted for s in mine),
            "accepted": sum(s.accepted for s in mine),
        }
        varied.append(
            {
                "policy": name,
                "together": together,
                "strangers": strangers,
                "chunk_tokens": chunk_tokens,
                **figures,
            }
        )
    texts = len({tuple(session.sequence.tokens) for session in plain})
    return {
        "seed": arguments.seed,
        **SEEDED,
        "different_texts": texts,
        "variations": varied,
        **compared(pairs, witness),
    }


def compared(pairs: list[tuple[Any, Session, Session]], witness: Witness) -> dict[str, Any]:
    """Return how many pairs of sessions have equal texts and, for the others, where they part and
    how near the tie was.
    """
    differences = []
    for name, one, other in pairs:
        tokens, sampling = one.sequence.tokens, one.sequence.sampling
        at = first_difference(tokens, other.sequence.tokens)
        if at is not None:
            rivals = tokens[at], other.sequence.tokens[at]
            gap = (
                witness.greedy_gap(tokens[:at], *rivals)
                if sampling.greedy
                else witness.race_gap(tokens[:at], *rivals, sampling)
            )
            differences.append(
                {
                    "text": name,
                    "position": at - one.sequence.prompt_tokens,
                    "logit_gap": float(f"{gap:.3g}"),
                }
            )
    return {
        "compared": len(pairs),
        "equal": len(pairs) - len(differences),
        "differences": differences,
    }


def _policies(app: App) -> list[tuple[str, Policy | None]]:
    """Return the policies that a seeded text is served under; None is the configured one."""
    fixed = [
        (f"fixed {d.name} {k}", FixedLength(d.name, k))
        for d in app.config.drafts
        for k in (2, app.config.policy.k_max)
    ]
    return [("configured", None), ("random", RandomChoice()), *fixed, ("none", NoSpeculation())]


if __name__ == "__main__":
    main()
