"""Which rule of acceptance gives most tokens a step with the shipped drafts, by shape.

    python -m bench.micro.coupling --model FOLDER --out FILE

The target draws texts; target and drafts are scored along them. Given a text, what a chain
would have had accepted at a place is known exactly (``bench.micro.accepted``). For trees
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
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from backend.engines.stepping.chunks import Chunk
from backend.request import SamplingParams
from bench.laws import Model
from bench.micro.accepted import (
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
from bench.micro.drawn_texts import (
    DRAFTS,
    SETTINGS,
    Text,
    arguments,
    draw_texts,
    laws_of,
    read_prompts,
    record,
)


def compositions(nodes: int) -> list[tuple[int, ...]]:
    """Return every way to write a number as a sum of widths, in order."""
    if not nodes:
        return [()]
    return [(n, *rest) for n in range(1, nodes + 1) for rest in compositions(nodes - n)]


NODES = (4, 8)
RACES, TREES = 8, 2
"""Draws of the noise that ranks, and best-first trees, are averaged over."""
SHAPES = {nodes: compositions(nodes) for nodes in NODES}
"""Every fixed tree of so many nodes, as its candidates by depth."""
COMPARED = (
    ("race", "chain"),
    ("race", "fixed tree"),
    ("race", "best-first"),
    ("point", "best-first"),
)
"""Rules and proposals whose ratios to rejection sampling are reported."""
SHARPNESS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Run:
    """A draft under a setting, how sharp its confidence is, and the step between places."""

    draft: Model
    params: SamplingParams
    sharpness: float
    every: int


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


def aligned(text: Text, draft: Model, params: SamplingParams) -> Aligned:
    """Return p, q [n, columns] and the text's columns [n, 1].

    Columns are the draft's shortlist and, as the last one, all that it cannot propose.
    """
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


def best_first(
    run: Run,
    text: Text,
    q: torch.Tensor,
    own: torch.Tensor,
    noises: list[torch.Tensor | None],
) -> dict[str, torch.Tensor]:
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


def tree_at(
    run: Run,
    text: Text,
    law: torch.Tensor,
    place: int,
    noise: torch.Tensor | None,
) -> tuple[list[int], list[int]]:
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
    accepted = {name: values[rows].sum(1) / counts[rows].sum(1) for name, values in sums.items()}
    means = {name: values + (", first" not in name) for name, values in accepted.items()}
    ratios = {
        f"{rule}, {mine} {nodes} / rejection, {base} {nodes}": interval(
            means[f"{rule}, {mine} {nodes}"] / means[f"rejection, {base} {nodes}"]
        )
        for nodes in NODES
        for base in ("chain", "fixed tree")
        for rule, mine in COMPARED
    }
    by_kind = {}
    steps = [item for item in sums.items() if ", first" not in item[0]]
    for kind in dict.fromkeys(kinds):
        mine = np.array([other == kind for other in kinds])
        places = counts[mine].sum()
        by_kind[kind] = {n: round(float(1 + of[mine].sum() / places), 3) for n, of in steps}
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
    prompts, kinds, ends = read_prompts(target, args)
    rows = []
    for setting, params in SETTINGS.items():
        texts = draw_texts(target, prompts, params, args.tokens, ends, args.seed)
        long = [len(text.tokens) >= MOST for text in texts]
        texts, kept = (list(itertools.compress(items, long)) for items in (texts, kinds))
        for name, draft in drafts.items():
            run = Run(draft, params, fit(texts, draft, params, args.seed), args.every)
            scores = [score(run, text, args.seed + n) for n, text in enumerate(texts)]
            row = {"setting": setting, "draft": name, "sharpness": run.sharpness}
            rows.append(row | summarise(scores, kept, args.seed))
            print(json.dumps({**rows[-1], "tokens_per_step_by_workload": 0}), file=sys.stderr)
    return {"rows": rows}


if __name__ == "__main__":
    record("coupling", arguments(__doc__ or ""), acceptance)
