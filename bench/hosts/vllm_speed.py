"""The policy in vLLM, and Spindle's front before it, compared with vLLM's own ways: the same
weights, prompts and machine, interleaved.

    make vllm && spindle prepare                                   # vLLM's environment, the model
    python -m bench.hosts.vllm_speed --out docs/results/vllm.json  # twelve minutes
    python -m bench.hosts.vllm_speed front --out FILE              # against vLLM's OpenAI server
    python -m bench.hosts.vllm_speed lengths --out FILE            # planned against fixed lengths

``plug-in``, in one process and on one CPU: plain vLLM, its n-grams with each of ``--lengths``, and
the plug-in in both modes, as it comes (draft ``suffix``, at most 8 tokens) and with planned lengths
for vLLM's n-grams. vLLM's suffix decoding needs a package that it does not bring, its adaptive
verification its other model runner: neither can be had here.

``front``: vLLM's own OpenAI server, Spindle's and Spindle's Triton models, with the same arguments
of vLLM, no drafter and no prefix cache. ``lengths``: Spindle's server without a drafter, with each
of ``--lengths``, and planned. The drafter is ``--speculation``, as vLLM has it. A fixed length is a
request's ceiling at a server whose policy is fixed.

The servers of ``front`` and ``lengths`` start twice, the second time in the other order, and a rate
is the mean of both: on two hardware threads the one that started last was 4 to 12 % faster,
whichever it was. In each block every arm serves the same prompts of each workload, greedily, at
each number in flight, one arm right after the other, forwards in even blocks and backwards in odd
ones. Tokens per second count prompts; what counts are ratios within a block and workload (medians,
bootstrap intervals). Planners have measured their tables before the first block. The best fixed
length of a block is the one that was best in the others.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

from backend.storage import cache
from backend.tokenizer import load_tokenizer
from bench import records, workloads
from bench.hosts.arms import (
    BEST,
    ENVIRONMENT,
    FIXED,
    NGRAMS,
    OURS,
    OWN,
    PLAIN,
    SPINDLE,
    Arm,
    Prompt,
    Run,
)
from bench.hosts.vllm_plug_in import workers
from bench.hosts.vllm_served import servers
from policy.simulation.statistics import abba, median_interval

MODEL = "models/smollm2-135m-instruct"
BASELINES = {"plug-in": PLAIN, "front": OWN, "lengths": PLAIN}
"""The arm of each mode by which texts are compared."""
MAX_PROMPT_CHARACTERS = 900


def texts(
    model: Path, blocks: int, seed: int, names: Sequence[str], in_flight: Sequence[int]
) -> dict[str, list[Prompt]]:
    """Return prompts by workload, enough that none is served twice."""
    tokenizer, needed = load_tokenizer(model), (blocks + 1) * sum(in_flight)
    prompts = {}
    for name in names:
        messages = workloads.load(name, 10 * needed, seed).messages
        short = [m for m in messages if len(m) <= MAX_PROMPT_CHARACTERS]
        rendered = [workloads.render(message, model) for message in short[:needed]]
        prompts[name] = [Prompt(text, tokenizer.encode(text, False)) for text in rendered]
    return prompts


def summary(runs: list[Run], in_flight: Sequence[int], seed: int) -> list[Run]:
    """Return the tokens per second of our arms over each other arm's."""
    logs: dict[tuple[int, str, int, str], list[float]] = {}
    for run in runs:
        cell = run["block"], run["workload"], run["in_flight"], run["arm"]
        logs.setdefault(cell, []).append(math.log(run["tokens"] / run["wall_s"]))
    starts = max(map(len, logs.values()))
    rate = {cell: math.exp(mean(r)) for cell, r in logs.items() if len(r) == starts}
    rate |= best_fixed(rate)
    arms = sorted({arm for *_, arm in rate})
    names = sorted({workload for _, workload, *_ in rate})
    versus = [(ours, other) for ours in OURS for other in arms if ours in arms and ours != other]
    rows = []
    for flying in in_flight:
        for ours, other in versus:
            for workload in (workloads.MIX, *names):
                pairs = [
                    rate[b, w, n, ours] / rate[b, w, n, other]
                    for b, w, n, arm in rate
                    if arm == other and n == flying and workload in (workloads.MIX, w)
                ]
                low, high = median_interval(pairs, seed)
                row = {"in_flight": flying, "arm": ours, "over": other, "workload": workload}
                row |= {"ratio": round(median(pairs), 3), "low": round(low, 3)}
                rows.append(row | {"high": round(high, 3), "pairs": len(pairs)})
    return rows


Rates = dict[tuple[int, str, int, str], float]
"""Tokens per second by block, workload, number in flight and arm."""


def best_fixed(rate: Rates) -> Rates:
    """Return the rates of the fixed length that was best in the other blocks, for each number in
    flight one length for all workloads.
    """
    fixed = {arm for *_, arm in rate if arm.startswith(FIXED)}
    cells = {cell[:3] for cell in rate} if fixed else set()
    rates = {}
    for block, workload, in_flight in cells:
        elsewhere: dict[str, list[float]] = {arm: [] for arm in fixed}
        for (other, _, n, arm), tokens_per_s in rate.items():
            if arm in fixed and n == in_flight and other != block:
                elsewhere[arm].append(math.log(tokens_per_s))
        best = max(sorted(fixed), key=lambda arm: sum(elsewhere[arm]))
        rates[block, workload, in_flight, BEST] = rate[block, workload, in_flight, best]
    return rates


def drift(runs: list[Run], in_flight: Sequence[int]) -> dict[str, float]:
    """Return measured over predicted seconds of the plug-in's steps, by number in flight."""
    ratios = {}
    for flying in in_flight:
        steps = [r["steps"] for r in runs if r["arm"] == SPINDLE and r["in_flight"] == flying]
        measured_s = sum(s["spindle_step_seconds_sum"] for s in steps)
        predicted_s = sum(s["spindle_step_predicted_seconds_sum"] for s in steps)
        if predicted_s:
            ratios[str(flying)] = round(measured_s / predicted_s, 3)
    return ratios


_ON_CPU = '{"enforce_eager": true, "kv_cache_memory_bytes": 536870912}'


def _folder(name: str) -> Path:
    return Path(name).absolute()


def main() -> None:
    """Measure, print and write after each block."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", nargs="?", choices=BASELINES, default="plug-in")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="no block begins later after a start"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4], help="fixed ones")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--model", type=_folder, default=cache.root() / MODEL)
    parser.add_argument("--python", default=str(ENVIRONMENT / "bin" / "python"))
    parser.add_argument("--speculation", default=json.dumps(NGRAMS), help="of lengths")
    parser.add_argument("--engine-args", default=_ON_CPU, help="more arguments of vLLM, as JSON")
    parser.add_argument(
        "--workloads", nargs="+", choices=workloads.NAMES, default=[*workloads.NAMES]
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    prompts = texts(
        options.model, options.blocks, options.seed, options.workloads, options.in_flight
    )
    runs: list[Run] = []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for backwards in (False, True) if options.mode != "plug-in" else (False,):
            with ExitStack() as stack:
                if options.mode == "plug-in":
                    arms = workers(options, folder, stack)
                else:
                    arms = servers(options, folder, stack, backwards=backwards)
                new_runs = serve(options, arms, prompts)
                runs += [run | {"backwards": backwards} for run in new_runs]
            write(options, runs, folder / "table.json")


def serve(
    options: argparse.Namespace, arms: dict[str, Arm], prompts: dict[str, list[Prompt]]
) -> Iterator[Run]:
    """Yield the runs of all arms, block after block; the first block is not counted."""
    started_s = time.perf_counter()
    for block in range(-1, options.blocks):
        if time.perf_counter() - started_s > options.limit_s:
            break
        for workload, pool in prompts.items():
            first = (block + 1) * sum(options.in_flight)
            for in_flight in options.in_flight:
                mine = [pool[i % len(pool)] for i in range(first, first + in_flight)]
                first += in_flight
                for name in abba([*arms], block):
                    run = arms[name].serve(mine, options.tokens)
                    if block >= 0:
                        labels = {"block": block, "workload": workload, "arm": name}
                        yield labels | {"in_flight": in_flight} | run
        print(f"block {block}: {time.perf_counter() - started_s:.0f} s", flush=True)


def write(options: argparse.Namespace, runs: list[Run], table: Path) -> None:
    """Print a summary, and write the record."""
    record: Run = {
        "seed": options.seed,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "summary": summary(runs, options.in_flight, options.seed),
        "texts_equal": equal_texts(runs, BASELINES[options.mode]),
    }
    if table.exists():
        tables = json.loads(table.read_text("utf-8"))
        record |= {"engine": tables["provenance"]["torch_version"], "table": tables}
        record["measured_over_predicted"] = drift(runs, options.in_flight)
    for row in record["summary"]:
        if row["workload"] == workloads.MIX:
            print(json.dumps(row))
    print(json.dumps(record["texts_equal"]))
    if options.out:
        bare = [{k: v for k, v in run.items() if k != "texts"} for run in runs]
        records.write(options.out, record | {"runs": bare})


def equal_texts(runs: list[Run], baseline: str) -> dict[str, str]:
    """Return by arm how many texts are those of one that drafts nothing."""
    plain = {
        (r["block"], r["workload"], r["in_flight"]): r["texts"]
        for r in runs
        if r["arm"] == baseline
    }
    same_by_arm: dict[str, list[bool]] = {}
    for run in runs:
        theirs = plain[run["block"], run["workload"], run["in_flight"]]
        same = [mine == its for mine, its in zip(run["texts"], theirs, strict=True)]
        same_by_arm.setdefault(run["arm"], []).extend(same)
    return {arm: f"{sum(same)} of {len(same)}" for arm, same in same_by_arm.items()}


if __name__ == "__main__":
    main()
