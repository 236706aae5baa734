"""Time an engine's step against transformers' forward on the same weights: ``python -m
bench.micro.forward --model FOLDER``.

One sequence with ``--context`` tokens of KV; 1, 5 and 9 tokens a pass (decoding, verifying 4,
verifying 8). The engine's side is a whole ``submit`` and ``poll`` with its verification,
transformers' a bare eager forward with its cache cropped back. The arms are interleaved (ABBA);
prints JSON with medians in ms and the ratio transformers / engine (above 1: the engine is faster).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from backend import machine
from backend.config import parse_config
from backend.engines.checkpoint import DTYPES
from backend.engines.port import Turn
from backend.engines.registry import Service, make_engine
from backend.engines.stepping.engine import StepEngine
from backend.kinds import KINDS
from backend.model_folders import model_path
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence


def engine_arm(engine: StepEngine, tokens: list[int], count: int) -> Callable[[], None]:
    context = len(tokens) - count
    blocks = list(range(len(tokens) // BLOCK_TOKENS + 2))
    sequence = Sequence(0, tokens[: context + 1], context, SamplingParams(), {engine.name: blocks})
    proposal = Proposal.chain("bench", tokens[context + 1 :]) if count > 1 else None
    engine.submit([Turn(sequence, context, run=0)])
    engine.poll(0.0)

    def step() -> None:
        engine.assume(sequence, context)
        engine.submit([Turn(sequence, context + 1, proposal=proposal)])
        if error := engine.poll(0.0)[0].error:
            raise RuntimeError(error)

    return step


def transformers_arm(model: torch.nn.Module, tokens: list[int], count: int) -> Callable[[], None]:
    context = len(tokens) - count
    cache = DynamicCache()
    model(torch.tensor([tokens[:context]]), past_key_values=cache, use_cache=True)
    ids = torch.tensor([tokens[context:]])

    def step() -> None:
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-count)

    return step


def abba(arms: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return each arm's median in ms over ``rounds`` rounds of A B B A after two of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds + 2):
        for name in names + names[::-1]:
            start = time.perf_counter()
            arms[name]()
            if index >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    kinds = [name for name, kind in KINDS.items() if kind.on_cpu]
    parser.add_argument("--engine", choices=["auto", *kinds], default="auto")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 9])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    longest = args.context + max(args.tokens)
    target = {"engine": args.engine, "model": str(args.model.resolve()), "dtype": args.dtype}
    limits = {"max_context_tokens": longest, "kv_cache_tokens": longest + 2 * BLOCK_TOKENS}
    config = parse_config({"target": target, "limits": limits})
    engine = make_engine(config.target, Service(config, 1, model_path))
    assert isinstance(engine, StepEngine)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=DTYPES[args.dtype], attn_implementation="sdpa"
    ).eval()
    tokens = torch.randint(0, model.config.vocab_size, (longest,)).tolist()
    rows = []
    with torch.inference_mode():
        for count in args.tokens:
            text = tokens[: args.context + count]
            medians = abba(
                {
                    "engine": engine_arm(engine, text, count),
                    "transformers": transformers_arm(model, text, count),
                },
                args.rounds,
            )
            rows.append(
                {
                    "tokens": count,
                    "ms": medians,
                    "ratio": medians["transformers"] / medians["engine"],
                }
            )
            engine.cancel([0])
    command = ["python", "-m", "bench.micro.forward", *sys.argv[1:]]
    command = [args.model.name if word == str(args.model) else word for word in command]
    report = {
        "command": command,
        "seed": args.seed,
        "engine": config.target.engine,
        "dtype": args.dtype,
        "context": args.context,
        "threads": 1,
        "rounds": args.rounds,
    }
    print(json.dumps(report | {"machine": machine.describe(), "results": rows}, indent=1))


if __name__ == "__main__":
    main()
