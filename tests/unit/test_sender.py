import threading
import time
from collections import defaultdict

import pytest

from backend.ipc.messages import Chunk, ErrorReply, Final
from backend.request import ErrorCode, FinishReason
from backend.triton_adapter import sender as sender_module
from backend.triton_adapter.codec import WantedOutputs
from backend.triton_adapter.sender import PendingReply, Senders
from tests.fakes.waiting import wait_until


def final(request_id, text, **more):
    counts = {"num_input_tokens": 1, "num_output_tokens": 1}
    return Final(id=request_id, text=text, finish_reason=FinishReason.LENGTH, **counts, **more)


class Client:
    """Records what a Triton response sender was given."""

    def __init__(self):
        self.texts = []
        self.log_probs = []
        self.endings = []
        self.gone = False
        self.ended = threading.Event()

    def send(self, outputs, *, final):
        assert not self.endings, "something was sent after the final reply"
        self.texts.append(outputs["text_output"][0][0].decode())
        self.log_probs.append(
            (outputs["output_log_probs"].tolist(), outputs["cum_log_probs"].tolist())
            if "cum_log_probs" in outputs
            else None
        )
        if final:
            self._end("success")

    def fail(self, code, message):
        assert not self.endings, "a second final reply"
        self._end((code, message))

    def is_cancelled(self):
        return self.gone

    def _end(self, how):
        self.endings.append(how)
        self.ended.set()


@pytest.fixture
def cancels():
    return []


@pytest.fixture
def senders(cancels):
    made = Senders(cancels.append)
    yield made
    made.close()


def open_clients(senders, count):
    clients = {i: Client() for i in range(1, count + 1)}
    for i, client in clients.items():
        senders.open(PendingReply(i, client, WantedOutputs()))
    return clients


def test_interleaved_streams_keep_their_order_and_end_once(senders):
    clients = open_clients(senders, 32)
    expected = defaultdict(str)
    for step in range(50):
        for i in clients:
            expected[i] += f"{i}.{step} "
            senders.deliver(Chunk(id=i, text=f"{i}.{step} "))
    for i in clients:
        senders.deliver(final(i, "end"))
    senders.close()
    assert {i: "".join(client.texts) for i, client in clients.items()} == {
        i: text + "end" for i, text in expected.items()
    }
    assert all(client.endings == ["success"] for client in clients.values())


def test_deltas_that_wait_are_sent_together_with_the_last_one(senders):
    class SlowFirst(Client):
        def __init__(self):
            super().__init__()
            self.sending, self.go_on = threading.Event(), threading.Event()

        def send(self, outputs, *, final):
            self.sending.set()
            assert self.go_on.wait(5)
            super().send(outputs, final=final)

    client = SlowFirst()
    senders.open(PendingReply(1, client, WantedOutputs()))
    messages = [
        Chunk(id=1, text=text, log_probs=[-0.5, -0.25], cum_log_prob=-0.75 * n)
        for n, text in enumerate("abc", 1)
    ]
    senders.deliver(messages[0])
    assert client.sending.wait(5)
    for message in (
        *messages[1:],
        final(1, "d", log_probs=[-1.0], cum_log_prob=-3.25),
    ):
        senders.deliver(message)
    client.go_on.set()
    assert client.ended.wait(5)
    assert client.texts == ["a", "bcd"]
    assert client.log_probs == [
        ([[[-0.5, -0.25]]], [[-0.75]]),
        ([[[-0.5, -0.25, -0.5, -0.25, -1.0]]], [[-3.25]]),
    ]


def test_an_error_ends_its_request_only(senders):
    clients = open_clients(senders, 2)
    senders.fail(1, ErrorCode.INVALID_ARGUMENT, "top_p")
    senders.deliver(final(2, "fine"))
    senders.close()
    assert clients[1].endings == [(ErrorCode.INVALID_ARGUMENT, "top_p")]
    assert clients[2].texts == ["fine"]


def test_a_lost_engine_ends_every_open_request_and_no_later_one(senders):
    clients = open_clients(senders, 9)
    senders.deliver(final(1, ""))
    senders.fail_all(ErrorCode.UNAVAILABLE, "gone")
    later = Client()
    senders.open(PendingReply(100, later, WantedOutputs()))
    senders.close()
    assert clients[1].endings == ["success"]
    assert all(clients[i].endings == [(ErrorCode.UNAVAILABLE, "gone")] for i in range(2, 10))
    assert later.endings == []


def test_a_cancelled_request_is_ended_and_the_engine_notified(senders, cancels):
    clients = open_clients(senders, 8)
    clients[3].gone = True
    assert clients[3].ended.wait(5)
    senders.deliver(ErrorReply(id=3, code=ErrorCode.CANCELLED, message="late"))
    senders.deliver(Chunk(id=3, text="late"))
    senders.close()
    assert cancels == [3]
    assert clients[3].endings == [(ErrorCode.CANCELLED, "Request cancelled by client")]
    assert clients[3].texts == []
    assert not any(client.endings for i, client in clients.items() if i != 3)


def test_a_request_that_the_engine_has_lost_ends_at_its_deadline(senders, cancels):
    lost, patient = Client(), Client()
    senders.open(PendingReply(1, lost, WantedOutputs(), deadline_s=time.monotonic()))
    senders.open(
        PendingReply(5, patient, WantedOutputs(), deadline_s=time.monotonic() + 600)
    )  # the same shard
    assert lost.ended.wait(5)
    senders.deliver(final(1, "late"))
    senders.close()
    assert cancels == [1]
    assert lost.endings == [(ErrorCode.UNAVAILABLE, "the engine has not ended the request in time")]
    assert patient.endings == []


class Jammed(Client):
    """Takes nothing until ``room`` is set, as when Triton's shared memory is full."""

    def __init__(self):
        super().__init__()
        self.room, self.refused = threading.Event(), threading.Event()

    def send(self, outputs, *, final):
        self._jam()
        super().send(outputs, final=final)

    def fail(self, code, message):
        self._jam()
        super().fail(code, message)

    def _jam(self):
        if not self.room.is_set():
            self.refused.set()
            raise RuntimeError("no shared memory")


def test_deltas_that_could_not_be_sent_go_with_the_next(senders):
    client = Jammed()
    senders.open(PendingReply(1, client, WantedOutputs()))
    senders.deliver(Chunk(id=1, text="a"))
    assert client.refused.wait(5)
    client.room.set()
    senders.deliver(Chunk(id=1, text="b"))
    senders.deliver(final(1, "c"))
    assert client.ended.wait(5)
    assert "".join(client.texts) == "abc"


def test_a_last_response_that_could_not_be_sent_becomes_an_error_as_soon_as_that_can_be(senders):
    client, cancelled = Jammed(), Jammed()
    senders.open(PendingReply(1, client, WantedOutputs()))
    senders.open(PendingReply(2, cancelled, WantedOutputs()))
    cancelled.gone = True
    senders.deliver(final(1, "whole text"))
    assert client.refused.wait(5)
    assert cancelled.refused.wait(5)
    senders.fail_all(ErrorCode.UNAVAILABLE, "gone")  # has nothing to add
    client.room.set()
    cancelled.room.set()
    assert client.ended.wait(5)
    assert cancelled.ended.wait(5)
    senders.close()
    assert client.endings == [sender_module.UNSENT]
    assert cancelled.endings == [(ErrorCode.CANCELLED, "Request cancelled by client")]


def test_a_last_response_that_can_never_be_sent_is_given_up(senders, monkeypatch, caplog):
    monkeypatch.setattr(sender_module, "GIVE_UP_S", 0.1)
    client, other = Jammed(), Client()
    senders.open(PendingReply(4, client, WantedOutputs()))
    senders.open(PendingReply(8, other, WantedOutputs()))  # the same shard
    senders.deliver(final(4, ""))
    wait_until(lambda: "got no last response" in caplog.text)
    senders.deliver(final(8, "fine"))
    assert other.ended.wait(5)
    assert caplog.text.count("could not be sent") == 2  # logged once, and named when given up
    assert client.endings == []


def test_a_client_that_cannot_be_sent_to_does_not_stop_its_shard(senders):
    class Broken(Client):
        def send(self, outputs, *, final):
            raise RuntimeError("broken")

    senders.open(PendingReply(4, Broken(), WantedOutputs()))
    other = Client()
    senders.open(PendingReply(8, other, WantedOutputs()))  # the same shard
    senders.deliver(Chunk(id=4, text="x"))
    senders.deliver(final(4, ""))
    senders.deliver(final(8, "fine"))
    assert other.ended.wait(5)
    assert other.texts == ["fine"]
