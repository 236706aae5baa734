"""Another stack serving a benchmark's requests, in an environment of its own: this file imports
nothing of the project.

    python worker.py STACK-KIND --model FOLDER --draft FOLDER --gguf FILE --draft-gguf FILE
        --ends ID ...

Writes a line when ready, then answers each JSON line {"prompts": [token ids], "max_tokens",
"concurrency"} with a line {"replies": [{"tokens", "first_s", "total_s"}], "wall_s"};
``worker.mjs`` does the same for llama.cpp. Decodes greedily. A closed loop: with
``concurrency`` requests in flight, the next is due when one has ended.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

DRAFT_TOKENS = 4
LOOKUP_NGRAM = (2, 3)
PLACES = 8
CONTEXT_TOKENS = 2048
START_LIMIT_S = 300.0
Reply = dict[str, Any]


class Transformers:
    """``generate``, alone or with an assistant model or prompt lookup. Only the first can batch,
    and its batches end as one.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(options.threads)
        self._torch, self._ends = torch, options.ends
        self._model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype)
        ).eval()
        self._batches = kind == "plain"
        self._more: dict[str, Any] = {}
        if kind == "draft":
            draft = AutoModelForCausalLM.from_pretrained(options.draft, dtype=torch.float32).eval()
            draft.generation_config.num_assistant_tokens = DRAFT_TOKENS
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            self._more = {"assistant_model": draft}
        elif kind == "lookup":
            self._more = {
                "prompt_lookup_num_tokens": DRAFT_TOKENS,
                "max_matching_ngram_size": LOOKUP_NGRAM[1],
            }

    def serve(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> list[Reply]:
        """Serve in waves; a request is due when one of those in flight before it has ended."""
        size, started_s = concurrency if self._batches else 1, time.perf_counter()
        replies: list[Reply] = []
        ended_s: list[float] = []
        for begin in range(0, len(prompts), size):
            answer, first_s = self._generate(prompts[begin : begin + size], max_tokens)
            now_s = time.perf_counter()
            for tokens in answer:
                due_s = (
                    started_s if len(replies) < concurrency else ended_s[len(replies) - concurrency]
                )
                replies.append(
                    {"tokens": tokens, "first_s": first_s - due_s, "total_s": now_s - due_s}
                )
                ended_s.append(now_s)
        return replies

    def close(self) -> None:
        """Do nothing: this process is all that runs."""

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], float]:
        """Return the tokens of each, and when the first was there."""
        from transformers import StoppingCriteria

        seen_s: list[float] = []

        class TokenClock(StoppingCriteria):
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                seen_s.append(time.perf_counter())
                return input_ids.new_zeros(input_ids.shape[0], dtype=bool)

        width = max(map(len, prompts))
        inputs = self._torch.tensor(
            [[self._ends[0]] * (width - len(prompt)) + prompt for prompt in prompts]
        )
        mask = self._torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        ends = {"eos_token_id": self._ends, "pad_token_id": self._ends[0]}
        with self._torch.inference_mode():
            output = self._model.generate(
                inputs,
                attention_mask=mask,
                max_new_tokens=max_tokens,
                do_sample=False,
                stopping_criteria=[TokenClock()],
                **ends,
                **self._more,
            )
        return [_cut(row[width:].tolist(), self._ends) for row in output], seen_s[0]


class OpenVino:
    """The continuous-batching pipeline of ``openvino_genai`` from GGUF files, alone, with a draft
    or with prompt lookup.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        import openvino_genai

        self._genai, self._kind, self._ends = openvino_genai, kind, options.ends
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size = PLACES, 1
        threads = {"INFERENCE_NUM_THREADS": options.threads}
        more: dict[str, Any] = {"prompt_lookup": True} if kind == "lookup" else {}
        if kind == "draft":
            more = {
                "draft_model": openvino_genai.draft_model(
                    _openvino_folder(options.draft_gguf), "CPU", **threads
                )
            }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options.gguf, scheduler, "CPU", threads | more
        )
        self._requests = 0

    def serve(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> list[Reply]:
        """Step the pipeline, giving it a request for each that has ended."""
        replies = [_Clock() for _ in prompts]
        running: dict[int, Any] = {}
        started_count = 0
        while started_count < len(prompts) or running:
            while started_count < len(prompts) and len(running) < concurrency:
                replies[started_count].begin()
                running[started_count] = self._submit(prompts[started_count], max_tokens)
                started_count += 1
            self._pipeline.step()
            for number, handle in [*running.items()]:
                while handle.can_read():
                    for output in handle.read().values():
                        replies[number].add(output.generated_ids)
                if handle.get_status() != self._genai.GenerationStatus.RUNNING:
                    del running[number]
        return [reply.as_reply(self._ends) for reply in replies]

    def close(self) -> None:
        """Do nothing: this process is all that runs."""

    def _submit(self, prompt: list[int], max_tokens: int) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.apply_chat_template = (
            max_tokens,
            False,
            False,
        )
        config.set_eos_token_id(self._ends[0])
        config.stop_token_ids = {*self._ends}
        if self._kind in ("draft", "lookup"):
            config.num_assistant_tokens = DRAFT_TOKENS
        if self._kind == "lookup":
            config.max_ngram_size = LOOKUP_NGRAM[1]
        self._requests += 1
        return self._pipeline.add_request(
            self._requests, openvino.Tensor(np.array([prompt])), config
        )


def _openvino_folder(gguf: str) -> str:
    """Return a GGUF model as OpenVINO's own folder, written on the first call: drafts are read from
    such only.
    """
    import openvino_genai

    folder = Path(gguf).with_suffix(".openvino")
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        copy = folder / "model.gguf"
        copy.unlink(missing_ok=True)
        copy.symlink_to(gguf)
        openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)
        (folder / "done").touch()
    return str(folder)


class Vllm:
    """vLLM's OpenAI server (what ``vllm serve`` starts), alone, with a draft or with n-grams of the
    text, over HTTP with streaming.
    """

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._model, self._ends = options.model, options.ends
        speculation: dict[str, Any] = {
            "draft": {
                "method": "draft_model",
                "model": options.draft,
                "num_speculative_tokens": DRAFT_TOKENS,
            },
            "lookup": {
                "method": "ngram",
                "num_speculative_tokens": DRAFT_TOKENS,
                "prompt_lookup_min": LOOKUP_NGRAM[0],
                "prompt_lookup_max": LOOKUP_NGRAM[1],
            },
        }
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            options.model,
            "--dtype",
            options.dtype,
        ]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(self._port),
            "--enforce-eager",  # compiled, it starts in 3 minutes and takes 1.1 times as long
            "--max-model-len",
            str(CONTEXT_TOKENS),
        ]
        command += ["--max-num-seqs", str(PLACES), "--kv-cache-memory-bytes", str(1 << 29)]
        if kind in speculation:
            command += ["--speculative-config", json.dumps(speculation[kind])]
        variables = {
            "OMP_NUM_THREADS": str(options.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
        }
        variables |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self._process = subprocess.Popen(command, env=os.environ | variables, stdout=sys.stderr)
        self._runs = 0
        self._await_ready()

    def serve(self, prompts: list[list[int]], max_tokens: int, concurrency: int) -> list[Reply]:
        """Ask with ``concurrency`` threads; KV is reused within a run only, as in Spindle's."""
        self._runs += 1
        with ThreadPoolExecutor(concurrency) as clients:
            return [*clients.map(lambda prompt: self._ask(prompt, max_tokens), prompts)]

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _await_ready(self) -> None:
        limit_s = time.monotonic() + START_LIMIT_S
        while self._process.poll() is None and time.monotonic() < limit_s:
            with suppress(OSError):
                if self._get("GET", "/health").status == http.client.OK:
                    return
            time.sleep(0.5)
        self._process.kill()
        raise RuntimeError(f"vLLM was not ready: status {self._process.wait()}")

    def _get(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_LIMIT_S)
        connection.request(
            method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"}
        )
        return connection.getresponse()

    def _ask(self, prompt: list[int], max_tokens: int) -> Reply:
        clock = _Clock()
        clock.begin()
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        body |= {
            "return_token_ids": True,
            "stop_token_ids": self._ends,
            "cache_salt": str(self._runs),
        }
        response = self._get("POST", "/v1/completions", body)
        if response.status != http.client.OK:
            raise RuntimeError(f"vLLM answered {response.status}: {response.read().decode()}")
        for event in _events(response):
            clock.add(event["choices"][0]["token_ids"])
        return clock.as_reply(self._ends)


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


class _Clock:
    """Takes a request's tokens and when they came."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._begun_s = self._first_s = self._last_s = 0.0

    def begin(self) -> None:
        self._begun_s = time.perf_counter()

    def add(self, tokens: list[int]) -> None:
        self._last_s = time.perf_counter()
        if not self._tokens:
            self._first_s = self._last_s
        self._tokens += tokens

    def as_reply(self, ends: list[int]) -> Reply:
        return {
            "tokens": _cut(self._tokens, ends),
            "first_s": self._first_s - self._begun_s,
            "total_s": self._last_s - self._begun_s,
        }


def _cut(tokens: list[int], ends: list[int]) -> list[int]:
    """Return the tokens up to the first that ends a text, that one included."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


STACKS: dict[str, Any] = {"transformers": Transformers, "openvino": OpenVino, "vllm": Vllm}


def main() -> None:
    """Load a stack and serve until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", help="STACK-KIND")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--draft", help="another, whose head scores the whole vocabulary")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the model"
    )
    parser.add_argument("--gguf")
    parser.add_argument("--draft-gguf")
    parser.add_argument("--ends", type=int, action="append", help="tokens that end a text")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    stack, _, kind = options.name.partition("-")
    stack_object = STACKS[stack](kind, options)
    try:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            work, started_s = json.loads(line), time.perf_counter()
            replies = stack_object.serve(work["prompts"], work["max_tokens"], work["concurrency"])
            print(
                json.dumps({"replies": replies, "wall_s": time.perf_counter() - started_s}),
                file=answers,
                flush=True,
            )
    finally:
        stack_object.close()


if __name__ == "__main__":
    main()
