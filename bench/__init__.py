"""Measurements: the load sweep, peers, the simulator's evidence, the CUDA probe, single parts.

A bench that is run without the packages it needs ends with one line that says how to get them.
"""

import sys
from itertools import pairwise
from types import TracebackType

from backend import PROJECT_ROOT


def report_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report an uncaught error; a missing package by the command that installs it."""
    name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
    if not name or (PROJECT_ROOT / name.partition(".")[0]).is_dir():
        sys.__excepthook__(kind, error, trace)
        return
    print(f"error: the package {name} is missing: `make dev` installs it", file=sys.stderr)


if any(
    flag == "-m" and f"{module}.".startswith("bench.") for flag, module in pairwise(sys.orig_argv)
):
    sys.excepthook = report_error
