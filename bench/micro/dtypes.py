"""What a dtype costs and what it keeps: ``python -m bench.micro.dtypes --model FOLDER
--dtypes bf16 int8 --out FILE``.

Time: whole ``submit`` and ``poll`` of decoding and verifying steps behind ``--context`` tokens, the
dtypes interleaved; CPU time of the one thread, so that other work on the machine moves it little.
Texts: news articles (``bench.workloads``), every position's arg-max, law and loss against the
same weights in fp32. Memory is what the plan counts for weights.
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
from backend.engines.torch.footprint import footprint

from backend import machine
from backend.engines.checkpoint import DTYPES
from backend.engines.port import Turn
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.torch.engine import TorchEngine
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from backend.tokenizer import load_tokenizer
from bench import workloads

STEPS = ((1, 0), (2, 0), (4, 0), (1, 4), (8, 0), (1, 8), (16, 0), (4, 4))
"""(sequences, proposed tokens of each)"""
EXCERPT_TOKENS = 256


def stepper(engine: TorchEngine, sequences: int, proposed: int, context: int) -> Callable[[], None]:
    """Return a step of so many sequences, each behind ``context`` tokens that are taken as run."""
    blocks = -(-(context + 1 + proposed) // BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(sequences)
    made = []
    for number in range(sequences):
        tokens = torch.randint(
            0, engine.limits.vocab_size, (context + 1 + proposed,), generator=generator
        ).tolist()
        table = list(range(number * blocks, (number + 1) * blocks))
        sequence = Sequence(
            number, tokens[: context + 1], context, SamplingParams(), {engine.name: table}
        )
        made.append((sequence, Proposal("bench", tokens[context + 1 :]) if proposed else None))

    def step() -> None:
        for sequence, _ in made:
            engine.assume(sequence, context)
        engine.submit(
            [
                Turn(sequence, context + 1, proposal=proposal, piece_tokens=0)
                for sequence, proposal in made
            ]
        )
        if error := next(
            (completion.error for completion in engine.poll(0.0) if completion.error), None
        ):
            raise RuntimeError(error)

    return step


def times(engines: dict[str, TorchEngine], context: int, rounds: int) -> list[dict[str, object]]:
    """Return the medians of every step, in CPU ms, and their ratios to the first dtype's."""
    rows = []
    for sequences, proposed in STEPS:
        steps = {
            name: stepper(engine, sequences, proposed, context) for name, engine in engines.items()
        }
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(rounds + 1):
            for name in [*steps, *reversed(steps)]:
                start = time.thread_time()
                steps[name]()
                if index:
                    taken[name].append(1e3 * (time.thread_time() - start))
        for engine in engines.values():
            engine.cancel(range(sequences))
        medians = {name: statistics.median(values) for name, values in taken.items()}
        first = next(iter(medians))
        ratios = {
            n: statistics.median(a / b for a, b in zip(taken[first], taken[n], strict=True))
            for n in list(medians)[1:]
        }
        rows.append(
            {
                "sequences": sequences,
                "proposed": proposed,
                "cpu_ms": medians,
                f"{first}_over": ratios,
            }
        )
    return rows


def fidelity(
    engines: dict[str, TorchEngine], exact: TorchEngine, texts: list[list[int]]
) -> dict[str, dict[str, float]]:
    """Return, by dtype: share of equal arg-maxes, mean KL from the fp32 law, mean loss on the
    text.
    """

    def laws(engine: TorchEngine, text: list[int]) -> torch.Tensor:
        chunk = Chunk(text, 0, KVTable(range(EXCERPT_TOKENS // BLOCK_TOKENS), "cpu"), len(text))
        return engine._model.forward([chunk]).float().log_softmax(-1)

    sums = {name: torch.zeros(3, dtype=torch.float64) for name in [*engines, "fp32"]}
    for text in texts:
        reference, target = laws(exact, text), torch.tensor(text[1:])[:, None]
        for name, engine in {**engines, "fp32": exact}.items():
            found = reference if engine is exact else laws(engine, text)
            same = (found.argmax(-1) == reference.argmax(-1)).double().mean()
            divergence = (reference.exp() * (reference - found)).sum(-1).mean().double()
            sums[name] += torch.stack(
                [same, divergence, -found[:-1].gather(1, target).mean().double()]
            )
    keys = ("arg_max_equal", "kl_mean", "loss_mean")
    return {
        name: dict(zip(keys, (total / len(texts)).tolist(), strict=True))
        for name, total in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["bf16", "int8"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    blocks = max(n * (-(-(args.context + 1 + k) // BLOCK_TOKENS)) for n, k in STEPS)

    def engine(dtype: str) -> TorchEngine:
        most = max(args.context, EXCERPT_TOKENS) + 16
        return TorchEngine(
            dtype,
            args.model,
            dtype=dtype,
            kv_blocks=blocks,
            max_context_tokens=most,
            threads=1,
            attention="tiled",
        )

    engines = {dtype: engine(dtype) for dtype in args.dtypes}
    steps = times(engines, args.context, args.rounds)
    tokenizer, articles = (
        load_tokenizer(args.model),
        workloads.load("summarise", args.texts, args.seed),
    )
    texts = [tokenizer.encode(message, False)[:EXCERPT_TOKENS] for message in articles.messages]
    with torch.inference_mode():
        kept = fidelity(engines, engine("fp32"), texts)
    sizes = {"kv_tokens": 0, "rows": 0, "logit_rows": 0, "law_rows": 0}
    weights = {dtype: footprint(args.model, dtype, "cpu", **sizes).weights for dtype in args.dtypes}
    command = [
        args.model.name if word == str(args.model) else word
        for word in ["python", "-m", "bench.micro.dtypes", *sys.argv[1:]]
    ]
    settings = {
        "command": command,
        "seed": args.seed,
        "context": args.context,
        "rounds": args.rounds,
        "threads": 1,
    }
    texts_are = {"source": articles.source, "tokens": sum(map(len, texts))}
    report = {
        **settings,
        "machine": machine.describe(),
        "steps": steps,
        "texts": texts_are,
        "against_fp32": kept,
        "weight_bytes": weights,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(json.dumps({"steps": steps, "against_fp32": kept, "weight_bytes": weights}, indent=1))


if __name__ == "__main__":
    main()
