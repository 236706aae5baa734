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
import http.client
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from backend import PROJECT_ROOT
from backend.advise.load import Client
from backend.advise.servers import free_port, running
from backend.storage import cache
from backend.tokenizer import load_tokenizer
from bench import records, workloads
from policy.simulation.statistics import abba, median_interval

ENVIRONMENT = PROJECT_ROOT / ".venv-vllm"
MODEL = "models/smollm2-135m-instruct"
PLAIN, SPINDLE, LENGTHS = "plain", "spindle", "ngram-planned"
OWN, OPENAI, TRITON = "vllm", "spindle-openai", "spindle-triton"
PLANNED, FIXED, BEST = "planned", "fixed", "fixed-best"
OURS = (SPINDLE, LENGTHS, OPENAI, TRITON, PLANNED)
BASELINES = {"plug-in": PLAIN, "front": OWN, "lengths": PLAIN}
"""The arm of each mode by which texts are compared."""
MAX_PROMPT_CHARACTERS = 900
K_MAX = 8
START_S, ANSWER_S = 600.0, 120.0
SETTLE_S = 1.2
"""Seconds before a server is measured: a worker of vLLM's spins for one after its last step."""
SERVED, CONTEXT = "m", 1024
NGRAMS = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
Run = dict[str, Any]


class Prompt(NamedTuple):
    """A prompt as text, and as vLLM's tokens."""

    text: str
    ids: list[int]


class Arm(Protocol):
    """Something that serves."""

    def serve(self, prompts: list[Prompt], max_tokens: int) -> Run:
        """Serve prompts all at once; return ``tokens``, ``wall_s`` and ``texts``."""
        ...


class Worker:
    """A process that serves, on one CPU."""

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


Asking = Callable[[Prompt, int], tuple[str, Run]]
"""Makes of a prompt and a number of tokens the path and the body of a request."""


class Streams:
    """Streams of a server, a connection each."""

    def __init__(self, url: str, ask: Asking) -> None:
        self._address, self._ask = urlsplit(url).netloc, ask

    def serve(self, prompts: list[Prompt], max_tokens: int) -> Run:
        """Return tokens, seconds and texts."""
        time.sleep(SETTLE_S)
        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [*pool.map(lambda prompt: self._stream(prompt, max_tokens), prompts)]
        wall_s = time.perf_counter() - started_s
        first_s = median(first_s for _, first_s in answers) - started_s
        run = {"tokens": len(prompts) * max_tokens, "wall_s": wall_s, "first_s": first_s}
        return run | {"texts": [text for text, _ in answers]}

    def _stream(self, prompt: Prompt, max_tokens: int) -> tuple[str, float]:
        """Return a text and when its first part came. Raises RuntimeError."""
        path, body = self._ask(prompt, max_tokens)
        connection = http.client.HTTPConnection(self._address, timeout=ANSWER_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {answer.read(300)!r}")
        text, first_s = "", 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter()
                part = json.loads(line[6:])
                text += part["choices"][0]["text"] if "choices" in part else part["text_output"]
        connection.close()
        return text, first_s


def of_openai(**more: Any) -> Asking:
    """Return what makes requests of ``/v1/completions``."""

    def ask(prompt: Prompt, max_tokens: int) -> tuple[str, Run]:
        body = {"model": SERVED, "prompt": prompt.ids, "max_tokens": max_tokens, "temperature": 0}
        return "/v1/completions", body | {"stream": True, "ignore_eos": True, **more}

    return ask


def of_triton(prompt: Prompt, max_tokens: int) -> tuple[str, Run]:
    """Return a request of the model ``tensorrt_llm_bls``."""
    body = {"text_input": prompt.text, "max_tokens": max_tokens, "stream": True}
    body |= {"end_id": -1, "exclude_input_in_output": True}
    return "/v2/models/tensorrt_llm_bls/generate_stream", body


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


def servers(
    options: argparse.Namespace, folder: Path, stack: ExitStack, *, backwards: bool
) -> dict[str, Arm]:
    """Return the arms of the modes ``front`` and ``lengths``, once they serve."""
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["SPINDLE_PYTHON"] = options.python
    engine: Run = json.loads(options.engine_args)

    def start(words: list[str]) -> str:
        return stack.enter_context(running(shlex.join(words), [], Client, START_S)).url

    def spindle(name: str, policy: Run, http_port: int = 0, **more: Any) -> str:
        target = {"engine": "vllm", "model": str(options.model), "engine_args": engine | more}
        target["dtype"] = {"bfloat16": "bf16", "float32": "fp32"}[options.dtype]
        limits = {"max_active_requests": max(options.in_flight), "max_context_tokens": CONTEXT}
        limits["enable_kv_cache_reuse"] = False
        file = folder / f"{name}.json"
        file.write_text(json.dumps({"target": target, "policy": policy, "limits": limits}))
        http_port, grpc, metrics = http_port or free_port(), free_port(), free_port()
        words = [sys.executable, "-m", "backend.cli", "serve", "--verbose", "--config", str(file)]
        words += ["--served-model-name", SERVED, "--openai-port", "{port}", "--port"]
        return start([*words, str(http_port), f"--grpc-port={grpc}", f"--metrics-port={metrics}"])

    http_port = free_port()
    starts: dict[str, Callable[[], str]] = {
        PLAIN: lambda: spindle(PLAIN, {"kind": "none"}, http_port)
    }
    if options.mode == "front":
        starts[OWN] = lambda: start(own_server(options, engine))
    else:
        drafter = json.loads(options.speculation) | {"num_speculative_tokens": K_MAX}
        fixed = {"kind": "fixed", "length": K_MAX}
        starts[FIXED] = lambda: spindle(FIXED, fixed, speculative_config=drafter)
        adaptive = {"kind": "adaptive"}
        starts[PLANNED] = lambda: spindle(PLANNED, adaptive, speculative_config=drafter)
    url = {name: starts[name]() for name in (reversed(starts) if backwards else starts)}
    if options.mode == "front":
        return {
            OWN: Streams(url[OWN], of_openai()),
            OPENAI: Streams(url[PLAIN], of_openai()),
            TRITON: Streams(f"http://127.0.0.1:{http_port}", of_triton),
        }
    arms: dict[str, Arm] = {PLAIN: Streams(url[PLAIN], of_openai())}
    for k in options.lengths:
        arms[f"{FIXED}-{k}"] = Streams(url[FIXED], of_openai(num_draft_tokens=k))
    return {**arms, PLANNED: Streams(url[PLANNED], of_openai())}


def own_server(options: argparse.Namespace, engine: Run) -> list[str]:
    """Return the words that start vLLM's own OpenAI server."""
    words = [options.python, "-m", "vllm.entrypoints.openai.api_server", "--port", "{port}"]
    words += ["--served-model-name", SERVED, "--no-enable-prefix-caching"]
    sizes = {"max_model_len": CONTEXT, "max_num_seqs": max(options.in_flight)}
    follow = {"model": str(options.model), "dtype": options.dtype} | sizes
    for name, value in (follow | engine).items():
        option = name.replace("_", "-")
        text = value if isinstance(value, str) else json.dumps(value)
        words += {"true": [f"--{option}"], "false": [f"--no-{option}"]}.get(
            text, [f"--{option}", text]
        )
    return words


def texts(
    model: Path, blocks: int, seed: int, names: Sequence[str], in_flight: Sequence[int]
) -> dict[str, list[Prompt]]:
    """Return prompts by workload, enough that none is served twice."""
    tokenizer, needed = load_tokenizer(model), (blocks + 1) * sum(in_flight)
    found = {}
    for name in names:
        messages = workloads.load(name, 10 * needed, seed).messages
        short = [m for m in messages if len(m) <= MAX_PROMPT_CHARACTERS]
        rendered = [workloads.render(message, model) for message in short[:needed]]
        found[name] = [Prompt(text, tokenizer.encode(text, False)) for text in rendered]
    return found


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
    found = []
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
                found.append(row | {"high": round(high, 3), "pairs": len(pairs)})
    return found


Rates = dict[tuple[int, str, int, str], float]
"""Tokens per second by block, workload, number in flight and arm."""


def best_fixed(rate: Rates) -> Rates:
    """Return the rates of the fixed length that was best in the other blocks, for each number in
    flight one length for all workloads.
    """
    fixed = {arm for *_, arm in rate if arm.startswith(FIXED)}
    cells = {cell[:3] for cell in rate} if fixed else set()
    found = {}
    for block, workload, in_flight in cells:
        elsewhere: dict[str, list[float]] = {arm: [] for arm in fixed}
        for (other, _, n, arm), tokens_per_s in rate.items():
            if arm in fixed and n == in_flight and other != block:
                elsewhere[arm].append(math.log(tokens_per_s))
        best = max(sorted(fixed), key=lambda arm: sum(elsewhere[arm]))
        found[block, workload, in_flight, BEST] = rate[block, workload, in_flight, best]
    return found


def drift(runs: list[Run], in_flight: Sequence[int]) -> dict[str, float]:
    """Return measured over predicted seconds of the plug-in's steps, by number in flight."""
    found = {}
    for flying in in_flight:
        own = [r["steps"] for r in runs if r["arm"] == SPINDLE and r["in_flight"] == flying]
        measured_s = sum(s["spindle_step_seconds_sum"] for s in own)
        predicted_s = sum(s["spindle_step_predicted_seconds_sum"] for s in own)
        if predicted_s:
            found[str(flying)] = round(measured_s / predicted_s, 3)
    return found


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
                served = serve(options, arms, prompts)
                runs += [run | {"backwards": backwards} for run in served]
            write(options, runs, folder / "table.json")


def serve(
    options: argparse.Namespace, arms: dict[str, Arm], prompts: dict[str, list[Prompt]]
) -> Iterator[Run]:
    """Yield the runs of all arms, block after block; the first block is not counted."""
    started_s = time.perf_counter()
    for block in range(-1, options.blocks):
        if time.perf_counter() - started_s > options.limit_s:
            break
        for workload, own in prompts.items():
            first = (block + 1) * sum(options.in_flight)
            for in_flight in options.in_flight:
                mine = [own[i % len(own)] for i in range(first, first + in_flight)]
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
    found: dict[str, list[bool]] = {}
    for run in runs:
        theirs = plain[run["block"], run["workload"], run["in_flight"]]
        same = [mine == its for mine, its in zip(run["texts"], theirs, strict=True)]
        found.setdefault(run["arm"], []).extend(same)
    return {arm: f"{sum(same)} of {len(same)}" for arm, same in found.items()}


if __name__ == "__main__":
    main()
