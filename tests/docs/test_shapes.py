"""Functions that take tensors or arrays say their shapes: on the parameter's line, or in the
docstring.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("backend", "engines_build", "policy")
ARRAY = re.compile(r"\b(?:Tensor|NDArray|FloatArray|IntArray|BoolArray|Floats|Ints|Array)\b")
IN_DOCSTRING = re.compile(r"\[[\w, .+*/:-]+\]")


def without_shapes(source: str) -> list[str]:
    """Return ``line: name`` of each function that takes an array without a shape."""
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
