"""``tensorrt_llm.LLM`` as a hosted engine: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

import tensorrt_llm
from tensorrt_llm.llmapi import RequestError as LlmRequestError
from tensorrt_llm.llmapi.llm_utils import update_llm_args_with_extra_dict

from backend.checked_settings import ConfigError
from backend.engine_config import EngineConfig
from backend.engines.hosted import HostedLimits, HostedRequest, HostedService, NewTokens
from backend.engines.port import EngineLostError
from backend.engines.tensorrt_llm.arguments import drafter as drafter_of
from backend.engines.tensorrt_llm.arguments import llm_arguments, plug_in_settings, vocabulary
from backend.engines.tensorrt_llm.folder import is_engine_folder
from backend.engines.tensorrt_llm.options import check, sampling_params
from backend.request import ErrorCode, RequestError

_NO_EXPLANATION: dict[str, Any] = {
    "age_s": None,
    "step": "TensorRT-LLM plans by itself",
    "requests": [],
}


async def start_engine(engine: EngineConfig, service: HostedService) -> LlmApiEngine:
    """Start the LLM in a thread: it takes minutes. Raises ConfigError for what this version of
    TensorRT-LLM does not have.
    """
    config, folder = service.config, service.path(engine)
    words = llm_arguments(engine, config, folder)
    if words.get("tensor_parallel_size", 1) * words.get("pipeline_parallel_size", 1) == 1:
        # Else it spawns a worker by MPI, and a drafter of ours could not be handed over.
        os.environ.setdefault("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
    arguments = update_llm_args_with_extra_dict({}, words)
    drafter = None
    if (settings := plug_in_settings(engine, config)) is not None:
        lengths = drafter_of(engine)[1], config.limits.max_context_tokens
        arguments |= _plug_in().engine_args(settings, *lengths, service.meters)
        drafter = arguments["speculative_config"].drafter
    loop = asyncio.get_running_loop()
    llm = await loop.run_in_executor(None, partial(_llm_class(folder), **arguments))
    name, k_max = ("", 0) if config.policy.kind == "none" else drafter_of(engine)
    sizes = vocabulary(folder), config.limits.max_context_tokens
    limits = HostedLimits(*sizes, draft=name, k_max=k_max)
    return LlmApiEngine(engine.name, llm, limits, service, is_engine_folder(folder), drafter)


def _llm_class(folder: Path) -> Any:
    if not is_engine_folder(folder):
        return tensorrt_llm.LLM
    try:
        return import_module("tensorrt_llm._tensorrt_engine").LLM
    except ImportError as error:
        raise ConfigError(
            f"{folder} is an engine folder, and TensorRT-LLM {tensorrt_llm.__version__} has no "
            f"engine backend: 1.2.1 is the last stable version with it"
        ) from error


class LlmApiEngine:
    """One LLM, and the drafter of ours in it, if any."""

    def __init__(
        self,
        name: str,
        llm: Any,
        limits: HostedLimits,
        service: HostedService,
        is_engine: bool,
        drafter: Any,
    ) -> None:
        self.name, self.limits = name, limits
        self._llm, self._service, self._drafter = llm, service, drafter
        self._is_engine = is_engine
        self._takes = inspect.signature(llm.generate_async).parameters.keys()
        self._stepped_s = 0.0

    async def generate(self, ask: HostedRequest) -> AsyncGenerator[NewTokens, None]:
        """Yield a generation's parts (``HostedEngine``)."""
        check(ask, is_engine=self._is_engine)
        if self._drafter is None and self.limits.draft and ask.most_drafted is not None:
            raise RequestError(
                ErrorCode.UNIMPLEMENTED,
                f"num_draft_tokens is not supported: TensorRT-LLM chooses the lengths of its "
                f"drafter {self.limits.draft}",
            )
        result, is_lost = self._submit(ask), False
        try:
            async for output in result:
                self._stepped_s = monotonic()
                part = self._part(output, ask)
                self._count(len(part.tokens))
                yield part
        except LlmRequestError as error:
            raise RequestError(
                ErrorCode.INTERNAL, f"TensorRT-LLM ended the request: {error}"
            ) from error
        except Exception as error:
            is_lost = True
            self._service.meters.count("spindle_engine_deaths_total", engine=self.name)
            raise EngineLostError(f"{type(error).__name__}: {error}") from error
        finally:
            if self._drafter is not None:
                self._drafter.requests.pop(result.request_id, None)
            if not result.finished and not is_lost:
                result.abort()

    def _submit(self, ask: HostedRequest) -> Any:
        """Enqueue a request; the drafter learns of it before it can begin."""
        words: dict[str, Any] = {"streaming": True}
        if ask.salt:
            if "cache_salt" not in self._takes:
                message = "cache_salt is not supported: this version of TensorRT-LLM has none"
                raise RequestError(ErrorCode.UNIMPLEMENTED, message)
            words["cache_salt"] = ask.salt
        if ask.trace and "trace_headers" in self._takes:
            words["trace_headers"] = ask.trace
        params = sampling_params(ask, vocab_size=self.limits.vocab_size, is_engine=self._is_engine)
        with nullcontext() if self._drafter is None else self._drafter.lock:
            try:
                result = self._llm.generate_async(list(ask.tokens), params, **words)
            except (ValueError, LlmRequestError) as error:
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT, f"TensorRT-LLM refuses it: {error}"
                ) from error
            except RuntimeError as error:
                raise EngineLostError(str(error)) from error
            if self._drafter is not None:
                request = _plug_in().HostRequest(self._ceiling(ask), ask.salt)
                self._drafter.requests[result.request_id] = request
        return result

    def _ceiling(self, ask: HostedRequest) -> Callable[[], int | None]:
        """Return what says how long the next proposal of a request may be, by the switches as they
        then stand.
        """

        def most() -> int | None:
            switches = self._service.switches()
            if switches.speculation == "off":
                return 0
            if ask.control or switches.speculation == "shadow":
                fixed = switches.fixed_length
                return fixed if ask.most_drafted is None else min(fixed, ask.most_drafted)
            return ask.most_drafted

        return most

    def _part(self, output: Any, ask: HostedRequest) -> NewTokens:
        """Return what is new of a request."""
        (one,) = output.outputs
        part = NewTokens(
            list(one.token_ids_diff), cached_tokens=getattr(output, "cached_tokens", 0)
        )
        if ask.sampling.reads_log_probs:
            rows = one.logprobs_diff
            part.log_probs = [_log_prob(row, t) for row, t in zip(rows, part.tokens, strict=True)]
            most = ask.sampling.top_log_probs or 0
            part.top = [_top(row, most) for row in rows] if most else []
        if output.finished and self._drafter is not None:
            part.verified_steps = self._drafter.requests[output.request_id].verified_steps
        ends = ask.sampling.end_ids
        if one.finish_reason == "stop" and not (one.token_ids and one.token_ids[-1] in ends):
            part.tokens.append(ends[0])  # the C++ decoder keeps the end token to itself
        return part

    def _count(self, tokens: int) -> None:
        if self._drafter is None:  # else the drafter counts its steps
            draft = self.limits.draft or "none"
            count = self._service.meters.count
            count("spindle_emitted_tokens_total", tokens, draft=draft, arm="planner")

    def stepped_s(self) -> float:
        """Return when a part last came."""
        return self._stepped_s

    def usage(self) -> dict[str, int]:
        """Return nothing: blocks are TensorRT-LLM's."""
        return {}

    def explain(self) -> dict[str, Any]:
        """Explain the last plan of the drafter of ours."""
        if self._drafter is None:
            return _NO_EXPLANATION
        reply: dict[str, Any] = self._drafter.explain()
        return reply

    def learned_state(self) -> dict[str, Any]:
        """Return nothing: what the drafter learns is not kept."""
        return {}

    async def close(self) -> None:
        """End its processes."""
        await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown)


def _log_prob(row: Any, token: int) -> float:
    """Return a token's log-probability: a row is a number, or has one by token."""
    return float(row) if isinstance(row, float) else float(row[token].logprob)


def _top(row: Any, most: int) -> list[tuple[int, float]]:
    pairs = [(token, float(one.logprob)) for token, one in row.items()]
    return sorted(pairs, key=lambda pair: -pair[1])[:most]


def _plug_in() -> Any:
    """Return Spindle's drafter inside TensorRT-LLM, which only its own interpreter can import."""
    return import_module("backend.hosts.tensorrt_llm")
