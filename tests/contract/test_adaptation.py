"""Two workloads in one batch on the real model: the policy treats them differently, and the metrics
show it.
"""

from collections import Counter, defaultdict

import pytest
import torch

from backend.app import build
from backend.config import parse_config
from backend.request import GenerationRequest
from engines_build.prepare import bring_embedded_model
from policy import LatencyTable
from tests.fakes.clients import SureSink

pytestmark = pytest.mark.slow


def chat(text):
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


CONFIG = {
    "target": {"engine": "torch", "model": "smollm2-135m-instruct", "dtype": "bf16"},
    "drafts": [
        {
            "name": "head",
            "engine": "head",
            "model": "engines_build/drafts/smollm2-135m-instruct-head",
        },
        {"name": "lookup", "engine": "lookup"},
    ],
    "policy": {"kind": "adaptive"},
    "limits": {"kv_cache_tokens": 16384},
}
TABLES = {
    "target": LatencyTable.synthetic("target", {1: 0.05, 8: 0.055, 16: 0.075, 64: 0.25}),
    "head": LatencyTable.synthetic("head", {1: 0.0025, 8: 0.004}),
}
ARTICLE = (
    "The fishing town of Skerry Point has voted to keep its old harbour crane, ending a dispute "
    "of two years. "
    "The crane, built in 1911 to lift coal from steam colliers, has not moved since 1974. A "
    "developer had offered to pay for its removal."
)
COPYING = [chat(f"Summarise: {ARTICLE}"), chat(f"Repeat this text word for word: {ARTICLE}")]
CHATTING = [
    chat("Why is the sky blue? Explain it to a child."),
    chat("Write a short poem about a lighthouse keeper and her dog."),
]


class Recorder:
    """A policy that notes what was chosen for whom."""

    def __init__(self, policy):
        self.policy, self.chosen = policy, defaultdict(Counter)

    def __getattr__(self, name):
        return getattr(self.policy, name)

    def observe(self, outcome, state, now):
        for request, draft, length in zip(
            outcome.rows.request.tolist(),
            outcome.rows.draft.tolist(),
            outcome.rows.length.tolist(),
            strict=True,
        ):
            self.chosen[request][("head", "lookup", "none")[draft], length] += 1
        return self.policy.observe(outcome, state, now)


def test_texts_that_copy_themselves_and_free_texts_get_other_drafts_and_lengths():
    torch.set_num_threads(1)
    bring_embedded_model()
    app = build(parse_config(CONFIG), TABLES)
    loop = app.orchestrator
    recorder = loop.cycle.runner.policy = Recorder(loop.cycle.runner.policy)
    sessions = [
        app.session(GenerationRequest(text, 48, end_id=-1), SureSink())
        for text in (*COPYING, *CHATTING)
    ]
    for session in sessions:
        loop.submit(session)
    while loop.step():
        pass
    copying, chatting = (
        sum((recorder.chosen[s.id] for s in half), Counter())
        for half in (sessions[:2], sessions[2:])
    )

    def mean_length(chosen):
        return sum(length * count for (_, length), count in chosen.items()) / chosen.total()

    def share_of_lookup(chosen):
        return (
            sum(count for (draft, _), count in chosen.items() if draft == "lookup") / chosen.total()
        )

    assert mean_length(copying) > mean_length(chatting)
    assert share_of_lookup(copying) > 2 * share_of_lookup(chatting)
    counters = {
        (name, labels.get("draft")): value for name, labels, value in app.stats.drain().counters
    }
    # a quarter of the copying texts: how many more depends on how busy the machine is
    assert counters["spindle_accepted_tokens_total", "lookup"] > 24
    assert counters["spindle_draft_tokens_total", "head"] > 0
    app.close()
