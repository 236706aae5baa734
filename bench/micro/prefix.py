"""Time to first token with and without prefix reuse. Prints JSON.

    python -m bench.micro.prefix --config model_repository/spindle/1/serving.json

Prompts of ``--tokens`` tokens (windows of the benchmark's texts) of which a share is the beginning
of a request served just before. Both arms run the same engine code in this process, on one torch
thread and without drafts, interleaved; the time is that from the submission of a request to its
first token. Texts of 16 tokens are compared too: KV of a prefix is computed in other chunks than
without reuse, which may round a near tie the other way. ``overhead`` is what reuse costs the loop
where nothing is shared.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median

from backend import machine
from backend.app import App, build
from backend.config import ServingConfig, load_config
from backend.core.kv_ledger import KVLedger
from backend.core.session import Session
from backend.engines.fake import FakeEngine
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence
from bench.in_process import Sink
from bench.paired import abba, median_interval
from bench.prompts import PROMPTS

SHARES = (0.9, 0.5, 0.0)
OUTPUT_TOKENS = 16
ids = count(1)


class Text:
    """A decoder for those who compare token ids."""

    def push(self, token_id: int) -> str:
        """Return nothing."""
        return ""

    def finish(self) -> str:
        """Return nothing."""
        return ""


def serve(app: App, prompt: list[int]) -> tuple[float, list[int]]:
    """Serve a prompt alone; return the seconds to its first token and its output."""
    sequence = Sequence(next(ids), list(prompt), len(prompt), SamplingParams())
    session = Session(sequence, GenerationRequest("", OUTPUT_TOKENS), frozenset(), Text(), Sink())
    started, first_s = time.perf_counter(), 0.0
    app.orchestrator.submit(session)
    while not session.sink.ended:
        app.orchestrator.step()
        if not first_s and session.output_tokens:
            first_s = time.perf_counter() - started
    return first_s, sequence.tokens[len(prompt) :]


def compare(
    apps: dict[str, App], stream: list[int], tokens: int, rounds: int, seed: int
) -> list[dict[str, object]]:
    """Return a row for each share: medians in ms, the ratio off / on with its interval, and how
    many texts were the same.
    """
    rng = random.Random(seed)
    times: dict[float, dict[str, list[float]]] = {
        share: {name: [] for name in apps} for share in SHARES
    }
    same = dict.fromkeys(SHARES, 0)
    for index in range(rounds + 1):
        for share in rng.sample(SHARES, len(SHARES)):
            shared = int(share * tokens)
            windows = [
                stream[at : at + tokens] for at in rng.sample(range(len(stream) - tokens), 3)
            ]
            before, prompt = (
                windows[0][:shared] + windows[1][shared:],
                windows[0][:shared] + windows[2][shared:],
            )
            texts = []
            for name in abba(list(apps), index):
                serve(apps[name], before)
                first_s, text = serve(apps[name], prompt)
                texts.append(text)
                if index:  # the first round warms up
                    times[share][name].append(1e3 * first_s)
            same[share] += index > 0 and texts[0] == texts[1]
    rows = []
    for share, arms in times.items():
        ratios = [off / on for off, on in zip(arms["off"], arms["on"], strict=True)]
        medians = {name: round(median(values), 1) for name, values in arms.items()}
        interval = [round(bound, 3) for bound in median_interval(ratios, seed)]
        row = {
            "share": share,
            "ms": medians,
            "off_over_on": round(median(ratios), 3),
            "interval": interval,
        }
        rows.append(row | {"same_texts": same[share], "texts": rounds})
    return rows


def overhead(
    rows: int = 64, prompt_tokens: int = 512, steps: int = 160
) -> dict[str, dict[str, float]]:
    """Return microseconds of the ledger, without and with reuse, in which no text is like another:
    admitting one, and a row in a step.
    """
    found = {}
    for name in ("off", "on"):
        target = FakeEngine("target", kv_blocks=8192) if name == "on" else None
        ledger = KVLedger({"target": 8192}, 9, growth_blocks=0, target=target)
        sequences = [
            Sequence(n, [n] * prompt_tokens, prompt_tokens, SamplingParams()) for n in range(rows)
        ]
        started = time.perf_counter()
        for sequence in sequences:
            assert ledger.reserve(sequence, prompt_tokens + steps)
        admitted = time.perf_counter()
        for step in range(steps):
            for sequence in sequences:
                sequence.tokens.append(step)
                ledger.grow(sequence)
        grown_s = time.perf_counter() - admitted
        found[name] = {
            "admission_us": 1e6 * (admitted - started) / rows,
            "row_and_step_us": 1e6 * grown_s / rows / steps,
        }
    return {
        name: {key: round(value, 2) for key, value in figures.items()}
        for name, figures in found.items()
    }


def apps_of(config: ServingConfig, tokens: int) -> dict[str, App]:
    """Return an app with reuse and one without."""
    limits = replace(config.limits, kv_cache_tokens=16 * tokens)
    plain = replace(config, drafts=(), policy=replace(config.policy, kind="none"))
    arms = {"off": False, "on": True}
    return {
        name: build(replace(plain, limits=replace(limits, enable_kv_cache_reuse=on)), {})
        for name, on in arms.items()
    }


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = load_config(arguments.config)
    apps = apps_of(
        replace(config, target=replace(config.target, dtype=arguments.dtype)), arguments.tokens
    )
    encode = apps["on"].tokenizer.encode
    stream = [
        token
        for messages in PROMPTS.values()
        for message in messages
        for token in encode(message, False)
    ]
    rows = compare(apps, stream, arguments.tokens, arguments.rounds, arguments.seed)
    report = {
        "command": "python -m bench.micro.prefix " + " ".join(sys.argv[1:]),
        "seed": arguments.seed,
        "machine": machine.describe(),
        "prompt_tokens": arguments.tokens,
        "first_token": rows,
        "overhead": overhead(),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
