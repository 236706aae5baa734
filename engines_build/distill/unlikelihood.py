"""Unlearn loops: a last phase of training in which a model is shown its own greedy texts and made
to expect their repetitions less.

Sequence-level unlikelihood (Welleck et al., "Neural text generation with unlikelihood training",
2019, section 5.2): every token of a greedy continuation that belongs to a run of ``RUN_TOKENS``
tokens that the continuation held before costs ``-log(1 - p)``. Next-token training on texts goes on
beside it, so that what is not repeated stays as likely as it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from engines_build.distill.corpora import Corpus
from engines_build.distill.generate import encode, eos_token_ids
from engines_build.distill.train import Sample, Trainer

RUN_TOKENS = 4
CONTINUATIONS, NEW_TOKENS, PROMPT_TOKENS = 16, 96, 192
"""Continuations a step, their longest and that of their prompts: longer prompts cost most and loop
no differently.
"""
LEFT_OUT = "sql"
"""The workload that may repeat itself: an answer in SQL names a column twice for good reason."""
_PROMPTS_A_STEP = 1000
"""Indices between the prompts of neighbouring steps: more than are tried, so that no prompt comes
twice.
"""
_WEIGHT = 2.0
"""Of the mean cost of a continuation's token beside the loss of a text's."""

Text = tuple[list[int], list[int]]
"""Prompt and continuation."""


class Unlikelihood(Trainer):
    """Trains on samples while it unlearns the repetitions of the model's own answers to ``corpus``.

    The curve has ``repetition`` beside the loss and the agreement on the samples: the share of runs
    that occurred before in their own text. Raises ValueError where the corpus makes no prompt but
    SQL.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        samples: list[Sample],
        args: argparse.Namespace,
        run: Path,
        tokenizer: Any,
    ):
        super().__init__(
            model, torch.arange(model.config.vocab_size), samples, args.device, args.seed, run
        )
        self.corpus, self.tokenizer = args.train, tokenizer
        self.workloads = [w for w in args.train.workloads if w != LEFT_OUT]
        if not self.workloads:
            raise ValueError(
                f"--unlikelihood-tokens: the sources {', '.join(args.train.sources)} make "
                f"prompts of {LEFT_OUT} alone; give 0"
            )

    def _loss(self, step: int, samples: list[Sample]) -> tuple[Tensor, dict[str, float]]:
        loss, seen = super()._loss(step, samples)
        prompts = short_prompts(self.corpus, self.tokenizer, self.workloads, step * _PROMPTS_A_STEP)
        texts = continued(self.draft, prompts, eos_token_ids(self.tokenizer), self.device)
        seen["repetition"] = share_repeated([new for _, new in texts])
        return loss + _WEIGHT * unlikelihood(self.draft, texts, self.device), seen


def short_prompts(
    corpus: Corpus, tokenizer: Any, workloads: Sequence[str], first: int = 0
) -> list[list[int]]:
    """Return the next ``CONTINUATIONS`` prompts of at most ``PROMPT_TOKENS`` tokens from index
    ``first`` on, of ``workloads`` in turn.
    """
    prompts = (corpus.prompt(index, workloads[index % len(workloads)]) for index in count(first))
    encoded = (encode(tokenizer, prompt) for prompt in prompts)
    return list(
        islice((tokens for tokens in encoded if 0 < len(tokens) <= PROMPT_TOKENS), CONTINUATIONS)
    )


@torch.no_grad()
def continued(
    model: LlamaForCausalLM, prompts: list[list[int]], ends: set[int], device: str
) -> list[Text]:
    """Return each prompt with its greedy continuation, up to one of ``ends`` (kept) or
    ``NEW_TOKENS``.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    there = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    settings = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": sorted(ends),
        "pad_token_id": 0,
    }
    found = model.generate(tokens, attention_mask=there, **settings)[:, longest:].tolist()
    stops = [
        next((i + 1 for i, token in enumerate(text) if token in ends), len(text)) for text in found
    ]
    return [(prompt, text[:stop]) for prompt, text, stop in zip(prompts, found, stops, strict=True)]


def greedy_repetition(
    model: LlamaForCausalLM, corpus: Corpus, tokenizer: Any, device: str
) -> dict[str, float]:
    """Return the share of repeated runs in the model's greedy answers to the first short prompts of
    each workload.
    """
    prompts = {
        workload: short_prompts(corpus, tokenizer, [workload]) for workload in corpus.workloads
    }
    texts = {
        workload: continued(model, of, eos_token_ids(tokenizer), device)
        for workload, of in prompts.items()
    }
    return {workload: share_repeated([new for _, new in of]) for workload, of in texts.items()}


def repeated(tokens: list[int], size: int = RUN_TOKENS) -> list[bool]:
    """Return which of ``tokens`` belong to a run of ``size`` that occurred before."""
    before: set[tuple[int, ...]] = set()
    marks = [False] * len(tokens)
    for start in range(len(tokens) - size + 1):
        run = tuple(tokens[start : start + size])
        if run in before:
            marks[start : start + size] = [True] * size
        before.add(run)
    return marks


def share_repeated(texts: list[list[int]], size: int = RUN_TOKENS) -> float:
    """Return the share of the runs of ``size`` tokens that occurred before in their own text."""
    runs = [[tuple(text[i : i + size]) for i in range(len(text) - size + 1)] for text in texts]
    return sum(len(found) - len(set(found)) for found in runs) / max(sum(map(len, runs)), 1)


def unlikelihood(model: LlamaForCausalLM, texts: list[Text], device: str) -> Tensor:
    """Return the mean over all tokens of the continuations of ``-log(1 - p)``, which those not
    repeated have as 0 (nats).
    """
    marks = [torch.tensor([False] * len(prompt) + repeated(new))[1:] for prompt, new in texts]
    whole = nn.utils.rnn.pad_sequence(
        [torch.tensor(prompt + new) for prompt, new in texts], batch_first=True
    ).to(device)
    with torch.autocast(device, torch.bfloat16):
        hidden = model.model(input_ids=whole, use_cache=False).last_hidden_state
        x = torch.cat(
            [h[: len(mark)][mark.to(device)] for h, mark in zip(hidden, marks, strict=True)]
        )
        logits = model.lm_head(x)
    wrong = torch.cat(
        [row[1 : len(mark) + 1][mark.to(device)] for row, mark in zip(whole, marks, strict=True)]
    )
    every = logits.float()
    others = every.scatter(
        1, wrong[:, None], -torch.inf
    )  # 1 - p itself would round to 0 where a loop is certain, and teach nothing
    return (every.logsumexp(dim=1) - others.logsumexp(dim=1)).sum() / sum(
        len(new) for _, new in texts
    )
