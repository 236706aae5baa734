"""Drafts in processes of their own: the same proposals, and a loop that never waits for one to
be made.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from itertools import pairwise

import pytest

from backend.engines.apart import DraftDiedError, EngineApart
from backend.engines.port import Turn
from backend.launcher.processes import is_running
from backend.request import SamplingParams
from backend.sequence import Sequence
from backend.speculation import drafting
from tests.contract.apart_drafts import make, slow_when_made_again, twin
from tests.contract.deployment import VOCAB, Deployment, Scripted, tiny_engine
from tests.contract.engine_folders import engine_folder
from tests.contract.fake_executor import Behaviour
from tests.contract.scenarios import PROMPTS, reference
from tests.contract.trtllm_deployment import trtllm_engine

PATIENCE_S = 60.0


@pytest.fixture
def apart(tmp_path):
    made = []

    def start(create, name="draft", **options):
        made.append(EngineApart(name, create, **{"answer_within_s": PATIENCE_S, **options}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


def folder(tmp_path):
    return engine_folder(tmp_path, "draft", vocab_size=VOCAB)


def run(engine, turns):
    engine.submit(turns)
    done = []
    while len(done) < len(turns):
        done += engine.poll(1.0)
    return {completion.sequence_id: completion for completion in done}


def await_ready(engine, sequence):
    until_s = time.monotonic() + PATIENCE_S
    while not engine.available(sequence, 1):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_turns_and_what_comes_of_them_are_those_of_the_engine_itself(tmp_path, apart):
    """Texts that grow by what was right and by what was not, one that is cancelled and comes
    back, and an option.
    """
    counts, options = [], {"bad_words": ((9,),), "min_tokens": 2, "end_ids": (11,)}
    engines = [
        apart(
            partial(make, folder(tmp_path), Behaviour),
            count=lambda *given, **labels: counts.append((*given, labels)),
        ),
        make(folder(tmp_path), Behaviour, None),
    ]
    assert engines[0].limits == engines[1].limits
    answers = []
    for engine in engines:
        texts = [
            Sequence(n, [n, 2, 3], 3, SamplingParams(0.7, seed=n, **options)) for n in range(1, 5)
        ]
        for step in range(4):
            done = run(engine, [Turn(text, len(text.tokens), run=3, nodes=3) for text in texts])
            for text in texts:
                answers.append(done[text.id].proposal)
                text.tokens += [*done[text.id].proposal.tokens[: text.id - 1], step]
                answers.append(engine.unseen(text))
            engine.cancel([texts[step].id])
            answers.append([engine.unseen(text) for text in texts])
    half = len(answers) // 2
    assert answers[:half] == answers[half:]
    assert ("spindle_fallback_total", 1, {"reason": "turn_cut_at_min_tokens"}) in counts


@pytest.mark.slow
def test_a_draft_that_is_made_again_does_not_stop_the_loop(tmp_path, apart):
    """Its constructor keeps the interpreter's lock: in a thread of this process nothing else
    runs meanwhile.
    """
    build_s, sequence = 3.0, Sequence(1, [1, 2], 2, SamplingParams())

    def longest_gap(goes_on, begin=lambda: None):
        times_s = [time.monotonic()]
        begin()  # a thread may have ended by the time it returns
        while goes_on():
            times_s.append(time.monotonic())
            time.sleep(0.001)
        times_s.append(time.monotonic())
        return max(later - earlier for earlier, later in pairwise(times_s))

    behaviour = partial(slow_when_made_again, tmp_path / "made", build_s)
    draft = apart(partial(make, folder(tmp_path), behaviour))
    assert run(draft, [Turn(sequence, 2, run=2, nodes=2)])[1].proposal.tokens == [3, 4]
    os.kill(draft._child.process.pid, signal.SIGKILL)
    with pytest.raises(DraftDiedError):
        run(draft, [Turn(sequence, 2, run=2, nodes=2)])
    assert longest_gap(lambda: draft.available(sequence, 1) == 0) < build_s
    assert run(draft, [Turn(sequence, 2, run=2, nodes=2)])[1].proposal.tokens == [3, 4]

    thread = threading.Thread(target=make, args=(folder(tmp_path), behaviour, None))
    assert longest_gap(thread.is_alive, thread.start) >= build_s


def test_a_dead_draft_falls_out_and_comes_back_and_no_text_changes(monkeypatch, tmp_path, apart):
    monkeypatch.setattr(drafting, "COOLDOWN_S", 3.0)
    draft = apart(partial(twin, tmp_path / "made"), "twin")
    deployment = Deployment(trtllm_engine(tiny_engine(), target=True), [draft], Scripted([(0, 3)]))
    sessions = [deployment.submit(prompt, 30) for prompt in PROMPTS[:3]]
    lengths = []
    while deployment.step():
        lengths.append(sum(o.rows.length.sum() for o in deployment.policy.outcomes[-1:]))
        if draft._child is None or not draft._child.ready:
            assert draft.available(sessions[0].sequence, 1) == 0
            await_ready(draft, sessions[0].sequence)
    assert [s.sequence.tokens for s in sessions] == [
        reference().text(prompt, 30) for prompt in PROMPTS[:3]
    ]
    assert deployment.counters()["spindle_fallback_total", "draft_error"] == 1
    assert 0 in lengths[3:]
    assert max(lengths[-4:]) > 0


@pytest.mark.slow
def test_a_draft_that_says_nothing_is_dead_and_one_that_cannot_be_made_is_an_error(tmp_path, apart):
    now_s = [0.0]
    draft = apart(
        partial(make, folder(tmp_path), partial(Behaviour, mute=True)),
        answer_within_s=5.0,
        clock=lambda: now_s[0],
    )
    draft.submit([Turn(Sequence(1, [1, 2], 2, SamplingParams()), 2)])
    assert draft.poll(0.01) == []
    now_s[0] = 5.1
    with pytest.raises(DraftDiedError, match="no answer for 5 s"):
        draft.poll(0.01)
    with pytest.raises(DraftDiedError, match="draft cannot be created"):
        apart(partial(make, tmp_path / "nowhere", Behaviour))


MAKES_A_DRAFT = """
from backend.engines.apart import EngineApart
from tests.contract.apart_drafts import hangs
EngineApart("draft", hangs, answer_within_s=60.0)
"""


def test_a_draft_that_is_being_made_in_native_code_dies_with_its_parent():
    parent = subprocess.Popen(
        [sys.executable, "-c", MAKES_A_DRAFT], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    until_s = time.monotonic() + PATIENCE_S
    while is_running(child):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    parent.stdout.close()
