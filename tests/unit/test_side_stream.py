"""The stream beside the drafts': who waits for what, and in which order, on recording fakes of
CUDA's streams.
"""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from backend.engines import contention
from backend.engines.fake import FakeEngine
from backend.engines.overlapped import Overlapped
from backend.engines.port import StreamsBeside, Turn
from backend.engines.torch.side_stream import SideStream
from backend.request import SamplingParams
from backend.sequence import Sequence
from tests.contract.deployment import tiny_engine

GUARD_S = 30.0


class OnStream(FakeEngine):
    """A fake with a recording stream: ``log`` has the marks by number, and what ran under which."""

    def __init__(self, name="target", **options):
        super().__init__(name, **options)
        self.log, self.streams, self.marks = [], 0, 0
        self.may_run = threading.Event()
        self.may_run.set()
        self.watched = None

    def side_stream(self):
        self.streams += 1
        return self.mark

    def mark(self):
        self.marks += 1
        self.log.append((f"mark {self.marks}", threading.get_ident()))
        return self.under(self.marks)

    @contextmanager
    def under(self, number):
        assert self.may_run.wait(GUARD_S)
        self.log.append((f"enter {number}", threading.get_ident()))
        try:
            yield
        finally:
            self.log.append(
                (f"leave {number}", None if self.watched is None else self.watched() is not None)
            )

    def submit(self, turns):
        self.log.append(("submit", threading.get_ident()))
        super().submit(turns)

    def poll(self, timeout_s):
        self.log.append(("poll", threading.get_ident()))
        return super().poll(timeout_s)


def turn(number=1, proposal=None):
    return Turn(Sequence(number, [97, 98], 2, SamplingParams()), 2, proposal=proposal)


def test_a_submission_is_marked_when_it_is_made_and_runs_under_the_stream_in_the_thread():
    engine = OnStream()
    beside = Overlapped(engine)
    engine.may_run.clear()
    beside.submit([turn(1)])
    beside.submit([turn(2)])
    assert [word for word, _ in engine.log] == ["mark 1", "mark 2"]
    engine.may_run.set()
    assert [[c.sequence_id for c in beside.poll(0.0)] for _ in range(2)] == [[1], [2]]
    beside.close()
    words = [word for word, _ in engine.log]
    assert words == [
        "mark 1",
        "mark 2",
        *(w for n in (1, 2) for w in (f"enter {n}", "submit", "poll", f"leave {n}")),
    ]
    here = threading.get_ident()
    assert {thread == here for word, thread in engine.log if word.startswith("mark")} == {True}
    assert {thread == here for word, thread in engine.log if word in ("submit", "poll")} == {False}
    assert engine.streams == 1


def test_a_submission_that_raises_leaves_the_stream_and_the_next_runs_under_it(monkeypatch):
    engine = OnStream()
    beside = Overlapped(engine)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "poll", lambda self, timeout_s: 1 / 0)
        beside.submit([turn(1)])
        with pytest.raises(ZeroDivisionError):
            beside.poll(0.0)
    engine.cancel([1])
    beside.submit([turn(2)])
    assert [c.sequence_id for c in beside.poll(0.0)] == [2]
    beside.close()
    assert [word for word, _ in engine.log if word[:5] in ("enter", "leave")] == [
        "enter 1",
        "leave 1",
        "enter 2",
        "leave 2",
    ]


def test_an_engine_on_the_host_or_without_streams_runs_as_it_is():
    here = tiny_engine()
    assert isinstance(here, StreamsBeside)
    assert here.side_stream() is None
    assert not isinstance(FakeEngine("target"), StreamsBeside)
    for engine in (here, FakeEngine("target")):
        beside = Overlapped(engine)
        sequence = Sequence(1, [1, 2], 2, SamplingParams(), {engine.name: [0]})
        beside.submit([Turn(sequence, 2)])
        assert [c.error for c in beside.poll(0.0)] == [None]
        beside.close()


def test_contention_is_measured_under_the_stream_that_will_be_served_on():
    engine = OnStream(step_s=0.001)
    beside, measured = contention.overlapped(engine, [FakeEngine("draft", step_s=0.001)])
    assert measured >= 1.0
    beside.submit([turn()])
    assert len(beside.poll(0.0)) == 1
    beside.close()
    depth = 0
    for word, _ in engine.log:
        depth += word.startswith("enter") - word.startswith("leave")
        assert depth == 1 or word not in ("submit", "poll")
    assert engine.streams == 1


@dataclass
class Cuda:
    """As much of ``torch.cuda`` as is asked for, on the host; ``log`` has every call, ``current``
    each thread's stream.
    """

    log: list = field(default_factory=list)
    current: threading.local = field(default_factory=threading.local)
    made: list = field(default_factory=list)

    def Stream(self, device):
        self.made.append(Stream(self, f"stream {len(self.made)}"))
        return self.made[-1]

    def current_stream(self, device):
        return getattr(self.current, "stream", self.default)

    @contextmanager
    def stream(self, stream):
        before, self.current.stream = self.current_stream(None), stream
        yield
        self.current.stream = before

    def __post_init__(self):
        self.default = Stream(self, "default")

    def install(self, patch):
        for name in ("Stream", "current_stream", "stream"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        return self


@dataclass
class Stream:
    cuda: Cuda
    name: str
    events: int = 0

    def record_event(self):
        self.events += 1
        self.cuda.log.append(("record", self.name, self.events))
        return self.name, self.events

    def wait_event(self, event):
        self.cuda.log.append(("wait", self.name, event))

    def synchronize(self):
        self.cuda.log.append(("synchronize", self.name))


def test_the_stream_waits_for_the_caller_s_at_the_call_and_the_host_for_the_stream_at_the_end(
    monkeypatch,
):
    cuda = Cuda().install(monkeypatch)
    behind = SideStream(torch.device("cuda")).behind

    def run(under):
        with under:
            cuda.log.append(("work", cuda.current_stream(None).name))

    first, second = behind(), behind()
    thread = threading.Thread(target=lambda: (run(first), run(second)))
    thread.start()
    thread.join(GUARD_S)
    expected = [("record", "default", 1), ("record", "default", 2)]
    for number in (1, 2):
        expected += [
            ("wait", "stream 0", ("default", number)),
            ("work", "stream 0"),
            ("synchronize", "stream 0"),
        ]
    assert cuda.log == expected
    assert cuda.current_stream(None) is cuda.default


def test_the_host_waits_for_the_stream_behind_a_body_that_raises(monkeypatch):
    cuda = Cuda().install(monkeypatch)
    under = SideStream(torch.device("cuda")).behind()
    with pytest.raises(ZeroDivisionError), under:
        _ = 1 / 0
    assert cuda.log[-1] == ("synchronize", "stream 0")
