"""Defects of NVIDIA's speculative loop in ``tensorrt_llm_bls`` (or options it lacks), right here:
one test each, on the engine ``torch``.
"""

import pytest

from backend.core.session import Session
from backend.request import SamplingParams
from tests.contract import deployment as deployments
from tests.contract.deployment import VOCAB, Deployment, ForetoldDraft, Scripted, tiny_engine
from tests.contract.scenarios import PROMPTS, Ask, plain_text, reference


def served(*samplings, k=3, max_tokens=16, **options):
    """One request a sampling, with a draft that is right; (deployment, sessions, turns of each
    submission to the target).
    """
    draft, target, submitted = ForetoldDraft("oracle", lies=False), tiny_engine(), []
    submit = target.submit
    target.submit = lambda turns: (submitted.append(list(turns)), submit(turns))[1]
    made = Deployment(target, [draft], Scripted([(0, k)]), chunk_tokens=64)
    sessions = []
    for number, sampling in enumerate(samplings):
        session = made.submit(PROMPTS[number % 6], max_tokens, sampling, **options)
        draft.truth[session.id] = reference().text(PROMPTS[number % 6], max_tokens, sampling)
        sessions.append(session)
    return made, sessions, submitted


def test_a_streamed_request_gets_its_tokens_turn_by_turn(monkeypatch):
    monkeypatch.setattr(deployments, "NoText", Letters)
    made, (session,), _ = served(SamplingParams(), stream=True)
    chunks = []
    session.sink.chunk = lambda delta: chunks.append(delta.text)
    made.run()
    assert len(chunks) >= 4
    assert len("".join(chunks)) > 8


class Letters:
    """A decoder that writes each token as a letter."""

    def push(self, token_id: int) -> str:
        return chr(ord("A") + token_id)

    def finish(self) -> str:
        return ""


def test_many_requests_speculate_in_one_batch():
    made, sessions, submitted = served(*[SamplingParams()] * 6)
    made.run()
    assert [s.sequence.tokens for s in sessions] == [plain_text(Ask(n, 16)) for n in range(6)]
    assert max(sum(turn.proposal is not None for turn in turns) for turns in submitted) == 6


def test_min_tokens_holds_over_all_turns():
    """The BLS model sets min_tokens for the draft's sake and then forgets the user's."""
    plain = reference().text(PROMPTS[0], 16)
    end = plain[len(PROMPTS[0])]
    made, (session,), _ = served(SamplingParams(min_tokens=9, end_ids=(end,)))
    made.run()
    assert session.sequence.tokens == reference().text(PROMPTS[0], 16, session.sequence.sampling)
    assert end not in session.sequence.tokens[len(PROMPTS[0]) :][:9]


def test_a_bias_holds_in_every_turn():
    sampling = SamplingParams(bias=((7, 3.0), (20, -2.0)))
    made, (session,), _ = served(sampling)
    made.run()
    assert session.sequence.tokens == reference().text(PROMPTS[0], 16, sampling)


@pytest.mark.parametrize("ignored", [0, 2, 2**31 - 1])
def test_penalties_count_the_text_of_all_turns(ignored):
    """Also where the prompt does not count: output counts when it is part of a turn's prompt."""
    sampling = SamplingParams(
        frequency_penalty=0.4, repetition_penalty=1.2, prompt_ignore_length=ignored
    )
    made, (session,), _ = served(sampling)
    made.run()
    assert session.sequence.tokens == reference().text(PROMPTS[0], 16, sampling)


def test_statistics_are_those_of_all_turns():
    made, (session,), submitted = served(SamplingParams())
    made.run()
    proposals = [turn.proposal for turns in submitted for turn in turns]
    drafted = sum(len(proposal.tokens) for proposal in proposals if proposal is not None)
    assert session.sink.usage.drafted == drafted > 6
    assert session.sink.usage.accepted == drafted


def test_a_stop_word_in_the_middle_of_an_accepted_run_ends_the_text_there(monkeypatch):
    monkeypatch.setattr(deployments, "NoText", Letters)
    plain = reference().text(PROMPTS[1], 16)[len(PROMPTS[1]) :]
    word = "".join(map(Letters().push, plain[2:4]))  # with proposals of four it lies inside a run
    made, sessions, _ = served(SamplingParams(), SamplingParams(), k=4, stop_words=(word,))
    made.run()
    text = Letters()
    session: Session = sessions[1]
    written = "".join(map(text.push, session.sequence.tokens[len(PROMPTS[1]) :]))
    assert written.endswith(word)
    assert session.output_tokens == written.index(word) + len(word)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(log_probs=True), SamplingParams(0.7, seed=1, log_probs=True)]
)
def test_log_probabilities_are_those_of_all_tokens(sampling):
    made, (session,), _ = served(sampling)
    made.run()
    tokens, prompt_tokens = session.sequence.tokens, session.sequence.prompt_tokens
    expected = [
        reference().log_probs(tokens[:at], prompt_tokens, sampling)[tokens[at]]
        for at in range(prompt_tokens, len(tokens))
    ]
    assert session.sink.log_probs == pytest.approx(expected, abs=1e-5)


assert VOCAB <= 26
