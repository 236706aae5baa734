"""What a draw costs (``backend.sampling.draw``), on laws of drawn texts.

    python -m bench.micro.draw --model FOLDER --out FILE

Draws are interleaved, each round with other rows and seeds, one thread. Beside the times: how much
of the laws is tail, how often a draft's first finisher is the target's (its head's race, and one in
which all tokens run), and how many draws differ where the same laws come from passes of another
shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from backend.engines.stepping.chunks import Chunk
from backend.request import SamplingParams
from backend.sampling.draw import HEAD, draw, finishers
from backend.sampling.randomness import Words, exponentials, word
from bench.laws import Model
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

SEEDS = 4
"""That every law is drawn from, where agreement is counted."""


def cost(target: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Return draws' times, the tails, how coupled a draft stays and what rounding moves."""
    draft = Model(args.drafts / DRAFTS[1], "fp32")
    prompts, _, ends = read_prompts(target, args)
    rows = []
    for setting, params in SETTINGS.items():
        texts = draw_texts(target, prompts, params, args.tokens, ends, args.seed)
        laws = torch.cat([text.laws for text in texts])
        found: dict[str, Any] = {"setting": setting, "laws": len(laws)}
        found["tail_mass"] = float((laws * (laws < HEAD)).sum(-1).mean())
        found["head_tokens"] = float((laws >= HEAD).sum(-1).float().mean())
        found["ms_a_row"] = times(laws, args.rounds, args.seed)
        rows.append(found | coupled(texts, draft, params, args.seed))
        with torch.inference_mode():
            rows[-1]["rounding"] = rounding(texts, target, params, args.seed)
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {"rows": rows}


def words_of(seed: int, count: int) -> Words:
    """Return the noise of so many rows."""
    return np.array([word(seed, position) for position in range(count)], np.uint64)


def draw_all(laws: torch.Tensor, words: Words) -> list[int]:
    """Return the columns that are drawn where the tail races with the head."""
    tokens = np.arange(laws.shape[1], dtype=np.uint64)
    with np.errstate(divide="ignore"):
        rows = zip(words, laws.numpy(), strict=True)
        return [int((exponentials(word ^ tokens) / row).argmin()) for word, row in rows]


def times(laws: torch.Tensor, rounds: int, seed: int) -> dict[str, Any]:
    """Return [median, mean] ms a row of CPU time by rows and draw."""
    arms = {
        "the words alone": lambda some, n: words_of(n, len(some)),
        "all race": lambda some, n: draw_all(some, words_of(n, len(some))),
        "draw": lambda some, n: draw(some, words_of(n, len(some))),
        "finishers": lambda some, n: finishers(some, words_of(n, len(some)), 4),
    }
    generator = torch.Generator().manual_seed(seed)
    report = {}
    for count in (1, 4, 16):
        taken: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(rounds):
            some = laws[torch.randperm(len(laws), generator=generator)[:count]]
            for name in [*arms] if number % 2 else [*arms][::-1]:
                start = time.thread_time()
                arms[name](some, number)
                taken[name].append(1e3 * (time.thread_time() - start) / count)
        report[count] = {name: summary(values) for name, values in taken.items()}
    return report


def summary(values: list[float]) -> list[float]:
    """Return median and mean."""
    return [round(statistics.median(values), 4), round(statistics.fmean(values), 4)]


def coupled(texts: list[Text], draft: Model, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return how often the draft's candidate is the target's draw: its head's first finisher (none
    without a head), and for comparison where all tokens race for both.
    """
    agreed: dict[str, list[bool]] = {"draw": [], "all race": []}
    for number, text in enumerate(texts):
        q = laws_of(draft.logits(text.prompt + text.tokens, len(text.prompt)), params)
        for again in range(SEEDS):
            words = words_of(seed + SEEDS * number + again, len(text.tokens))
            pairs = zip(draw(text.laws, words), finishers(q, words, 1), strict=True)
            agreed["draw"] += [any(token == column for column, _ in best) for token, best in pairs]
            pair = draw_all(text.laws, words), draw_all(q, words)
            agreed["all race"] += [token == other for token, other in zip(*pair, strict=True)]
    return {"agreement": {name: round(float(np.mean(of)), 4) for name, of in agreed.items()}}


def rounding(texts: list[Text], target: Model, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return how many draws differ between laws of one row a text and of a whole text a pass."""
    moved, draws, distances = dict.fromkeys(("draw", "inverse"), 0), 0, []
    for number, text in list(enumerate(texts))[::5]:
        own = target._tables[number]  # its prompt's KV is written again, others' stays
        whole = Chunk((text.prompt + text.tokens)[:-1], 0, own, len(text.tokens))
        other = laws_of(target._llama.forward([whole]).float(), params)
        distances.append(0.5 * (other.double() - text.laws.double()).abs().sum(-1))
        sums = [law.numpy().cumsum(-1) for law in (text.laws, other)]
        for again in range(16):
            words = words_of(seed + 1000 * again + number, len(text.tokens))
            pair = draw(text.laws, words), draw(other, words)
            moved["draw"] += sum(one != two for one, two in zip(*pair, strict=True))
            height = np.random.default_rng([number, again]).random((len(words), 1))
            one, two = ((law < height * law[:, -1:]).sum(-1) for law in sums)
            moved["inverse"] += int((one != two).sum())
            draws += len(words)
    far = torch.cat(distances)
    distance = {"mean": float(far.mean()), "greatest": float(far.max())}
    return {"draws": draws, "moved": moved, "total_variation": distance}


if __name__ == "__main__":
    record("draw", arguments(__doc__ or ""), cost)
