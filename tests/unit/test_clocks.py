"""A clock that is set moves no deadline and no estimate: the wall clock only dates what is
reported.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATES = {
    "backend/advise/cli.py",
    "backend/advise/passive.py",
    "backend/ops/kv_events.py",
    "backend/ops/nvidia_metrics.py",
    "backend/openai_frontend/answers.py",
    "backend/openai_frontend/app.py",
    "backend/openai_frontend/template.py",
    "backend/ops/request_trace.py",
    "backend/speculation/learned_state.py",
}
"""Files that write a date: into an advice, a metric, an event, a reply, a chat template's text, a
span, and with what was learnt, which fades by its age (never below 0).
"""
WALL = {
    ("time", "time"),
    ("time", "time_ns"),
    ("time", "localtime"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
}


def wall_clocks(source):
    """Return the lines of calls of a wall clock, also of one that was imported by its name."""
    tree = ast.parse(source)
    named = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "time"
        for name in node.names
    }
    named &= {name for _, name in WALL}
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            found = (function.value.id, function.attr) in WALL
        else:
            found = isinstance(function, ast.Name) and function.id in named
        if found:
            lines.append(node.lineno)
    return lines


def test_no_wall_clock_is_read_where_times_matter():
    read = {}
    for folder in ("backend", "policy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if lines := wall_clocks(path.read_text("utf-8")):
                read[path.relative_to(ROOT).as_posix()] = lines
    assert set(read) == DATES, read


def test_a_wall_clock_is_found_however_it_is_imported():
    assert wall_clocks("import time\ntime.time()") == [2]
    assert wall_clocks("from time import time\ntime()") == [2]
    assert wall_clocks("from time import monotonic\nmonotonic()") == []
