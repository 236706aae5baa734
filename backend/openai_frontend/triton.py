"""The way to Triton: one body, one gRPC stream, so that giving up one ends its requests and no
others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcclient
from tritonclient.utils import InferenceServerException

from backend.loopback import CHANNEL_OPTIONS
from backend.openai_frontend.errors import FIELDS, ApiError, upstream_error
from backend.openai_frontend.template import EscapedPrompt
from backend.triton_adapter.fields import MODELS, NUMPY_TYPES
from backend.triton_adapter.responder import ERRORS_AS_OUTPUTS

_TYPES = {field.name: field.dtype for model in MODELS for field in model.inputs}
_STATUS = {
    "INVALID_ARGUMENT": 400,
    "UNIMPLEMENTED": 400,
    "UNAVAILABLE": 503,
    "NOT_FOUND": 503,  # Triton has not loaded the model yet, or has unloaded it
    "CANCELLED": 499,
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text with its log-probabilities."""

    data: bytes
    """The token's bytes; a special token's name."""
    log_prob: float | None
    """None for a text's first token."""
    top: list[tuple[bytes, float]]
    """The likeliest tokens at its place: bytes and log-probability."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The new part of the text of a prompt and sequence.

    ``finish_reason``, the counts and the ``seed`` of a sampled text come with its last piece.
    ``acceptance_histogram`` and the two lists by step are the outputs of these names. ``tokens``
    are there where they were asked for, and with the first piece ``prompt_tokens``.
    """

    prompt: int
    sequence: int
    text: str
    finish_reason: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    seed: int | None = None
    draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_accepted: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: list[Token] = field(default_factory=list)


class Triton:
    """A client of the model ``tensorrt_llm_bls``; make it inside the event loop."""

    def __init__(
        self,
        address: str,
        most_texts: int,
        special_tokens: Mapping[str, int],
        admin_secret: str = "",
    ) -> None:
        """``most_texts`` of one body are asked for at once; ``special_tokens`` are ids by name;
        ``admin_secret`` is sent with administrative commands.
        """
        self._special_tokens = special_tokens
        self._letters: dict[str, list[int]] = {}  # of special tokens as plain text
        self._most_texts = most_texts
        self._admin_secret = admin_secret
        self._client = grpcclient.InferenceServerClient(address, channel_args=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def command(self, command: str) -> dict[str, Any]:
        """Return the reply to a command of the administrative interface. Raises ApiError."""
        result = await self._infer(
            "spindle", {"command": [command], "secret": [self._admin_secret]}
        )
        reply: dict[str, Any] = json.loads(result.as_numpy("reply").item())
        return reply

    async def tokenize(
        self,
        text: str | EscapedPrompt,
        names: Mapping[str, str] = FIELDS,
        *,
        add_special_tokens: bool | None = None,
    ) -> list[int]:
        """Return the token ids that a prompt has; ``names`` are what a client calls the inputs.
        Raises ApiError.
        """
        if isinstance(text, EscapedPrompt):
            ids = await self.tokenize(text.text, names, add_special_tokens=add_special_tokens)
            for name in text.plain - self._letters.keys():
                self._letters[name] = await self._letters_of(name)
            if (escaped := text.ids(ids, self._special_tokens, self._letters)) is None:
                message = "messages have special tokens, which this tokenizer cannot take as text"
                raise ApiError(400, message, "messages")
            return escaped
        inputs: dict[str, Any] = {"QUERY": [[text]], "REQUEST_OUTPUT_LEN": [[1]]}
        if add_special_tokens is not None:
            inputs["add_special_tokens"] = [[add_special_tokens]]
        try:
            reply = await self._infer("preprocessing", inputs)
        except ApiError as error:
            message = str(error).replace("QUERY", "text_input", 1)
            raise upstream_error(error.status, message, names) from None
        token_ids: list[int] = reply.as_numpy("INPUT_ID")[0].tolist()
        return token_ids

    async def _letters_of(self, name: str) -> list[int]:
        """Return the tokens of a special token's name as plain text: those of two parts of it."""
        parts = {"STOP_WORDS_DICT": [[name[:1], name[1:]]]}
        inputs = {"QUERY": [["a"]], "REQUEST_OUTPUT_LEN": [[1]], **parts}
        reply = await self._infer("preprocessing", inputs)
        ids: list[int] = reply.as_numpy("STOP_WORDS_IDS")[0, 0].tolist()
        return ids

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of token ids, without special ones. Raises ApiError."""
        if not ids:  # Triton takes no tensor without elements
            return ""
        inputs = {"TOKENS_BATCH": [[ids]], "SEQUENCE_LENGTH": [[len(ids)]]}
        try:
            reply = await self._infer("postprocessing", inputs)
        except ApiError as error:
            message = str(error).replace("TOKENS_BATCH", "tokens_batch", 1)
            raise upstream_error(error.status, message, {"tokens_batch": "tokens"}) from None
        text: bytes = reply.as_numpy("OUTPUT").item()
        return text.decode()

    async def generate(
        self,
        prompts: Sequence[str | list[int]],
        options: dict[str, Any],
        names: Mapping[str, str],
        n: int = 1,
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the texts that continue the prompts, ``n`` for each: every text is a
        request of its own with the same options, the next one as soon as there is a place.

        ``names`` are what a client calls the inputs. Raises ApiError. Closing the iterator cancels
        them.
        """
        seed = options.get("seed")
        shared = {name: value for name, value in options.items() if name != "seed"}
        inputs = [_tensors(_rows(prompt, shared)) for prompt in prompts]
        texts = _Texts(len(prompts) * n, self._most_texts)
        body = secrets.token_hex(8)

        async def requests() -> AsyncIterator[dict[str, Any]]:
            while (index := await texts.next()) is not None:
                prompt, sequence = divmod(index, n)
                yield {
                    "model_name": "tensorrt_llm_bls",
                    "inputs": inputs[prompt] + _seed_of(seed, sequence),
                    "request_id": f"{body}/{index}",
                    "parameters": {ERRORS_AS_OUTPUTS: True},
                }

        responses = self._client.stream_infer(requests())
        try:
            async for result, failure in responses:
                if failure is not None:
                    # Triton's own: a model that is not there (again) yet
                    raise ApiError(503, str(failure))
                index = int(result.get_response().id.rpartition("/")[2])
                try:
                    piece = _piece(result, names, *divmod(index, n))
                except ApiError as error:
                    full = error.status == 503 and "maximum queue size" in str(error)
                    if not (full and texts.put_off(index)):
                        raise
                    continue
                if piece.finish_reason is not None:
                    texts.free_place()
                yield piece
        except grpc.RpcError as error:
            raise ApiError(_STATUS.get(error.code().name, 500), str(error.details())) from None
        finally:
            responses.cancel()

    async def _infer(self, model: str, values: dict[str, Any]) -> Any:
        """Return one answer of a model. Raises ApiError."""
        try:
            return await self._client.infer(model, _tensors(values))
        except InferenceServerException as error:
            code = str(error.status()).removeprefix("StatusCode.")
            raise ApiError(_STATUS.get(code, 500), error.message()) from None


class _Texts:
    """Says which text of a body is asked for next, at most ``most`` at once.

    A text that found the queue full is asked for again when another has ended.
    """

    def __init__(self, count: int, most: int) -> None:
        self._remaining = count
        self._in_flight = min(count, most)
        self._waiting = iter(range(self._in_flight, count))
        self._put_off: list[int] = []
        self._due: asyncio.Queue[int | None] = asyncio.Queue()
        for index in range(self._in_flight):
            self._due.put_nowait(index)

    async def next(self) -> int | None:
        """Return the next text as soon as there is a place for it, None after the last."""
        return await self._due.get()

    @property
    def has_next(self) -> bool:
        """Whether ``next`` returns at once."""
        return not self._due.empty()

    def free_place(self) -> None:
        """Give its place to another text."""
        self._remaining -= 1
        self._in_flight -= 1
        index = self._put_off.pop() if self._put_off else next(self._waiting, None)
        if index is not None:
            self._in_flight += 1
            self._due.put_nowait(index)
        elif not self._remaining:
            self._due.put_nowait(None)

    def put_off(self, index: int) -> bool:
        """Ask for a text again when another has ended; False where no other is in flight."""
        self._in_flight -= 1
        self._put_off.append(index)
        return self._in_flight > 0


def _seed_of(seed: int | None, sequence: int) -> list[Any]:
    """Return the input that is not the same for all texts of a prompt: their seeds follow one
    another.
    """
    return [] if seed is None else _tensors({"seed": [[(seed + sequence) % 2**64]]})


def _rows(prompt: str | list[int], options: dict[str, Any]) -> dict[str, list[list[Any]]]:
    """Return the inputs of one text: a batch of one."""
    values_given = (
        {"text_input": prompt}
        if isinstance(prompt, str)
        else {"text_input": "", "prompt_token_ids": prompt}
    )
    values = {**values_given, **options}
    return {name: [value if isinstance(value, list) else [value]] for name, value in values.items()}


def _tensors(values: dict[str, Any]) -> list[Any]:
    """Return inputs, by the types that they have. Raises ApiError for text that is none."""
    tensors = []
    for name, value in values.items():
        strings = _TYPES[name] == "STRING"
        array = np.array(value, dtype=NUMPY_TYPES[_TYPES[name]])
        if strings:
            try:
                array = np.array([text.encode() for text in array.flat], np.object_).reshape(
                    array.shape
                )
            except UnicodeEncodeError as error:
                raise ApiError(
                    400, f"text has a lone surrogate at character {error.start}"
                ) from None
        tensors.append(
            grpcclient.InferInput(name, array.shape, "BYTES" if strings else _TYPES[name])
        )
        tensors[-1].set_data_from_numpy(array)
    return tensors


def _piece(result: Any, names: Mapping[str, str], prompt: int, sequence: int) -> Piece:
    # Most have one output, and looking for one that is not there is not free.
    outputs = {
        output.name: result.as_numpy(output.name) for output in result.get_response().outputs
    }

    def number(name: str) -> int:
        array = outputs.get(name)
        return 0 if array is None else int(array.item())

    def numbers(name: str) -> list[int]:
        array = outputs.get(name)
        return [] if array is None else array.ravel().tolist()

    reason, seed = outputs.get("finish_reason"), outputs.get("seed")
    if reason is not None and reason.item().startswith(b"error:"):
        code, _, message = reason.item().decode().removeprefix("error:").partition(" ")
        raise upstream_error(_STATUS.get(code, 500), message, names)
    text = outputs["text_output"].item().decode()
    return Piece(
        prompt,
        sequence,
        text,
        None if reason is None else reason.item().decode(),
        number("num_input_tokens"),
        number("num_output_tokens"),
        None if seed is None else seed.item(),
        number("total_draft_tokens"),
        numbers("acceptance_histogram"),
        numbers("per_step_drafted"),
        numbers("per_step_accepted"),
        _tokens(outputs, "output_tokens", "output_log_probs", "top"),
        _tokens(outputs, "prompt_tokens", "prompt_log_probs", "prompt_top"),
    )


def _tokens(outputs: dict[str, Any], tokens: str, log_probs: str, top: str) -> list[Token]:
    """Return the tokens of two outputs; where one more has a name than a log-probability, the first
    has none.
    """
    data, values = outputs.get(tokens), outputs.get(log_probs)
    if data is None or values is None:
        return []
    rows: list[list[tuple[bytes, float]]] = [[] for _ in values.flat]
    if (names := outputs.get(f"{top}_tokens")) is not None:
        likeliest = outputs[f"{top}_log_probs"][0].tolist()
        rows = [list(zip(*row, strict=True)) for row in zip(names[0], likeliest, strict=True)]
    first = [Token(data[0, 0], None, [])] if data.size > values.size else []
    places = zip(data[0, len(first) :], values.ravel().tolist(), rows, strict=True)
    return first + [Token(*place) for place in places]
