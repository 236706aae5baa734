"""Log lines as text or JSON, with fields of their own; a line that repeats too often is held back
and counted.

Fields are given as ``logger.info("request refused", extra=fields(code="UNAVAILABLE"))``.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any

from backend.config import LogConfig

BURST, PERIOD_S = 3, 1.0
"""Lines of one kind (logger, level and message before its arguments) that are let through in a
period.
"""
MAX_KINDS = 1000


def fields(**values: Any) -> dict[str, Any]:
    """Return ``extra`` for a logging call: the record's own fields, JSON-able values by name."""
    return {"fields": values}


def set_up_logging(process: str, config: LogConfig) -> None:
    """Send all log lines of this process to standard error; ``process`` names it in each. May be
    called again with other settings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process) if config.format == "json" else TextFormatter(process)
    )
    handler.addFilter(FloodGate())
    logging.basicConfig(level=config.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    values: dict[str, Any] = dict(getattr(record, "fields", {}))
    if suppressed := getattr(record, "suppressed", 0):
        values["suppressed"] = suppressed
    return values


class TextFormatter(logging.Formatter):
    """``TIME PROCESS LEVEL LOGGER: MESSAGE key=value ...``; a traceback follows on lines of its
    own.
    """

    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s {process.replace('%', '%%')} %(levelname)s %(name)s: %(message)s"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """Return the line without a traceback."""
        return " ".join(
            (
                super().formatMessage(record),
                *(f"{key}={value}" for key, value in _fields_of(record).items()),
            )
        )


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``process``, ``logger``, ``event``, the
    record's fields, ``exception``.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a value that JSON does not know is its ``str``."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in _fields_of(record).items() if key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class FloodGate(logging.Filter):
    """Lets ``BURST`` records of a kind through in each ``PERIOD_S``; the next one that passes tells
    how many were held back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, int, str], tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may pass."""
        kind = (record.name, record.levelno, str(record.msg))
        with self._lock:
            # messages made without arguments: forgetting a count is better than growing
            if len(self._counts) > MAX_KINDS:
                self._counts.clear()
            started_s, passed, suppressed = self._counts.get(kind, (record.created, 0, 0))
            if not 0 <= record.created - started_s < PERIOD_S:
                started_s, passed = record.created, 0
            if passed == BURST:
                self._counts[kind] = (started_s, passed, suppressed + 1)
                return False
            self._counts[kind] = (started_s, passed + 1, 0)
        record.suppressed = suppressed
        return True
