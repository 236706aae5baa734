"""Code in plain English: its comments, docstrings and names, by the words of ``english.py``."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.english import foreign, fronted, prose_and_names

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backend", "bench", "docs", "engines_build", "examples", "policy", "tests")
_MAY_FRONT = re.compile(r"\b(?:What|Where|Whose|Who|Of)\b")
PRODUCT = ("backend", "bench", "docs", "engines_build", "policy")
BARE = re.compile(
    "anew|asked|brought|built|chosen|drawn|found|given|grown|held|kept|known|left|lost|made|meant"
    "|own|said|seen|sent|served|settled|shown|taken|tied|told|used|written"
)
"""Participles that say nothing as the whole name of a function, which is a verb or a noun, or of a
field or variable, which is a noun or begins with ``is_`` or ``has_``.
"""
REGULAR = re.compile("(?!embed|exceed|feed|need|proceed|seed|speed)[a-z]+ed")
OPTIONS = {"bench/baselines/suffix_else.py:own"}
"""Keys of settings, which are called so for users."""
MOST_WORDS = 75
"""Words of a class docstring: fields are documented at the fields."""
MOST_FIRST_WORDS = 24
"""Words of its first sentence, which says what the class is."""


def faults(source: str) -> list[str]:
    """Return ``line: words`` of each text of a module that is not in plain English."""
    if not foreign(re.sub(r"[_#]", " ", source)) and not _MAY_FRONT.search(source):
        return []  # ten times as fast as its tokens
    return [
        f"{line}: {', '.join(found)}"
        for line, text in prose_and_names(source)
        if (found := foreign(text) + fronted(text))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_code_is_in_plain_english(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {path: faults(path.read_text("utf-8")) for path in files}
    assert [f"{path}:{fault}" for path, of_it in found.items() for fault in of_it] == []


def functions(source: str) -> list[str]:
    """Return the names of a module's functions; one with a decorator may be a value."""
    return [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
    ]


def classes(source: str) -> list[str]:
    """Return the names of a module's classes."""
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def fields(source: str) -> list[str]:
    """Return the names of the fields of a module's classes."""
    nodes = [*ast.walk(ast.parse(source))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    return [
        *(
            each.target.id
            for node in classes
            for each in node.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ),
        *(
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ),
    ]


def variables(source: str) -> list[str]:
    """Return the names of a module's variables and parameters; a left with a right is a side."""
    nodes = [*ast.walk(ast.parse(source))]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return [*names - ({"left"} if "right" in names else set())]


def named_by_participles(path: Path) -> set[str]:
    """Return what a module names by one bare participle: classes, functions, fields and
    variables.
    """
    source, place = path.read_text("utf-8"), path.relative_to(ROOT).as_posix()
    bare = [*functions(source), *fields(source), *variables(source)]
    names = {name for name in bare if BARE.fullmatch(name.strip("_"))}
    names |= {name for name in functions(source) if REGULAR.fullmatch(name.strip("_"))}
    participle = re.compile(f"{BARE.pattern}|{REGULAR.pattern}|ran", re.IGNORECASE)
    names |= {name for name in classes(source) if participle.fullmatch(name.strip("_"))}
    return {f"{place}:{name}" for name in names} - OPTIONS


@pytest.mark.parametrize("folder", PRODUCT)
def test_nothing_is_named_by_a_bare_participle(folder):
    found = [named_by_participles(path) for path in (ROOT / folder).rglob("*.py")]
    assert set().union(*found) == set()


def class_docstrings(folder: str) -> dict[str, str]:
    """Return the docstrings of a folder's classes by file and name."""
    return {
        f"{path}:{node.name}": ast.get_docstring(node) or ""
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_class_docstrings_are_short(folder):
    words = {name: len(text.split()) for name, text in class_docstrings(folder).items()}
    assert {name: count for name, count in words.items() if count > MOST_WORDS} == {}


@pytest.mark.parametrize("folder", PRODUCT)
def test_class_docstrings_begin_with_a_short_sentence(folder):
    firsts = {
        name: re.split(r"(?<=[.?!])\s|\n\n", text)[0]
        for name, text in class_docstrings(folder).items()
    }
    long = {name for name, first in firsts.items() if len(first.split()) > MOST_FIRST_WORDS}
    assert long == set()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""Nodes behind the text."""', ["1: behind"]),
        ('class A:\n    """Takes\n    so\n    many."""\n', ["2: so many"]),
        ("x = 1  # is told\n", ["1: told"]),
        ("was_held = 1\n", ["1: held"]),
        ("MOST_TOLD = 1\n", ["1: TOLD"]),
        ('x: int\n"""Tokens besides those. Some are kept besides."""\n', ["2: besides"]),
        ('"""A text, of which some is kept; rows, each of which fits."""', ["1: of which"]),
        ("# What a step takes.\nx = 1\n", ["1: What"]),
        ('"""A step. Where\nit ends.\n\nOf rows: one."""\n', ["1: Where, Of"]),
        ('"""A step, of What and Where."""\nx = "What"\n', []),
        ('x = {"held": "nobody"}\n', []),  # data
        ('"""The number ``held`` counts."""', []),
        ('"""Held back, held out: withheld."""\nheld_out = 1  # holds a lock\n', []),
    ],
)
def test_comments_docstrings_and_names_are_read_and_data_is_not(source, words):
    assert faults(source) == words
