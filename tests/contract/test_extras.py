"""Logits and the most likely tokens, under speculation: those of plain decoding, once for every
token, whatever is planned.
"""

from dataclasses import replace

import numpy as np
import pytest

from backend.request import SamplingParams
from tests.contract.deployment import Deployment, Scripted, tiny_engine
from tests.contract.scenarios import CROSSED, PROMPTS, SCRIPT, TRIMS, new_drafts, reference


def asks(deployment):
    """Submit requests of every kind that want everything, and return their sessions."""
    sessions = []
    for number, sampling in enumerate(
        [
            SamplingParams(top_log_probs=3, log_probs=True),
            *(replace(s, top_log_probs=2) for s in CROSSED),
        ]
    ):
        session = deployment.submit(PROMPTS[number % 6], 30, sampling, salt=str(number))
        session.sequence.context_logits = session.sequence.generation_logits = True
        session.sequence.prompt_log_probs = True
        sessions.append(session)
    return sessions


@pytest.mark.parametrize("script", [SCRIPT, ((6, 4),)], ids=["trees", "oracle"])
@pytest.mark.parametrize("kv_blocks", [64, 6], ids=["enough KV", "little KV"])
def test_each_token_has_its_logits_and_each_of_the_prompt_too(script, kv_blocks):
    deployment = Deployment(
        tiny_engine(),
        new_drafts(),
        Scripted(script, TRIMS),
        chunk_tokens=5,
        max_active=6,
        kv_blocks=kv_blocks,
    )
    sessions = asks(deployment)
    deployment.run()
    assert (deployment.counters().get(("spindle_preemptions_total",), 0) > 0) == (kv_blocks < 64)
    for session in sessions:
        tokens, prompt_tokens, sampling = (
            session.sequence.tokens,
            session.sequence.prompt_tokens,
            session.sequence.sampling,
        )
        extras = session.sink.extras
        assert extras.tokens == tokens[prompt_tokens:]
        same = {"rtol": 0.0, "atol": 1e-5}
        assert np.allclose(
            extras.context_logits,
            [reference().logits(tokens[: at + 1]) for at in range(prompt_tokens)],
            **same,
        )
        assert np.allclose(
            extras.logits,
            [reference().logits(tokens[:at]) for at in range(prompt_tokens, len(tokens))],
            **same,
        )
        log_probs = [reference().logits(tokens[:at]) for at in range(1, prompt_tokens)]
        log_probs = [row - np.logaddexp.reduce(row) for row in log_probs]
        assert extras.prompt.tokens == tokens[:prompt_tokens]
        said = [row[token] for row, token in zip(log_probs, tokens[1:], strict=False)]
        assert np.allclose(extras.prompt.log_probs, said, **same)
        for row, best in zip(log_probs, extras.prompt.top, strict=True):
            values = [value for _, value in best]
            assert np.allclose(values, sorted(row, reverse=True)[: sampling.top_log_probs], **same)
            assert np.allclose([row[token] for token, _ in best], values, **same)
        assert extras.logits.dtype == extras.context_logits.dtype == np.float32
        for at, best in enumerate(extras.top, prompt_tokens):
            row = reference().log_probs(tokens[:at], prompt_tokens, sampling)
            assert [value for _, value in best] == pytest.approx(
                sorted(row, reverse=True)[: len(best)]
            )
            assert [row[token] for token, _ in best] == pytest.approx([value for _, value in best])
            assert len(best) == sampling.top_log_probs
        assert len(extras.top) == len(extras.tokens)
