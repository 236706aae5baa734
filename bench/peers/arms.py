"""Other stacks as arms, on the same weights: each a process in an environment of its own
(``worker.py``, ``worker.mjs``).

Token ids go in and come out, so that no stack's tokenizer is part of what is compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from backend.config import parse_config
from backend.engine_config import EMBEDDED_MODEL, EngineConfig
from backend.engines import memory
from backend.machine import Machine, machine
from backend.model_folders import model_path
from backend.storage import cache
from backend.tokenizer import IncrementalDecoder, Tokenizer, load_tokenizer
from bench.peers.models import as_gguf, whole_head
from bench.servers import LoadArm, LoadResult, OfferedLoad, ServedReply
from engines_build.convert import embedded_gguf

KINDS = ("plain", "draft", "lookup")
STACKS = ("transformers", "vllm", "openvino", "llamacpp")
WHOLE = ("openvino-16bit", "llamacpp-16bit")
"""Plain too, with the weights that Spindle runs; the others of these stacks read the packaged model
as it is, in 4 bits.
"""
PEERS = (*(f"{stack}-{kind}" for stack in STACKS for kind in KINDS), *WHOLE)
ALONE = ("transformers-draft", "transformers-lookup")
"""They serve one request at a time."""
_FORMS = {"openvino": "F16", "llamacpp": "BF16"}
WORKERS = Path(__file__).parent
QUIT_LIMIT_S = 20.0
ROOM_BYTES = 4 << 30
"""Memory that a peer may need: vLLM with a model of 135 M parameters in fp32 and its KV."""


class PeerArm:
    """A worker process."""

    def __init__(self, command: list[str], tokenizer: Tokenizer) -> None:
        # threads that spin lose many times over where others use the cores
        patient = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the worker)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=patient,
        )
        self._tokenizer = tokenizer
        self._read()

    def run(self, offer: OfferedLoad) -> LoadResult:
        """Serve a closed loop. Raises ValueError for an open one, RuntimeError when the worker has
        ended.
        """
        if offer.at_s is not None:
            raise ValueError("a peer serves closed loops only")
        assert self._process.stdin is not None
        prompts = [self._tokenizer.encode(request["text_input"]) for request in offer.requests]
        work = {
            "prompts": prompts,
            "max_tokens": offer.requests[0]["max_tokens"],
            "concurrency": offer.concurrency,
        }
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        return LoadResult(
            [self._reply(**reply) for reply in answer["replies"]], answer["wall_s"], {}
        )

    def close(self) -> None:
        """End the worker: it ends with its input, and what it has started with it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(QUIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _reply(self, tokens: list[int], first_s: float, total_s: float) -> ServedReply:
        decoder = IncrementalDecoder(self._tokenizer.token_bytes)
        text = (
            "".join(decoder.push(token) for token in tokens if token not in self._tokenizer.end_ids)
            + decoder.finish()
        )
        return ServedReply(
            text,
            len(tokens),
            drafted=0,
            accepted=0,
            finish_reason="",
            first_s=first_s,
            total_s=total_s,
        )

    def _read(self) -> str:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return line
        status = self._process.wait()
        self._log.seek(0)
        raise RuntimeError(
            f"the peer ended with status {status}: "
            f"{(self._log.read().strip() or 'it wrote nothing').splitlines()[-1]}"
        )


class Peers:
    """Gives the arms of the peers, each started when first asked for; where memory runs short the
    one not used for longest ends.
    """

    def __init__(self, config: dict[str, Any], machine: Machine = machine) -> None:
        self._config = parse_config(config)
        # If the processor has no products in bf16, those take much longer.
        self._dtype = "bfloat16" if machine.multiplies_bf16() else "float32"
        self._running: OrderedDict[str, PeerArm] = OrderedDict()

    def missing(self, name: str) -> str:
        """Return why a peer cannot be run here, '' when it can."""
        if not self._config.target.kind.checkpoint:
            return f"peers run checkpoints only, not the engine {self._config.target.engine!r}"
        if name.endswith("-draft") and not self._drafts():
            return "no draft that runs a model"
        stack, _, _ = name.partition("-")
        if name in WHOLE and self._config.target.model != EMBEDDED_MODEL:
            return f"{stack}-plain reads 16 bits already"
        return "" if _ready(stack) else f"no environment: bench/peers/peers.sh {stack}"

    def arm(self, name: str) -> tuple[LoadArm, bool]:
        """Return the arm and whether it has just begun."""
        fresh = name not in self._running
        if fresh:
            while self._running and memory.host_bytes() < ROOM_BYTES:
                self._running.popitem(last=False)[1].close()
            self._running[name] = PeerArm(
                self.command(name), load_tokenizer(model_path(self._config.target))
            )
        self._running.move_to_end(name)
        return self._running[name], fresh

    def weights(self, name: str) -> str:
        """Say in which form a peer reads the target and, where it has one, the draft."""
        stack, _, kind = name.partition("-")
        run = "bf16 checkpoint" if self._dtype == "bfloat16" else "bf16 checkpoint, run in fp32"
        target = self._gguf_kind(name) if stack in _FORMS else run
        dtype = "bf16" if self._dtype == "bfloat16" else "fp32"
        draft = {"transformers": "fp32", "vllm": dtype, "openvino": "fp16", "llamacpp": "bf16"}[
            stack
        ]
        return f"{target}; draft {draft}, whole head" if kind == "draft" else target

    def close(self) -> None:
        """End all peers."""
        while self._running:
            self._running.popitem()[1].close()

    def _gguf_kind(self, name: str) -> str:
        if self._is_packaged(name):
            return "Q4_1 GGUF, as packaged"
        return f"{_FORMS[name.partition('-')[0]]} GGUF"

    def _is_packaged(self, name: str) -> bool:
        return name not in WHOLE and self._config.target.model == EMBEDDED_MODEL

    def _drafts(self) -> list[EngineConfig]:
        """Return the drafts that run a model, the largest first."""
        draft_folders = [
            draft
            for draft in self._config.drafts
            if draft.kind.checkpoint and not draft.kind.reads_target
        ]
        return sorted(
            draft_folders,
            key=lambda draft: (
                -sum(file.stat().st_size for file in model_path(draft).glob("*.safetensors"))
            ),
        )

    def command(self, name: str) -> list[str]:
        """Return the command of a stack's worker."""
        stack, _, kind = name.partition("-")
        target, tokenizer = (
            model_path(self._config.target),
            load_tokenizer(model_path(self._config.target)),
        )
        threads = self._config.threads if isinstance(self._config.threads, int) else 1
        arguments = [
            "--threads",
            str(threads),
            *(
                word
                for end in sorted(tokenizer.end_ids, reverse=True)
                for word in ("--ends", str(end))
            ),
        ]
        if stack in ("transformers", "vllm"):
            models = ["--model", target, "--dtype", self._dtype]
            models += (
                ["--draft", whole_head(model_path(self._drafts()[0]))] if kind == "draft" else []
            )
        else:
            form = _FORMS[stack]
            packaged = self._is_packaged(name) and embedded_gguf(cache.root() / "peers")
            models = ["--gguf", packaged or as_gguf(target, target, form)]
            models += (
                ["--draft-gguf", as_gguf(model_path(self._drafts()[0]), target, form)]
                if kind == "draft"
                else []
            )
        return [*_COMMANDS[stack](name), *map(str, models), *arguments]


def environment(stack: str) -> Path:
    """Return where ``peers.sh`` puts a stack's environment."""
    return cache.root() / "peers" / stack


def _ready(stack: str) -> bool:
    if stack == "transformers":
        return True
    if stack == "llamacpp":
        return (
            shutil.which("node") is not None
            and (environment(stack) / "node_modules" / "node-llama-cpp").is_dir()
        )
    return (environment(stack) / "bin" / "python").is_file()


def _python(name: str) -> list[str]:
    stack = name.partition("-")[0]
    python = (
        sys.executable if stack == "transformers" else str(environment(stack) / "bin" / "python")
    )
    return [python, str(WORKERS / "worker.py"), name]


def _node(name: str) -> list[str]:
    return ["node", str(WORKERS / "worker.mjs"), name, "--root", str(environment("llamacpp"))]


_COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "transformers": _python,
    "vllm": _python,
    "openvino": _python,
    "llamacpp": _node,
}
