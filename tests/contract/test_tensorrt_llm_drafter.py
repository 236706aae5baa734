"""The drafter for TensorRT-LLM's PyTorch backend, on a fake of its loop: never on the real one."""

import json

import numpy as np
import pytest

from backend.checked_settings import ConfigError
from backend.ops.stats import Stats
from policy import AdaptivePlanner, LatencyCurve, LatencyModel, LatencyTable, PlannerConfig, View
from tests.contract.fake_tensorrt_llm import Executor, Request, install

K_MAX = 4


@pytest.fixture
def plugin(monkeypatch):
    return install(monkeypatch)


@pytest.fixture(params=["1.2.1", "1.3.0rc20"])
def loop(request, plugin):
    """Makes an executor of a version, with the plug-in's arguments."""
    return lambda stats=None: Executor(
        **plugin.engine_args({}, K_MAX, 512, stats), version=request.param
    )


def repeating(number, tokens=160, period=10):
    return Request(number, [1000 * number + 1 + i % period for i in range(tokens)], 24)


def noise(number, tokens=160):
    text = np.random.default_rng(number).integers(1, 30_000, tokens).tolist()
    return Request(number, text, 24)


def serve(executor, requests, most=1000):
    executor.active += requests
    for _ in range(most):
        if not executor.active:
            return
        executor.step()
    pytest.fail("some requests never end")


def table(tmp_path, padded_factor):
    """Steps of up to 64 tokens; those of ``K_MAX`` tokens a row take so much longer."""
    file = tmp_path / "table.json"
    tokens = {1: 1e-5, 2: 1e-5, 5: padded_factor * 1e-5, 64: padded_factor * 1.01e-5}
    file.write_text(json.dumps(LatencyTable.synthetic("target", tokens).to_dict()))
    return {"latency_file": str(file)}


def test_texts_are_whole_and_take_fewer_steps(loop):
    executor = loop()
    requests = [repeating(n) for n in range(1, 5)]
    serve(executor, requests)
    assert all(r.text == r.truth for r in requests)
    assert len(executor.steps) < 110  # 137 without drafts
    assert executor._drafter._host.sequences == {}
    assert executor._resources.decoding == {}


def test_the_length_of_a_step_is_none_or_all(loop):
    executor = loop()
    serve(executor, [repeating(1), noise(2), noise(3)])
    assert {length for length, _, _ in executor.steps} == {0, K_MAX}
    within = [proposed for length, _, proposed in executor.steps if length]
    assert any(len(set(one)) > 1 for one in within)  # the executor pads, row by row


def test_rows_come_back_after_steps_without_drafts(loop):
    executor = loop()
    half = noise(1).truth[:80] + repeating(1, 80).truth
    request = Request(1, half, 24)
    serve(executor, [request])
    lengths = [length for length, _, _ in executor.steps]
    assert 0 in lengths
    assert K_MAX in lengths[lengths.index(0) :]
    assert request.py_disable_speculative_decoding == (lengths[-1] == 0)


def test_requests_that_come_later_are_drafted_for_too(loop):
    executor = loop()
    executor.active += [noise(1)]
    for _ in range(30):
        executor.step()
    late = repeating(2)
    serve(executor, [late])
    assert max(max(p, default=0) for _, _, p in executor.steps) == K_MAX
    assert late.text == late.truth


def test_the_last_step_of_a_request_is_learned_from(loop):
    executor = loop(stats := Stats())
    serve(executor, [repeating(1)])
    counters = stats.drain().counters
    emitted = sum(n for name, _, n in counters if name == "spindle_emitted_tokens_total")
    assert emitted == 135  # the first of 136 comes from the prompt's step


def test_a_request_has_its_own_ceiling(loop, plugin):
    executor = loop()
    drafter = executor._drafter
    asked = {n: plugin.HostRequest(lambda n=n: {1: None, 2: 0, 3: 2}[n]) for n in (1, 2, 3)}
    drafter.requests.update({100 + n: one for n, one in asked.items()})
    requests = [repeating(n) for n in (1, 2, 3)]
    serve(executor, requests)
    assert all(r.text == r.truth for r in requests)
    assert max(proposed for proposed, _ in asked[1].verified_steps) == K_MAX
    assert asked[2].verified_steps == []
    assert {proposed for proposed, _ in asked[3].verified_steps} <= {1, 2}
    emitted = sum(accepted + 1 for _, accepted in asked[1].verified_steps)
    assert 0 < emitted <= 136


def test_a_model_on_several_gpus_is_refused(monkeypatch):
    plugin = install(monkeypatch, ranks=2)
    with pytest.raises(ConfigError, match="one GPU, got 2 ranks"):
        plugin.engine_args({}, K_MAX, 512)


def test_settings_are_checked(plugin):
    with pytest.raises(ConfigError, match="unknown key 'draft'"):
        plugin.engine_args({"draft": "lookup"}, K_MAX, 512)


def test_a_file_is_planned_by_and_a_guess_is_counted(plugin, tmp_path, caplog):
    plugin.engine_args(table(tmp_path, 1.0), K_MAX, 512)
    assert "guess" not in caplog.text
    plugin.engine_args({}, K_MAX, 512)
    assert "guess" in caplog.text


def test_padding_has_its_price():
    curve = LatencyCurve(np.array([1.0] * 11 + [5.0] * 40), 0.0)
    model = LatencyModel(curve, (LatencyCurve(np.zeros(2), 0.0),))
    planner = AdaptivePlanner(("a",), model, PlannerConfig(k_max=K_MAX, padded_tokens=K_MAX))
    many = np.full((10, 1), K_MAX)
    view = View(("a",), np.arange(10), np.ones(10, np.int64), np.full(10, 99), many, many)
    problem, _ = planner.problem(view, planner.admit(view, planner.start(), 0.0))
    assert problem.undrafted_s.tolist() == [1.0] + [5.0] * 10 * K_MAX
