import json
import logging
import sys

import pytest

from backend.config import LogConfig
from backend.log_format import (
    BURST,
    FloodGate,
    JsonFormatter,
    TextFormatter,
    fields,
    set_up_logging,
)


def record(message="request %d refused", *arguments, created=100.25, extra=None, exc_info=None):
    made = logging.getLogger("backend.test").makeRecord(
        "backend.test", logging.WARNING, "file", 1, message, arguments, exc_info, extra=extra
    )
    made.created, made.msecs = created, created % 1 * 1000
    return made


def failure():
    try:
        raise ValueError("no\nroom")
    except ValueError:
        return sys.exc_info()


def test_a_json_line_has_the_event_its_fields_and_nothing_else():
    line = JsonFormatter("engine").format(
        record("request %d refused", 7, extra=fields(code="UNAVAILABLE", waiting=3))
    )
    assert json.loads(line) == {
        "time": "1970-01-01T00:01:40.250Z",
        "level": "warning",
        "process": "engine",
        "logger": "backend.test",
        "event": "request 7 refused",
        "code": "UNAVAILABLE",
        "waiting": 3,
    }


def test_a_json_line_is_one_line_even_with_a_traceback_and_never_fails_on_a_value():
    line = JsonFormatter("engine").format(
        record("a\nb", extra=fields(path=object, event="not the event"), exc_info=failure())
    )
    assert "\n" not in line
    read = json.loads(line)
    assert read["event"] == "a\nb"
    assert read["path"] == "<class 'object'>"
    assert "ValueError: no\nroom" in read["exception"]


def test_a_text_line_ends_with_its_fields_and_the_traceback_follows():
    line, *traceback = (
        TextFormatter("100%")
        .format(record("refused", extra=fields(code="X", n=1), exc_info=failure()))
        .splitlines()
    )
    assert line.endswith(" 100% WARNING backend.test: refused code=X n=1")
    assert traceback[-2:] == ["ValueError: no", "room"]


def test_repeats_are_held_back_and_counted_by_the_next_line():
    gate = FloodGate()
    passed = [gate.filter(record("connection %d lost", i)) for i in range(10)]
    assert passed == [True] * BURST + [False] * (10 - BURST)
    assert gate.filter(record("another kind"))
    later = record("connection %d lost", 11, created=101.5)
    assert gate.filter(later)
    assert json.loads(JsonFormatter("engine").format(later))["suppressed"] == 10 - BURST
    after = record("connection %d lost", 12, created=101.6)
    assert gate.filter(after)
    assert "suppressed" not in JsonFormatter("engine").format(after)


def test_a_clock_that_is_set_back_does_not_silence_a_kind():
    gate = FloodGate()
    for _ in range(BURST + 1):
        gate.filter(record(created=1000.0))
    assert gate.filter(record(created=10.0))


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_last_set_up_holds(root_logger, capfd):
    set_up_logging("engine", LogConfig())
    set_up_logging("engine", LogConfig("json", "warning"))
    logging.getLogger("x").info("unheard")
    logging.getLogger("x").warning("heard")
    lines = capfd.readouterr().err.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["heard"]
