"""The TensorRT-LLM adapter by itself: what it asks of the executor, and what the executor's
troubles come to. On the fake executor.
"""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from backend.engines.port import Turn
from backend.engines.trtllm import engine as trtllm
from backend.engines.trtllm.engine import EngineDiedError, ExecutorSettings, TrtllmEngine
from backend.engines.trtllm.folder import check_draft, check_target, read_engine_folder
from backend.engines.trtllm.memory import RESERVE_BYTES, EngineMemory, plan_kv
from backend.request import SamplingParams
from backend.sequence import ROOT, Proposal, Sequence
from backend.settings import ConfigError
from tests.contract import fake_executor
from tests.contract.deployment import GREEDY, K_MAX, VOCAB
from tests.contract.engine_folders import engine_folder
from tests.contract.fake_executor import Behaviour, Executor, Model


def counting(tokens):
    return np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB] * 9.0


TREE = Proposal("d", [2, 3], [ROOT, ROOT], [0.6, 0.3])


class Rig:
    """An engine on a model that counts, its metrics, and a clock that is set by hand."""

    def __init__(self, tmp_path, behaviour=None, *, settings=None, target=True, **folder):
        self.folder = engine_folder(
            tmp_path, vocab_size=VOCAB, max_draft_len=K_MAX if target else 0, **folder
        )
        Executor.models[str(self.folder)] = Model(counting, behaviour or Behaviour())
        self.counts, self.now_s = Counter(), 0.0
        self.engine = TrtllmEngine(
            "target",
            read_engine_folder(self.folder),
            settings or ExecutorSettings(turn_timeout_s=2.0),
            max_context_tokens=96,
            bindings=fake_executor,
            count=self.count,
            clock=lambda: self.now_s,
        )

    def count(self, name, amount=1, **labels):
        self.counts[(name, *labels.values())] += amount

    @property
    def executor(self):
        return Executor.created[-1]

    def run(self, *turns):
        self.engine.submit(turns)
        done = []
        while len(done) < len(turns):
            done += self.engine.poll(0.1)
        return done


def sequence(tokens, sampling=GREEDY, number=1, prompt_tokens=None, **options):
    return Sequence(number, list(tokens), prompt_tokens or len(tokens), sampling, **options)


def verify(seq, proposed):
    return Turn(seq, len(seq.tokens), proposal=Proposal.chain("d", list(proposed)))


def test_a_turn_is_the_whole_text_with_a_draft_after_it(tmp_path):
    rig = Rig(tmp_path)
    (done,) = rig.run(verify(sequence([1, 2]), [3, 4, 9]))
    assert (done.tokens, done.accepted) == ([3, 4, 5], 2)
    (request,) = rig.executor.requests
    assert (request.input_token_ids, request.max_tokens) == ([1, 2], 4)
    assert request.external_draft_tokens_config.tokens == [3, 4, 9]
    assert request.external_draft_tokens_config.logits is None  # greedy needs none


def test_sampling_says_with_logits_that_a_proposal_is_certain(tmp_path):
    """Logits of requests that are over are used again, and those in flight at once have their
    own.
    """
    rig, given = Rig(tmp_path), []
    make = rig.engine._requests._draft_logits
    rig.engine._requests._draft_logits = lambda *args: given.append(make(*args)) or given[-1]
    for proposed in ([3, 4], [3, 5]):
        turns = [verify(sequence([n, 2], SamplingParams(1.0), n), proposed) for n in (1, 2)]
        rig.engine.submit(turns)
        first, second = given[-2:]
        assert first.argmax(-1).tolist() == second.argmax(-1).tolist() == proposed
        assert (first.exp().sum(-1) == 1.0).all()
        assert first.data_ptr() != second.data_ptr()
        rig.engine.poll(0.1)
    assert len({logits.data_ptr() for logits in given}) == 2


def test_min_p_is_the_decoder_s_own(tmp_path):
    rig = Rig(tmp_path)
    rig.run(Turn(sequence([1, 2], SamplingParams(1.0, min_p=0.25)), 2))
    rig.run(Turn(sequence([1, 2], SamplingParams(1.0)), 2))
    assert [request.sampling_config.min_p for request in rig.executor.requests] == [0.25, None]


def test_a_draft_proposes_what_is_likeliest_and_exchanges_no_logits(tmp_path):
    rig = Rig(tmp_path, target=False)
    sampling = SamplingParams(1.0, log_probs=True, bad_words=((4,),), seed=3)
    (done,) = rig.run(Turn(sequence([1, 2], sampling), 2, run=2, nodes=9))
    (request,) = rig.executor.requests
    assert (done.tokens, done.log_probs) == ([], None)
    assert done.proposal == Proposal.chain("target", done.proposal.tokens)
    assert done.proposal.tokens[0] == 3
    assert done.proposal.tokens[1] != 4  # the options hold
    assert (request.sampling_config.top_k, request.output_config.return_generation_logits) == (
        1,
        False,
    )


def test_a_prefill_chunk_costs_nothing_and_the_turn_that_ends_the_prompt_runs_it_all(tmp_path):
    rig = Rig(tmp_path)
    seq = sequence([1, 2, 3, 4])
    (done,) = rig.run(Turn(seq, 2, run=0))
    assert (done.tokens, rig.executor.requests, rig.engine.unseen(seq)) == ([], [], 2)
    (done,) = rig.run(Turn(seq, 4))
    assert done.tokens == [5]


def test_many_turns_complete_whatever_the_order_and_a_full_queue(tmp_path):
    rig = Rig(tmp_path, Behaviour(seed=1, late=0.5, shuffled=True))
    done = rig.run(
        *(verify(sequence([1, n % VOCAB], number=n), [(n + 1) % VOCAB]) for n in range(1, 40))
    )
    assert {c.sequence_id: c.tokens for c in done} == {
        n: [(n + 1) % VOCAB, (n + 2) % VOCAB] for n in range(1, 40)
    }


def test_a_full_queue_is_waited_for(tmp_path, monkeypatch):
    config = fake_executor.ExecutorConfig
    monkeypatch.setattr(
        fake_executor, "ExecutorConfig", lambda *a, **k: config(*a, **k, max_queue_size=3)
    )
    rig = Rig(tmp_path)
    assert len(rig.run(*(Turn(sequence([1], number=n), 1) for n in range(1, 9)))) == 8
    assert rig.counts["spindle_fallback_total", "engine_queue_full"] > 0


def test_what_one_turn_has_wrong_is_its_own_error(tmp_path):
    rig = Rig(tmp_path)
    bad = [
        (
            verify(sequence([1], number=1), range(2, 2 + K_MAX + 1)),
            "exceeds maximum draft tokens length",
        ),
        (
            Turn(sequence([1], SamplingParams(1.0, top_k=2000), 2), 1),
            "top_k must be at most 1024, got 2000",
        ),
        (Turn(sequence([1], number=3), 1, proposal=TREE), "a tree of tokens cannot be verified"),
    ]
    done = {
        c.sequence_id: c
        for c in rig.run(*(turn for turn, _ in bad), Turn(sequence([1], number=4), 1))
    }
    for turn, message in bad:
        assert message in done[turn.sequence.id].error
    assert done[4].tokens == [2]


def test_a_cancelled_sequence_completes_no_more(tmp_path):
    rig = Rig(tmp_path)
    rig.engine.submit([Turn(sequence([1], number=1), 1), Turn(sequence([1], number=2), 1)])
    rig.engine.cancel([1])
    assert [c.sequence_id for c in rig.engine.poll(0.1)] == [2]
    assert rig.engine.unseen(sequence([1, 2], number=1)) == 2


def test_a_turn_that_takes_too_long_is_cancelled_and_one_that_is_never_answered_is_a_dead_executor(
    tmp_path,
):
    rig = Rig(tmp_path, Behaviour(mute=True))
    rig.engine.submit([Turn(sequence([1]), 1)])
    rig.now_s = 2.5
    (done,) = rig.engine.poll(0.0)
    assert "has not ended within 2 s" in done.error
    rig.engine.submit([Turn(sequence([1]), 1)])
    rig.now_s += 2.0 + trtllm.GRACE_S + 0.1
    with pytest.raises(EngineDiedError, match="was not answered"):
        rig.engine.poll(0.0)


def test_a_dead_target_stays_dead_and_its_turns_are_void(tmp_path):
    rig = Rig(tmp_path, Behaviour(dies_at=1))
    rig.engine.submit([Turn(sequence([1]), 1)])
    with pytest.raises(EngineDiedError, match="worker has died"):
        rig.engine.poll(0.1)
    with pytest.raises(EngineDiedError):
        rig.engine.submit([Turn(sequence([1]), 1)])
    assert rig.counts["spindle_engine_deaths_total", "target"] == 1
    rig.engine.close()


@pytest.mark.parametrize("ends", [(5,), (5, 6)])
def test_end_tokens_are_forbidden_for_whole_turns(tmp_path, ends):
    """The executor does not know the ends; a turn is cut where they become allowed."""
    rig = Rig(tmp_path)
    sampling = SamplingParams(min_tokens=3, end_ids=ends)
    (done,) = rig.run(verify(sequence([1, 2, 3, 4], sampling, prompt_tokens=3), [7, 8, 9]))
    assert (len(done.tokens), done.accepted) == (1, 0)
    assert rig.counts["spindle_fallback_total", "turn_cut_at_min_tokens"] == 1
    assert rig.executor.requests[-1].bad_words == [[end] for end in ends]


@pytest.mark.parametrize(
    "turn",
    [lambda seq: verify(seq, [3, 4, 5, 6]), lambda seq: Turn(seq, 2, run=4)],
    ids=["verified", "run"],
)
def test_a_text_ends_after_its_end_token_which_has_its_log_probability(tmp_path, turn):
    """The executor returns no row of logits for an end that it knows, so it does not get any."""
    rig = Rig(tmp_path)
    (done,) = rig.run(turn(sequence([1, 2], SamplingParams(log_probs=True, end_ids=(4,)))))
    assert (done.error, done.tokens, len(done.log_probs)) == (None, [3, 4], 2)
    assert done.accepted == (2 if rig.executor.requests[0].external_draft_tokens_config else 0)
    assert rig.executor.requests[0].end_id is None


def test_texts_beyond_the_token_budget_wait_and_lose_no_draft(tmp_path):
    """A context counts whole though all of it is found. In chunks, drafts would be discarded and
    a cancelled text left unfinished.
    """
    rig = Rig(tmp_path, max_num_tokens=64)
    texts = [sequence([n, *range(20)], number=n) for n in range(1, 9)]
    for _ in range(3):
        for done in rig.run(
            *(verify(seq, [(seq.tokens[-1] + i) % VOCAB for i in (1, 2, 3)]) for seq in texts)
        ):
            assert (done.error, done.accepted) == (None, 3)
            texts[done.sequence_id - 1].tokens += done.tokens
    assert (rig.executor.discarded, rig.executor.chunks) == (0, 0)
    assert rig.executor.iterations > 3


def test_what_raises_while_a_request_is_made_is_that_turns_error(tmp_path):
    """The constructors of C++ raise RuntimeError, those of nanobind TypeError; neither says
    anything of the executor.
    """
    rig = Rig(tmp_path)
    wrong = (
        sequence([1, -(2**40)], number=1),
        sequence([1], SamplingParams(1.0, repetition_penalty=-1.0), number=2),
    )
    done = {
        c.sequence_id: c
        for c in rig.run(
            *(Turn(seq, len(seq.tokens)) for seq in wrong), Turn(sequence([1], number=3), 1)
        )
    }
    assert "input_token_ids must be list[int32]" in done[1].error
    assert "repetition_penalty -1.0" in done[2].error
    assert done[3].tokens == [2]


# -- engine folders and memory


def test_engines_that_cannot_serve_are_refused_with_the_command_that_builds_them_again(tmp_path):
    def folder(name, **options):
        return read_engine_folder(engine_folder(tmp_path, name, vocab_size=VOCAB, **options))

    target = folder("target", max_draft_len=4)
    check_target(target, 4)
    check_draft(folder("draft"), target)
    with pytest.raises(
        ConfigError, match=r"k_max 6 is over its max_draft_len 4.*trtllm-build .*--max_draft_len 6"
    ):
        check_target(target, 6)
    with pytest.raises(
        ConfigError, match="without --speculative_decoding_mode draft_tokens_external"
    ):
        check_target(folder("plain"), 4)
    with pytest.raises(ConfigError, match="without --use_paged_context_fmha enable"):
        check_draft(folder("old", paged_context_fmha=False), target)
    with pytest.raises(ConfigError, match=r"its logits are float16.*--logits_dtype float32"):
        check_target(folder("half", max_draft_len=4, logits_dtype="float16"), 4)
    with pytest.raises(ConfigError, match="built as a target"):
        check_draft(target, target)
    with pytest.raises(ConfigError, match=f"vocabulary of 9 tokens, its target .* {VOCAB}"):
        check_draft(read_engine_folder(engine_folder(tmp_path, "other", vocab_size=9)), target)


def test_a_folder_that_is_no_engine_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing"):
        read_engine_folder(tmp_path / "nothing")
    made = engine_folder(tmp_path, vocab_size=VOCAB, tp_size=2)
    (made / "rank1.engine").unlink()
    with pytest.raises(ConfigError, match=r"lacks rank1\.engine"):
        read_engine_folder(made)
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="not the config of a TensorRT-LLM engine"):
        read_engine_folder(made)


def test_the_longest_text_leaves_room_for_what_the_executor_would_silently_shorten(tmp_path):
    engine = read_engine_folder(
        engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4, max_seq_len=100)
    )
    assert engine.max_context_tokens == 92
    assert replace(engine, max_input_len=50).max_context_tokens == 46
    assert (
        replace(engine, max_num_tokens=40).max_context_tokens == 36
    )  # one without chunks runs a text at once


def test_every_engine_gets_room_for_the_same_tokens_whatever_is_created_first():
    gib = 1 << 30
    engines = [
        EngineMemory("1b", [0], 2 * gib, 32 << 10),
        EngineMemory("8b", [0], 16 * gib, 128 << 10),
    ]
    free = {0: 78 * gib}
    plan = plan_kv(engines, free, kv_share=1.0)
    fractions = plan.fractions
    room = 78 * gib - 18 * gib - 2 * RESERVE_BYTES
    tokens = room / (160 << 10)
    assert plan.tokens == int(tokens)
    first = fractions["1b"] * (free[0] - 2 * gib)
    second = fractions["8b"] * (free[0] - 18 * gib - first)
    assert (first, second) == (
        pytest.approx(tokens * (32 << 10)),
        pytest.approx(tokens * (128 << 10), rel=1e-6),
    )
    with pytest.raises(ConfigError, match="GPU 0 has 10240 MiB free, and 1b, 8b need"):
        plan_kv(engines, {0: 10 * gib}, kv_share=1.0)


def test_an_engine_over_several_gpus_takes_its_part_of_each():
    gib = 1 << 30
    engines = [
        EngineMemory("1b", [0], 2 * gib, 32 << 10),
        EngineMemory("70b", [0, 1], 80 * gib, 320 << 10),
    ]
    fractions = plan_kv(engines, {0: 79 * gib, 1: 79 * gib}, kv_share=0.9).fractions
    kv = fractions["1b"] * 77 * gib
    assert fractions["70b"] * (37 * gib - kv) == pytest.approx(
        kv / (32 << 10) * (160 << 10), rel=1e-6
    )


def test_the_executor_gets_the_devices_and_ranks_in_processes_of_their_own(tmp_path):
    rig = Rig(
        tmp_path,
        settings=ExecutorSettings(
            gpus=(2, 3), kv_fraction=0.4, orchestrated=True, worker="/opt/worker"
        ),
        tp_size=2,
    )
    config = rig.executor.config
    assert config.parallel_config.communication_mode is fake_executor.CommunicationMode.ORCHESTRATOR
    assert (config.parallel_config.device_ids, config.kv_cache_config.free_gpu_memory_fraction) == (
        [2, 3],
        0.4,
    )
    assert config.parallel_config.orchestrator_config.worker_executable_path == "/opt/worker"


def test_without_tensorrt_llm_the_engine_says_so(tmp_path):
    folder = read_engine_folder(engine_folder(tmp_path, vocab_size=VOCAB))
    with pytest.raises(EngineDiedError, match=r"needs TensorRT-LLM 1\.2\.1"):
        TrtllmEngine("target", folder, ExecutorSettings(), max_context_tokens=64)


def test_the_turns_of_a_submission_are_in_one_iteration(tmp_path, monkeypatch):
    rig = Rig(tmp_path)
    calls = []
    enqueue = rig.executor.enqueue_requests
    monkeypatch.setattr(
        rig.executor,
        "enqueue_requests",
        lambda requests: calls.append(len(requests)) or enqueue(requests),
    )
    rig.run(*(Turn(sequence([1, 2, number]), 3) for number in range(3)))
    assert calls == [3]
