"""What the loop adds to a turn on TensorRT-LLM: ``python -m bench.micro.executor_loop [--json
FILE]``. On the fake executor.

CPU time of the loop's thread outside the executor's own calls is counted: planning, prompt lookup,
making requests, reading answers, committing. Requests and answers are the fake's Python values, not
the bindings'; no engine runs. Greedy, one draft (lookup), all sequences in one batch; then without
proposals, in free runs of several lengths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import thread_time

import numpy as np
import torch

from backend import app
from backend.config import parse_config
from backend.engines.trtllm import engine as trtllm
from backend.request import GenerationRequest
from tests.contract import fake_executor
from tests.contract.fake_executor import Executor
from tests.contract.trtllm_folders import folder as engine

SEQUENCES = (1, 32, 256)
RUNS = (1, 2, 5)
STEP_S = 0.010
"""A step of an engine that the overhead is set against."""

WARM_UP, STEPS = 8, 40


class Sink:
    """A client that only counts."""

    cancelled = False

    def final(self, delta, reason, usage):
        self.usage = usage

    def error(self, code, message):
        raise RuntimeError(message)


class Clock:
    """Adds up the time inside the executor's calls."""

    def __init__(self) -> None:
        self.inside_s = 0.0

    def around(self, function):
        def timed(*arguments, **options):
            started = thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.inside_s += thread_time() - started

        return timed


def settings(folder: Path, sequences: int, run_tokens: int | None) -> dict:
    limits = {
        "max_active_requests": sequences,
        "max_queued_requests": sequences,
        "max_context_tokens": 512,
        "prefill_chunk_tokens": 512,
    }
    target = engine(folder, "target", max_draft_len=4, max_batch_size=256, max_seq_len=600)
    policy = {"k_max": 4, "keep_learned": False}
    if run_tokens is not None:
        policy |= {"kind": "none"}
        limits |= {"free_run_tokens": run_tokens}
    drafts = [{"engine": "lookup", "name": "lookup"}]
    return {
        "target": {"engine": "trtllm", "model": str(target)},
        "drafts": drafts,
        "policy": policy,
        "limits": limits,
    }


def measure(sequences: int, folder: Path, run_tokens: int | None = None) -> list[float]:
    """Return the seconds of each step outside the executor: with proposals, or in free runs of so
    many tokens.
    """
    made = app.build(parse_config(settings(folder, sequences, run_tokens)))
    executor = Executor.created[-1]
    clock = Clock()
    for name in ("enqueue_requests", "await_responses", "get_latest_iteration_stats"):
        setattr(executor, name, clock.around(getattr(executor, name)))
    for number in range(sequences):
        prompt = "abcdefgh" + "abcdefgh"[: number % 8]
        made.orchestrator.submit(made.session(GenerationRequest(prompt, 400), Sink()))
    while made.orchestrator.counts()[1] or len(executor.requests) < sequences:
        made.orchestrator.step()
    costs = []
    for step in range(WARM_UP + STEPS):
        requests, started, clock.inside_s = len(executor.requests), thread_time(), 0.0
        made.orchestrator.step()
        if step >= WARM_UP:
            assert len(executor.requests) - requests == sequences, "not every sequence had a turn"
            costs.append(thread_time() - started - clock.inside_s)
    made.close()
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trtllm.load_bindings = lambda: fake_executor
    torch.cuda.mem_get_info = lambda gpu: (1 << 36, 1 << 37)
    result = {}
    for sequences in SEQUENCES:
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure(sequences, Path(folder))
        median = statistics.median(seconds)
        result[sequences] = {
            "median_s": median,
            "p90_s": float(np.quantile(seconds, 0.9)),
            "share_of_10_ms": median / STEP_S,
        }
        print(
            f"{sequences:4} sequences: {median * 1e3:6.2f} ms a step, "
            f"{median / sequences * 1e6:6.1f} us a turn"
        )
    runs = {}
    for tokens in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            median = statistics.median(measure(SEQUENCES[-1], Path(folder), tokens))
        runs[tokens] = {
            "median_s": median,
            "iteration_s": median / tokens,
            "share_of_10_ms": median / tokens / STEP_S,
        }
        print(
            f"{SEQUENCES[-1]:4} sequences, runs of {tokens}: {median * 1e3:6.2f} ms a turn of "
            f"all, {median / tokens * 1e3:.2f} an iteration"
        )
    if args.json:
        args.json.write_text(
            json.dumps({"steps": STEPS, "sequences": result, "free_runs": runs}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
