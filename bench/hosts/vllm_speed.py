"""The policy in vLLM compared with vLLM's own speculation, on its CPU build: the same weights,
prompts and machine, interleaved, on one CPU.

    make test-vllm && spindle prepare                              # vLLM's environment, the model
    python -m bench.hosts.vllm_speed --out docs/results/vllm.json  # twelve minutes

Arms: plain vLLM, its n-grams with each of ``--ngram`` lengths, and the plug-in in both modes: as it
comes (draft ``suffix``, at most 8 tokens), and with planned lengths for vLLM's n-grams. vLLM's
suffix decoding needs a package that it does not bring, its adaptive verification its other model
runner: neither can be had here. In each block every arm serves the same prompts of five workloads,
greedily, at each number in flight, one arm right after the other, forwards in even blocks and
backwards in odd ones. Tokens per second count prompts; what counts are ratios within a block and
workload (medians, bootstrap intervals). The plug-in has measured its table before the first block.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from backend.config import PROJECT_ROOT
from backend.machine import machine
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from bench import workloads
from policy.simulation.statistics import abba, median_interval

ENVIRONMENT = PROJECT_ROOT / ".venv-vllm"
MODEL = "models/smollm2-135m-instruct"
PLAIN, SPINDLE, LENGTHS = "plain", "spindle", "ngram-planned"
OURS = (SPINDLE, LENGTHS)
IN_FLIGHT = (1, 8)
MAX_PROMPT_CHARACTERS = 900
K_MAX = 8
Run = dict[str, Any]


class Arm:
    """A process that serves."""

    def __init__(self, engine: dict[str, Any]) -> None:
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_ROOT)}
        openmp = ENVIRONMENT / "lib" / "libiomp5.so"  # which vLLM asks for on CPUs
        if openmp.exists():
            own["LD_PRELOAD"] = str(openmp)
        worker = Path(__file__).with_name("vllm_worker.py")
        self._process = subprocess.Popen(
            [str(ENVIRONMENT / "bin" / "python"), str(worker), json.dumps(engine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | own,
        )
        # OMP_NUM_THREADS alone leaves vLLM's n-grams more than one thread.
        os.sched_setaffinity(self._process.pid, {min(os.sched_getaffinity(0))})

    def ready(self) -> None:
        """Wait until it serves. Raises RuntimeError."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("vLLM did not start")

    def serve(self, prompts: list[list[int]], max_tokens: int) -> Run:
        """Return tokens, seconds and texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer: Run = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def engines(model: Path, dtype: str, table: Path, ngrams: list[int]) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``vllm.LLM`` by arm."""
    base = {"model": str(model), "dtype": dtype, "max_model_len": 1024, "max_num_seqs": 8}
    base |= {"enforce_eager": True, "disable_log_stats": True, "kv_cache_memory_bytes": 1 << 29}
    ours = {
        "speculative_config": {
            "method": "custom_class",
            "model": "backend.hosts.vllm.SpindleProposer",
            "num_speculative_tokens": K_MAX,
        },
        "scheduler_cls": "backend.hosts.vllm.SpindleScheduler",
        "additional_config": {"spindle": {"latency_file": str(table)}},
    }
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    arms: dict[str, dict[str, Any]] = {
        f"ngram-{k}": {"speculative_config": ngram | {"num_speculative_tokens": k}} for k in ngrams
    }
    arms[SPINDLE] = ours
    arms[LENGTHS] = {
        "speculative_config": ngram | {"num_speculative_tokens": K_MAX},
        "scheduler_cls": "backend.hosts.vllm_lengths.SpindleLengthScheduler",
        "additional_config": {"spindle": {"latency_file": str(table.with_name("lengths.json"))}},
        "async_scheduling": False,
    }
    return {PLAIN: base, **{name: base | one for name, one in arms.items()}}


def texts(model: Path, blocks: int, seed: int) -> dict[str, list[list[int]]]:
    """Return prompts by workload, enough that none is served twice."""
    tokenizer, needed = load_tokenizer(model), (blocks + 1) * sum(IN_FLIGHT)
    found = {}
    for name in workloads.NAMES:
        messages = workloads.load(name, 10 * needed, seed).messages
        short = [m for m in messages if len(m) <= MAX_PROMPT_CHARACTERS]
        rendered = [workloads.render(message, model) for message in short[:needed]]
        found[name] = [tokenizer.encode(text, False) for text in rendered]
    return found


def summary(runs: list[Run], seed: int) -> list[Run]:
    """Return the tokens per second of the plug-in's modes over each other arm's."""
    rate = {
        (r["block"], r["workload"], r["in_flight"], r["arm"]): r["tokens"] / r["wall_s"]
        for r in runs
    }
    arms = sorted({r["arm"] for r in runs})
    versus = [(ours, other) for ours in OURS for other in arms if ours != other]
    found = []
    for in_flight in IN_FLIGHT:
        for ours, other in versus:
            for workload in (workloads.MIX, *workloads.NAMES):
                pairs = [
                    rate[b, w, n, ours] / rate[b, w, n, other]
                    for b, w, n, arm in rate
                    if arm == other and n == in_flight and workload in (workloads.MIX, w)
                ]
                low, high = median_interval(pairs, seed)
                row = {"in_flight": in_flight, "arm": ours, "over": other, "workload": workload}
                row |= {"ratio": round(median(pairs), 3), "low": round(low, 3)}
                found.append(row | {"high": round(high, 3), "pairs": len(pairs)})
    return found


def drift(runs: list[Run]) -> dict[str, float]:
    """Return measured over predicted seconds of the plug-in's steps, by number in flight."""
    found = {}
    for in_flight in IN_FLIGHT:
        own = [r["steps"] for r in runs if r["arm"] == SPINDLE and r["in_flight"] == in_flight]
        measured_s = sum(s["spindle_step_seconds_sum"] for s in own)
        predicted_s = sum(s["spindle_step_predicted_seconds_sum"] for s in own)
        found[str(in_flight)] = round(measured_s / predicted_s, 3) if predicted_s else 0.0
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--limit-s", type=float, default=600.0, help="no block begins later")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--ngram", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, runs = cache.root() / MODEL, []
    prompts = texts(model, options.blocks, options.seed)
    started_s = time.perf_counter()
    with TemporaryDirectory() as folder:
        table = Path(folder) / "table.json"
        arms = {}
        try:
            for name, engine in engines(model, options.dtype, table, options.ngram).items():
                arms[name] = Arm(engine)
                arms[name].ready()
            for block in range(-1, options.blocks):
                if time.perf_counter() - started_s > options.limit_s:
                    break
                for workload, own in prompts.items():
                    first = (block + 1) * sum(IN_FLIGHT)
                    for in_flight in IN_FLIGHT:
                        mine = [own[i % len(own)] for i in range(first, first + in_flight)]
                        first += in_flight
                        for name in abba([*arms], block):
                            run = arms[name].serve(mine, options.tokens)
                            if block >= 0:
                                labels = {"block": block, "workload": workload, "arm": name}
                                runs.append(labels | {"in_flight": in_flight} | run)
                print(f"block {block}: {time.perf_counter() - started_s:.0f} s", flush=True)
            tables = json.loads(table.read_text("utf-8"))
        finally:
            for arm in arms.values():
                arm.close()
    alike = equal_texts(runs)
    for run in runs:
        del run["texts"]
    record = {
        "command": " ".join(["python -m bench.hosts.vllm_speed", *sys.argv[1:]]),
        "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
        "machine": machine.processor(),
        "engine": tables["provenance"]["torch_version"],
        "seed": options.seed,
        "dtype": options.dtype,
        "tokens": options.tokens,
        "summary": summary(runs, options.seed),
        "measured_over_predicted": drift(runs),
        "texts_equal_to_plain": alike,
        "table": tables,
        "runs": runs,
    }
    print(json.dumps({key: record[key] for key in ("command", "machine", "seed")}))
    for row in record["summary"]:
        if row["workload"] == workloads.MIX:
            print(json.dumps(row))
    print(json.dumps(record["measured_over_predicted"]), json.dumps(alike))
    if options.out:
        options.out.write_text(json.dumps(record) + "\n", "utf-8")


def equal_texts(runs: list[Run]) -> dict[str, str]:
    """Return by arm how many texts are those of plain vLLM."""
    plain = {
        (r["block"], r["workload"], r["in_flight"]): r["texts"] for r in runs if r["arm"] == PLAIN
    }
    found: dict[str, list[bool]] = {}
    for run in runs:
        theirs = plain[run["block"], run["workload"], run["in_flight"]]
        same = [mine == its for mine, its in zip(run["texts"], theirs, strict=True)]
        found.setdefault(run["arm"], []).extend(same)
    return {arm: f"{sum(same)} of {len(same)}" for arm, same in found.items()}


if __name__ == "__main__":
    main()
