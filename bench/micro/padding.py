"""A verification whose rows are attended to one by one, padded to the longest context, or cut into
pieces. Prints JSON.

    python -m bench.micro.padding --config model_repository/spindle/1/serving.json

Every case is a batch of contexts; all arms verify ``--length`` proposed tokens a row in one torch
engine, interleaved, and nothing is accepted. Times are CPU times of the one thread that does it.
``decided`` is what the policy's cost model chooses (``policy.decomposition`` with the price
``backend.policy_factory.MERGE_TOKENS``), ``fit`` that price as these figures have it: seconds of
the padding arms of a case are one constant and c (tokens read + price x pieces).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from backend import machine
from backend.config import load_config
from backend.engines.port import Turn
from backend.engines.torch.engine import PADDED, RAGGED, TorchEngine
from backend.model_folders import model_path
from backend.policy_factory import MERGE_TOKENS
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from bench.paired import abba, median_interval
from policy.decomposition import Decomposition

LENGTHS = (64, 128, 256, 512)
"""Of pieces, in tokens."""


def cases(seed: int) -> dict[str, list[int]]:
    """Return contexts by name."""
    rng = random.Random(seed)
    drawn = [rng.randint(50, 600) for _ in range(16)]
    return {
        "1 of 256": [256],
        "4 of 250": [250] * 4,
        "16 of 120": [120] * 16,
        "16 of 50 to 600": drawn,
        "15 of 100, 1 of 1500": [100] * 15 + [1500],
        "16 of 1000": [1000] * 16,
    }


def step(
    engine: TorchEngine, contexts: list[int], length: int, attention: str, piece_tokens: int
) -> Callable[[], None]:
    """Return a verification of random tokens behind contexts that are taken as seen but for the
    last token.
    """
    rng, first, turns = np.random.default_rng(len(contexts)), itertools.count(), []
    for number, context in enumerate(contexts):
        text = rng.integers(0, engine.limits.vocab_size, context + 1 + length).tolist()
        blocks = list(itertools.islice(first, -(-len(text) // BLOCK_TOKENS)))
        sequence = Sequence(
            number, text[: context + 1], context, SamplingParams(), {engine.name: blocks}
        )
        turns.append(
            Turn(
                sequence,
                context + 1,
                proposal=Proposal.chain("bench", text[context + 1 :]),
                piece_tokens=piece_tokens,
            )
        )

    def run() -> None:
        engine.limits = replace(engine.limits, pads=attention == PADDED)
        engine.cancel(range(len(contexts)))
        for turn in turns:
            engine.assume(turn.sequence, turn.end - 1)
        engine.submit(turns)
        started = time.thread_time()
        errors = [completion.error for completion in engine.poll(0.0) if completion.error]
        samples.append(time.thread_time() - started)
        if errors:
            raise RuntimeError(errors[0])

    samples: list[float] = []
    run.samples = samples  # type: ignore[attr-defined]
    return run


def measure(
    engine: TorchEngine, contexts: list[int], length: int, rounds: int, seed: int
) -> dict[str, Any]:
    """Return the arms' medians in ms, and ragged over each, by pairs, with their intervals."""
    reads = np.array(contexts) + 1
    decided = Decomposition(MERGE_TOKENS, BLOCK_TOKENS).best_piece(reads)
    pieces = {"padded": 0} | {
        f"cut {tokens}": tokens for tokens in LENGTHS if tokens < max(contexts)
    }
    pieces["decided"] = decided.piece_tokens
    arms = {RAGGED: step(engine, contexts, length, RAGGED, 0)}
    arms |= {
        name: step(engine, contexts, length, PADDED, tokens) for name, tokens in pieces.items()
    }
    for block in range(rounds + 1):
        for name in abba(list(arms), block):
            arms[name]()
    taken = {name: run.samples[1:] for name, run in arms.items()}  # type: ignore[attr-defined]
    ratios = {
        name: [one / other for one, other in zip(taken[RAGGED], times, strict=True)]
        for name, times in taken.items()
    }
    return {
        "ms": {name: round(1e3 * statistics.median(times), 2) for name, times in taken.items()},
        "ragged_over": {
            n: [round(x, 3) for x in (statistics.median(r), *median_interval(r, seed))]
            for n, r in ratios.items()
        },
        "decided_piece_tokens": decided.piece_tokens,
        "work": {name: work(reads, tokens) for name, tokens in pieces.items()},
    }


def work(contexts: np.ndarray[Any, Any], piece_tokens: int) -> tuple[int, int]:
    """Return the pieces, and the tokens read for them."""
    if not piece_tokens:
        return len(contexts), len(contexts) * int(contexts.max())
    pieces = int((-(-contexts // piece_tokens)).sum())
    return pieces, pieces * piece_tokens


def fitted(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the price of a piece in tokens read, and of a token read in us, by least squares over
    the cases that cut at all.
    """
    rows, seconds = [], []
    many = [case for case in found.values() if len(case["work"]) > 2]
    for number, case in enumerate(many):
        for name, (pieces, tokens) in case["work"].items():
            rows.append(
                [
                    tokens,
                    pieces if case["work"]["padded"][0] != pieces else 0,
                    *(float(number == n) for n in range(len(many))),
                ]
            )
            seconds.append(1e3 * case["ms"][name])
    (token_us, piece_us, *_), *_ = np.linalg.lstsq(
        np.array(rows, float), np.array(seconds), rcond=None
    )
    return {
        "token_us": round(float(token_us), 3),
        "merge_tokens": round(float(piece_us / token_us), 1),
    }


def main() -> None:
    """Run the measurement and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    target = replace(load_config(arguments.config).target, dtype=arguments.dtype)
    folder, blocks = model_path(target), 16 * 1024 // BLOCK_TOKENS + 64
    engine = TorchEngine(
        "target", folder, dtype=target.dtype, kv_blocks=blocks, max_context_tokens=2048, threads=1
    )
    found = {
        name: measure(engine, c, arguments.length, arguments.rounds, arguments.seed)
        for name, c in cases(arguments.seed).items()
    }
    report = {
        "command": "python -m bench.micro.padding " + " ".join(sys.argv[1:]),
        "seed": arguments.seed,
        "machine": machine.describe(),
        "dtype": target.dtype,
        "threads": 1,
        "cases": found,
        "fit": fitted(found),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
