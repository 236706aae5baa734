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
from pathlib import Path
from statistics import median

import torch
from backend.engines.torch.footprint import footprint
from transformers import AutoModelForCausalLM

from backend import machine
from backend.app import build
from backend.config import parse_config
from backend.engines.checkpoint import DTYPES
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        default="bf16",
        help="of the engine; transformers has what activations have",
    )
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = {"engine": "torch", "model": str(args.model.resolve()), "dtype": args.dtype}
    app = build(parse_config({"target": target, "policy": {"kind": "none"}, "threads": 1}), {})
    theirs = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).eval()
    theirs.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(args.seed)
    rows = []
    for in_flight in args.in_flight:
        taken: dict[str, list[float]] = {"engine": [], "transformers": []}
        for index in range(args.rounds + 1):
            prompts = torch.randint(
                9,
                app.target.limits.vocab_size,
                (in_flight, args.prompt_tokens),
                generator=generator,
            )

            def engine(prompts: torch.Tensor = prompts) -> None:
                asks = [
                    GenerationRequest("", args.tokens, input_ids=tuple(prompt), end_id=NO_END)
                    for prompt in prompts.tolist()
                ]
                sessions = generate(app, asks, len(asks))
                assert all(session.output_tokens == args.tokens for session in sessions)

            def transformers(prompts: torch.Tensor = prompts) -> None:
                with torch.inference_mode():
                    mask = torch.ones_like(prompts)
                    theirs.generate(
                        prompts,
                        attention_mask=mask,
                        max_new_tokens=args.tokens,
                        do_sample=False,
                        pad_token_id=0,
                    )

            for name, arm in [("engine", engine), ("transformers", transformers)][
                :: 1 if index % 2 else -1
            ]:
                seconds = cpu_s(arm)
                if index:
                    taken[name].append(seconds)
        per_s = {name: in_flight * args.tokens / median(values) for name, values in taken.items()}
        ratio = median(b / a for a, b in zip(*taken.values(), strict=True))
        rows.append(
            {"in_flight": in_flight, "tokens_per_cpu_s": per_s, "engine_over_transformers": ratio}
        )
    app.close()
    weights = footprint(
        args.model, args.dtype, "cpu", kv_tokens=0, rows=0, logit_rows=0, law_rows=0
    ).weights
    embedding = (
        theirs.config.vocab_size * theirs.config.hidden_size * DTYPES[args.dtype].itemsize
    )  # rows of it are read, not all
    bandwidth = read_gb_per_s()
    command = [
        args.model.name if word == str(args.model) else word
        for word in ["python", "-m", "bench.micro.generate", *sys.argv[1:]]
    ]
    settings = {
        "command": command,
        "seed": args.seed,
        "dtype": args.dtype,
        "threads": 1,
        "machine": machine.describe(),
    }
    memory = {
        "read_gb_per_s": bandwidth,
        "weight_bytes_a_step": weights - embedding,
        "step_ms": (weights - embedding) / bandwidth / 1e6,
    }
    args.out.write_text(
        json.dumps({**settings, "results": rows, "memory": memory}, indent=1) + "\n", "utf-8"
    )
    print(json.dumps([rows, memory]))


if __name__ == "__main__":
    main()
