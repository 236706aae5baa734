"""Plain decoding against transformers' ``generate``: ``python -m bench.micro.generate --model
FOLDER --out FILE``.

Both on the same weights. The engine's side is the whole loop in this process, without speculation
and without a draft; greedy, no end token, prompts of one length, so that transformers pads nothing.
Interleaved (ABBA), CPU time of the one thread. Beside it the memory bandwidth: the bytes of weights
that a token reads, over what one thread reads from memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from backend import machine
from backend.app import App, build
from backend.config import parse_config
from backend.engines.checkpoint import DTYPES, read_config
from backend.kinds import KINDS
from backend.request import GenerationRequest
from bench.in_process import generate

NO_END = -1


def cpu_s(work: Callable[[], None]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def read_gb_per_s(megabytes: int = 512) -> float:
    """Return what one thread reads from memory, the best of five."""
    numbers = torch.ones(megabytes << 18, dtype=torch.int32)
    return max(numbers.nbytes / 1e9 / cpu_s(lambda: numbers.max().item()) for _ in range(5))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    kinds = [name for name, kind in KINDS.items() if kind.on_cpu]
    parser.add_argument("--engine", choices=["auto", *kinds], default="auto")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def by_engine(app: App, prompts: torch.Tensor, tokens: int) -> None:
    """Answer prompts int64[n, length] by the whole loop."""
    asks = [
        GenerationRequest("", tokens, input_ids=tuple(prompt), end_id=NO_END)
        for prompt in prompts.tolist()
    ]
    sessions = generate(app, asks, len(asks))
    assert all(session.output_tokens == tokens for session in sessions)


def by_transformers(model: Any, prompts: torch.Tensor, tokens: int) -> None:
    """Answer prompts int64[n, length] by ``generate``."""
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )


def measured(args: argparse.Namespace, app: App, model: Any) -> list[dict[str, Any]]:
    """Return a row for each number in flight; the first round of each does not count."""
    generator = torch.Generator().manual_seed(args.seed)
    arms: dict[str, Callable[[torch.Tensor], None]] = {
        "engine": lambda prompts: by_engine(app, prompts, args.tokens),
        "transformers": lambda prompts: by_transformers(model, prompts, args.tokens),
    }
    rows = []
    for in_flight in args.in_flight:
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        shape, most = (in_flight, args.prompt_tokens), app.target.limits.vocab_size
        for index in range(args.rounds + 1):
            prompts = torch.randint(9, most, shape, generator=generator)
            for name, arm in list(arms.items())[:: 1 if index % 2 else -1]:
                took_s = cpu_s(partial(arm, prompts))
                if index:
                    seconds[name].append(took_s)
        per_s = {name: in_flight * args.tokens / median(values) for name, values in seconds.items()}
        ratio = median(b / a for a, b in zip(*seconds.values(), strict=True))
        rows.append(
            {"in_flight": in_flight, "tokens_per_cpu_s": per_s, "engine_over_transformers": ratio}
        )
    return rows


def memory_bound(args: argparse.Namespace) -> dict[str, float]:
    """Return what one thread reads from memory, and how long the weights of a step take at that:
    all, but of an embedding that is not the head a few rows.
    """
    config = read_config(args.model)
    shapes = config.shapes()
    embedding = 0 if config.tied else prod(shapes["model.embed_tokens.weight"])
    weights = (sum(map(prod, shapes.values())) - embedding) * DTYPES[args.dtype].itemsize
    bandwidth = read_gb_per_s()
    return {
        "read_gb_per_s": bandwidth,
        "weight_bytes_a_step": weights,
        "step_ms": weights / bandwidth / 1e6,
    }


def main() -> None:
    """Measure, and write the record."""
    args = parse()
    torch.set_num_threads(1)
    target = {"engine": args.engine, "model": str(args.model.resolve()), "dtype": args.dtype}
    config = parse_config({"target": target, "policy": {"kind": "none"}, "threads": 1})
    app = build(config, {})
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).eval()
    theirs.generation_config.eos_token_id = None
    rows = measured(args, app, theirs)
    app.close()
    memory = memory_bound(args)
    command = [
        args.model.name if word == str(args.model) else word
        for word in ["python", "-m", "bench.micro.generate", *sys.argv[1:]]
    ]
    settings = {
        "command": command,
        "seed": args.seed,
        "engine": config.target.engine,
        "dtype": args.dtype,
        "threads": 1,
        "machine": machine.describe(),
    }
    args.out.write_text(
        json.dumps({**settings, "results": rows, "memory": memory}, indent=1) + "\n", "utf-8"
    )
    print(json.dumps([rows, memory]))


if __name__ == "__main__":
    main()
