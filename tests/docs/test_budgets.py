"""Each wing of the backend has a budget of lines and files in CONTRIBUTING.md."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(backend\S*)/` \| ([\d,]+) \| (\d+) \|$", re.MULTILINE)


def budgets():
    """(lines, files) by folder, as the table has them."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    return {
        folder: (int(lines.replace(",", "")), int(files))
        for folder, lines, files in ROW.findall(text)
    }


def wings():
    """(lines, files) of each package right under the backend and under its engines."""
    sizes = {}
    for parent in (ROOT / "backend", ROOT / "backend/engines"):
        for folder in sorted(path.parent for path in parent.glob("*/__init__.py")):
            if folder == ROOT / "backend/engines":
                continue
            modules = list(folder.rglob("*.py"))
            lines = sum(len(module.read_text("utf-8").splitlines()) for module in modules)
            sizes[folder.relative_to(ROOT).as_posix()] = lines, len(modules)
    return sizes


def test_every_wing_keeps_to_its_budget():
    budget, sizes = budgets(), wings()
    assert budget.keys() == sizes.keys()
    over = [
        f"{wing} has {lines} lines in {files} files, more than {budget[wing]}"
        for wing, (lines, files) in sizes.items()
        if lines > budget[wing][0] or files > budget[wing][1]
    ]
    assert not over, "find what to remove, or raise the budget in CONTRIBUTING.md and say why"
