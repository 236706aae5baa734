"""The target's greedy answers to a few prompts, with its states: what a head is measured on."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging

from backend.engines.models.loading import load_decoder
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
    written = lm.generate(
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
    return [_until_end(row, ends) for row in written[:, longest:].tolist()]


def _until_end(tokens: list[int], ends: Set[int]) -> list[int]:
    stop = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: stop + 1]
