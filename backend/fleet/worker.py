"""Dynamo's engine: it forwards what Dynamo sends to one Spindle, token by token."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import tritonclient.grpc.aio as grpcclient
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.llm.exceptions import InvalidArgument, StreamIncomplete

from backend.fleet.requests import Array, Chunks, ResponseError, WrongRequestError, tensors_of
from backend.loopback import CHANNEL_OPTIONS
from backend.openai_frontend.template import load_template

logger = logging.getLogger(__name__)

PROBE_PERIOD_S = 1.0
FAILED_PROBES = 3
"""Failed probes in a row after which the worker ends, so that Dynamo sends it nothing more."""
ANSWER_LIMIT_S = 5.0
END_LIMIT_S = 10.0
"""Seconds after the time of a drain in which the server must have ended what is left."""
OUTPUTS = ("output_ids", "output_log_probs", "finish_reason", "seed")
ERRORS_AS_OUTPUTS = {"spindle_errors_as_outputs": True}
CLIENT_ERRORS = ("INVALID_ARGUMENT", "UNIMPLEMENTED")


@dataclass(frozen=True, slots=True)
class Replica:
    """The Spindle that a worker stands for."""

    address: str
    """Address of Triton's gRPC service."""
    folder: str
    """The model's, for Dynamo's tokenizer and chat template."""
    name: str
    """The model's, as clients say it."""
    namespace: str
    """Dynamo's: workers of one namespace and model are one fleet."""
    block_tokens: int
    kv_blocks: int
    max_requests: int
    drain_s: float
    kv_events: str = ""
    """The endpoint at which the engine publishes KV events; empty: none."""


class SpindleEngine(LLMEngine):  # type: ignore[misc]  # Dynamo is not in the main environment
    """One Spindle, as Dynamo sees an engine."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._client: Any = None
        self._marker: list[int] = []
        self._context_tokens = 0
        self._running = 0
        self._probing: asyncio.Task[None] | None = None

    def config(self, discovery: str) -> WorkerConfig:
        """Return what Dynamo registers the worker by."""
        replica = self._replica
        return WorkerConfig(
            namespace=replica.namespace,
            model_name=replica.folder,
            served_model_name=replica.name,
            discovery_backend=discovery,
            enable_kv_routing=bool(replica.kv_events),
        )

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> Any:
        """Refuse: ``backend.fleet`` reads the arguments."""
        raise NotImplementedError

    async def start(self, worker_id: int) -> EngineConfig:  # noqa: ARG002
        """Wait until the server is ready: a worker that is registered gets requests."""
        self._client = grpcclient.InferenceServerClient(
            self._replica.address, channel_args=CHANNEL_OPTIONS
        )
        while (health := await self._health()) is None or health["status"] != "ok":
            await asyncio.sleep(PROBE_PERIOD_S)
        self._context_tokens = health["max_context_tokens"]
        self._marker = await self._answer_opening()
        self._probing = asyncio.ensure_future(self._probe())
        return EngineConfig(
            model=self._replica.folder,
            served_model_name=self._replica.name,
            llm=LlmRegistration(
                context_length=self._context_tokens,
                kv_cache_block_size=self._replica.block_tokens,
                total_kv_blocks=self._replica.kv_blocks,
                max_num_seqs=self._replica.max_requests,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where the engine publishes KV events."""
        endpoint = self._replica.kv_events
        return [ZmqSource(endpoint=endpoint)] if endpoint else []

    async def generate(
        self, request: dict[str, Any], context: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a request."""
        try:
            inputs = tensors_of(request, context.id(), self._marker, self._context_tokens)
        except WrongRequestError as error:
            raise InvalidArgument(str(error)) from None
        if "resumed_tokens" in inputs:
            logger.info("%s resumes after %d tokens", context.id(), inputs["resumed_tokens"].item())
        chunks = Chunks(len(request["token_ids"]), log_probs="return_log_probs" in inputs)
        self._running += 1
        try:
            async for chunk in self._stream(inputs, context, chunks):
                yield chunk
        finally:
            self._running -= 1

    async def cleanup(self) -> None:
        """Let streams end; Dynamo calls this while they run, and ends them when it returns."""
        if self._probing is not None:
            self._probing.cancel()
        deadline_s = monotonic() + self._replica.drain_s + END_LIMIT_S
        while self._running and monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _stream(
        self,
        inputs: dict[str, Array],  # [1, ...] by name
        context: Any,
        chunks: Chunks,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield chunks until the text ends. Raises StreamIncomplete, upon which Dynamo sends
        prompt and text to another worker, where the server cannot end it.
        """

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {
                "model_name": "tensorrt_llm",
                "inputs": [_tensor(name, array) for name, array in inputs.items()],
                "request_id": context.id(),
                "parameters": ERRORS_AS_OUTPUTS,
            }

        stream = self._client.stream_infer(requests())
        cancellation = asyncio.ensure_future(_cancel_when_stopped(context, stream))
        try:
            async for result, error in stream:
                if error is not None:
                    raise StreamIncomplete(str(error))
                chunk = chunks.chunk({name: result.as_numpy(name) for name in OUTPUTS})
                yield chunk
                if "finish_reason" in chunk:
                    return
            raise StreamIncomplete("the server ended the stream")
        except ResponseError as error:
            if error.code in CLIENT_ERRORS:
                raise InvalidArgument(str(error)) from None
            raise StreamIncomplete(str(error)) from None
        except grpcclient.InferenceServerException as error:
            raise StreamIncomplete(str(error)) from None
        except asyncio.CancelledError:
            if not context.is_stopped():
                raise StreamIncomplete("the server is gone") from None
            yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
        finally:
            cancellation.cancel()
            stream.cancel()

    async def _probe(self) -> None:
        """End this process, as SIGTERM does, once the engine has stopped answering."""
        failures = 0
        while failures < FAILED_PROBES:
            await asyncio.sleep(PROBE_PERIOD_S)
            failures = 0 if await self._health() is not None else failures + 1
        logger.error("%d probes in a row have failed: this worker ends", failures)
        signal.raise_signal(signal.SIGTERM)

    async def _health(self) -> dict[str, Any] | None:
        """Return what the engine says of itself, None where it does not answer."""
        command = np.array([b"health"], np.object_)
        try:
            result = await self._client.infer(
                "spindle", [_tensor("command", command)], client_timeout=ANSWER_LIMIT_S
            )
        except grpcclient.InferenceServerException:
            return None
        health: dict[str, Any] = json.loads(result.as_numpy("reply").item())
        return health

    async def _answer_opening(self) -> list[int]:
        """Return the token ids with which the chat template begins an answer: those after what a
        prompt with and one without them share. Empty where there is no template.
        """
        if (template := load_template(Path(self._replica.folder), None)) is None:
            return []
        chat = [{"role": "user", "content": "a"}]
        whole = await self._tokenise(template.prompt(chat))
        rest = await self._tokenise(template.prompt(chat, opens_answer=False))
        shared = [a == b for a, b in zip(whole, rest, strict=False)]
        return whole[shared.index(False) if False in shared else len(shared) :]

    async def _tokenise(self, text: str) -> list[int]:
        inputs = {
            "QUERY": np.array([[text.encode()]], np.object_),
            "REQUEST_OUTPUT_LEN": np.array([[1]], np.int32),
            "add_special_tokens": np.array([[False]]),
        }
        tensors = [_tensor(name, array) for name, array in inputs.items()]
        result = await self._client.infer("preprocessing", tensors)
        ids: list[int] = result.as_numpy("INPUT_ID").ravel().tolist()
        return ids


async def _cancel_when_stopped(context: Any, stream: Any) -> None:
    await context.async_killed_or_stopped()
    stream.cancel()


def _tensor(name: str, array: Array) -> Any:
    """Return an array of any shape, such as [1, 1], as an input of Triton's."""
    kinds = {"O": "BYTES", "b": "BOOL", "u": "UINT64", "i": "INT32", "f": "FP32"}
    tensor = grpcclient.InferInput(name, array.shape, kinds[array.dtype.kind])
    tensor.set_data_from_numpy(array)
    return tensor
