"""Functions that take tensors or arrays, and records that have some, say their shapes: on the line
of the parameter or field, or in the docstring.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backend", "engines_build", "policy")
RECORDS = ("backend", "bench", "engines_build", "policy")
ARRAY = re.compile(r"\b(?:Tensor|NDArray|FloatArray|IntArray|BoolArray|Floats|Ints|Array)\b")
IN_DOCSTRING = re.compile(r"\[[\w, .+*/:-]+\]")
OF_ALL = re.compile(rf"{IN_DOCSTRING.pattern} each")
BY_FOLDER = {"RowWeights"}
"""Records of weights, whose shapes are a folder's (``EagleShape.tensors``)."""


def without_shapes(source: str) -> list[str]:
    """Return ``line: name`` of each function that takes an array without a shape."""
    if not ARRAY.search(source):
        return []
    lines, names = source.split("\n"), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        arrays = [
            argument
            for argument in (*node.args.args, *node.args.kwonlyargs)
            if argument.annotation is not None and ARRAY.search(ast.unparse(argument.annotation))
        ]
        has_comments = all(re.search(r"#.*\[", lines[argument.lineno - 1]) for argument in arrays)
        if not has_comments and not IN_DOCSTRING.search(ast.get_docstring(node) or ""):
            names.append(f"{node.lineno}: {node.name}")
    return names


def fields_without_shapes(source: str) -> list[str]:
    """Return ``line: Class.name`` of each field of a class that is an array without a shape, or
    several; a class may say the shape of all its fields.
    """
    if not ARRAY.search(source):
        return []
    lines, names = source.split("\n"), []
    for record in ast.walk(ast.parse(source)):
        if not isinstance(record, ast.ClassDef) or record.name in BY_FOLDER:
            continue
        summary = ast.get_docstring(record) or ""
        if OF_ALL.search(summary):
            continue
        for field, after in pairwise([*record.body, ast.Pass()]):
            if not isinstance(field, ast.AnnAssign):
                continue
            kind = ast.unparse(field.annotation)
            if not ARRAY.search(kind) or kind.startswith("Callable"):
                continue
            comment = lines[(field.end_lineno or 0) - 1].partition("#")[2]
            text = after.value if isinstance(after, ast.Expr) else None
            docstring = text.value if isinstance(text, ast.Constant) else ""
            name = ast.unparse(field.target)
            is_named = re.search(rf"``{name}``[^`]*{IN_DOCSTRING.pattern}", summary)
            if "[" not in comment and not IN_DOCSTRING.search(str(docstring)) and not is_named:
                names.append(f"{field.lineno}: {record.name}.{name}")
    return names


@pytest.mark.parametrize("folder", RECORDS)
def test_records_say_the_shapes_of_their_arrays(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {path: fields_without_shapes(path.read_text("utf-8")) for path in files}
    assert [f"{path}:{name}" for path, names in found.items() for name in names] == []


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ("x: Tensor", ["2: A.x"]),
        ("x: Tensor  # [n]", []),
        ("x: Tensor  # float32", ["2: A.x"]),
        ('x: dict[str, IntArray]\n    """By name [n, 2]."""', []),
        ('x: IntArray | None = None\n    """By name."""\n    y: int  # [n]', ["2: A.x"]),
        ('"""Columns, [n] each."""\n    x: Floats\n    y: Floats', []),
        ('"""A row: ``x`` float32[n]."""\n    x: Tensor\n    y: Tensor', ["4: A.y"]),
        ("x: Callable[[Tensor], int]", []),
        ("x: list[int]", []),
    ],
)
def test_a_shape_stands_at_the_field_or_is_that_of_each(body, names):
    assert fields_without_shapes(f"class A:\n    {body}\n") == names


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_say_the_shapes_that_they_take(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = {path: without_shapes(path.read_text("utf-8")) for path in files}
    assert [f"{path}:{name}" for path, names in found.items() for name in names] == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(x: torch.Tensor) -> int: ...\n", ["1: f"]),
        ("def f(\n    x: IntArray,  # [n]\n) -> int: ...\n", []),
        ("def f(\n    x: IntArray,  # [n]\n    y: IntArray,\n) -> int: ...\n", ["1: f"]),
        ('def f(x: Floats) -> int:\n    """Return the sum of ``x[rows, K]``."""\n', []),
        ('def f(x: Floats) -> int:\n    """Return the sum."""\n', ["1: f"]),
        ("def f(x: int) -> int: ...\n", []),
    ],
)
def test_a_shape_stands_on_the_parameter_s_line_or_in_the_docstring(source, names):
    assert without_shapes(source) == names
