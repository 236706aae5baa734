"""The arms of ``bench.hosts.vllm_speed front`` and ``lengths``: servers, and streams of them."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from backend.advise.load import Client
from backend.advise.servers import free_port, running
from bench.hosts.arms import FIXED, K_MAX, OPENAI, OWN, PLAIN, PLANNED, TRITON, Arm, Prompt, Run

START_S, ANSWER_S = 600.0, 120.0
SETTLE_S = 1.2
"""Seconds before a server is measured: a worker of vLLM's spins for one after its last step."""
SERVED, CONTEXT = "m", 1024


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
