"""The cost of an EAGLE-3 head next to a pass of its target, for three shapes with random weights.

    python -m bench.micro.eagle_cost --seed 0 --rounds 15

The target runs on torch and the head on OpenVINO, in one thread. For each shape and batch: the
target's pass of one token a row (and of a prompt's chunk), what the head takes of that pass
(``absorb``), and a depth of its proposals, in medians of interleaved rounds, with their shares of
the pass. Memory is planned, for 2,048 tokens a row. Prints a record in JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from math import prod
from statistics import median
from time import perf_counter
from typing import Any

import torch

from backend.engines.eagle.engine import EagleEngine
from backend.engines.eagle.folder import EagleShape
from backend.engines.eagle.openvino import OpenvinoModel
from backend.engines.latency_cases import Case, blocks_for
from backend.engines.models.spec import AttentionSpec
from backend.engines.port import HiddenStates
from backend.engines.torch.engine import TorchEngine
from backend.engines.weights import stored_matrix
from backend.machine import machine
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from bench import records
from bench.cuda.random_models import DecoderShape, random_llama
from engines_build.timing import Rig

SHAPES = {
    "SmolLM2-135M": (DecoderShape(30, 576, 1536, 9, 3, 64, 49152, ties_embeddings=True), 16384),
    "Qwen2.5-0.5B": (DecoderShape(24, 896, 4864, 14, 2, 64, 151936, ties_embeddings=True), 32000),
    "Llama-3.2-1B": (DecoderShape(16, 2048, 8192, 32, 8, 64, 128256, ties_embeddings=True), 32000),
}
"""A target, and the tokens that its head can propose."""

CONTEXT, DEPTH, CHUNK = 512, 4, 256
ROWS = (1, 8)
FORMS = ("", " in int8")


def engines(
    name: str, dtype: torch.dtype
) -> tuple[TorchEngine, dict[str, EagleEngine], EagleShape]:
    """Return a target and its head in both number formats, with random weights."""
    model, rows = SHAPES[name]
    layers = (2, model.layers // 2, model.layers - 3)
    shape = EagleShape(
        vocab_size=model.vocab,
        draft_vocab_size=rows,
        hidden_size=model.hidden,
        target_hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.dim,
        layers=layers,
    )
    lm = random_llama(model, "cpu", dtype)
    embedding = lm.get_input_embeddings().weight.detach()
    tensors = {n: 0.02 * torch.randn(size, dtype=dtype) for n, size in shape.tensors().items()}
    tensors["token_ids"] = torch.arange(rows)
    for norm in (one for one in tensors if "norm" in one):
        tensors[norm].fill_(6.0 if norm == "norm.weight" else 1.0)  # few tokens are likely
    cases = [Case(max(ROWS), CONTEXT, length=0), Case(1, CONTEXT, new=CHUNK, run=0)]
    sizes: dict[str, Any] = {"kv_blocks": blocks_for(cases) + 8, "max_context_tokens": 2 * CONTEXT}
    heads_of, dim = (model.heads, model.kv_heads), model.dim
    specs = [AttentionSpec(n, *heads_of, dim, dim, dim**-0.5) for n in range(model.layers)]
    target = TorchEngine("target", lm, specs, taps=layers, **sizes)
    arrays = {n: t.float().numpy() if "." in n else t.numpy() for n, t in tensors.items()}
    table = stored_matrix(embedding)
    heads = {}
    for form in FORMS:
        run_by = OpenvinoModel(
            shape,
            arrays,
            embedding=table,
            lm_head=table,
            positions=2048,
            slots=sizes["kv_blocks"] * BLOCK_TOKENS,
            rounded=form == " in int8",
            narrow=dtype == torch.bfloat16,
            threads=1,
        )
        heads[form] = EagleEngine("eagle", run_by, max_draft_tokens=DEPTH, **sizes)
    return target, heads, shape


def absorbing(head: EagleEngine, shape: EagleShape, rows: int, tokens: int) -> float:
    """Return the seconds in which a head takes the states of some tokens of each row."""
    blocks = (CONTEXT + tokens) // 32 + 1
    states = torch.randn(tokens, len(shape.layers), shape.target_hidden_size).numpy()
    parts = []
    for row in range(rows):
        table = {"eagle": list(range(row * blocks, (row + 1) * blocks))}
        text = random.choices(range(shape.vocab_size), k=CONTEXT + 1)
        sequence = Sequence(row, text, CONTEXT + 1, SamplingParams(), table)
        head.assume(sequence, CONTEXT)
        sequence.tokens += random.choices(range(shape.vocab_size), k=tokens)
        parts.append((sequence, HiddenStates(CONTEXT, shape.layers, states)))
    began = perf_counter()
    head.absorb(parts)
    seconds = perf_counter() - began
    head.cancel(range(rows))
    return seconds


def measure(name: str, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the figures of a shape."""
    target, heads, shape = engines(name, dtype)
    targets, head = Rig(target, random.Random(0)), heads[""]
    rigs = {form: Rig(engine, random.Random(0)) for form, engine in heads.items()}
    arms: dict[str, Callable[[], float]] = {}
    for rows in ROWS:
        step = Case(rows, CONTEXT)
        arms[f"target, {rows} rows"] = lambda case=step: targets.time(case)  # type: ignore[misc]
        arms[f"absorb, {rows} rows"] = lambda n=rows: absorbing(head, shape, n, 1)  # type: ignore[misc]
        depth = Case(rows, CONTEXT, run=DEPTH)
        for form, rig in rigs.items():
            arms[f"depth{form}, {rows} rows"] = lambda rig=rig, case=depth: rig.time(case) / DEPTH  # type: ignore[misc]
    chunk = Case(1, CONTEXT, new=CHUNK, run=0)
    arms[f"target, {CHUNK} tokens"] = lambda: targets.time(chunk)
    arms[f"absorb, {CHUNK} tokens"] = lambda: absorbing(head, shape, 1, CHUNK)
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for turn in range(rounds + 1):
        for arm, run in arms.items():
            spent = run()
            if turn:
                seconds[arm].append(spent)
    ms = {arm: 1e3 * median(values) for arm, values in seconds.items()}
    shares = {
        arm: round(value / ms[f"target, {arm.partition(', ')[2]}"], 4)
        for arm, value in ms.items()
        if not arm.startswith("target")
    }
    numbers = sum(map(prod, shape.tensors().values()))
    numbers_of_a_token = 2 * shape.num_kv_heads * shape.head_dim  # in a layer, of both
    token = numbers_of_a_token * torch.float32.itemsize
    of_target = numbers_of_a_token * dtype.itemsize * SHAPES[name][0].layers
    return {
        "ms": {arm: round(value, 3) for arm, value in ms.items()},
        "of_the_target_s_pass": shares,
        "head_mb": round(numbers * dtype.itemsize / 1e6, 1),
        "kv_kb_a_token": token / 1e3,
        "kv_of_the_target_s": round(token / of_target, 4),
    }


def main() -> None:
    """Measure the shapes, and print a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES])
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    shapes = {name: measure(name, args.rounds, dtype) for name in args.shapes}
    record = {
        "seed": args.seed,
        "dtype": args.dtype,
        "instructions": machine.instructions(),
        "shapes": shapes,
    }
    print(json.dumps(records.stamp() | record, indent=1))


if __name__ == "__main__":
    main()
