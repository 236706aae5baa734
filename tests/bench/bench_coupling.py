"""Which rule of acceptance gives most tokens a step with the shipped drafts, by shape.

    python -m tests.bench.bench_coupling --model FOLDER --out FILE

The target draws texts; target and drafts are scored along them. Given a text, what
a chain would have had accepted at a place is known exactly (``tests.bench.accepted``). For trees
the race's noise is drawn given that the text won it, and they are grown and followed as they would
be. Fixed trees are a spine with siblings, of the widths that are best over all places (which
flatters both rules alike). Best-first trees take the nodes to which the product of the draft's
confidences is greatest, with one forward a node; a chain takes as many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from backend import machine
from backend.engines.chunks import Chunk
from backend.engines.laws import target_laws
from backend.request import SamplingParams
from backend.tokenizer import load_tokenizer
from tests.bench import workloads
from tests.bench.accepted import (
    MOST,
    chain,
    fixed,
    followed,
    grow,
    hindsight,
    race_chance,
    race_ranks,
    rejection_ranks,
)
from tests.bench.drafts import Model

SETTINGS = {
    "T 0.7": SamplingParams(temperature=0.7),
    "T 1.0": SamplingParams(temperature=1.0),
    "T 1.0, top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
}
NODES = (4, 8)
RACES, TREES = 8, 2
"""Draws of the noise that ranks, and best-first trees, are averaged over."""
DRAFTS = tuple(f"smollm2-135m-instruct-{name}" for name in ("4m", "10m", "10m-sql"))
SHAPES = {
    nodes: [tuple(np.diff([0, *cuts, nodes]).tolist()) for count in range(nodes) for cuts in itertools.combinations(range(1, nodes), count)]
    for nodes in NODES
}
"""Every fixed tree of so many nodes, as its candidates by depth."""
COMPARED = (
    ("race", "chain"),
    ("race", "fixed tree"),
    ("race", "best-first"),
    ("point", "best-first"),
)
"""Rules and proposals whose ratios to rejection sampling are reported."""
SHARPNESS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


Measurement = Callable[[Model, argparse.Namespace], dict[str, Any]]


@dataclass
class Text:
    """A prompt, what the target drew behind it, and the laws [tokens, vocab] that it drew from."""

    prompt: list[int]
    tokens: list[int]
    laws: torch.Tensor


@dataclass
class Run:
    """A draft under a setting, how sharp its confidence is, and the step between places."""

    draft: Model
    params: SamplingParams
    sharpness: float
    every: int


def laws_of(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return laws that sum to one, in fp32."""
    laws = target_laws(logits, [params] * len(logits))
    return laws / laws.sum(-1, keepdim=True)


@torch.inference_mode()
def draw_texts(target: Model, prompts: list[list[int]], params: SamplingParams, length: int, seed: int) -> list[Text]:
    """Return up to ``length`` tokens behind each prompt, whose own KV but the last is there."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = [[] for _ in prompts]
    laws: list[list[torch.Tensor]] = [[] for _ in prompts]
    for place in range(length):
        last = [(tokens[row] or prompt)[-1:] for row, prompt in enumerate(prompts)]
        chunks = [Chunk(last[row], len(prompt) + place - 1, target._tables[row], 1) for row, prompt in enumerate(prompts)]
        found = laws_of(target._llama.forward(chunks).float(), params)
        times = torch.empty_like(found).exponential_(generator=generator) / found
        for row, token in enumerate(times.argmin(-1).tolist()):
            tokens[row].append(token)
            laws[row].append(found[row])
    return [Text(p, t, torch.stack(rows)) for p, t, rows in zip(prompts, tokens, laws, strict=True)]


@torch.inference_mode()
def score(run: Run, text: Text, seed: int) -> dict[str, torch.Tensor]:
    """Return the accepted tokens [places] of every arm; fixed trees: [places, shapes]."""
    generator = torch.Generator().manual_seed(seed)
    p, q, own = aligned(text, run.draft, run.params)
    noises = [hindsight(p, own, generator) for _ in range(RACES)]
    rejection, race = rejection_ranks(p, q, own), race_chance(p, q, own).double()
    raced = torch.stack([race_ranks(q / noise, own) for noise in noises]).mean(0)
    raced[:, 0] = race  # exact
    point = (q.argmax(-1, keepdim=True) == own)[:, 0].double()
    found = {"rejection, first": rejection[:, 0], "race, first": race, "point, first": point}
    for width in (2, 4):
        found[f"rejection, first of {width}"] = rejection[:, :width].sum(-1)
        found[f"race, first of {width}"] = raced[:, :width].sum(-1)
    found = {name: values[: len(own) - MOST + 1] for name, values in found.items()}
    for nodes in NODES:
        for name, ranks in (("rejection", rejection), ("race", raced)):
            trees = [fixed(ranks[:, 0], ranks, shape) for shape in SHAPES[nodes]]
            found[f"{name}, fixed tree {nodes}"] = torch.stack(trees, 1)
            found[f"{name}, chain {nodes}"] = chain(ranks[:, 0], nodes)
        found[f"point, chain {nodes}"] = chain(point, nodes)
    found = {name: values[:: run.every] for name, values in found.items()}
    found |= best_first(run, text, q, own, [*noises[:TREES]])
    return found | best_first(run, text, q, own, [None])


def aligned(text: Text, draft: Model, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return p, q [n, columns] and the text's columns [n, 1]: the draft's shortlist and, as one
    column, all that it cannot propose."""
    ids = shortlist(draft)
    logits = draft.logits(text.prompt + text.tokens, len(text.prompt))[:, ids]
    inside = text.laws[:, ids]
    p = torch.cat([inside, (1 - inside.sum(-1, keepdim=True)).clamp_(min=0)], 1)
    q = functional.pad(laws_of(logits, params), (0, 1))
    column = torch.full((draft.vocab_size,), len(ids)).index_copy_(0, ids, torch.arange(len(ids)))
    return p, q, column[text.tokens][:, None]


def shortlist(draft: Model) -> torch.Tensor:
    """Return the tokens that a draft can propose."""
    return torch.arange(draft.vocab_size) if draft.token_ids is None else draft.token_ids


def best_first(run: Run, text: Text, q: torch.Tensor, own: torch.Tensor, noises: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Return the accepted tokens of trees grown at each place, the mean over ``noises``.

    None stands for no race: the draft's own probabilities.
    """
    places = range(0, len(text.tokens) - MOST + 1, run.every)
    counts = torch.zeros(len(NODES), len(places), dtype=torch.float64)
    for column in reversed(range(len(places))):  # KV overwrites what is behind the place
        place = places[column]
        for noise in noises:
            tree = tree_at(run, text, q[place], place, noise)
            for row, nodes in enumerate(NODES):
                counts[row, column] += followed(*tree, own[place:, 0].tolist(), nodes)
    rule = "point" if noises == [None] else "race"
    return {f"{rule}, best-first {n}": counts[row] / len(noises) for row, n in enumerate(NODES)}


def tree_at(run: Run, text: Text, law: torch.Tensor, place: int, noise: torch.Tensor | None) -> tuple[list[int], list[int]]:
    """Return columns and parents of the tree behind ``place`` tokens, where q is ``law``."""
    draft, ids = run.draft, shortlist(run.draft).tolist()

    def confidence(law: torch.Tensor, depth: int) -> torch.Tensor:
        return law if noise is None else confident(law, noise[place + depth], run.sharpness)

    def behind(tokens: list[int], parents: list[int]) -> torch.Tensor:
        depth, node = 0, len(tokens) - 1
        while node >= 0:
            depth, node = depth + 1, parents[node]
        nodes = [ids[column] for column in tokens]
        chunk = Chunk(nodes, len(text.prompt) + place, draft._tables[0], 1, parents)
        found = laws_of(draft._llama.forward([chunk]).float(), run.params)
        return confidence(functional.pad(found, (0, 1))[0], depth)

    return grow(confidence(law, 0), behind)


def confident(law: torch.Tensor, noise: torch.Tensor, sharpness: float) -> torch.Tensor:
    """Return how likely the draft holds each token to be what the target draws, from its race."""
    return ((law / noise).log() * sharpness).softmax(-1)


def fit(texts: list[Text], draft: Model, params: SamplingParams, seed: int) -> float:
    """Return the sharpness with the greatest likelihood of the texts."""
    generator, totals = torch.Generator().manual_seed(seed), dict.fromkeys(SHARPNESS, 0.0)
    for text in texts:
        p, q, own = aligned(text, draft, params)
        noise = hindsight(p, own, generator)
        for sharpness in SHARPNESS:
            found = confident(q, noise, sharpness).gather(1, own).clamp_(min=1e-6)
            totals[sharpness] += float(found.log().sum())
    return max(SHARPNESS, key=totals.__getitem__)


def summarise(scores: list[dict[str, torch.Tensor]], kinds: list[str], seed: int) -> dict[str, Any]:
    """Return every arm's mean with its interval by prompt, and ratios to rejection sampling."""
    sums: dict[str, np.ndarray] = {}
    shapes = {}
    for name in scores[0]:
        totals = torch.stack([score[name].sum(0) for score in scores])
        if totals.ndim == 2:
            best = int(totals.sum(0).argmax())
            shapes[name], totals = SHAPES[int(name[-1])][best], totals[:, best]
        sums[name] = totals.numpy()
    counts = np.array([len(score["race, first"]) for score in scores])
    rows = np.random.default_rng(seed).integers(len(counts), size=(1000, len(counts)))
    rows = np.vstack([np.arange(len(counts)), rows])
    means = {name: values[rows].sum(1) / counts[rows].sum(1) + (", first" not in name) for name, values in sums.items()}
    ratios = {
        f"{rule}, {mine} {nodes} / rejection, {base} {nodes}": interval(
            means[f"{rule}, {mine} {nodes}"] / means[f"rejection, {base} {nodes}"]
        )
        for nodes in NODES
        for base in ("chain", "fixed tree")
        for rule, mine in COMPARED
    }
    by_kind = {}
    for kind in dict.fromkeys(kinds):
        mine = np.array([other == kind for other in kinds])
        by_kind[kind] = {
            name: round(float(1 + values[mine].sum() / counts[mine].sum()), 3) for name, values in sums.items() if ", first" not in name
        }
    return {
        "places": int(counts.sum()),
        "prompts": len(counts),
        "arms": {name: interval(values) for name, values in means.items()},
        "shapes": shapes,
        "ratios": ratios,
        "tokens_per_step_by_workload": by_kind,
    }


def interval(values: np.ndarray) -> list[float]:
    """Return the first value, and the 95 % interval of the others."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return [round(float(value), 3) for value in (values[0], low, high)]


def acceptance(target: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return the table of every setting and draft."""
    drafts = {name: Model(args.drafts / name, "fp32") for name in DRAFTS}
    prompts, kinds = read_prompts(target, args)
    rows = []
    for setting, params in SETTINGS.items():
        texts = draw_texts(target, prompts, params, args.tokens, args.seed)
        for name, draft in drafts.items():
            run = Run(draft, params, fit(texts, draft, params, args.seed), args.every)
            scores = [score(run, text, args.seed + n) for n, text in enumerate(texts)]
            row = {"setting": setting, "draft": name, "sharpness": run.sharpness}
            rows.append(row | summarise(scores, kinds, args.seed))
            print(json.dumps({**rows[-1], "tokens_per_step_by_workload": 0}), file=sys.stderr)
    return {"rows": rows}


@torch.inference_mode()
def read_prompts(target: Model, args: argparse.Namespace) -> tuple[list[list[int]], list[str]]:
    """Return prompts and their workloads; the target has run all of each but its last token."""
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
    return prompts, kinds


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
    command = ["python", "-m", f"tests.bench.bench_{name}", *words]
    found = {"command": command, "machine": machine.describe(), "seed": args.seed}
    found |= measure(target, args)
    whole = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    args.out.write_text(json.dumps({**whole, name: found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    record("coupling", arguments(__doc__ or ""), acceptance)
