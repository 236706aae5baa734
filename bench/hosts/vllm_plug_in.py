"""The arms of ``bench.hosts.vllm_speed plug-in``: vLLM in processes of one CPU each."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from backend import PROJECT_ROOT
from bench.hosts.arms import ENVIRONMENT, K_MAX, LENGTHS, NGRAMS, PLAIN, SPINDLE, Arm, Prompt, Run


class Worker:
    """A process that serves, on one CPU."""

    def __init__(self, engine: dict[str, Any]) -> None:
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT_ROOT)}
        openmp = ENVIRONMENT / "lib" / "libiomp5.so"  # which vLLM asks for on CPUs
        if openmp.exists():
            variables["LD_PRELOAD"] = str(openmp)
        worker = Path(__file__).with_name("vllm_worker.py")
        self._process = subprocess.Popen(
            [str(ENVIRONMENT / "bin" / "python"), str(worker), json.dumps(engine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | variables,
        )
        # OMP_NUM_THREADS alone leaves vLLM's n-grams more than one thread.
        os.sched_setaffinity(self._process.pid, {min(os.sched_getaffinity(0))})

    def ready(self) -> None:
        """Wait until it serves. Raises RuntimeError."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("vLLM did not start")

    def serve(self, prompts: list[Prompt], max_tokens: int) -> Run:
        """Return tokens, seconds and texts."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        work = {"prompts": [prompt.ids for prompt in prompts], "max_tokens": max_tokens}
        self._process.stdin.write(json.dumps(work) + "\n")
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
    arms: dict[str, dict[str, Any]] = {
        f"ngram-{k}": {"speculative_config": NGRAMS | {"num_speculative_tokens": k}} for k in ngrams
    }
    arms[SPINDLE] = ours
    arms[LENGTHS] = {
        "speculative_config": NGRAMS | {"num_speculative_tokens": K_MAX},
        "scheduler_cls": "backend.hosts.vllm_lengths.SpindleLengthScheduler",
        "additional_config": {"spindle": {"latency_file": str(table.with_name("lengths.json"))}},
        "async_scheduling": False,
    }
    return {PLAIN: base, **{name: base | one for name, one in arms.items()}}


def workers(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Arm]:
    """Return the arms of the mode ``plug-in``, once they serve."""
    arms: dict[str, Arm] = {}
    table = folder / "table.json"
    for name, engine in engines(options.model, options.dtype, table, options.lengths).items():
        arms[name] = worker = Worker(engine)
        stack.callback(worker.close)
        worker.ready()
    return arms
