from dataclasses import fields, replace

import pytest

from backend.app import _report_slow_kernels, build
from backend.config import parse_config
from backend.core.admission import Admission
from backend.core.kv_ledger import KVLedger
from backend.engines.lookup import LookupEngine
from backend.engines.proposer import InTarget
from backend.ops.stats import Stats, StepStats
from backend.request import FinishReason, GenerationRequest, RequestError, SamplingParams
from backend.sampling.options import sampling_params
from backend.sequence import BLOCK_TOKENS
from backend.speculation.policy_factory import make_policy
from backend.tokenizer import ByteTokenizer
from policy import (
    AdaptivePlanner,
    FixedLength,
    LatencyError,
    NoSpeculation,
)
from policy.baselines import AcceptanceEma, BatchSchedule, SmartSpec
from policy.custom import CheckedPolicy
from policy.guard import Guard
from policy.replay import replay, same
from tests.fakes.apps import FAKE, ask, fake_app, finish, submit
from tests.fakes.clients import Sink
from tests.fakes.fake_engine import FakeEngine
from tests.options import greedy


def params(end_ids=(), **options):
    return sampling_params(
        GenerationRequest("a", 1, **options), ByteTokenizer(), frozenset(end_ids)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SamplingParams(seed=5)),
        ({"temperature": 0.0, "top_k": 40}, SamplingParams(0.0, 40, seed=5)),
        ({"temperature": 0.7}, SamplingParams(0.7, seed=5)),
        ({"top_p": 0.9}, SamplingParams(1.0, 0, 0.9, seed=5)),
        ({"top_k": 3}, SamplingParams(1.0, 3, seed=5)),
        ({"min_p": 0.2}, SamplingParams(1.0, seed=5, min_p=0.2)),
        ({"temperature": 0.0, "min_p": 0.2}, SamplingParams(0.0, seed=5, min_p=0.2)),
        ({"temperature": 0.7, "top_p": 0.0}, SamplingParams(0.7, seed=5)),
        ({"temperature": 1e-7}, SamplingParams(0.0, seed=5)),
        (
            {"presence_penalty": -0.5, "frequency_penalty": 0.25, "prompt_ignore_length": 9},
            SamplingParams(
                seed=5, presence_penalty=-0.5, frequency_penalty=0.25, prompt_ignore_length=9
            ),
        ),
        (
            {"repetition_penalty": 1.2, "return_log_probs": True},
            SamplingParams(seed=5, repetition_penalty=1.2, log_probs=True),
        ),
    ],
)
def test_absent_options_mean_greedy_and_zero_means_off(options, expected):
    assert params(seed=5, **options) == expected


def test_greedy_is_no_option_temperature_zero_or_one_candidate():
    greedy = [{}, {"temperature": 0.0}, {"temperature": 0.9, "top_k": 1}, {"top_k": 1}]
    assert all(params(**options).greedy for options in greedy)
    assert not params(temperature=0.9).greedy


def test_requests_without_a_seed_differ():
    seeds = {params().seed for _ in range(10)}
    assert len(seeds) == 10
    assert all(float(seed) == seed for seed in seeds)  # as readers of JSON keep numbers


def test_words_become_token_ids_and_a_word_without_tokens_has_no_effect():
    assert params(bad_words=("ab", "", "c")).bad_words == ((97, 98), (99,))
    assert params(bad_words=("", "")).bad_words == ()


def test_the_weights_of_a_token_add_up_over_a_word_and_over_words():
    words = {
        "embedding_bias_words": ("aab", "", "b", "c"),
        "embedding_bias_weights": (1.5, 9.0, -1.5, 2.0),
    }
    assert params(**words).bias == ((97, 3.0), (99, 2.0))


@pytest.mark.parametrize(
    ("end_id", "stops", "expected"),
    [
        (None, (), (256,)),
        (101, (), (101,)),
        (-1, (), ()),
        (-1, (101, 101), (101,)),
        (None, (101,), (101, 256)),
    ],
)
def test_the_end_ids_of_a_request_are_known_to_engine_and_session(end_id, stops, expected):
    session = fake_app().session(
        GenerationRequest(
            "a", 9, end_id=end_id, min_tokens=2, stop_token_ids=stops, exclude_input_in_output=True
        ),
        sink=None,
    )
    assert (session.sequence.sampling.end_ids, session.sequence.sampling.min_tokens) == (
        expected,
        2,
    )
    session.commit([97, 256, 101])
    assert session.output_tokens == (2 if end_id is None else 3)
    ended = session.finish_reason is not None
    assert (session.pop_delta().text, ended) == {
        **dict.fromkeys([(None, ()), (None, (101,)), (101, ())], ("a", True)),
        (-1, ()): ("ae", False),
        (-1, (101, 101)): ("a", True),
    }[end_id, stops]


def test_more_logits_than_the_limit_are_refused_with_the_numbers():
    app = fake_app(limits={"max_logits_bytes": 12 * 257 * 4})
    flags = {"return_context_logits": True, "return_generation_logits": True}
    app.session(GenerationRequest("abc", 9, **flags), Sink())
    with pytest.raises(
        RequestError,
        match=r"return_context_logits: 13 rows of 257 logits are 13364 bytes, over "
        r"limits.max_logits_bytes, 12336",
    ):
        app.session(GenerationRequest("abc", 10, **flags), Sink())
    app.session(GenerationRequest("abc", 10), Sink())


def test_requests_wait_until_there_is_room_for_the_logits_that_all_keep_and_none_is_refused():
    app = fake_app(limits={"max_logits_bytes": 30 * 257 * 4, "max_active_requests": 8})
    request = GenerationRequest("abc", 12, end_id=-1, return_generation_logits=True)
    sessions = [app.session(request, Sink()) for _ in range(5)]
    sessions.append(app.session(replace(request, return_generation_logits=False), Sink()))
    for session in sessions:
        app.orchestrator.submit(session)
    app.orchestrator.step()
    # 24 rows of 30; the one without logits waits for its turn
    assert app.orchestrator.counts() == (2, 4)
    most = 0
    while app.orchestrator.step():
        active = [session for session in sessions if session.sequence.blocks]
        most = max(most, sum(session.logits_bytes for session in active))
    assert most == 24 * 257 * 4
    assert all(session.sink.has_ended for session in sessions)


def test_a_pre_empted_request_keeps_its_room_for_logits_and_one_that_leaves_gives_it_back():
    app, blocks = fake_app(), 8
    admission = Admission(
        KVLedger({"target": blocks}, 1, growth_blocks=0), 8, 8, max_logits_bytes=20 * 257 * 4
    )
    first, second = (
        app.session(GenerationRequest("abc", 12, return_generation_logits=True), Sink())
        for _ in range(2)
    )
    for session in (first, second):
        admission.offer(session)
    assert admission.admit(0) == [first]
    tokens = list(first.sequence.tokens)
    first.sequence.tokens += [0] * blocks * BLOCK_TOKENS
    assert admission.make_room([first]) == [first]
    first.sequence.tokens[:] = tokens
    assert admission.admit(0) == [first]
    assert admission.admit(1) == []
    admission.release(first)
    assert admission.admit(0) == [second]


def test_a_request_for_the_logits_of_its_prompt_shares_no_kv_with_others():
    app = build(parse_config(FAKE))
    salts = {
        app.session(GenerationRequest("abc", 9, return_context_logits=True), Sink()).sequence.salt
        for _ in range(2)
    }
    assert len(salts | {""}) == 3


@pytest.mark.parametrize(
    "policy", [{"kind": "none"}, {"kind": "fixed", "draft": "d0", "length": 8}]
)
def test_a_run_ends_at_the_edge_of_the_context(policy):
    drafts = [{"name": "d0", "engine": "tests.fakes.fake", "options": {"agreement": 1.0}}]
    app = build(
        parse_config(
            {
                "target": {"engine": "tests.fakes.fake"},
                "drafts": drafts,
                "policy": policy,
                "limits": {"max_context_tokens": 32},
            }
        )
    )
    finish(app, sink := ask(app, "edge", 28, return_log_probs=True))
    [(reason, usage)] = sink.ends
    assert sink.text == "edge" + bytes(greedy("edge", 28, SamplingParams())[0]).decode()
    assert (reason, usage.output_tokens, len(sink.log_probs)) == (FinishReason.LENGTH, 28, 28)
    assert (usage.accepted > 20) == (policy["kind"] == "fixed")
    with pytest.raises(
        RequestError, match="max_tokens 29 and a prompt of 4 tokens exceed the context of 32 tokens"
    ):
        app.session(GenerationRequest("edge", 29), sink)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "limits", "most"),
    [
        (4, 2**31 - 1, {}, 28),
        (4, 29, {}, 28),
        (4, 28, {}, 28),
        (4, 5, {}, 5),
        (31, 2**31 - 1, {}, 1),
        (4, 999, {"max_context_tokens": 1024, "kv_cache_tokens": 256}, 256 - 9 - 4),
    ],
)
def test_max_tokens_may_be_lowered_to_what_fits(prompt_tokens, max_tokens, limits, most):
    limits = {"max_context_tokens": 32, **limits}
    app = build(parse_config({"target": {"engine": "tests.fakes.fake"}, "limits": limits}))
    request = GenerationRequest("x" * prompt_tokens, max_tokens, end_id=-1, fit_max_tokens=True)
    finish(app, sink := submit(app, request))
    [(reason, usage)] = sink.ends
    assert (reason, usage.output_tokens) == (FinishReason.LENGTH, most)
    context = limits["max_context_tokens"]
    with pytest.raises(RequestError, match=f"over the limit of {context - 1}"):
        app.session(replace(request, text_input="x" * context), sink)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"kind": "adaptive"}, Guard),
        ({"kind": "adaptive", "guard": False}, AdaptivePlanner),
        ({"kind": "none"}, NoSpeculation),
        ({"kind": "fixed", "draft": "d0", "length": 2}, FixedLength),
        (
            {"kind": "schedule", "draft": "d0", "schedule": [{"batch": 4, "length": 3}]},
            BatchSchedule,
        ),
        ({"kind": "ema", "draft": "d0"}, AcceptanceEma),
        ({"kind": "smartspec", "draft": "d0"}, SmartSpec),
        ({"kind": "bench.baselines.spin.SpinSelection", "options": {"length": 2}}, CheckedPolicy),
    ],
)
def test_the_configured_policy_is_built_and_serves(settings, kind):
    app = fake_app(
        target={"engine": "tests.fakes.fake", "options": {"step_s": 0.002}}, policy=settings
    )
    assert isinstance(app.orchestrator.cycle.runner.policy.policy, kind)
    finish(app, sink := ask(app, "text", 40))
    [(reason, usage)] = sink.ends
    assert (reason, usage.output_tokens) == (FinishReason.LENGTH, 40)
    assert (usage.drafted == 0) == (kind is NoSpeculation)


def test_a_deployment_without_drafts_does_not_speculate():
    assert isinstance(
        build(
            parse_config({"target": {"engine": "tests.fakes.fake"}})
        ).orchestrator.cycle.runner.policy.policy,
        NoSpeculation,
    )


def test_a_missing_latency_table_is_an_error_that_names_the_engine():
    config = parse_config(
        {
            "target": {"engine": "tests.fakes.fake"},
            "drafts": [{"name": "d0", "engine": "torch", "model": "m"}],
        }
    )
    with pytest.raises(LatencyError, match="d0"):
        make_policy(config, [FakeEngine("d0")], {}, StepStats(Stats()))


def served(policy, texts=("one", "another", "a third")):
    """An app that has served some requests."""
    app = fake_app(policy=policy)
    finish(app, *[ask(app, text, 60) for text in texts])
    return app


def test_what_the_planner_of_the_real_loop_saw_and_decided_replays_bit_for_bit(tmp_path):
    path = tmp_path / "trace.jsonl"
    served({"trace_file": str(path)})
    steps = list(replay(path.read_text().splitlines()))
    assert len(steps) > 20
    assert all(same(step.recorded, step.plan) for step in steps)
    assert any(step.recorded.length.any() for step in steps)


def test_a_trace_that_cannot_be_written_is_counted_once_and_costs_no_request(tmp_path):
    app = served({"trace_file": str(tmp_path / "no folder" / "trace.jsonl")})
    fallbacks = [
        (labels, value)
        for name, labels, value in app.stats.drain().counters
        if name == "spindle_fallback_total"
    ]
    assert fallbacks == [({"reason": "trace_file_error"}, 1)]


@pytest.mark.parametrize(("scores", "expected"), [(True, True), (False, False)])
def test_a_probe_counts_on_being_scored_only_where_every_draft_that_runs_is(scores, expected):
    config = parse_config(FAKE)
    drafts = [FakeEngine("d0"), LookupEngine("lookup", max_draft_tokens=8)]
    drafts[0].limits = replace(drafts[0].limits, scores=scores)
    guard = make_policy(config, drafts, {}, StepStats(Stats()))
    assert guard.policy.config.catchup_scored is expected


@pytest.mark.parametrize("alike", [True, False])
def test_a_plan_is_for_the_whole_batch_if_the_target_runs_all_drafts_so(alike):
    config = parse_config(FAKE)
    kinds = {"d0": True, "lookup": alike}
    drafts = [InTarget(name, max_draft_tokens=8, whole_batch=kind) for name, kind in kinds.items()]
    guard = make_policy(config, drafts, {}, StepStats(Stats()))
    assert guard.policy.config.whole_batch is alike


COMPILED = {"temperature", "top_k", "top_p", "seed", "end_ids"}
DECLINED = {
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens", "bad_words"),
    *("bias", "guide", "log_probs", "top_log_probs", "top_p_decay", "min_p"),
    *("top_p_min", "top_p_reset_id"),  # of no effect without a decay
    "prompt_ignore_length",  # of no effect without penalties
}


def test_every_sampling_option_is_compiled_into_networks_or_declined():
    """A new one is declined by ``suits`` in ``trt_graph/inputs.py`` until a network has it."""
    options = {field.name for field in fields(SamplingParams) if field.init}
    assert options == COMPILED | DECLINED


def test_an_engine_on_a_gpu_without_its_kernels_is_logged_and_counted(caplog):
    stats = Stats()
    drafts = [{"engine": "torch", "model": "m", "name": "small", "device": "cpu"}]
    target = {"engine": "torch", "model": "m", "device": "cuda"}
    config = parse_config({"target": target, "drafts": drafts})
    _report_slow_kernels(config, StepStats(stats))
    assert "target: torch on cuda, not cuda on a GPU: no NVIDIA GPU is visible" in caplog.text
    assert "small" not in caplog.text
    counters = [(name, labels) for name, labels, _ in stats.drain().counters]
    assert ("spindle_fallback_total", {"reason": "cuda_engine_unused"}) in counters
