"""A draft that is added under sequences in flight shares the target's block tables: it proposes
what it would have from the start.
"""

import pytest

from backend.engines.lookup import LookupEngine
from tests.contract.deployment import K_MAX, Deployment, Scripted, tiny_config, tiny_engine
from tests.contract.reference import Reference

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], list(range(20))]
LENGTH = 30


def change(deployment, drafts, script):
    """Let the loop draft with these between two steps."""
    policy = Scripted(script)
    done = deployment.loop.between_steps(
        lambda: deployment.loop.draft_with(drafts, policy, policy.start())
    )
    deployment.engines = [deployment.target, *drafts]
    for _ in range(1 + deployment.target.limits.lookahead):
        deployment.step()
    assert done.done()
    done.result()


@pytest.mark.parametrize("before", [0, 1, 7], ids=["in prefill", "after a step", "in decode"])
def test_texts_are_those_of_plain_decoding_and_a_sure_draft_is_right_from_its_first_proposal(
    before,
):
    reference = Reference(tiny_engine("reference"))
    wrong, sure = tiny_engine("wrong", seed=5, noise=2.0), tiny_engine("sure")
    deployment = Deployment(tiny_engine(), [wrong], Scripted([(0, 3)]), nodes=0)
    sessions = [deployment.submit(prompt, LENGTH) for prompt in PROMPTS]
    for _ in range(before):
        deployment.step()
    change(deployment, [sure], [(0, K_MAX)])
    deployment.run()
    for session, prompt in zip(sessions, PROMPTS, strict=True):
        assert session.sequence.tokens == reference.text(prompt, LENGTH)
    outcomes = deployment.loop.cycle.runner.policy.outcomes
    assert all((outcome.rows.accepted == outcome.rows.scored).all() for outcome in outcomes)
    assert sum(int(outcome.rows.accepted.sum()) for outcome in outcomes) > 20
    assert deployment.counters().get(("spindle_fallback_total", "draft_error"), 0) == 0


def test_drafts_of_other_shapes_come_and_go_in_every_step():
    reference = Reference(tiny_engine("reference"))
    engines = [
        tiny_engine("shallow", config=tiny_config(layers=1), seed=1, noise=0.2),
        LookupEngine("lookup", max_draft_tokens=K_MAX, vocab_size=24),
        tiny_engine("sure"),
    ]
    deployment = Deployment(tiny_engine())
    sessions = [deployment.submit(prompt, LENGTH) for prompt in PROMPTS]
    for step in range(12):
        chosen = [engine for place, engine in enumerate(engines) if (step + 1) >> place & 1]
        change(deployment, chosen, [(column, 2 + step % 3) for column in range(-1, len(chosen))])
    deployment.run()
    assert [session.sequence.tokens for session in sessions] == [
        reference.text(prompt, LENGTH) for prompt in PROMPTS
    ]
    assert sum(session.accepted for session in sessions) > 0
