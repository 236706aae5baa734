"""The file of a served planner's trace, which may fail without harm."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TextIO

from backend.ops.stats import StepStats

logger = logging.getLogger(__name__)


class TraceFile:
    """Writes lines to a new file. A line that cannot be written ends the trace, with a metric, and
    never a step.
    """

    def __init__(self, path: Path, stats: StepStats) -> None:
        self._path, self._stats = path, stats
        self._file: TextIO | None = None
        self._over = False

    def __call__(self, line: str) -> None:
        """Write a line."""
        if self._over:
            return
        try:
            if self._file is None:
                self._file = self._path.open("w", buffering=1, encoding="utf-8")
            self._file.write(line + "\n")
        except OSError:
            self._over = True
            logger.exception("the planner's trace cannot be written to %s", self._path)
            self._stats.fallback("trace_file_error")
