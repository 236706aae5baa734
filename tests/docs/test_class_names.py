"""A class has a name of its own, so that it means one thing wherever it is read."""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backend", "bench", "docs", "engines_build", "policy")
SHARED = {
    "TritonPythonModel": "the name by which Triton looks for the class of a Python model",
}
"""Names of several classes, and why."""
CLASS = re.compile(r"^ *class _*(\w+)[(:]", re.MULTILINE)


def shared(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return where each name of several classes is, of (place, source); private ones count, too."""
    places = defaultdict(list)
    for place, source in sources:
        for name in CLASS.findall(source):
            places[name].append(place)
    return {name: several for name, several in places.items() if len(several) > 1}


def test_a_class_has_a_name_of_its_own():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    names = shared((str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in files)
    assert names.keys() == SHARED.keys(), {n: at for n, at in names.items() if n not in SHARED}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("class Step:\n", []),
        ("class Width:\n", ["Width"]),
        ("class _Width(NamedTuple):\n", ["Width"]),
        ("def f():\n    class Width: ...\n", ["Width"]),
        ("class PassWidth:\n", []),
    ],
)
def test_a_private_or_nested_class_counts(source, names):
    assert [*shared([("a", "class Width: ...\n"), ("b", source)])] == names
