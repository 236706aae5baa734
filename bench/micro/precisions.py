"""Costs and fidelity of engines and number formats: ``python -m bench.micro.precisions --model
FOLDER --out FILE``.

An arm is ``engine:dtype``, with ``:runs`` of OpenVINO without the promise of the same bits, with
``:64`` of int8 whose activations are rounded in groups of 64 columns (0: not rounded). Time:
whole ``submit`` and ``poll`` of steps after ``--context`` tokens and of prompts, arms interleaved;
CPU time of the one thread, so that other work on the machine moves it little. Texts: the five
workloads; every position's arg-max and distribution against the first arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backend.engines.openvino import engine as openvino
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.port import Turn
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.engines.stepping.engine import StepEngine
from backend.engines.torch.engine import TorchEngine
from backend.machine import machine
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from backend.tokenizer import load_tokenizer
from bench import records, workloads

STEPS = ((1, 0), (1, 2), (1, 4), (1, 8), (8, 0), (8, 2), (16, 0), (16, 2))
"""(sequences, proposed tokens of each)"""
PROMPTS = (64, 200, 256)
EXCERPT_TOKENS = 192
ARMS = ("torch:fp32", "openvino:fp32", "openvino:fp32:runs", "openvino:int8")
FIDELITY = ("arg_max_equal", "kl_mean", "log_likelihood_more")
NARROW = ("openvino:bf16", "openvino:bf16:runs")


def make(arm: str, folder: Path, context: int) -> StepEngine:
    """Return the engine of an arm."""
    engine, dtype, *more = arm.split(":")
    blocks = max(n * -(-(context + 1 + k) // BLOCK_TOKENS) for n, k in STEPS)
    sizes: dict[str, Any] = {"kv_blocks": blocks, "max_context_tokens": max(context, *PROMPTS) + 16}
    if engine == "torch":
        torch.set_num_threads(1)
        return TorchEngine.load("arm", folder, dtype=dtype, **sizes)
    groups = [int(word) for word in more if word.isdecimal()]
    with mock.patch.object(openvino, "INT8_GROUP", *groups or [openvino.INT8_GROUP]):
        sizes |= {"threads": 1, "invariant": "runs" not in more}
        return OpenvinoEngine.load("arm", folder, dtype=dtype, **sizes)


def stepper(engine: StepEngine, sequences: int, proposed: int, context: int) -> Callable[[], None]:
    """Return a step of this many sequences, each after ``context`` tokens that count as run; with
    ``proposed`` below 0 a prefill of ``context`` tokens.
    """
    prefills = proposed < 0
    length = context if prefills else context + 1
    blocks = -(-(length + max(0, proposed)) // BLOCK_TOKENS)
    generator = torch.Generator().manual_seed(sequences)
    outputs = []
    for number in range(sequences):
        count = length + max(0, proposed)
        tokens = torch.randint(0, engine.limits.vocab_size, (count,), generator=generator).tolist()
        table = list(range(number * blocks, (number + 1) * blocks))
        sequence = Sequence(number, tokens[:length], context, SamplingParams(), {"arm": table})
        chain = Proposal.chain("bench", tokens[length:]) if proposed > 0 else None
        outputs.append(Turn(sequence, length, proposal=chain))

    def step() -> None:
        for turn in outputs:
            engine.assume(turn.sequence, 0 if prefills else context)
        engine.submit(outputs)
        for completion in engine.poll(0.0):
            if completion.error:
                raise RuntimeError(completion.error)

    return step


def times(engines: dict[str, StepEngine], context: int, rounds: int) -> list[dict[str, object]]:
    """Return the medians of every step, in CPU ms, and the first arm's time over the others'."""
    cells = [*((n, k, context) for n, k in STEPS), *((1, -1, tokens) for tokens in PROMPTS)]
    rows = []
    for sequences, proposed, before in cells:
        steps = {arm: stepper(e, sequences, proposed, before) for arm, e in engines.items()}
        seconds: dict[str, list[float]] = {arm: [] for arm in steps}
        for index in range(rounds + 1):
            for arm in [*steps, *reversed(steps)]:
                start = time.process_time()
                steps[arm]()
                if index:
                    seconds[arm].append(1e3 * (time.process_time() - start))
        for engine in engines.values():
            engine.cancel(range(sequences))
        first, *others = engines
        ratios = {
            arm: statistics.median(a / b for a, b in zip(seconds[first], seconds[arm], strict=True))
            for arm in others
        }
        row = {"sequences": sequences, "proposed": proposed, "tokens": before}
        medians = {arm: statistics.median(values) for arm, values in seconds.items()}
        rows.append({**row, "cpu_ms": medians, f"{first}_over": ratios})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def fidelity(
    engines: dict[str, StepEngine], texts: dict[str, list[list[int]]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return by kind of text and arm the share of equal arg-maxes, the mean KL from the first arm's
    distribution, and the log-likelihood of a token less the first arm's.
    """

    def log_probs(engine: StepEngine, text: list[int]) -> torch.Tensor:
        table = KVTable(range(-(-EXCERPT_TOKENS // BLOCK_TOKENS)))
        chunk = PassChunk(text, 0, table, len(text), prompt_rows=len(text))
        return torch.from_numpy(engine.model.forward([chunk])).float().log_softmax(-1)

    first, *others = engines
    results: dict[str, dict[str, dict[str, float]]] = {}
    for kind, lines in texts.items():
        sums = {arm: torch.zeros(3, dtype=torch.float64) for arm in others}
        for text in lines:
            reference = log_probs(engines[first], text)
            for arm in others:
                other = log_probs(engines[arm], text)
                same = (other.argmax(-1) == reference.argmax(-1)).double().sum()
                divergence = (reference.exp() * (reference - other)).sum(-1).double().sum()
                more = (other - reference)[:-1].gather(1, torch.tensor(text[1:])[:, None])
                sums[arm] += torch.stack([same, divergence, more.double().sum()])
        positions = sum(map(len, lines))
        results[kind] = {
            arm: dict(zip(FIDELITY, (total / positions).tolist(), strict=True))
            for arm, total in sums.items()
        }
    return results


def main() -> None:
    """Measure, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arms", nargs="+")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=12, help="of each workload")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    arms = args.arms or [*ARMS, *(NARROW if machine.multiplies_bf16() else ())]
    engines = {arm: make(arm, args.model, args.context) for arm in arms}
    tokenizer = load_tokenizer(args.model)
    texts = {}
    for name in workloads.NAMES:
        messages = workloads.load(name, args.texts, args.seed).messages
        rendered = [workloads.render(message, args.model) for message in messages]
        texts[name] = [tokenizer.encode(text, False)[:EXCERPT_TOKENS] for text in rendered]
    with torch.inference_mode():
        agreement = fidelity(engines, texts)
    report = {
        "seed": args.seed,
        "threads": 1,
        "positions": {name: sum(map(len, lines)) for name, lines in texts.items()},
        f"against {arms[0]}": agreement,
        "steps": times(engines, args.context, args.rounds),
    }
    records.write(args.out, report)
    print(json.dumps(agreement, indent=1))


if __name__ == "__main__":
    main()
