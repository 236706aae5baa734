"""vLLM on a GPU, with and without the plug-in: which arms start, and how long their steps take.

In a clone, with the wheel of the plug-in in vLLM's environment:

    python -m bench.hosts.vllm_gpu --python VLLM/bin/python --out FOLDER/vllm.json
    python -m bench.hosts.vllm_gpu --python .venv-vllm/bin/python --rehearse   # on a CPU

Arms: plain vLLM, its n-grams, the plug-in with ``custom_class``, and planned lengths for a draft
model under asynchronous scheduling. ``texts``: SmolLM2 and its prompts, whose texts are compared
with plain vLLM's; it drafts for itself, which shows the lengths and no gain. ``steps``: an 8B of
random weights, whose proposals are of no use: only the milliseconds of a step count. An arm that
does not start is recorded with the end of its log.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backend.engine_config import EMBEDDED_MODEL
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from bench import records, workloads

SEED, K_MAX, START_S, WORK_S = 20261126, 4, 240.0, 120.0
TOKENS = (8, 72)
"""Tokens of each text in two rounds, whose difference is that of steps without prompts."""
CONTEXT_TOKENS = 1000
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
_SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048}
_SMALL |= {"eos_token_id": 1, "bos_token_id": 0}
Job = dict[str, Any]


def arms(model: Path, rows: int, *, rehearse: bool, is_random: bool) -> dict[str, Job]:
    """Return the arguments of ``vllm.LLM`` by arm."""
    base: Job = {"model": str(model), "max_num_seqs": rows, "max_model_len": 2048}
    base |= {"dtype": "bfloat16", "disable_log_stats": True, "seed": SEED}
    base |= {"load_format": "dummy", "skip_tokenizer_init": True} if is_random else {}
    base |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28} if rehearse else {}
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    speculation = {"method": "custom_class", "model": "spindle_vllm.SpindleProposer"}
    by_model = {"method": "draft_model", "model": str(model)}
    lengths = "SpindleLengthScheduler" if rehearse else "SpindleAsyncLengthScheduler"
    length = {"num_speculative_tokens": K_MAX}
    return {
        "plain": base,
        "ngram": base | {"speculative_config": ngram | length},
        "plug-in": base
        | {
            "speculative_config": speculation | length,
            "scheduler_cls": "spindle_vllm.SpindleScheduler",
        },
        "draft model": base | {"speculative_config": by_model | length},
        "draft model, planned": base
        | {"speculative_config": by_model | length, "scheduler_cls": f"spindle_vllm.{lengths}"}
        | {"async_scheduling": not rehearse},
    }


class VllmProcess:
    """A process of vLLM's environment that serves one arm."""

    def __init__(self, python: str, engine: Job, log: Path) -> None:
        worker = Path(__file__).with_name("vllm_worker.py")
        command = [python, str(worker), json.dumps(engine)]
        environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():  # what vLLM asks for on CPUs
            environment["LD_PRELOAD"] = str(openmp)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
            )

    def line(self, limit_s: float) -> bytes:
        """Return the next line. Raises TimeoutError, or EOFError if it ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"no answer in {limit_s:.0f} s")
        if not (line := self._process.stdout.readline()):
            raise EOFError("vLLM ended")
        return line

    def serve(self, prompts: list[list[int]], tokens: int) -> Job:
        """Return seconds and texts of requests that are all in flight."""
        assert self._process.stdin is not None
        work = {"prompts": prompts, "max_tokens": tokens, "ignore_eos": True}
        self._process.stdin.write(json.dumps(work).encode() + b"\n")
        self._process.stdin.flush()
        answer: Job = json.loads(self.line(WORK_S))
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def measure(python: str, engine: Job, rounds: dict[int, list[list[int]]], log: Path) -> Job:
    """Start an arm and serve each number of prompts twice; return what it did, or its error."""
    started_s = time.perf_counter()
    arm, done = VllmProcess(python, engine, log), []
    try:
        arm.line(START_S)
        start_s = time.perf_counter() - started_s
        for rows, prompts in rounds.items():
            arm.serve(prompts, TOKENS[0])  # compiles, and captures graphs
            short, long = (arm.serve(prompts, tokens) for tokens in TOKENS)
            seconds = long["wall_s"] - short["wall_s"]
            tokens = long["tokens"] - short["tokens"]
            row = {"rows": rows, "tokens_per_s": round(tokens / seconds, 1)}
            row["ms_per_token_and_row"] = round(1e3 * seconds / (TOKENS[1] - TOKENS[0]), 3)
            done.append(row | {"texts": long["texts"]})
    except (OSError, EOFError, TimeoutError) as error:
        end = log.read_text("utf-8", "replace")[-3000:]
        return {"error": f"{type(error).__name__}: {error}", "log": end, "rows": done}
    finally:
        arm.close()
    return {"start_s": round(start_s, 1), "rows": done}


def random_model(folder: Path, *, rehearse: bool) -> Path:
    """Write the configuration of a model of random weights."""
    folder.mkdir()
    shape = LLAMA_8B | (_SMALL if rehearse else {})
    (folder / "config.json").write_text(json.dumps(shape), "utf-8")
    return folder


def random_prompts(rows: list[int], vocabulary: int) -> dict[int, list[list[int]]]:
    """Return prompts without repeats of each other, by number of rows."""
    rng = random.Random(SEED)
    return {
        n: [[rng.randrange(5, vocabulary) for _ in range(CONTEXT_TOKENS)] for _ in range(n)]
        for n in rows
    }


def real_prompts(rows: list[int], model: Path) -> dict[int, list[list[int]]]:
    """Return prompts of all workloads, by number of rows."""
    tokenizer, prompts = load_tokenizer(model), []
    for name in workloads.NAMES:
        messages = workloads.load(name, 2 * max(rows), SEED).messages
        rendered = [workloads.render(message, model) for message in messages]
        prompts.append([tokenizer.encode(text, False)[-CONTEXT_TOKENS:] for text in rendered])
    mixed = [prompt for each in zip(*prompts, strict=False) for prompt in each]
    return {n: mixed[:n] for n in rows}


def main() -> None:
    """Measure, print and write after each arm."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable, help="of the environment with vLLM")
    parser.add_argument(
        "--parts", nargs="+", choices=("texts", "steps"), default=["texts", "steps"]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=540.0, help="no arm starts later")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a small model")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [n for n in options.rows if n <= 8] if options.rehearse else options.rows
    began_s = time.perf_counter()
    record: Job = {}
    with TemporaryDirectory() as folder:
        smollm2 = cache.root() / "models" / EMBEDDED_MODEL
        random_folder = random_model(Path(folder) / "random", rehearse=options.rehearse)
        shape = json.loads((random_folder / "config.json").read_text("utf-8"))
        for part in options.parts:
            is_random = part == "steps"
            model = random_folder if is_random else smollm2
            rounds = (
                random_prompts(rows, shape["vocab_size"])
                if is_random
                else real_prompts(rows, smollm2)
            )
            engines = arms(model, max(rows), rehearse=options.rehearse, is_random=is_random)
            plain: list[list[list[int]]] = []
            for name, engine in engines.items():
                if time.perf_counter() - began_s > options.seconds:
                    break
                if is_random and name.startswith("draft model"):
                    continue  # it would be as large as its target
                done = measure(options.python, engine, rounds, Path(folder) / "log")
                record.setdefault(part, {})[name] = done
                texts = [row.pop("texts") for row in done["rows"]]
                plain = texts if name == "plain" else plain
                for row, mine, its in zip(done["rows"], texts, plain, strict=False):
                    row["equal_texts"] = sum(a == b for a, b in zip(mine, its, strict=True))
                print(json.dumps({"part": part, "arm": name} | done), flush=True)
                if options.out:
                    records.write(options.out, record)


if __name__ == "__main__":
    main()
