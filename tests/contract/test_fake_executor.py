"""The fake executor against the recorded API of ``tensorrt_llm.bindings.executor``, and its decoder against laws worked out by hand.

The real module is held against the same record where it can be imported (marker ``trtllm``: inside NVIDIA's container).
"""

import dataclasses
import inspect
import json
from datetime import timedelta
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contract import fake_executor as trtllm
from tests.contract import fake_executor_types as types
from tests.contract.engine_folders import engine_folder

RECORD = json.loads((Path(__file__).parent / "tensorrt_llm_executor_api.json").read_text())
FAKED = [name for name in RECORD["classes"] if hasattr(trtllm, name) or hasattr(types, name)]
VOCAB = 6


def faked(name):
    return getattr(trtllm, name, None) or getattr(types, name)


def parameters(function):
    """A signature as the record writes it."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "_"):
            continue
        entry = {"name": parameter.name}
        if parameter.kind is parameter.KEYWORD_ONLY:
            entry["keyword_only"] = True
        if parameter.default is not parameter.empty:
            entry["default"] = written(parameter)
        found.append(entry)
    return found


def written(parameter):
    """A default: a plain value, the name of an enum's value, or the name of a class that is made anew each time."""
    value = parameter.default
    if repr(value) == "<factory>":
        return f"{parameter.annotation}()"
    return str(value) if isinstance(value, Enum) else value


def test_the_fake_has_what_this_project_uses():
    used = {"Executor", "ExecutorConfig", "Request", "SamplingConfig", "OutputConfig", "ExternalDraftTokensConfig", "KvCacheConfig"}
    assert used | {"KvCacheRetentionConfig", "ParallelConfig", "Response", "Result", "IterationStats"} <= set(FAKED)


@pytest.mark.parametrize("name", [name for name in FAKED if RECORD["classes"][name]["constructors"][0] and name != "Response"])
def test_constructors_are_those_of_the_record(name):
    assert parameters(faked(name)) == RECORD["classes"][name]["constructors"][0]


@pytest.mark.parametrize("name", FAKED)
def test_attributes_are_some_of_the_record_and_no_others(name):
    cls, entry = faked(name), RECORD["classes"][name]
    ours = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    assert ours <= {*entry["attributes"], *(p["name"] for c in entry["constructors"] for p in c)}


@pytest.mark.parametrize("name", ["Executor", "Response"])
def test_methods_are_some_of_the_record_and_no_others(name):
    recorded = RECORD["classes"][name]["methods"]
    for method, function in inspect.getmembers(faked(name), inspect.isfunction):
        if not method.startswith("_"):
            assert parameters(function) in recorded[method]


@pytest.mark.parametrize("name", RECORD["enums"])
def test_enums_are_those_of_the_record(name):
    if hasattr(types, name):
        assert [member.name for member in getattr(types, name)] == RECORD["enums"][name]


@pytest.mark.trtllm
def test_the_real_module_has_what_the_record_says():
    real = pytest.importorskip("tensorrt_llm.bindings.executor")
    for name, entry in RECORD["classes"].items():
        cls = getattr(real, name, None) or getattr(real.KvCacheRetentionConfig, name, None)
        assert cls is not None, f"{name} is missing"
        missing = [a for a in [*entry["attributes"], *entry["methods"]] if not hasattr(cls, a)]
        assert not missing, f"{name} lacks {missing}"


# -- the decoder


def execute(folder, law, requests, **config):
    trtllm.Executor.models[str(folder)] = trtllm.Model(law, **config.pop("model", {}))
    executor = trtllm.Executor(folder, trtllm.ModelType.DECODER_ONLY, trtllm.ExecutorConfig(gather_generation_logits=True, **config))
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
    return types.Request([1], max_tokens, sampling_config=sampling, external_draft_tokens_config=config, output_config=output)


def counting(tokens):
    """The next token is the last one plus one."""
    return np.eye(VOCAB)[(tokens[-1] + 1) % VOCAB] * 9.0


def test_greedy_verification_accepts_what_the_target_would_write_and_ends_the_request(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=4)
    _, (right, half, wrong) = execute(
        folder, counting, [request([2, 3, 4], max_tokens=9), request([2, 5, 4], max_tokens=9), request([3], max_tokens=9)]
    )
    assert [answer.result.output_token_ids[0] for answer in (right, half, wrong)] == [[2, 3, 4, 5], [2, 3], [2]]
    assert right.result.is_final


def test_with_draft_logits_the_emitted_token_follows_the_targets_law(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=3, max_draft_len=1)
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.2, 0.6])
    rng = np.random.default_rng(0)
    asks = [request([int(rng.choice(3, p=q))], torch.log(torch.tensor(q))[None], seed=s, top_p=1.0, temperature=1.0) for s in range(6000)]
    _, answers = execute(folder, fixed(*p), asks)
    shares = np.bincount([a.result.output_token_ids[0][0] for a in answers], minlength=3) / len(answers)
    assert np.abs(shares - p).max() < 0.03


def test_without_draft_logits_sampling_does_not_keep_the_law(tmp_path):
    """Two draws where one is due: the reason why the adapter always gives draft logits where it samples."""
    folder = engine_folder(tmp_path, vocab_size=2, max_draft_len=1)
    _, answers = execute(folder, fixed(0.5, 0.5), [request([0], seed=s, top_p=1.0, temperature=1.0) for s in range(4000)])
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
    first, again, salted = (types.Request(prompt, 1, output_config=types.OutputConfig(return_perf_metrics=True)) for _ in range(3))
    salted.cache_salt_id = 7
    executor, _ = execute(folder, counting, [first])
    for later, reused in ((again, 2), (salted, 0)):
        executor.enqueue_request(later)
        (answer,) = executor.await_responses()
        assert answer.result.request_perf_metrics.kv_cache_metrics.num_reused_blocks == reused
    assert [s.inflight_batching_stats.num_ctx_tokens for s in executor.get_latest_iteration_stats()] == [10, 2, 10]


def test_responses_come_late_out_of_order_and_in_parts(tmp_path):
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    trtllm.Executor.models[str(folder)] = trtllm.Model(counting, trtllm.Behaviour(late=0.5, shuffled=True))
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
    _, (refused,) = execute(folder, counting, [request()], model={"behaviour": trtllm.Behaviour(refuses=1.0)})
    assert refused.error_msg == "injected failure"
    with pytest.raises(RuntimeError, match="died"):
        execute(folder, counting, [request()], model={"behaviour": trtllm.Behaviour(dies_at=1)})


def test_a_request_with_min_tokens_keeps_all_later_ones_from_ending_at_once(tmp_path):
    """The decoder's least length is 1 by default, once it is looked at: a turn of one token could never end the text."""
    folder = engine_folder(tmp_path, vocab_size=VOCAB, max_draft_len=2)
    ends = types.Request([1], 3, end_id=2, output_config=types.OutputConfig(exclude_input_from_output=True))
    executor, (before,) = execute(folder, counting, [ends])
    assert (before.result.finish_reasons, before.result.output_token_ids) == ([types.FinishReason.END_ID], [[]])
    executor.enqueue_requests([request(min_tokens=1), ends])
    after = {r.request_id: r for _ in range(3) for r in executor.await_responses()}
    assert after[3].result.output_token_ids[0][:1] == [0]
