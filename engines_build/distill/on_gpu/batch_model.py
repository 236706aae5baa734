"""A target that answers a large batch of prompts in step, as one CUDA graph a token.

Prompts are padded on the left, so that every text writes its KV at the same place. Ended texts run
on, unread, until all have ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from backend.engines.models.rope import rope_tables
from backend.engines.models.spec import PlainLlama
from backend.engines.weights import Weights
from engines_build.distill.generate import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, TOP_K
from engines_build.distill.head import HeadSample

_WIDTH_STEP = 64
"""Places that attention reads at a time: a graph for each number of them."""

_PREFILL_TOKENS = 1 << 16
_HEAD_ROWS = 4096
_STEPS_PER_LOOK = 16
_LOOP_TOKENS, _LOOP_WINDOW, _LOOP_TIMES, _LOOP_FIRST = 8, 64, 3, 24

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer (counted from 0) by queries, keys and values [..., heads, head_dim]."""


class EncodedPrompt(NamedTuple):
    """A prompt's workload and tokens."""

    workload: str
    tokens: list[int]


class _Linear(NamedTuple):
    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, rows: Tensor) -> Tensor:  # [..., in] to [..., out]
        return functional.linear(rows, self.weight, self.bias)


class _Layer(NamedTuple):
    attention_norm: Tensor  # [hidden]
    qkv: _Linear
    output: _Linear
    mlp_norm: Tensor  # [hidden]
    gate_up: _Linear
    down: _Linear


def _layer(weights: Weights, index: int) -> _Layer:
    def linear(*names: str) -> _Linear:
        full = [f"model.layers.{index}.{name}" for name in names]
        biases = [weights[f"{n}.bias"] for n in full if f"{n}.bias" in weights]
        joined = torch.cat([weights[f"{n}.weight"] for n in full])
        return _Linear(joined, torch.cat(biases) if biases else None)

    return _Layer(
        weights[f"model.layers.{index}.input_layernorm.weight"],
        linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        linear("self_attn.o_proj"),
        weights[f"model.layers.{index}.post_attention_layernorm.weight"],
        linear("mlp.gate_proj", "mlp.up_proj"),
        linear("mlp.down_proj"),
    )


def lengths_of(answers: Tensor, ends: Tensor) -> Tensor:
    """Return how many tokens of each row of answers [n, made] count: up to one of ``ends`` [k], or
    to where the last tokens stand for the third time (as ``Generator`` ends them).
    """
    over = torch.isin(answers, ends)
    if answers.shape[1] >= _LOOP_FIRST:
        pieces = answers.unfold(1, _LOOP_TOKENS, 1)
        times = torch.ones(pieces.shape[:2], dtype=torch.long, device=answers.device)
        for back in range(1, min(_LOOP_WINDOW - _LOOP_TOKENS + 1, pieces.shape[1])):
            times[:, back:] += (pieces[:, back:] == pieces[:, :-back]).all(2)
        first = _LOOP_FIRST - _LOOP_TOKENS
        over[:, _LOOP_FIRST - 1 :] |= times[:, first:] >= _LOOP_TIMES
    over[:, -1] = True
    return over.int().argmax(1) + 1


class BatchModel:
    """A Llama that answers up to ``rows`` prompts at once.

    ``taps`` are the layers, counted from 1, whose states are kept, ``ends`` the tokens that end a
    text.
    """

    def __init__(
        self, config: PlainLlama, weights: Weights, rows: int, taps: Sequence[int], ends: set[int]
    ) -> None:
        self.config, self.rows, self.taps = config, rows, tuple(taps)
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = _Linear(weights.get("lm_head.weight", self._embedding))
        self._norm = weights["model.norm.weight"]
        self._layers = [_layer(weights, index) for index in range(config.num_layers)]
        self.device, dtype = self._embedding.device, self._embedding.dtype
        self._room = -(-(MAX_PROMPT_TOKENS + MAX_NEW_TOKENS) // _WIDTH_STEP) * _WIDTH_STEP
        self._top = min(TOP_K, config.vocab_size)
        self._places = torch.arange(self._room, device=self.device)
        tables = rope_tables(config, self._room, torch)
        self._cos, self._sin = (table.to(self.device)[:, None] for table in tables)
        self._ends = torch.tensor(sorted(ends), device=self.device)

        def room(*shape: int, kind: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, device=self.device, dtype=kind)

        heads, width = config.num_kv_heads, config.head_dim
        self._kv = room(config.num_layers, 2, rows, heads, self._room, width, kind=dtype)
        self._token, self._padding, self._place, self._step = (
            room(rows),
            room(rows),
            room(1),
            room(1),
        )
        self._temperature, self._done = room(rows, kind=torch.float), room(rows, kind=torch.bool)
        self._answers = room(rows, MAX_NEW_TOKENS)
        self._ids = room(rows, MAX_NEW_TOKENS, self._top, kind=torch.int)
        self._logprobs = room(rows, MAX_NEW_TOKENS, self._top, kind=torch.half)
        shape = (rows, MAX_NEW_TOKENS, len(taps), config.hidden_size)
        self._features = room(*shape, kind=torch.bfloat16)
        self._graphs: dict[int, Any] = {}

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[EncodedPrompt], temperatures: Sequence[float]
    ) -> list[HeadSample]:
        """Answer prompts, up to ``rows``; of temperature 0 greedily, else drawn from the top
        ``TOP_K``.
        """
        count, width = len(prompts), max(len(one.tokens) for one in prompts)
        texts = [one.tokens for one in prompts] + [prompts[0].tokens] * (self.rows - count)
        padding = [width - len(text) for text in texts]
        tokens = torch.tensor([[0] * n + x for n, x in zip(padding, texts, strict=True)])
        self._padding.copy_(torch.tensor(padding))
        self._temperature[:count] = torch.tensor(temperatures).to(self.device)
        self._done.zero_()
        self._done[count:] = True
        self._step.zero_()
        self._place.fill_(width)
        part = max(1, _PREFILL_TOKENS // width)
        parts = [
            self._prefill(some.to(self.device), number * part)
            for number, some in enumerate(tokens.split(part))
        ]
        self._draw(*(torch.cat(column) for column in zip(*parts, strict=True)))
        steps = 1
        while steps < MAX_NEW_TOKENS and (steps % _STEPS_PER_LOOK or not self._done.all()):
            self._next(-(-(width + steps) // _WIDTH_STEP) * _WIDTH_STEP)
            steps += 1
        answers = self._answers[:count, :steps]
        lengths = lengths_of(answers, self._ends)
        is_answer = self._places[:steps] < lengths[:, None]
        columns = (self._ids, self._logprobs, self._features)
        return _samples(
            prompts,
            [row[:n] for row, n in zip(answers.tolist(), lengths.tolist(), strict=True)],
            [temperature == 0 for temperature in temperatures],
            [column[:count, :steps][is_answer] for column in columns],
        )

    @torch.inference_mode()
    def read(
        self, prompts: Sequence[EncodedPrompt], answers: Sequence[list[int]], greedy: Sequence[bool]
    ) -> list[HeadSample]:
        """Return the samples that generating these answers gave: in one pass over the texts, padded
        on the right.
        """
        texts = [one.tokens + answer[:-1] for one, answer in zip(prompts, answers, strict=True)]
        width, group = max(map(len, texts)), self._group
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        first = torch.tensor([len(one.tokens) - 1 for one in prompts])[:, None]
        after = torch.tensor([len(text) for text in texts])[:, None]
        places = torch.arange(width)
        is_answer = ((places >= first) & (places < after)).to(self.device)

        def attend(
            layer: int,  # noqa: ARG001
            q: Tensor,  # [n, width, heads, head_dim]
            k: Tensor,  # [n, width, kv_heads, head_dim]
            v: Tensor,  # [n, width, kv_heads, head_dim]
        ) -> Tensor:
            return _attention(q, k, v, group, is_causal=True)

        features, hidden = self._run(tokens.to(self.device), slice(width), attend, is_answer)
        targets = [self._top_logprobs(some) for some in hidden.split(_HEAD_ROWS)]
        ids, logprobs = (torch.cat(column) for column in zip(*targets, strict=True))
        columns = [ids.int(), logprobs.half(), features.bfloat16()]
        return _samples(prompts, answers, greedy, columns)

    def _prefill(self, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Run prompts [n, width] of the rows from ``first`` on; return what ``_run`` does of their
        last places.
        """
        (count, width), group = tokens.shape, self._group
        rows, places = slice(first, first + count), self._places[: tokens.shape[1]]
        mask = (places >= self._padding[rows, None])[:, None] & (places <= places[:, None])
        mask = (mask | (places == places[:, None]))[:, None]  # a row of none would be no number

        def attend(
            layer: int,
            q: Tensor,  # [n, width, heads, head_dim]
            k: Tensor,  # [n, width, kv_heads, head_dim]
            v: Tensor,  # [n, width, kv_heads, head_dim]
        ) -> Tensor:
            for cache, new in zip(self._kv[layer], (k, v), strict=True):
                cache[rows, :, :width] = new.transpose(1, 2)
            return _attention(q, k, v, group, attn_mask=mask)

        return self._run(tokens, slice(width), attend, (slice(None), -1))

    def _next(self, width: int) -> None:
        """Run the next token of every row over the first ``width`` places of the KV."""
        if self.device.type != "cuda":
            self._decode(width)
            return
        if width not in self._graphs:
            state = (self._token, self._place, self._step, self._done)
            before = [tensor.clone() for tensor in state]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._decode(width)  # what is made on first use cannot be captured
            torch.cuda.current_stream().wait_stream(stream)
            for tensor, value in zip(state, before, strict=True):
                tensor.copy_(value)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._decode(width)
            self._graphs[width] = graph
        self._graphs[width].replay()

    def _decode(self, width: int) -> None:
        places = self._places[:width]
        mask = (places >= self._padding[:, None]) & (places <= self._place)
        mask = mask[:, None, None].expand(-1, self.config.num_kv_heads, self._group, -1)

        def attend(
            layer: int,
            q: Tensor,  # [rows, heads, head_dim]
            k: Tensor,  # [rows, kv_heads, head_dim]
            v: Tensor,  # [rows, kv_heads, head_dim]
        ) -> Tensor:
            keys, values = self._kv[layer]
            keys.index_copy_(2, self._place, k[:, :, None])
            values.index_copy_(2, self._place, v[:, :, None])
            queries = q.unflatten(1, (self.config.num_kv_heads, self._group))
            kv = keys[:, :, :width], values[:, :, :width]
            return functional.scaled_dot_product_attention(queries, *kv, attn_mask=mask).flatten(1)

        self._draw(*self._run(self._token, self._place, attend, ...))
        self._place += 1

    def _run(
        self, tokens: Tensor, places: Any, attend: Attend, wanted: Any
    ) -> tuple[Tensor, Tensor]:
        """Run tokens [...] at ``places``; return what ``wanted`` picks of the states after ``taps``
        [n, taps, hidden] and of the last [n, hidden].
        """
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        cos, sin = self._cos[places], self._sin[places]
        hidden, tapped = self._embedding[tokens], []
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normalise(hidden, layer.attention_norm))
            qkv = qkv.unflatten(-1, (-1, self.config.head_dim))
            rotated, v = qkv.split([heads + kv_heads, kv_heads], -2)
            swapped = rotated.roll(self.config.head_dim // 2, -1)
            q, k = (rotated * cos + swapped * sin).to(v.dtype).split([heads, kv_heads], -2)
            hidden = hidden + layer.output(attend(number, q, k, v))
            gate, up = layer.gate_up(self._normalise(hidden, layer.mlp_norm)).chunk(2, -1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
            if number + 1 in self.taps:
                tapped.append(hidden[wanted])
        return torch.stack(tapped, 1), hidden[wanted]

    def _top_logprobs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and log probabilities [n, TOP_K] after the last states [n, hidden]."""
        logits = self._head(self._normalise(hidden, self._norm)).float()
        top, ids = logits.topk(self._top, dim=1)
        return ids, top - logits.logsumexp(1, keepdim=True)

    def _draw(self, features: Tensor, hidden: Tensor) -> None:
        """Draw every row's next token (as ``Generator`` does) and keep what it was drawn from:
        ``features`` [rows, taps, hidden] and the last states ``hidden`` [rows, hidden].
        """
        ids, logprobs = self._top_logprobs(hidden)
        gumbel = -torch.empty_like(logprobs).exponential_().log()
        pick = (logprobs + self._temperature[:, None] * gumbel).argmax(1, keepdim=True)
        token = ids.gather(1, pick)[:, 0]
        for buffer, new in (
            (self._answers, token),
            (self._ids, ids.int()),
            (self._logprobs, logprobs.half()),
            (self._features, features.bfloat16()),
        ):
            buffer.index_copy_(1, self._step, new[:, None])
        self._done |= torch.isin(token, self._ends)
        self._token.copy_(token)
        self._step += 1

    @property
    def _group(self) -> int:
        return self.config.num_heads // self.config.num_kv_heads

    def _normalise(
        self,
        rows: Tensor,  # [..., hidden]
        weight: Tensor,  # [hidden]
    ) -> Tensor:
        shape = (self.config.hidden_size,)
        return functional.rms_norm(rows, shape, weight, self.config.rms_norm_eps)


def _attention(q: Tensor, k: Tensor, v: Tensor, group: int, **mask: Any) -> Tensor:
    """Attention of whole texts, [n, width, heads x head_dim]: of ``q`` [n, width, heads, head_dim],
    ``k`` and ``v`` [n, width, kv_heads, head_dim].
    """
    q, k, v = q.transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, **mask).transpose(1, 2).flatten(2)


def _samples(
    prompts: Sequence[EncodedPrompt],
    answers: Sequence[list[int]],
    greedy: Sequence[bool],
    columns: Sequence[Tensor],
) -> list[HeadSample]:
    """Cut ids [n, TOP_K], log probabilities [n, TOP_K] and states [n, taps, hidden] of the ``n``
    tokens of all answers into samples of one answer each.
    """
    texts = [one.tokens + answer for one, answer in zip(prompts, answers, strict=True)]
    flat = torch.tensor(list(chain(*texts)), dtype=torch.int).to(columns[0].device)
    parts = [column.split([len(answer) for answer in answers]) for column in columns]
    rows = zip(flat.split([len(text) for text in texts]), prompts, greedy, *parts, strict=True)
    return [HeadSample(a, len(b.tokens), b.workload, c, d, e, f) for a, b, c, d, e, f in rows]
