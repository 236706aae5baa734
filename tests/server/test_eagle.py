"""An EAGLE-3 head next to ``suffix`` in a real tritonserver: texts and accepted counts that are
known beforehand, and a planner that uses both.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.fakes.counting import UNKNOWN, accepted, counted, write_head, write_target
from tests.fakes.eagle import published, read, write
from tests.server.tensors import connected, ids_of

TOKENS, LENGTH, MOST_TURNS = 120, 4, 40
PERF = {"return_perf_metrics": [[True]]}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", params=["openvino", "torch, head as published"])
def service(request, start_service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("counting")
    target = write_target(folder / "target")
    head = write_head(folder / "head", target)
    engine, _, is_published = request.param.partition(", ")
    if is_published:
        files = published("SafeAILab", *read(head))
        head = write(folder / "published", "SafeAILab", *files)
    settings = {
        "target": {"engine": engine, "model": str(target), "dtype": "fp32"},
        "drafts": [
            {"name": "eagle", "engine": "eagle", "model": str(head), "dtype": "fp32"},
            {"name": "suffix", "engine": "suffix"},
        ],
        "limits": {"prefill_chunk_tokens": 16},
    }
    (folder / "serving.json").write_text(json.dumps(settings))
    cache = {"SPINDLE_CACHE": str(folder / "cache")}
    return start_service(folder / "serving.json", **cache).wait_ready(limit_s=300)


@pytest.fixture
def command(service):
    def send(text):
        status, body = service.command(text)
        assert status == 200, body

    yield send
    send("set canary_share=1 fixed_draft= fixed_length=0")


def asked(prompt, tokens=TOKENS, **more):
    """A request of token ids."""
    return {
        "input_ids": [prompt],
        "input_lengths": [[len(prompt)]],
        "request_output_len": [[tokens]],
        "end_id": [[-1]],
        **PERF,
        **more,
    }


def served(service, prompts, more=()):
    """The last response and the tokens of each of several requests at once."""
    with connected(service) as client:
        options = more or [{}] * len(prompts)
        for number, (prompt, own) in enumerate(zip(prompts, options, strict=True)):
            client.send("tensorrt_llm", str(number), **asked(prompt, **own))
        replies = [client.collect(str(number)) for number in range(len(prompts))]
    return [(responses[-1], ids_of(responses)) for responses in replies]


def known_steps(last):
    """(proposed, accepted) of every step of a request; the prompt's step draws one token."""
    left, steps = TOKENS - 1, []
    last = counted(last, 1)[-1]
    while left > 1:
        length = min(LENGTH, left - 1)
        count = accepted(last, length)
        steps.append((length, count))
        left -= count + 1
        last = counted(last, count + 1)[-1]
    return steps


PROMPTS = [[3], [5, 6, *range(60, 117)], [*range(200, 240)], [9, 60, 61], [1, *range(130, 195)]]


def test_every_accepted_count_is_known(service, command):
    command(f"set canary_share=0 fixed_draft=eagle fixed_length={LENGTH}")
    for (reply, tokens), prompt in zip(served(service, PROMPTS), PROMPTS, strict=True):
        whole = counted(prompt[-1], TOKENS)
        assert tokens[-TOKENS:] == whole
        assert set(whole) & {*UNKNOWN}
        columns = (reply[f"per_step_{name}"].flatten().tolist() for name in ("drafted", "accepted"))
        assert list(zip(*columns, strict=True)) == known_steps(prompt[-1])
        assert reply["draft_names"].flatten().tolist() == [b"eagle"]


def test_the_planner_chooses_the_head_and_suffix_for_one_request_and_no_text_changes(service):
    """In a tenant's second text, ``suffix`` knows the second half from the first one."""
    both = 0
    for turn in range(MOST_TURNS):
        salts = [{"cache_salt": [[f"tenant {turn} {number}"]]} for number in range(3)]
        for last in (59, 0):
            for reply, tokens in served(service, [[last]] * len(salts), salts):
                assert tokens[-TOKENS:] == counted(last, TOKENS)
                both += reply.get("draft_names", np.array([])).size == 2
        if both and used(service, "eagle") and used(service, "suffix"):
            return
    pytest.fail(f"in {MOST_TURNS} turns, {both} requests were drafted for by both")


def used(service, draft):
    return service.metric("spindle_accepted_tokens_total", draft=draft, arm="planner") > 0


def test_a_sampled_text_is_that_of_its_seed_alone(service, command):
    prompts, options = [[3, 4, 5], [60, 61]], {"temperature": [[1.5]], "seed": [[7]]}
    texts = []
    for length in (LENGTH, 0):
        command(f"set canary_share=0 fixed_draft=eagle fixed_length={length}")
        texts.append([tokens for _, tokens in served(service, prompts, [options] * 2)])
    assert texts[0] == texts[1]
    assert texts[0][0][-TOKENS:] != counted(5, TOKENS)
