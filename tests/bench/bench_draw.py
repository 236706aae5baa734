"""What a draw costs, today's and the cheap exact one, on laws of drawn texts.

    python -m tests.bench.bench_draw --model FOLDER --out FILE

Draws are interleaved, each round with other rows and seeds, one thread. Beside the times: how much
of the laws is tail, how often a draft's first finisher is the target's (its race with and without a
threshold), and how many draws differ where the same laws come from passes of another shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from backend.engines.chunks import Chunk
from backend.engines.coupling import winner
from backend.engines.processing import WHOLE_VOCABULARY
from backend.randomness import Purpose, key
from backend.request import SamplingParams
from tests.bench.coupled_draw import draw, draw_torch, noise
from tests.bench.drafts import Model
from tests.bench.drawn_texts import (
    DRAFTS,
    SETTINGS,
    Text,
    arguments,
    draw_texts,
    laws_of,
    read_prompts,
    record,
)

THRESHOLDS = (1e-3, 1e-4, 1e-5)
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
        found["tail_mass"] = {t: float((laws * (laws < t)).sum(-1).mean()) for t in THRESHOLDS}
        found["head_tokens"] = {t: float((laws >= t).sum(-1).float().mean()) for t in THRESHOLDS}
        found["ms_a_row"] = times(laws, args.rounds, args.seed)
        rows.append(found | coupled(texts, draft, params, args.seed))
        with torch.inference_mode():
            rows[-1]["rounding"] = rounding(texts, target, params, args.seed)
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {"rows": rows}


def words_of(seed: int, count: int) -> np.ndarray:
    """Return the noise of so many rows."""
    return key(seed, np.arange(count), Purpose.RACE)


def with_numpy(threshold: float, laws: torch.Tensor, seed: int) -> np.ndarray:
    """Draw for rows of tensors by NumPy."""
    return draw(laws.numpy(), words_of(seed, len(laws)), threshold)


def with_torch(threshold: float, laws: torch.Tensor, seed: int) -> torch.Tensor:
    """Draw for rows of tensors by torch."""
    words = torch.from_numpy(words_of(seed, len(laws)).view(np.int64))
    return draw_torch(laws, words, threshold)


def all_race(laws: torch.Tensor, seed: int) -> np.ndarray:
    """Draw for rows of tensors by NumPy, the tail racing with the head."""
    tokens = np.arange(laws.shape[1], dtype=np.uint64)
    with np.errstate(divide="ignore"):
        rows = zip(words_of(seed, len(laws)), laws.numpy(), strict=True)
        times = [noise(word ^ tokens) / row for word, row in rows]
    return np.array([row.argmin() for row in times])


def times(laws: torch.Tensor, rounds: int, seed: int) -> dict[str, Any]:
    """Return [median, mean] ms a row of CPU time by rows and draw."""
    arms: dict[str, Callable[[torch.Tensor, int], Any]] = {
        "today": lambda some, n: [winner(r, n, i, WHOLE_VOCABULARY) for i, r in enumerate(some)],
        "the words alone": lambda some, n: words_of(n, len(some)),
        "numpy, all race": all_race,
    }
    for threshold in THRESHOLDS:
        arms[f"numpy {threshold}"] = partial(with_numpy, threshold)
        arms[f"torch {threshold}"] = partial(with_torch, threshold)
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
    """Return how often the draft's candidate is the target's draw, by threshold (0: all race).

    The candidate is the draft's own draw, or the first finisher of its head alone.
    """
    agreed: dict[float, list[np.ndarray]] = {t: [] for t in (0.0, *THRESHOLDS)}
    for number, text in enumerate(texts):
        q = laws_of(draft.logits(text.prompt + text.tokens, len(text.prompt)), params).numpy()
        for threshold, again in itertools.product(agreed, range(SEEDS)):
            words = words_of(seed + SEEDS * number + again, len(text.tokens))
            least = max(threshold, 1e-30)
            own = draw(text.laws.numpy(), words, least)
            head = np.where(q < least, np.float32(0), q)
            agreed[threshold].append(np.stack([own == draw(n, words, least) for n in (q, head)]))
    shares = {t: np.concatenate(found, 1).mean(1) for t, found in agreed.items()}
    return {"agreement": {t: [round(float(v), 4) for v in pair] for t, pair in shares.items()}}


def rounding(texts: list[Text], target: Model, params: SamplingParams, seed: int) -> dict[str, Any]:
    """Return how many draws differ between laws of one row a text and of a whole text a pass."""
    moved, draws, distances = dict.fromkeys(("race of the head", "inverse"), 0), 0, []
    for number, text in list(enumerate(texts))[::5]:
        own = target._tables[number]  # its prompt's KV is written again, others' stays
        whole = Chunk((text.prompt + text.tokens)[:-1], 0, own, len(text.tokens))
        other = laws_of(target._llama.forward([whole]).float(), params)
        distances.append(0.5 * (other.double() - text.laws.double()).abs().sum(-1))
        pair = [law.numpy() for law in (text.laws, other)]
        sums = [law.cumsum(-1) for law in pair]
        for again in range(16):
            words = words_of(seed + 1000 * again + number, len(text.tokens))
            one, two = (draw(law, words, 1e-4) for law in pair)
            moved["race of the head"] += int((one != two).sum())
            height = np.random.default_rng([number, again]).random((len(one), 1))
            one, two = ((law < height * law[:, -1:]).sum(-1) for law in sums)
            moved["inverse"] += int((one != two).sum())
            draws += len(one)
    far = torch.cat(distances)
    distance = {"mean": float(far.mean()), "greatest": float(far.max())}
    return {"draws": draws, "moved": moved, "total_variation": distance}


if __name__ == "__main__":
    record("draw", arguments(__doc__ or ""), cost)
