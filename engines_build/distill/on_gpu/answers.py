"""Answers of a target to train a head on: their states stay on its device, and those that share a
run of words with what judges are left out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from time import monotonic

import numpy as np

from engines_build.distill.corpora import CorpusPrompt, ask_about
from engines_build.distill.generate import GREEDY_SHARE, SAMPLED_TEMPERATURES, encode
from engines_build.distill.head import HeadSample
from engines_build.distill.on_gpu.batch_model import BatchModel, EncodedPrompt
from engines_build.distill.on_gpu.prompts import PlainTokenizer, Text, read_about
from engines_build.distill.overlap import Grams, overlaps

_GROUP_BATCHES = 16
"""Batches of prompts that are sorted by length: a batch is as wide as its longest."""

_READ_ROWS = 256
_LOOKING = 4
"""Batches, at most, that wait to be looked at; each holds its states."""

_FOLLOW_UP_SHARE = 0.25
"""Share of a batch, at most: long answers of chats, which later prompts are about."""

_LONG_TOKENS = 100
_RAW_SHARE = 0.35


@cache
def _tools(target: Path, prompts: Path) -> tuple[PlainTokenizer, Grams]:
    judged = frozenset(np.load(prompts / "judged.npy", allow_pickle=False).tolist())
    return PlainTokenizer(target, read_about(prompts)["around"]), judged


def look(
    target: Path, prompts: Path, texts: Sequence[Text], seed: str
) -> tuple[list[bool], list[EncodedPrompt]]:
    """Return which texts share a run of words with what judges (``prompts`` is the folder that says
    what does), and prompts about long answers of the others.
    """
    tokenizer, judged = _tools(target, prompts)
    words = tokenizer.plain.decode_batch([text[1] for text in texts])
    shared = [overlaps(text, judged) for text in words]
    rng, follow_ups = random.Random(seed), []
    long = [
        tokens[prompt:]
        for (workload, tokens, prompt, _), bad in zip(texts, shared, strict=True)
        if workload == "chat" and len(tokens) - prompt > _LONG_TOKENS and not bad
    ]
    for answer in long[: int(_FOLLOW_UP_SHARE * len(texts))]:
        workload, reply = rng.choice(["summarise", "qa"]), tokenizer.decode(answer, True)
        prompt = CorpusPrompt(workload, ask_about(reply, workload, rng), rng.random() < _RAW_SHARE)
        follow_ups.append(EncodedPrompt(workload, encode(tokenizer, prompt)))
    return shared, follow_ups


class GeneratedAnswers:
    """The ``samples`` that a model's answers give; ``left_out`` counts those that share words."""

    def __init__(self, model: BatchModel, target: Path, prompts: Path, seed: int) -> None:
        self.samples: list[HeadSample] = []
        self.tokens = self.left_out = 0
        self._model, self._folders, self._seed = model, (target, prompts), seed
        self._follow_ups: list[EncodedPrompt] = []
        self._waiting: deque[
            tuple[list[HeadSample], Future[tuple[list[bool], list[EncodedPrompt]]]]
        ]
        self._waiting = deque()
        self._pool = ProcessPoolExecutor(2, get_context("spawn"))  # a fork and CUDA go ill together

    def read(self, texts: Sequence[Text]) -> None:
        """Take texts that were answered before."""
        texts = sorted(texts, key=lambda text: len(text[1]))
        for at in range(0, len(texts), _READ_ROWS):
            prompts, answers, greedy = [], [], []
            for workload, tokens, prompt, sampled in texts[at : at + _READ_ROWS]:
                prompts.append(EncodedPrompt(workload, tokens[:prompt]))
                answers.append(tokens[prompt:])
                greedy.append(not sampled)
            self._take(self._model.read(prompts, answers, greedy))
        self._settle(0)
        self._follow_ups.clear()

    def generate(self, prompts: Sequence[EncodedPrompt], seconds: float, tokens: int) -> int:
        """Answer prompts, and others about the answers, for a time or until there are that
        many answered tokens; return how many of the prompts were taken.
        """
        rows, rng, count = self._model.rows, random.Random(self._seed), 0
        batches: list[list[EncodedPrompt]] = []
        end = monotonic() + seconds
        while monotonic() < end and self.tokens < tokens:
            if not batches:
                fresh = prompts[count : count + _GROUP_BATCHES * rows]
                count += len(fresh)
                group = sorted([*self._follow_ups, *fresh], key=lambda one: len(one.tokens))
                self._follow_ups.clear()
                batches = [group[at : at + rows] for at in range(0, len(group), rows)]
                rng.shuffle(batches)
                if not batches:
                    break
            batch = batches.pop()
            temperatures = [
                0.0 if rng.random() < GREEDY_SHARE else rng.uniform(*SAMPLED_TEMPERATURES)
                for _ in batch
            ]
            self._take(self._model.generate(batch, temperatures))
        self._settle(0)
        return count

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown()

    def _take(self, samples: list[HeadSample]) -> None:
        samples = [sample for sample in samples if len(sample.features) > 1]
        number = f"{self._seed}/{len(self.samples)}"
        job = self._pool.submit(look, *self._folders, texts_of(samples), number)
        self._waiting.append((samples, job))
        self._settle(_LOOKING)

    def _settle(self, waiting: int) -> None:
        """Keep what was looked at, until at most this many batches wait."""
        while len(self._waiting) > waiting or (self._waiting and self._waiting[0][1].done()):
            samples, job = self._waiting.popleft()
            shared, follow_ups = job.result()
            unshared = [sample for sample, bad in zip(samples, shared, strict=True) if not bad]
            self.samples += unshared
            self.tokens += sum(len(sample.features) for sample in unshared)
            self.left_out += sum(shared)
            self._follow_ups += follow_ups
            print(f"answers: {self.tokens} tokens, {self.left_out} left out", flush=True)


def texts_of(samples: Sequence[HeadSample]) -> list[Text]:
    """Return the texts of samples."""
    return [(s.workload, s.tokens.tolist(), s.prompt_tokens, not s.greedy) for s in samples]
