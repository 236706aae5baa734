"""Requests to Triton for a body, and the answers to them, whole or as they are written."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from backend.openai_frontend.access import tenant_salt
from backend.openai_frontend.choices import COMPLETION, Style, TextChoice
from backend.openai_frontend.errors import CHAT_FIELDS, FIELDS, TOOL_FIELDS, ApiError
from backend.openai_frontend.schema import ChatRequest, CompletionOptions, CompletionRequest
from backend.openai_frontend.template import EscapedPrompt
from backend.openai_frontend.triton import Piece, Triton
from backend.triton_adapter.fields import TEXT_INPUTS
from backend.triton_adapter.openai_options import as_tensors

_SAME = {field.name for field in TEXT_INPUTS} & {*CompletionRequest.model_fields}
"""Options that are tensors by the same name, and pass as they are unless ``tensors`` says else."""
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""Proxies such as nginx pass events on as they come instead of filling a buffer."""
_LINE_ENDS = {"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON may have as they are, but readers of lines, such as httpx's, take for the
end of one.
"""
WATCH_PERIOD_S = 0.25


class TokenCounts:
    """Adds up the tokens and the proposals of an answer.

    A prompt counts once, however many texts continue it; with ``silent`` nothing else does.
    """

    def __init__(self, level: str = "summary", *, silent: bool = False) -> None:
        """``level`` of the counts of proposals: ``none``, ``summary`` or ``detailed``, as in
        vLLM.
        """
        self._level = level
        self._silent = silent
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Count a text's last piece; the others carry no counts."""
        if piece.finish_reason is not None:
            self._pieces.append(piece)

    def metrics(self) -> dict[str, Any]:
        """Return the fields to add at the root of the response. Steps keep their order only where
        there is one text.
        """
        if self._level == "none" or not self._pieces:
            return {}
        columns = zip(*(piece.acceptance_histogram for piece in self._pieces), strict=True)
        histogram = [sum(column) for column in columns]
        steps, drafted = sum(histogram), sum(piece.draft_tokens for piece in self._pieces)
        accepted = sum(tokens * count for tokens, count in enumerate(histogram))
        counts: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": len(histogram) - 1,
        }
        if self._level == "detailed" and len(self._pieces) == 1:
            counts["per_step_accepted"] = self._pieces[0].per_step_accepted
            counts["per_step_drafted"] = self._pieces[0].per_step_drafted
        return {"metrics": {"speculative_decoding": counts}}

    async def usage(self, choices: Sequence[TextChoice], triton: Triton) -> dict[str, Any]:
        """Return OpenAI's ``usage``; the tokens of reasoning only where they can be counted, for no
        answer is lost by that.
        """
        inputs = sum({piece.prompt: piece.input_tokens for piece in self._pieces}.values())
        output = 0 if self._silent else sum(piece.output_tokens for piece in self._pieces)
        usage: dict[str, Any] = {
            "prompt_tokens": inputs,
            "completion_tokens": output,
            "total_tokens": inputs + output,
        }
        if any(choice.splits_reasoning for choice in choices):
            with suppress(ApiError):
                texts = ["".join(choice.reasoning) for choice in choices]
                ids = [
                    await triton.tokenize(text, add_special_tokens=False) for text in texts if text
                ]
                tokens = min(sum(map(len, ids)), output)
                usage["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return usage


def tensors(
    body: CompletionOptions,
    max_tokens: int | None,
    default: int,
    *,
    echo: bool = False,
    top: int | None = None,
) -> dict[str, Any]:
    """Return the inputs of the text model that a body's options mean. OpenAI's temperature is 1
    unless given; without ``max_tokens`` a text has at most ``default`` tokens and what is left of
    the context.

    ``top``: log-probabilities are wanted, and that many of the likeliest at each place; with
    ``echo`` of the prompt, too.
    """
    options = {name: getattr(body, name, None) for name in _SAME}
    options |= {
        "max_tokens": default if max_tokens is None else max_tokens,
        "fit_max_tokens": True if max_tokens is None else None,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "seed": None if body.seed is None else body.seed % 2**64,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "stop_words": body.stop or None,
        "stop_token_ids": body.stop_token_ids or None,
        "logit_bias_ids": list(body.logit_bias) if body.logit_bias else None,
        "logit_bias_values": list(body.logit_bias.values()) if body.logit_bias else None,
        "end_id": -1 if body.ignore_eos else None,
        "remember": None if body.remember else False,
        "stream": body.stream,
        "exclude_input_in_output": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        "return_log_probs": None if top is None else True,
        "return_top_log_probs": top,
        "return_prompt_log_probs": True if echo and top is not None else None,
    }
    return as_tensors({name: value for name, value in options.items() if value is not None})


@dataclass(slots=True)
class RequestedTexts:
    """The texts that a body asks for: ``n`` for each of the ``prompts``, in the order of the
    choices. ``spec_decode_metrics``: how much of ``metrics.speculative_decoding`` they bring.
    """

    body: CompletionOptions
    style: Style
    prompts: Sequence[str | list[int] | EscapedPrompt]
    options: dict[str, Any]
    spec_decode_metrics: str = "summary"

    async def tokens(self, triton: Triton) -> list[list[int]]:
        """Return the token ids of each prompt. Raises ApiError."""
        return [
            prompt if isinstance(prompt, list) else await self._tokenize(triton, prompt)
            for prompt in self.prompts
        ]

    async def _tokenize(self, triton: Triton, prompt: str | EscapedPrompt) -> list[int]:
        special = self.options.get("add_special_tokens")
        return await triton.tokenize(prompt, self._fields(), add_special_tokens=special)

    async def response(self, request: Request, triton: Triton) -> Response:
        """Ask Triton and return its answer. A client that hangs up ends its request. Raises
        ApiError.
        """
        fields = self._fields()
        prompts = [
            await self._tokenize(triton, prompt) if isinstance(prompt, EscapedPrompt) else prompt
            for prompt in self.prompts
        ]
        echoed = [await _text(triton, prompt) if self.style.echo else "" for prompt in prompts]
        texts = [text for text in echoed for _ in range(self.body.n)]
        choices = [TextChoice(self.style, index, text) for index, text in enumerate(texts)]
        kind = self.style.kind
        head = {
            "id": f"{kind.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.body.model,
        }
        counted = {} if self.spec_decode_metrics == "none" else {"return_perf_metrics": True}
        salt = tenant_salt(request.state.tenant, self.options.get("cache_salt"))
        salted = {} if salt is None else {"cache_salt": salt}
        pieces = triton.generate(prompts, self.options | counted | salted, fields, self.body.n)
        counts = TokenCounts(self.spec_decode_metrics, silent=self.style.silent)
        output = _Output(pieces, choices, counts, head, self.body.n)
        answer = self._stream if self.body.stream else self._whole
        return await until_gone(request, answer(output, triton))

    def _fields(self) -> dict[str, str]:
        """Return the fields of the tensors whose name is another one."""
        if self.style.kind == COMPLETION:
            return FIELDS
        fields = CHAT_FIELDS if self.style.tool is None else TOOL_FIELDS
        if isinstance(self.body, ChatRequest) and self.body.max_completion_tokens is not None:
            fields = {**fields, "max_tokens": "max_completion_tokens"}
        return fields

    async def _stream(self, output: _Output, triton: Triton) -> Response:
        """Return a stream once it has something: what is wrong with a request has a status."""
        first = await anext(output.pieces)
        return StreamingResponse(self._events(first, output, triton), headers=_STREAM_HEADERS)

    async def _whole(self, output: _Output, triton: Triton) -> Response:
        async for piece in output.pieces:
            output.add(piece)
        body = {
            **output.head,
            "object": self.style.kind.whole,
            "choices": [choice.whole() for choice in output.choices],
            "usage": await output.counts.usage(output.choices, triton),
        }
        return JSONResponse({**body, **output.counts.metrics()})

    async def _events(self, first: Piece, output: _Output, triton: Triton) -> AsyncIterator[str]:
        """Yield server-sent events; the requests are cancelled when the client has left."""
        options, head = self.body.stream_options, {**output.head, "object": self.style.kind.part}
        with_usage = options is not None and options.include_usage
        choices, counts = output.choices, output.counts
        async with aclosing(output.pieces):
            piece: Piece | None = first
            try:
                while piece is not None:
                    if (part := output.add(piece).part()) is not None:
                        ended = all(choice.reason is not None for choice in choices)
                        last = counts.metrics() if ended and not with_usage else {}
                        yield _event({**head, "choices": [part], **last})
                    piece = await anext(output.pieces, None)
            except ApiError as error:
                yield _event(error.body())
                return
            if with_usage:
                usage = {"choices": [], "usage": await counts.usage(choices, triton)}
                yield _event({**head, **usage, **counts.metrics()})
            yield "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class _Output:
    """The pieces of an answer, and where they go."""

    pieces: AsyncGenerator[Piece, None]
    choices: list[TextChoice]
    counts: TokenCounts
    head: dict[str, Any]
    n: int
    """Choices of each prompt."""

    def add(self, piece: Piece) -> TextChoice:
        """Return the choice of a piece, with the piece."""
        choice = self.choices[piece.prompt * self.n + piece.sequence]
        choice.add(piece)
        self.counts.add(piece)
        return choice


def _event(body: dict[str, Any]) -> str:
    text = json.dumps(body, ensure_ascii=False)
    for character, escape in _LINE_ENDS.items():
        text = text.replace(character, escape)
    return f"data: {text}\n\n"


async def _text(triton: Triton, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else await triton.detokenize(prompt)


async def until_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what ``work`` returns; cancel it when the client hangs up before."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=WATCH_PERIOD_S)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
