"""Whole texts at once, for training heads and for measuring them: a head's forward without a KV
cache, and a target's greedy answers with its states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer
from transformers.utils import logging

from backend.engines.eagle.folder import EagleShape
from backend.engines.models.loading import load_decoder
from backend.engines.models.rope import rope_tables
from backend.tokenizer import load_tokenizer

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are three things to look for when buying a used bicycle?",
    "Translate into French: The library opens at nine and closes at six.",
    "Write an SQL query that counts the orders of every customer in 2024.",
    "Tell a short story about a lighthouse keeper and a lost ship.",
    "How do I remove a coffee stain from a cotton shirt?",
    "Summarise the causes of the First World War in four points.",
)
ANSWER_TOKENS = 64
"""The most tokens of an answer."""


class WholeText:
    """The forward of ``folder`` for every place of a text, in the dtype of its tensors."""

    def __init__(
        self, shape: EagleShape, tensors: Mapping[str, Tensor], embedding: Tensor, head: Tensor
    ) -> None:
        """``tensors`` are those of ``folder``; ``embedding`` and ``head`` [vocab, hidden] the
        target's.
        """
        self.shape, self._tensors = shape, tensors
        self.token_ids = tensors["token_ids"]
        self._embedding = tensors.get("embed_tokens.weight", embedding)
        own_rows = tensors.get("lm_head.weight")
        self._rows = head[self.token_ids] if own_rows is None else own_rows

    def unroll(self, tokens: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """Yield logits [places, draft vocabulary] by step, of a text's ``tokens`` int64[n] and the
        target's ``states`` [n, layers, hidden] there.

        In step j (from 0 on), place i is a proposal of j + 1 tokens that begins after token
        i + 1: its last token follows token i + j + 1, and those before it are the text's.
        """
        rows = len(tokens) - 1
        cos, sin = (table.to(states) for table in rope_tables(self.shape, rows, torch))
        embedded = self._embedding[tokens[1:]]
        state = self._fuse(states[:-1])
        drafted: list[tuple[Tensor, Tensor]] = []
        for step in range(min(steps, rows)):
            at = slice(step, rows)  # of all rows, those that this step has
            query, key, value, residual = self._read(embedded[at], state, cos[at], sin[at])
            drafted.append((key, value))
            attended = self._attend(query, drafted)
            output = self._finish(residual, attended)
            normed = self._norm(output, "norm")
            yield normed @ self._rows.T
            state = (normed if self.shape.norm_output else output)[:-1]

    def _norm(
        self,
        rows: Tensor,  # [..., columns of the weight]
        name: str,
    ) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return functional.rms_norm(rows, weight.shape, eps=self.shape.rms_norm_eps) * weight

    def _fuse(self, states: Tensor) -> Tensor:
        """Return f of states [n, layers, hidden]."""
        if self.shape.fuse == "each":
            each = [self._norm(states[:, tap], f"fc_norm.{tap}") for tap in range(states.shape[1])]
            states = torch.stack(each, 1)
        flat = states.flatten(1)
        if self.shape.fuse == "joint":
            flat = self._norm(flat, "input_norm")
        return functional.linear(flat, self._tensors["fc.weight"], self._tensors.get("fc.bias"))

    def _read(
        self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values [rows, heads, head_dim], and the residual [rows, hidden];
        ``embedded`` and ``state`` are [rows, hidden], ``cos`` and ``sin`` [rows, head_dim].
        """
        shape, normed = self.shape, self._norm(state, "hidden_norm")
        read = torch.cat([self._norm(embedded, "input_layernorm"), normed], 1)
        query, key, value = (
            (read @ self._tensors[f"self_attn.{name}_proj.weight"].T).unflatten(
                1, (-1, shape.head_dim)
            )
            for name in "qkv"
        )
        if shape.qk_norm:
            query = self._norm(query, "self_attn.q_norm")
            key = self._norm(key, "self_attn.k_norm")
        query, key = (
            rows * cos[:, None] + rows.roll(shape.head_dim // 2, -1) * sin[:, None]
            for rows in (query, key)
        )
        return query, key, value, normed if shape.norm_before_residual else state

    def _attend(
        self,
        query: Tensor,  # [rows, heads, head_dim]
        drafted: list[tuple[Tensor, Tensor]],  # [at least rows, kv_heads, head_dim]
    ) -> Tensor:
        """Attend to the text's rows, the first of ``drafted``, and to each proposal's own, the
        others: those of step j begin j rows later.
        """
        shape, step = self.shape, len(drafted) - 1
        groups = shape.num_heads // shape.num_kv_heads
        count = len(query)
        repeated = [
            (keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1))
            for keys, values in drafted
        ]
        (texts, text_values), *rest = repeated
        texts, text_values = texts[:count], text_values[:count]
        scores = torch.einsum("qhd,khd->hqk", query, texts) / math.sqrt(shape.head_dim)
        place = torch.arange(count, device=query.device)
        distance = place[:, None] - place[None]
        is_visible = distance >= 0
        if shape.sliding_window:
            is_visible &= distance + step < shape.sliding_window
        scores = scores.masked_fill(~is_visible, -math.inf)
        later = [(query * keys[:count]).sum(-1).T / math.sqrt(shape.head_dim) for keys, _ in rest]
        if shape.sliding_window:
            reach = [step - at < shape.sliding_window for at in range(1, len(later) + 1)]
            far = query.new_full((shape.num_heads, count), -math.inf)
            later = [one if is_near else far for one, is_near in zip(later, reach, strict=True)]
        weights = torch.cat([scores, *(column[:, :, None] for column in later)], 2).softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights[:, :, :count], text_values)
        for at, (_, values) in enumerate(rest):
            result = result + weights[:, :, count + at].T[:, :, None] * values[:count]
        return result.flatten(1)

    def _finish(
        self,
        residual: Tensor,  # [rows, hidden]
        attended: Tensor,  # [rows, heads x head_dim]
    ) -> Tensor:
        """Return z: the layer's output before the last norm."""
        output = residual + attended @ self._tensors["self_attn.o_proj.weight"].T
        normed = self._norm(output, "post_attention_layernorm")
        gate, up = (normed @ self._tensors[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        down = self._tensors["mlp.down_proj.weight"]
        return output + (functional.silu(gate) * up) @ down.T


@dataclass(frozen=True, slots=True)
class Answer:
    """A text whose end the target wrote greedily."""

    tokens: Tensor
    """int64[n], the prompt's first."""
    prompt_tokens: int
    states: Tensor
    """float32[n, num_layers, hidden], after every layer."""


def answer(folder: Path, dtype: str, device: str = "cpu") -> list[Answer]:
    """Return the answers of the target in a folder. Raises CheckpointError for a folder that cannot
    be served.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    lm = load_reader(folder, dtype, device)
    prompts, ends = (
        [_encode(tokenizer, prompt) for prompt in PROMPTS],
        load_tokenizer(folder).end_ids,
    )
    with torch.inference_mode():
        return [
            Answer(torch.tensor(prompt + new), len(prompt), states_of(lm, prompt + new))
            for prompt, new in zip(prompts, _generate(lm, prompts, ends), strict=True)
        ]


def load_reader(folder: Path, dtype: str, device: str = "cpu") -> Any:
    """Return the decoder in a folder for whole texts. Raises CheckpointError for one that cannot be
    served.
    """
    logging.set_verbosity_error()
    lm: Any = load_decoder(folder, dtype, device)
    lm.set_attn_implementation("eager")
    return lm


def states_of(lm: Any, tokens: Sequence[int]) -> Tensor:
    """Return the states float32[n, num_layers, hidden] of a text after every layer of a decoder."""
    states: list[Tensor] = []

    def keep(module: object, inputs: object, output: Any) -> None:
        del module, inputs
        rows = output[0] if isinstance(output, tuple) else output
        states.append(rows[0].float().cpu())

    hooks = [layer.register_forward_hook(keep) for layer in lm.get_decoder().layers]
    try:
        lm.get_decoder()(input_ids=torch.tensor([tokens], device=lm.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(states, 1)


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _generate(lm: Any, prompts: Sequence[Sequence[int]], ends: Set[int]) -> list[list[int]]:
    """Return greedy answers, each with its end token, of one batch that is padded on the left."""
    longest = max(map(len, prompts))
    pads = [longest - len(prompt) for prompt in prompts]
    ids = [[0] * pad + [*prompt] for pad, prompt in zip(pads, prompts, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
    texts = lm.generate(
        input_ids=torch.tensor(ids, device=lm.device),
        attention_mask=torch.tensor(mask, device=lm.device),
        do_sample=False,
        max_new_tokens=ANSWER_TOKENS,
        eos_token_id=sorted(ends),
        pad_token_id=0,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return [_until_end(row, ends) for row in texts[:, longest:].tolist()]


def _until_end(tokens: list[int], ends: Set[int]) -> list[int]:
    stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]
