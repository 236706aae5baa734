"""The code that a measured engine's pass runs, as a hash by kind: a change of it asks whether
passes take another time. Comments, docstrings and layout do not count.

    python -m tests.hot_paths     # record the code as it is

If times change, raise ``behaviour`` in ``backend/kinds.py``, which has every deployment measured
anew, then record; if not, only record.
"""

import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

from backend.kinds import KINDS

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).with_suffix(".json")
COMMON = ("draw", "laws", "processing", "verification")


def files(kind):
    """The files of a kind's hot path: what step engines share, its own, and the sampling."""
    folders = [ROOT / "backend" / "engines" / folder for folder in ("stepping", kind)]
    sampling = [ROOT / "backend" / "sampling" / f"{name}.py" for name in COMMON]
    return [*(file for folder in folders for file in sorted(folder.glob("*.py"))), *sampling]


def code(source):
    """Return a source without comments, docstrings and blanks."""
    lines = source.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column] + "\n"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for row in range(node.lineno - 1, node.end_lineno):
                lines[row] = "\n"
    return "".join("".join(lines).split())


def digests():
    """Return by kind its version of behaviour and the hash of its code."""
    found = {}
    for name, kind in KINDS.items():
        if kind.measured:
            text = "\n".join(code(file.read_text("utf-8")) for file in files(name))
            digest = hashlib.sha256(text.encode()).hexdigest()
            found[name] = {"behaviour": kind.behaviour, "sha256": digest}
    return found


if __name__ == "__main__":
    RECORD.write_text(json.dumps(digests(), indent=1) + "\n", "utf-8")
