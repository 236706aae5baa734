import threading

from backend.request import ErrorCode
from backend.triton_adapter.sender import Group


class Sender:
    def __init__(self):
        self.sent = []

    def send(self, outputs, *, final):
        self.sent.append((outputs, final))

    def fail(self, code, message):
        self.sent.append((code, True))

    def is_cancelled(self):
        return False


def test_only_the_last_part_to_end_carries_the_final_flag():
    sender = Sender()
    group = Group(sender, 3)
    for name, final in (("a", False), ("b", True), ("a", True), ("c", False), ("c", True)):
        group.send({"text": name}, final=final)
    assert [final for _, final in sender.sent] == [False] * 4 + [True]


def test_from_many_threads_the_final_flag_is_on_the_last_response_and_on_no_other():
    sender = Sender()
    group = Group(sender, 16)
    threads = [
        threading.Thread(target=lambda: [group.send({}, final=n == 19) for n in range(20)])
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [final for _, final in sender.sent] == [False] * (16 * 20 - 1) + [True]


def test_the_first_error_ends_the_request_and_cancels_the_other_parts():
    sender = Sender()
    group = Group(sender, 2)
    assert not group.is_cancelled()
    group.fail(ErrorCode.UNAVAILABLE, "full")
    assert group.is_cancelled()
    group.fail(ErrorCode.CANCELLED, "gone")
    group.send({}, final=True)
    assert sender.sent == [(ErrorCode.UNAVAILABLE, True)]
