"""What each draft is worth to its target, by workload: acceptance by position, tokens a step, cost.
Prints JSON, tables to standard error.

    python -m bench.micro.drafts --target FOLDER --draft NAME=FOLDER ... [--prompts 16]
        [--out FILE]

Free-running: along the target's own answers, greedy and at temperature 0.8 (``bench.drafts``
says how). Teacher-forced: along human texts, the share of positions where draft and target choose
the same token, and the acceptance if both sampled. None of the texts are in any training set:
MT-Bench, news to summarise, questions over Wikipedia, SQL over tables and questions of its own,
functions of held-out modules. Prompt lookup stands beside. Costs: one token at 256 tokens of
context, draft over target, one thread, interleaved (ABBA).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend import machine
from backend.engines.torch.engine import TorchEngine
from backend.sequence import BLOCK_TOKENS
from backend.storage.manifest import check_pair, read_manifest, weights_sha256
from backend.tokenizer import Tokenizer, load_tokenizer
from bench.drafts import (
    MAX_TOKENS,
    POSITIONS,
    Model,
    Run,
    accepting,
    by_coins,
    by_lookup,
    interval,
    overlap,
    steps,
)
from bench.drafts import tokens_per_step as rate
from bench.micro.forward import abba, engine_arm
from bench.workloads import load, render
from engines_build.distill.corpora import Corpus
from engines_build.distill.evaluation_sets import (
    lee_news,
    sql_questions,
    wikipedia,
    wikipedia_questions,
)
from engines_build.distill.unlikelihood import share_repeated

LENGTHS = (2, 4, 8)
TEMPERATURES = (0.0, 0.8)
HUMAN_TOKENS = 256
PARTS = ("free_running", "teacher_forced", "forward")
Texts = list[tuple[list[int], list[int]]]


def messages(workload: str, count: int, seed: int) -> list[str]:
    """Return ``count`` messages of a workload."""
    if workload in ("chat", "summarise", "code"):
        return list(load(workload, count, seed).messages)
    every = (
        wikipedia_questions() if workload == "qa" else [question for question, _ in sql_questions()]
    )
    return random.Random(f"{workload}/{seed}").sample(every, count)


def human_texts(kind: str, count: int, seed: int) -> list[str]:
    """Return ``count`` texts that people wrote (of SQL: the generator's right answers)."""
    functions = [
        f
        for d in Corpus(["stdlib"], None, True, 0).documents("stdlib")
        for f in d.text.split("\n\f\n")
    ]
    every = {"news": lee_news(), "wikipedia": [text for _, text in wikipedia()], "code": functions}
    every["sql"] = [f"{question}\n{answer}" for question, answer in sql_questions()]
    return random.Random(f"{kind}/{seed}").sample(every[kind], count)


def free_running(
    texts: Texts, target: Model, drafts: dict[str, Model], temperature: float, seed: int
) -> dict[str, Any]:
    """Score every draft along the target's answers (prompt, answer)."""
    runs: dict[str, list[tuple[int, Run]]] = {name: [] for name in (*drafts, "lookup")}
    chances: dict[str, list[np.ndarray]] = {name: [] for name in drafts}
    for number, (prompt, answer) in enumerate(texts):
        law = target.logits(prompt + answer, len(prompt))
        coins = np.random.default_rng([seed, number]).random(len(answer))
        for name, draft in drafts.items():
            chances[name].append(
                accepting(draft.logits(prompt + answer, len(prompt)), law, answer, temperature)
            )
            runs[name].append((len(answer), by_coins(chances[name][-1], coins)))
        runs["lookup"].append((len(answer), by_lookup(prompt, answer)))
    found = {name: score(of, seed) for name, of in runs.items()}
    for name, values in chances.items():
        found[name]["acceptance"] = round(float(np.concatenate(values).mean()), 3)
    return found


def score(runs: list[tuple[int, Run]], seed: int) -> dict[str, Any]:
    """Return tokens a step by length (with the interval at 4) and, of steps that propose 8, the
    share that accepts each position.
    """
    taken = {k: [(tokens, steps(run, tokens, k)) for tokens, run in runs] for k in LENGTHS}
    long = [accepted for _, of in taken[POSITIONS] for accepted in of]
    low, high = interval(taken[4], np.random.default_rng(seed))
    return {
        "tokens_per_step": {str(k): round(rate(taken[k]), 3) for k in LENGTHS},
        "interval_4": [round(low, 3), round(high, 3)],
        "accepted_by_position": [
            round(sum(a >= j for a in long) / len(long), 3) for j in range(1, POSITIONS + 1)
        ],
    }


def teacher_forced(
    texts: list[list[int]], target: Model, drafts: dict[str, Model]
) -> dict[str, Any]:
    """Score every draft along human texts: agreement, and the acceptance at temperature 0.8."""
    found: dict[str, list[list[torch.Tensor]]] = {name: [[], []] for name in drafts}
    for text in texts:
        law = target.logits(text, 1)
        for name, draft in drafts.items():
            mine = draft.logits(text, 1)
            for column, temperature in zip(found[name], TEMPERATURES, strict=True):
                column.append(overlap(mine, law, temperature))
    means = {
        name: [round(float(torch.cat(column).mean()), 3) for column in columns]
        for name, columns in found.items()
    }
    return {
        name: {"agreement": greedy, "acceptance_0.8": sampled}
        for name, (greedy, sampled) in means.items()
    }


def costs(
    target: Path, drafts: dict[str, Path], dtypes: tuple[str, str], rounds: int
) -> dict[str, Any]:
    """Return the median time of one token, target and drafts, and the drafts' shares of the
    target's.
    """
    context = 256
    room = {
        "kv_blocks": context // BLOCK_TOKENS + 2,
        "max_context_tokens": context + 8,
        "threads": 1,
    }
    engines = {
        name: TorchEngine(name, folder, dtype=dtypes[1], **room) for name, folder in drafts.items()
    }
    engines = {"target": TorchEngine("target", target, dtype=dtypes[0], **room), **engines}
    tokens = torch.randint(
        0,
        engines["target"].limits.vocab_size,
        (context,),
        generator=torch.Generator().manual_seed(0),
    ).tolist()
    ms = abba({name: engine_arm(engine, tokens, 1) for name, engine in engines.items()}, rounds)
    return {
        name: {"ms": round(value, 3), "of_target": round(value / ms["target"], 3)}
        for name, value in ms.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything that the arguments ask for."""
    folders = dict(item.split("=", 1) for item in args.draft)
    drafts = {name: Model(Path(folder), args.draft_dtype) for name, folder in folders.items()}
    target, tokenizer = Model(args.target, args.dtype, args.prompts), load_tokenizer(args.target)
    parts = {
        "free_running": lambda: answered(args, target, tokenizer, drafts),
        "teacher_forced": lambda: human(args, target, tokenizer, drafts),
        "forward": lambda: costs(
            args.target,
            {name: Path(f) for name, f in folders.items()},
            (args.dtype, args.draft_dtype),
            args.rounds,
        ),
    }
    with torch.inference_mode():
        return {part: parts[part]() for part in args.parts}


def answered(
    args: argparse.Namespace, target: Model, tokenizer: Tokenizer, drafts: dict[str, Model]
) -> list[dict[str, Any]]:
    """Return the scores along the target's own answers, a row for every workload and
    temperature.
    """
    rows = []
    for workload in args.workloads:
        prompts = [
            tokenizer.encode(render(message, args.target))
            for message in messages(workload, args.prompts, args.seed)
        ]
        prompts = [prompt for prompt in prompts if len(prompt) + args.tokens <= MAX_TOKENS]
        for temperature in TEMPERATURES:
            answers = target.answers(
                prompts, temperature, args.tokens, tokenizer.end_ids, args.seed
            )
            texts = list(zip(prompts, answers, strict=True))
            row = {
                "workload": workload,
                "temperature": temperature,
                "texts": len(texts),
                "tokens": sum(map(len, answers)),
            }
            row |= {
                "repetition": round(share_repeated(answers), 3),
                "drafts": free_running(texts, target, drafts, temperature, args.seed),
            }
            rows.append(row)
            print(table(row), file=sys.stderr, flush=True)
    return rows


def human(
    args: argparse.Namespace, target: Model, tokenizer: Tokenizer, drafts: dict[str, Model]
) -> list[dict[str, Any]]:
    """Return the scores along human texts, a row for every kind."""
    rows = []
    for kind in ("news", "wikipedia", "code", "sql"):
        encoded = [
            tokenizer.encode(text)[:HUMAN_TOKENS]
            for text in human_texts(kind, args.prompts, args.seed)
        ]
        scores = teacher_forced([text for text in encoded if len(text) > 8], target, drafts)
        rows.append({"text": kind, "tokens": sum(map(len, encoded)), "drafts": scores})
    return rows


def table(row: dict[str, Any]) -> str:
    """Return the lines of a workload's table."""
    head = (
        f"{row['workload']}, temperature {row['temperature']}, {row['tokens']} tokens, 4-gram "
        f"repetition {row['repetition']:.2f}"
    )
    lines = [
        head,
        "| draft | k=2 | k=4 | k=8 | accepted at 1 | 2 | 4 | 8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in row["drafts"].items():
        by = found["accepted_by_position"]
        cells = [*found["tokens_per_step"].values(), by[0], by[1], by[3], by[7]]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument(
        "--workloads", nargs="+", default=["chat", "summarise", "qa", "sql", "code"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--draft-dtype", default="fp32")
    parser.add_argument("--prompts", type=int, default=16, help="of each workload")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for item in args.draft:
        check_pair(read_manifest(args.target), read_manifest(Path(item.split("=", 1)[1])))
    words = [
        "python",
        "-m",
        "bench.micro.drafts",
        *(re.sub("[^=]*/", "", word) for word in sys.argv[1:]),
    ]
    hashes = {
        item.split("=", 1)[0]: weights_sha256(Path(item.split("=", 1)[1])) for item in args.draft
    }
    record = {
        "machine": machine.describe(),
        "command": words,
        "dtypes": [args.dtype, args.draft_dtype],
        "weights_sha256": hashes,
    }
    text = json.dumps(record | measure(args), indent=1)
    args.out.write_text(text + "\n", "utf-8") if args.out else print(text)


if __name__ == "__main__":
    main()
