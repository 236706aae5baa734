"""Distillation data: the teacher answers prompts in a large in-flight batch, its top logits kept at
every position.

Data and soft labels come from the same forward passes. Finished rows are refilled at once, so the
batch stays full. Shards are written as sequences finish; a later call continues behind the last
shard.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.engines.checkpoint import LlamaConfig, Weights
from backend.engines.torch.llama import rope_tables
from engines_build.distill.corpora import WORKLOADS, Corpus, Prompt, ask_about

TOP_K = 32
"""Teacher logits kept per position; what they do not cover is one rest class."""

MAX_PROMPT_TOKENS = 400
MAX_NEW_TOKENS = 224
SEQUENCES_PER_SHARD = 64
SAMPLED_TEMPERATURES = (0.7, 1.0)
"""What a sampled row's temperature lies between."""

_FOLLOW_UP_SHARE = 0.12
_BLOCK_SLOTS = 16
"""Slots attended together, up to the longest of them: rows of unlike length share less padding in
small blocks.
"""
_WORKLOAD_NAMES = list(WORKLOADS)


class Teacher:
    """A Llama-family checkpoint with a preallocated KV cache of ``slots`` rows; ``lengths`` [slots]
    counts the tokens in each.

    ``features`` [rows, taps, hidden] is what the last call's rows held behind the layers ``taps``
    (counted from 1): what a head reads.

    A lean forward (fused projections, grouped heads attended as query rows) since this loop is the
    whole cost of distillation.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, slots: int, taps: Sequence[int] = ()):
        self.taps = frozenset(taps)
        self.heads, self.kv_heads, self.head_dim, self.eps = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        self.layers = [_fused(weights, f"model.layers.{i}.") for i in range(config.num_layers)]
        self.embedding, self.norm = (
            weights["model.embed_tokens.weight"],
            weights["model.norm.weight"],
        )
        self.head = weights.get("lm_head.weight", self.embedding)
        self.device, self.slots = self.embedding.device, slots
        room = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS
        shape = (len(self.layers), slots, self.kv_heads, room, self.head_dim)
        self.keys, self.values = self.embedding.new_zeros(shape), self.embedding.new_zeros(shape)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.cos, self.sin = (table.to(self.embedding) for table in rope_tables(config, room))
        self.features = self.embedding.new_zeros(slots, len(taps), config.hidden_size)

    def prefill(self, slot: int, tokens: list[int]) -> Tensor:
        """Put ``tokens`` into ``slot``, replacing what it held. Returns the logits [1, vocab]
        behind the last of them.
        """
        n = len(tokens)
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        cos, sin = self.cos[:n, None], self.sin[:n, None]
        tapped = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            self.keys[i, slot, :, :n], self.values[i, slot, :, :n] = (
                k.transpose(0, 1),
                v.transpose(0, 1),
            )
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            x = self._feed_forward(
                layer,
                x,
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[
                    0
                ].transpose(0, 1),
            )
            tapped += [x[-1:]] if i + 1 in self.taps else []
        self.lengths[slot] = n
        self._tap(tapped)
        return F.rms_norm(x[-1:], self.norm.shape, self.norm, self.eps) @ self.head.T

    def decode(self, tokens: Tensor) -> Tensor:
        """Append one token [slots] to every slot. Returns logits [slots, vocab]."""
        rows, at = torch.arange(self.slots, device=self.device), self.lengths
        x = self.embedding[tokens]
        cos, sin = self.cos[at][:, None], self.sin[at][:, None]
        blocks = [
            (b, int(n.max()) + 1)
            for b, n in zip(rows.split(_BLOCK_SLOTS), at.split(_BLOCK_SLOTS), strict=True)
        ]
        spans = [(slice(int(b[0]), int(b[-1]) + 1), longest) for b, longest in blocks]
        masks = [
            (torch.arange(longest, device=self.device) <= at[span, None])[:, None, None, :]
            for span, longest in spans
        ]
        tapped = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, cos, sin)
            self.keys[i, rows, :, at], self.values[i, rows, :, at] = k, v
            q = q.view(self.slots, self.kv_heads, -1, self.head_dim)
            keys, values = self.keys[i], self.values[i]
            out = [
                F.scaled_dot_product_attention(
                    q[span], keys[span, :, :longest], values[span, :, :longest], attn_mask=mask
                )
                for (span, longest), mask in zip(spans, masks, strict=True)
            ]
            x = self._feed_forward(layer, x, torch.cat(out))
            tapped += [x] if i + 1 in self.taps else []
        self.lengths = at + 1
        self._tap(tapped)
        return F.rms_norm(x, self.norm.shape, self.norm, self.eps) @ self.head.T

    def copy(self, source: int, slot: int, tokens: int) -> None:
        """Put the first ``tokens`` of a slot into another, replacing what it held."""
        for kept in (self.keys, self.values):
            kept[:, slot, :, :tokens] = kept[:, source, :, :tokens]
        self.lengths[slot] = tokens

    def _tap(self, tapped: list[Tensor]) -> None:
        if tapped:
            self.features = torch.stack(tapped, dim=1).bfloat16().cpu()

    def _project(
        self, layer: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [n, heads, head_dim], keys and values [n, kv_heads, head_dim] of hidden
        states [n, hidden].
        """
        qkv = F.linear(
            F.rms_norm(x, self.norm.shape, layer["attention_norm"], self.eps),
            layer["qkv"],
            layer.get("qkv_bias"),
        )
        qkv = qkv.view(x.shape[0], -1, self.head_dim)
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        qk = qk * cos + qk.roll(self.head_dim // 2, -1) * sin
        return qk[:, : self.heads], qk[:, self.heads :], v

    def _feed_forward(self, layer: dict[str, Tensor], x: Tensor, attended: Tensor) -> Tensor:
        x = x + F.linear(attended.reshape(x.shape[0], -1), layer["o"], layer.get("o_bias"))
        gate, up = (
            F.rms_norm(x, self.norm.shape, layer["mlp_norm"], self.eps) @ layer["gate_up"].T
        ).chunk(2, dim=-1)
        return x + (F.silu(gate) * up) @ layer["down"].T


def _fused(weights: Weights, layer: str) -> dict[str, Tensor]:
    def joined(*names: str) -> Tensor:
        return torch.cat([weights[layer + name] for name in names])

    heads = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    found = {
        "qkv": joined(*(f"{name}.weight" for name in heads)),
        "gate_up": joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "o": weights[layer + "self_attn.o_proj.weight"],
        "down": weights[layer + "mlp.down_proj.weight"],
        "attention_norm": weights[layer + "input_layernorm.weight"],
        "mlp_norm": weights[layer + "post_attention_layernorm.weight"],
    }
    if f"{layer}{heads[0]}.bias" in weights:
        found["qkv_bias"] = joined(*(f"{name}.bias" for name in heads))
    if f"{layer}self_attn.o_proj.bias" in weights:
        found["o_bias"] = weights[layer + "self_attn.o_proj.bias"]
    return found


@dataclass(slots=True)
class _Row:
    """A sequence in flight: its tokens and, for each but the last, top ids and log probabilities of
    the next token.

    Within the prompt that law is the next token itself: the teacher's would cost as much again as
    the prefill.
    """

    workload: int
    prompt_tokens: int
    tokens: list[int]
    temperature: float
    top_ids: list[Tensor] = field(default_factory=list)
    top_logprobs: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    """Of the prompt's last token and of each one generated but the last."""

    def ended(self, eos: set[int]) -> bool:
        """Whether the text is over, full, or repeats its last 8 tokens for the third time in 64 (a
        loop teaches nothing more).
        """
        new = self.tokens[self.prompt_tokens :]
        tail, recent = new[-8:], new[-64:]
        looping = (
            len(new) >= 24 and sum(recent[i : i + 8] == tail for i in range(len(recent) - 7)) >= 3
        )
        return new[-1] in eos or len(new) >= MAX_NEW_TOKENS or looping


@dataclass(slots=True)
class Shards:
    """A folder of shards; ``generated`` counts teacher-generated tokens and ``next_prompt`` the
    prompts taken.
    """

    folder: Path
    generated: int = 0
    next_prompt: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.paths():
            shard = load_file(path)
            self.generated += int((shard["lengths"] - shard["prompt_lengths"]).sum())
            self.next_prompt = int(shard["next_prompt"])

    def paths(self) -> list[Path]:
        """Return the shard files, oldest first."""
        return sorted(self.folder.glob("shard-*.safetensors"))

    def write(self, rows: list[_Row]) -> None:
        """Append one shard; it appears whole or not at all."""
        tensors = {
            "tokens": torch.tensor([t for r in rows for t in r.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(r.tokens) for r in rows]),
            "prompt_lengths": torch.tensor([r.prompt_tokens for r in rows]),
            "workloads": torch.tensor([r.workload for r in rows]),
            "sampled": torch.tensor([r.temperature > 0 for r in rows]),
            "top_ids": torch.cat([t for r in rows for t in r.top_ids]).int(),
            "top_logprobs": torch.cat([t for r in rows for t in r.top_logprobs]).half(),
            "next_prompt": torch.tensor(self.next_prompt),
        }
        if features := [t for r in rows for t in r.features]:
            tensors["features"] = torch.cat(features)
        path = self.folder / f"shard-{len(self.paths()):05d}.safetensors"
        save_file(tensors, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
        self.generated += sum(len(r.tokens) - r.prompt_tokens for r in rows)


class Generator:
    """Fills ``shards`` with the teacher's answers to ``corpus`` until ``tokens`` are there or
    ``deadline`` (monotonic seconds) passes.

    Prompts are of ``workloads`` (none named: all), by their shares in training, in turn on the
    held-out side. ``greedy_share`` of the rows decode greedily, the others sample
    between ``SAMPLED_TEMPERATURES`` among the top ``TOP_K``. A prompt gets ``answers`` answers, all
    but the first sampled: its prefill is most of a short answer's cost.
    """

    def __init__(
        self,
        teacher: Teacher,
        tokenizer: Any,
        corpus: Corpus,
        shards: Shards,
        greedy_share: float,
        workloads: Sequence[str] | None = None,
        answers: int = 1,
    ):
        self.workloads = [w for w in corpus.workloads if workloads is None or w in workloads]
        self.teacher, self.tokenizer, self.corpus, self.shards, self.greedy_share = (
            teacher,
            tokenizer,
            corpus,
            shards,
            greedy_share,
        )
        self.answers = answers
        self.eos = eos_token_ids(tokenizer)
        self.replies: deque[str] = deque(maxlen=64)
        self.rows: dict[int, _Row] = {}
        self.asked: list[tuple[_Row, int]] = []  # answers still wanted, and the slot of the prompt
        self.noise = torch.Generator().manual_seed(corpus.seed * 1_000_003 + len(shards.paths()))
        self.rng = random.Random(f"{corpus.seed}/{len(shards.paths())}")

    @torch.inference_mode()
    def run(self, tokens: int, deadline: float) -> None:
        """Generate, printing progress; sequences still in flight at the end are kept as far as they
        went.
        """
        start, before = time.monotonic(), self.shards.generated
        finished: list[_Row] = []
        rows = [self._start(slot) for slot in range(self.teacher.slots)]
        while self.shards.generated < tokens and time.monotonic() < deadline:
            logits = self.teacher.decode(
                torch.tensor([r.tokens[-1] for r in rows], device=self.teacher.device)
            )
            self._extend(rows, logits)
            for slot, row in enumerate(rows):
                if row.ended(self.eos):
                    finished.append(row)
                    self._remember(row)
                    rows[slot] = self._start(slot)
            if len(finished) >= SEQUENCES_PER_SHARD:
                self.shards.write(finished)
                finished.clear()
                rate = (self.shards.generated - before) / (time.monotonic() - start)
                print(
                    f"generate: {self.shards.generated} tokens, {self.shards.next_prompt} "
                    f"prompts, {rate:.0f} tok/s",
                    flush=True,
                )
        self.shards.write(finished + rows)

    def _start(self, slot: int) -> _Row:
        """Begin another answer to a prompt that a slot still holds, or one to a new prompt."""
        while self.asked:
            first, source = self.asked.pop()
            if self.rows.get(source) is first:
                self.teacher.copy(source, slot, first.prompt_tokens)
                return self._begin(slot, first, self._sampled())
        prompt = self._next_prompt()
        ids = encode(self.tokenizer, prompt)
        row = _Row(_WORKLOAD_NAMES.index(prompt.workload), len(ids), ids, 0.0)
        top_logprobs, top_ids = _top(self.teacher.prefill(slot, ids))
        following = torch.tensor(ids[1:], dtype=torch.long)[:, None].expand(-1, top_ids.shape[1])
        certain = torch.full(following.shape, -math.inf)
        certain[:, 0] = 0.0
        row.top_ids += [following, top_ids]
        row.top_logprobs += [certain, top_logprobs]
        row.features += [self.teacher.features] if self.teacher.taps else []
        greedy = self.rng.random() < self.greedy_share
        started = self._begin(slot, row, 0.0 if greedy else self._sampled())
        self.asked += [(started, slot)] * (self.answers - 1)
        return started

    def _begin(self, slot: int, prompt: _Row, temperature: float) -> _Row:
        """Draw the first token behind a prompt, with lists of its own for what follows."""
        n = prompt.prompt_tokens
        row = replace(
            prompt,
            tokens=prompt.tokens[:n],
            temperature=temperature,
            top_ids=prompt.top_ids[:2],
            top_logprobs=prompt.top_logprobs[:2],
            features=prompt.features[:1],
        )
        chosen = self._choose(row.top_logprobs[1], row.top_ids[1], torch.tensor([temperature]))
        row.tokens.append(int(chosen))
        self.rows[slot] = row
        return row

    def _sampled(self) -> float:
        return self.rng.uniform(*SAMPLED_TEMPERATURES)

    def _next_prompt(self) -> Prompt:
        self.shards.next_prompt += 1
        if (
            not self.corpus.held_out
            and self.replies
            and "qa" in self.workloads
            and self.rng.random() < _FOLLOW_UP_SHARE
        ):
            workload = self.rng.choice(["summarise", "qa"])
            return Prompt(
                workload,
                ask_about(self.rng.choice(self.replies), workload, self.rng),
                self.rng.random() < 0.35,
            )
        index = self.shards.next_prompt - 1
        if self.corpus.held_out:
            return self.corpus.prompt(index, self.workloads[index % len(self.workloads)])
        return self.corpus.prompt(
            index, self.rng.choices(self.workloads, [WORKLOADS[w] for w in self.workloads])[0]
        )

    def _extend(self, rows: list[_Row], logits: Tensor) -> None:
        top_logprobs, top_ids = _top(logits)
        chosen = self._choose(
            top_logprobs, top_ids, torch.tensor([r.temperature for r in rows])
        ).tolist()
        for i, row in enumerate(rows):
            row.top_ids.append(top_ids[i : i + 1])
            row.top_logprobs.append(top_logprobs[i : i + 1])
            row.features += [self.teacher.features[i : i + 1]] if self.teacher.taps else []
            row.tokens.append(chosen[i])

    def _choose(self, top_logprobs: Tensor, top_ids: Tensor, temperatures: Tensor) -> Tensor:
        """One token per row [n]: the Gumbel-max trick over the kept logits; temperature 0 leaves
        the noise out.
        """
        gumbel = -torch.empty_like(top_logprobs).exponential_(generator=self.noise).log()
        pick = (top_logprobs + temperatures[:, None] * gumbel).argmax(dim=1, keepdim=True)
        return top_ids.gather(1, pick)[:, 0]

    def _remember(self, row: _Row) -> None:
        """Keep a long answer of a chat as the article of later summaries and questions: prose on
        more topics than the documents have.
        """
        if _WORKLOAD_NAMES[row.workload] == "chat" and len(row.tokens) - row.prompt_tokens > 100:
            self.replies.append(
                self.tokenizer.decode(row.tokens[row.prompt_tokens :], skip_special_tokens=True)
            )


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log probabilities and ids of the most likely tokens, [n, TOP_K] each, on the CPU."""
    logits = logits.float()
    top, ids = logits.topk(min(TOP_K, logits.shape[1]), dim=1)
    return (top - logits.logsumexp(dim=1, keepdim=True)).cpu(), ids.cpu()


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt as the server would see them, cut to the first ``MAX_PROMPT_TOKENS``
    (in the template: the message is cut).
    """
    if prompt.raw or tokenizer.chat_template is None:
        return list(tokenizer(prompt.text)["input_ids"])[:MAX_PROMPT_TOKENS]
    message = tokenizer.decode(tokenizer(prompt.text)["input_ids"][: MAX_PROMPT_TOKENS - 64])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text)["input_ids"])[:MAX_PROMPT_TOKENS]


def eos_token_ids(tokenizer: Any) -> set[int]:
    """Tokens that end a text: the tokenizer's own EOS and, where it has one, ``<|endoftext|>``."""
    ids = {tokenizer.eos_token_id}
    if "<|endoftext|>" in tokenizer.get_vocab():
        ids.add(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    return ids
