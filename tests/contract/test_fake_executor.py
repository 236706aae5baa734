"""The fake executor: what it refuses as nanobind and the C++ sources do, and its decoder against
distributions worked out by hand.

The real module is compared with the same record where it can be imported (marker ``trtllm``: inside
NVIDIA's container).
"""

from datetime import timedelta

import numpy as np
import pytest
import torch

from backend.engines.port import Turn
from backend.engines.trtllm.engine import ExecutorSettings, executor_config
from backend.engines.trtllm.folder import read_engine_folder
from backend.engines.trtllm.requests import Requests
from backend.request import SamplingParams
from backend.sequence import Proposal, Sequence
from tests.contract import fake_executor as trtllm
from tests.contract import fake_executor_types as types
from tests.contract.engine_folders import engine_folder

VOCAB = 6
KEEP = timedelta(seconds=1)
RANGE = types.TokenRangeRetentionConfig(0, None, 80, KEEP)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: types.KvCacheRetentionConfig([RANGE], 80, KEEP),
            "directory must be str, got None",
        ),
        (
            lambda: types.KvCacheRetentionConfig([RANGE], 80, 1000),
            "decode_duration_ms must be Optional.timedelta., got 1000",
        ),
        (
            lambda: types.TokenRangeRetentionConfig(0, None),
            "missing a required argument: 'priority'",
        ),
        (lambda: types.SamplingConfig(1, 50), "too many positional arguments"),
        (lambda: types.SamplingConfig(top_k=1.0), "top_k must be Optional.int32., got 1.0"),
        (lambda: types.SamplingConfig(seed=2**64), "seed must be Optional.uint64."),
        (lambda: types.SamplingConfig(temp=1.0), "unexpected keyword argument 'temp'"),
        (lambda: types.Request([1], 1, False), "too many positional arguments"),
        (lambda: types.Request([np.int64(1)], 1), "input_token_ids must be list.int32."),
        (
            lambda: types.Request([1], 1, sampling_config=None),
            "sampling_config must be SamplingConfig, got None",
        ),
        (
            lambda: types.Request([1], 1, bad_words=[2]),
            "bad_words must be Optional.list.list.int32..., got .2.",
        ),
        (
            lambda: types.Request([1], 1, allotted_time_ms=5),
            "allotted_time_ms must be Optional.timedelta., got 5",
        ),
        (
            lambda: types.ExternalDraftTokensConfig([1], np.zeros((1, VOCAB))),
            "logits must be Optional.Tensor.",
        ),
        (
            lambda: types.OrchestratorConfig(True, None),
            "worker_executable_path must be str, got None",
        ),
        (
            lambda: types.ExecutorConfig(1, parallel_config=types.KvCacheConfig()),
            "parallel_config must be Optional.ParallelConfig.",
        ),
        (
            lambda: types.ExecutorConfig(1, batching_type="INFLIGHT_"),
            "batching_type must be BatchingType",
        ),
    ],
)
def test_a_call_that_nanobind_refuses_is_a_type_error(call, message):
    with pytest.raises(TypeError, match=message):
        call()


TURNS = {
    "greedy": (
        SamplingParams(min_tokens=9, end_ids=(3,)),
        {"proposal": Proposal.chain("d", [2, 3, 4])},
    ),
    "sampled": (
        SamplingParams(0.7, top_k=5, top_p=0.9, seed=2**63),
        {"proposal": Proposal.chain("d", [2, 3])},
    ),
    "every option": (
        SamplingParams(
            1.0,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            prompt_ignore_length=5,
            bias=((2, 1.0),),
            bad_words=((1, 2),),
            log_probs=True,
        ),
        {"run": 3},
    ),
}


def make_all(module, folder):
    """Make every object that the adapter makes, with its own calls."""
    engine = read_engine_folder(folder)
    for settings in (
        ExecutorSettings(),
        ExecutorSettings(gpus=(0, 1), orchestrated=True, worker="/opt/worker"),
    ):
        executor_config(module, engine, settings)
    requests = Requests(module, engine, 1.0)
    for number, (sampling, options) in enumerate(TURNS.values()):
        requests.ask(
            Turn(Sequence(number, [1, 2, 1], 2, sampling, salt="tenant"), 3, **options), begun=True
        )


def test_what_the_adapter_makes_fits_the_record(tmp_path):
    make_all(trtllm, engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4))


@pytest.mark.trtllm
def test_what_the_adapter_makes_fits_the_real_module_which_has_what_the_record_says(tmp_path):
    real = pytest.importorskip("tensorrt_llm.bindings.executor")
    make_all(real, engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4))
    for name, entry in types.RECORD["classes"].items():
        cls = getattr(real, name, None) or getattr(real.KvCacheRetentionConfig, name, None)
        assert cls is not None, f"{name} is missing"
        missing = [a for a in [*entry["attributes"], *entry["methods"]] if not hasattr(cls, a)]
        assert not missing, f"{name} lacks {missing}"


# -- the decoder


def execute(folder, forward, requests, **config):
    trtllm.Executor.models[str(folder)] = trtllm.Model(forward, **config.pop("model", {}))
    executor = trtllm.Executor(
        folder,
        trtllm.ModelType.DECODER_ONLY,
        trtllm.ExecutorConfig(gather_generation_logits=True, **config),
    )
    ids = executor.enqueue_requests(requests)
    answers = {}
    while len(answers) < len(ids):
        for response in executor.await_responses(timedelta(milliseconds=10)):
            if response.has_error() or response.result.is_final:
                answers[response.request_id] = response
    return executor, [answers[i] for i in ids]


def fixed(*probs):
    with np.errstate(divide="ignore"):
        logits = np.log(np.array(probs)).clip(-1e30)
    return lambda tokens: logits


def request(draft=None, logits=None, max_tokens=1, **options):
    sampling = types.SamplingConfig(**options) if options else types.SamplingConfig()
    config = types.ExternalDraftTokensConfig(draft, logits) if draft else None
    output = types.OutputConfig(exclude_input_from_output=True, return_perf_metrics=True)
    return types.Request(
        [1],
        max_tokens,
        sampling_config=sampling,
        external_draft_tokens_config=config,
        output_config=output,
    )


def counting(tokens):
    """The next token is the last one plus one."""
    return np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB] * 9.0


def test_greedy_verification_accepts_what_the_target_would_write_and_ends_the_request(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4)
    _, (right, half, wrong) = execute(
        folder,
        counting,
        [
            request([2, 3, 4], max_tokens=9),
            request([2, 5, 4], max_tokens=9),
            request([3], max_tokens=9),
        ],
    )
    assert [answer.result.output_token_ids[0] for answer in (right, half, wrong)] == [
        [2, 3, 4, 5],
        [2, 3],
        [2],
    ]
    assert right.result.is_final


def test_with_draft_logits_the_emitted_token_follows_the_targets_distribution(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=3, max_draft_len=1)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])
    rng, logits = np.random.default_rng(0), torch.log(torch.tensor(q, dtype=torch.float32))[None]
    asks = [
        request([int(rng.choice(3, p=q))], logits, seed=s, top_p=1.0, temperature=1.0)
        for s in range(6000)
    ]
    _, answers = execute(folder, fixed(*p), asks)
    shares = np.bincount([a.result.output_token_ids[0][0] for a in answers], minlength=3) / len(
        answers
    )
    assert np.abs(shares - p).max() < 0.03


def test_without_draft_logits_sampling_does_not_keep_the_distribution(tmp_path):
    """Two draws where one is due: the reason why the adapter always gives draft logits where it
    samples.
    """
    folder = engine_folder(tmp_path, vocab_size=2, max_draft_len=1)
    _, answers = execute(
        folder,
        fixed(0.5, 0.5),
        [request([0], seed=s, top_p=1.0, temperature=1.0) for s in range(4000)],
    )
    share = np.mean([a.result.output_token_ids[0][0] == 0 for a in answers])
    assert share == pytest.approx(0.75, abs=0.03)


def test_a_draft_that_is_too_long_is_an_error_of_its_request_alone(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    _, (bad, good) = execute(folder, counting, [request([2, 3, 4]), request([2, 3])])
    assert "exceeds maximum draft tokens length (2)" in bad.error_msg
    with pytest.raises(RuntimeError):
        _ = bad.result
    assert good.result.output_token_ids == [[2]]  # max_tokens 1


def test_a_target_without_block_reuse_is_refused(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2, paged_context_fmha=False)
    with pytest.raises(RuntimeError, match="block reuse must be enabled"):
        execute(folder, counting, [])


def test_a_second_request_finds_the_blocks_of_the_first_but_for_another_salt(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2, tokens_per_block=4)
    prompt = [n % VOCAB for n in range(10)]
    first, again, salted = (
        types.Request(prompt, 1, output_config=types.OutputConfig(return_perf_metrics=True))
        for _ in range(3)
    )
    salted.cache_salt_id = 7
    executor, _ = execute(folder, counting, [first])
    for later, reused in ((again, 2), (salted, 0)):
        executor.enqueue_request(later)
        (answer,) = executor.await_responses()
        assert answer.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks == reused
    assert [
        s.inflight_batching_stats.num_ctx_tokens for s in executor.get_latest_iteration_stats()
    ] == [10, 2, 10]


def test_responses_come_late_out_of_order_and_in_parts(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    trtllm.Executor.models[str(folder)] = trtllm.Model(
        counting, trtllm.Behaviour(late=0.5, shuffled=True)
    )
    executor = trtllm.Executor(folder, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig())
    ids = executor.enqueue_requests([types.Request([1], 3, streaming=True) for _ in range(8)])
    order, parts, done = [], {i: [] for i in ids}, set()
    while len(done) < len(ids):
        for response in executor.await_responses(timedelta(milliseconds=1)):
            order.append(response.request_id)
            parts[response.request_id] += response.result.output_token_ids[0]
            done |= {response.request_id} if response.result.is_final else set()
    assert order != sorted(order)
    assert len(order) == 24
    assert all(tokens == [2, 3, 4] for tokens in parts.values())


def test_cancelled_refused_full_and_dead(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    executor, _ = execute(folder, counting, [], max_queue_size=1)
    number = executor.enqueue_request(request(max_tokens=50))
    with pytest.raises(RuntimeError, match="Maximum queue size of 1"):
        executor.enqueue_request(request())
    executor.cancel_request(number)
    (answer,) = executor.await_responses()
    assert answer.result.finish_reasons == [types.FinishReason.CANCELLED]
    _, (refused,) = execute(
        folder, counting, [request()], model={"behaviour": trtllm.Behaviour(refuses=1.0)}
    )
    assert refused.error_msg == "injected failure"
    with pytest.raises(RuntimeError, match="died"):
        execute(folder, counting, [request()], model={"behaviour": trtllm.Behaviour(dies_at=1)})


def test_an_end_that_the_executor_knows_has_no_row_of_logits(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    output = types.OutputConfig(exclude_input_from_output=True, return_generation_logits=True)
    draft = types.ExternalDraftTokensConfig([2, 3])
    asks = [
        types.Request([1], 3, end_id=3, output_config=output, external_draft_tokens_config=d)
        for d in (draft, None)
    ]
    _, answers = execute(folder, counting, asks)
    for answer in answers:
        assert (answer.result.finish_reasons, answer.result.output_token_ids) == (
            [types.FinishReason.END_ID],
            [[2]],
        )
        assert tuple(answer.result.generation_logits.shape) == (1, 1, VOCAB)


def test_draft_logits_of_another_type_than_the_engines_are_refused(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2, logits_dtype="float16")
    _, (answer,) = execute(folder, counting, [request([2], torch.zeros(1, VOCAB), top_p=1.0)])
    assert "do not match the engine's logits of torch.float16" in answer.error_msg


@pytest.mark.parametrize("chunked", [False, True])
def test_past_the_token_budget_texts_wait_or_are_cut_and_their_drafts_discarded(tmp_path, chunked):
    """Six texts of 10 tokens with drafts of 4 that are right, a budget of 48, and everything but
    the last block in the cache.
    """
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4, max_num_tokens=48)
    texts = [[n, *(i % VOCAB for i in range(9))] for n in range(VOCAB)]
    output = types.OutputConfig(exclude_input_from_output=True)

    def ask(text, draft):
        config = (
            types.ExternalDraftTokensConfig([(text[-1] + i) % VOCAB for i in range(1, 5)])
            if draft
            else None
        )
        return types.Request(
            text, 5 if draft else 1, output_config=output, external_draft_tokens_config=config
        )

    executor, _ = execute(
        folder, counting, [ask(text, draft=False) for text in texts], enable_chunked_context=chunked
    )
    before = executor.iterations
    executor.enqueue_requests([ask(text, draft=True) for text in texts])
    answers = []
    while len(answers) < len(texts):
        answers += executor.await_responses()
    assert all(len(answer.result.output_token_ids[0]) == 5 for answer in answers)
    if chunked:
        assert executor.discarded >= 4 * 4
        assert executor.iterations - before >= 5  # plain ones
    else:
        assert (executor.discarded, executor.iterations - before) == (0, 2)


def test_a_text_longer_than_the_budget_runs_in_chunks_or_not_at_all(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4, max_num_tokens=16)
    ask = types.Request(
        [1] * 40, 1, output_config=types.OutputConfig(exclude_input_from_output=True)
    )
    executor, (answer,) = execute(folder, counting, [ask], enable_chunked_context=True)
    assert (executor.chunks, answer.result.output_token_ids) == (2, [[2]])
    _, (answer,) = execute(folder, counting, [ask])
    assert "exceeds maximum input length (16)" in answer.error_msg
