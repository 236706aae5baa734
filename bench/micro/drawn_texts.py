"""Texts that the target draws from prompts of the workloads, with the laws that it drew from.

What is measured along them is written into one file of results by ``record``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backend import machine
from backend.engines.stepping.chunks import Chunk
from backend.request import SamplingParams
from backend.sampling.laws import target_laws
from backend.tokenizer import load_tokenizer
from bench import records, workloads
from bench.laws import Model

SETTINGS = {
    "T 0.7": SamplingParams(temperature=0.7),
    "T 1.0": SamplingParams(temperature=1.0),
    "T 1.0, top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
}
DRAFTS = tuple(f"smollm2-135m-instruct-{name}" for name in ("4m", "10m", "10m-sql"))
Measurement = Callable[[Model, argparse.Namespace], dict[str, Any]]


@dataclass
class Text:
    """A prompt, what the target drew behind it, and the laws [tokens, vocab] that it drew from."""

    prompt: list[int]
    tokens: list[int]
    laws: torch.Tensor


def laws_of(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return laws that sum to one, in fp32."""
    laws = target_laws(logits, [params] * len(logits))
    return laws / laws.sum(-1, keepdim=True)


@torch.inference_mode()
def draw_texts(
    target: Model,
    prompts: list[list[int]],
    params: SamplingParams,
    length: int,
    ends: frozenset[int],
    seed: int,
) -> list[Text]:
    """Return up to ``length`` tokens behind each prompt, or up to an end token.

    The KV of the prompts but for their last token is there (``read_prompts``).
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = [[] for _ in prompts]
    laws: list[list[torch.Tensor]] = [[] for _ in prompts]
    for place in range(length):
        last = [(tokens[row] or prompt)[-1:] for row, prompt in enumerate(prompts)]
        starts = [len(prompt) + place - 1 for prompt in prompts]
        rows = zip(last, starts, target._tables[: len(prompts)], strict=True)
        chunks = [Chunk(token, start, table, 1) for token, start, table in rows]
        found = laws_of(target._llama.forward(chunks).float(), params)
        times = torch.empty_like(found).exponential_(generator=generator) / found
        for row, token in enumerate(times.argmin(-1).tolist()):
            tokens[row].append(token)
            laws[row].append(found[row])
    texts = []
    for prompt, own, rows in zip(prompts, tokens, laws, strict=True):
        end = next((at for at, token in enumerate(own, start=1) if token in ends), length)
        texts.append(Text(prompt, own[:end], torch.stack(rows[:end])))
    return texts


@torch.inference_mode()
def read_prompts(
    target: Model,
    args: argparse.Namespace,
) -> tuple[list[list[int]], list[str], frozenset[int]]:
    """Return prompts, their workloads and what ends an answer.

    The target has run all of each prompt but its last token.
    """
    tokenizer = load_tokenizer(args.model)
    prompts, kinds = [], []
    for kind in workloads.NAMES:
        for message in workloads.load(kind, 4 * args.prompts, args.seed).messages:
            prompt = tokenizer.encode(workloads.render(message, args.model))
            if len(prompt) <= args.longest and kinds.count(kind) < args.prompts:
                prompts.append(prompt)
                kinds.append(kind)
    for row, prompt in enumerate(prompts):
        target._llama.forward([Chunk(prompt[:-1], 0, target._tables[row], 0)])
    return prompts, kinds, tokenizer.end_ids


def arguments(about: str) -> argparse.Namespace:
    """Return what a measurement on drawn texts is asked to do."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="the target's folder")
    parser.add_argument("--drafts", type=Path, default=Path("engines_build/drafts"))
    parser.add_argument("--prompts", type=int, default=6, help="of each workload")
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="drawn behind each prompt")
    parser.add_argument("--every", type=int, default=4, help="places between two that are scored")
    parser.add_argument("--rounds", type=int, default=40, help="of timing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def record(name: str, args: argparse.Namespace, measure: Measurement) -> None:
    """Measure and write it as ``name`` into the file of results, beside what is there."""
    torch.set_num_threads(1)
    target = Model(args.model, "fp32", len(workloads.NAMES) * args.prompts)
    words = [args.model.name if word == str(args.model) else word for word in sys.argv[1:]]
    command = ["python", "-m", f"bench.micro.{name}", *words]
    found = {"command": command, "machine": machine.describe(), "seed": args.seed}
    found |= measure(target, args)
    packed = args.out.with_name(f"{args.out.name}.gz")
    whole = records.read(args.out) if args.out.exists() or packed.exists() else {}
    args.out.write_text(json.dumps({**whole, name: found}, indent=1) + "\n", "utf-8")
