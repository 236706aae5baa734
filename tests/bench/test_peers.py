import json
import sys

import pytest

from tests.bench import peers
from tests.bench.arms import Offer
from tests.bench.peer_worker import serve
from tests.bench.peers import PeerArm

REQUESTS = [{"text_input": text, "max_tokens": 2} for text in "abc"]
ANSWER = {"replies": [{"text": "x", "output_tokens": 2, "first_s": 0.1, "total_s": 0.2}], "wall_s": 0.2}


class Stack:
    """Notes what it is asked to generate together."""

    def __init__(self, batches):
        self.batches, self.asked = batches, []

    def generate(self, texts, max_tokens):
        self.asked.append(texts)
        return [(text.upper(), max_tokens) for text in texts], 0.0


@pytest.mark.parametrize(("batches", "asked"), [(True, [["a", "b"], ["c"]]), (False, [["a"], ["b"], ["c"]])])
def test_a_stack_that_batches_gets_as_many_requests_at_once_as_are_in_flight(batches, asked):
    stack = Stack(batches)
    served = serve(stack, REQUESTS, 2)
    assert stack.asked == asked
    assert [(reply["text"], reply["output_tokens"]) for reply in served["replies"]] == [("A", 2), ("B", 2), ("C", 2)]
    assert all(0 < reply["total_s"] <= served["wall_s"] for reply in served["replies"])


def test_a_peer_answers_over_its_pipe_and_its_end_is_an_error():
    peer = PeerArm([sys.executable, "-c", f"print('ready'); input(); print({json.dumps(ANSWER)!r})"])
    served = peer.run(Offer(REQUESTS[:1]))
    assert (served.wall_s, served.replies[0].text, served.replies[0].drafted) == (0.2, "x", 0)
    with pytest.raises((RuntimeError, BrokenPipeError)):
        peer.run(Offer(REQUESTS[:1]))
    with pytest.raises(ValueError, match="closed"):
        peer.run(Offer(REQUESTS[:1], at_s=[0.0]))
    peer.close()


def test_a_peer_without_its_environment_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PROJECT_ROOT", tmp_path)
    known = peers.Peers({"target": {"engine": "torch", "model": "smollm2-135m-instruct"}})
    assert known.missing("openvino-plain") == "no environment: tests/bench/peers.sh openvino"
    assert known.missing("transformers-plain") == ""
    assert known.missing("transformers-assisted") == "no draft that runs a model"
