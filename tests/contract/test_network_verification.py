"""The verifications that TensorRT compiles, run by ONNX Runtime, are the torch rule: verdicts,
distributions, what is drawn of them.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from backend.engines.trt_graph.inputs import (
    DRAWN,
    GREEDY,
    inputs_of,
    network_for,
    suits,
    verdicts_of,
)
from backend.request import SamplingParams
from backend.sampling.distributions import target_probs
from backend.sampling.draw import HEAD, draw
from backend.sampling.randomness import word
from backend.sampling.verification import VerifyRequest
from backend.sequence import ROOT
from engines_build.trt_graph.distributions import DistributionOptions, VocabularyRows
from engines_build.trt_graph.graph import F32, F64
from tests.contract.network_cases import (
    DTYPES,
    VERIFICATIONS,
    Cases,
    Compiled,
    disagreements,
    is_tie,
    open_session,
    outcome,
    run,
)
from tests.contract.onnx_graph import OnnxGraph

MANY = 3000
"""Columns of distributions whose heads are drawn from: more than TopK takes."""


@pytest.mark.parametrize("network", VERIFICATIONS)
def test_every_verdict_is_the_rule_s_in_fp64(network):
    assert not disagreements(network, F64, 1000, seed=7)
    assert not disagreements(network, F64, 60, seed=8, vocab=MANY, batch=30)


@pytest.mark.parametrize("network", VERIFICATIONS)
def test_every_verdict_is_the_rule_s_in_fp32_but_for_ties_of_a_millionth(network):
    found = disagreements(network, F32, 1000, seed=9)
    found += disagreements(network, F32, 60, seed=10, vocab=MANY, batch=30)
    assert len(found) <= (network == DRAWN) * 2
    assert all(is_tie(request, logits, theirs) for request, logits, _, theirs in found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [40, MANY])
def test_a_token_is_the_one_that_is_drawn_of_the_network_s_own_distribution(dtype, vocab):
    compiled, source = Compiled(DRAWN, dtype, vocab), Cases(DRAWN, dtype, 11, vocab)
    requests, logits = source.batch(60)
    requests = [replace(request, tokens=[], parents=[]) for request in requests]
    outputs = compiled.outputs(requests, logits[:, :1])
    words = np.array([word(one.sampling.seed, one.position) for one in requests], np.uint64)
    verdicts = verdicts_of(DRAWN, requests, outputs)
    probs = outputs["probs"][:, 0].numpy()
    assert [verdict.column for verdict in verdicts] == draw(probs.__getitem__, words)


def test_cases_reach_all_that_can_happen():
    """Paths of any length, off the first child too, and tokens of heads as of tails, which read the
    distribution.
    """
    greedy, (requests, logits) = Compiled(GREEDY, F64), Cases(GREEDY, F64, 7).batch(500)
    paths = [verdict.path for verdict in greedy.verdicts(requests, logits)]
    assert {len(path) for path in paths} >= set(range(5))
    assert any(path != list(range(len(path))) for path in paths)
    drawn, (requests, logits) = Compiled(DRAWN, F64, MANY), Cases(DRAWN, F64, 8, MANY).batch(60)
    outputs, columns = drawn.outputs(requests, logits), []
    for number, verdict in enumerate(drawn.verdicts(requests, logits)):
        last = verdict.path[-1] + 1 if verdict.path else 0
        columns.append(float(outputs["probs"][number, last, verdict.column]))
    assert 5 < sum(mass < HEAD for mass in columns) < 55


def test_requests_at_temperature_0_among_drawn_ones_are_greedy():
    _, drawn = Compiled(GREEDY, F32), Compiled(DRAWN, F32)
    requests, logits = Cases(GREEDY, F32, 12).batch(100)
    alone = [outcome(one) for one in Compiled(GREEDY, F32).verdicts(requests, logits)]
    others, more = Cases(DRAWN, F32, 13).batch(100)
    rows = max(logits.shape[1], more.shape[1])
    both = [torch.nn.functional.pad(one, (0, 0, 0, rows - one.shape[1])) for one in (logits, more)]
    mixed = drawn.verdicts(requests + others, torch.cat(both))
    assert [outcome(one) for one in mixed[:100]] == alone
    assert [outcome(one) for one in mixed[100:]] == [
        outcome(one) for one in drawn.verdicts(others, more)
    ]


def test_another_seed_or_position_is_noticed():
    compiled, (requests, logits) = Compiled(DRAWN, F64), Cases(DRAWN, F64, 14).batch(200)
    right = compiled.verdicts(requests, logits)
    later = [replace(request, position=request.position + 1) for request in requests]
    wrong = compiled.verdicts(later, logits)
    assert sum(outcome(a) != outcome(b) for a, b in zip(right, wrong, strict=True)) > 40


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-6), (F64, 1e-12)])
def test_distributions_are_the_host_s(dtype, bound):
    graph, vocab = OnnxGraph(), 300
    logits = graph.input("logits", dtype, "batch", "rows", vocab)
    graph.output(
        "probs",
        VocabularyRows(graph, vocab, dtype).probs(
            logits, DistributionOptions.declare(graph, dtype)
        ),
    )
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 2, vocab)) * rng.choice([0.5, 3.0, 10.0], size=(400, 1, 1))
    values[::5] = np.round(values[::5])
    tensor = torch.from_numpy(values).to(DTYPES[dtype])
    params = [
        SamplingParams(float(t), int(k), float(p))
        for t, k, p in zip(
            rng.choice([0.3, 1.0, 2.0], 400),
            rng.choice([0, 2, 9, 299, 300], 400),
            rng.choice([1.0, 0.2, 0.9, 0.999], 400),
            strict=True,
        )
    ]
    inputs = inputs_of(DRAWN, [VerifyRequest(param, 1) for param in params], vocab, DTYPES[dtype])
    found = run(open_session(graph), {"logits": tensor, **inputs})["probs"]
    rows = zip(tensor.flatten(0, 1).numpy(), [p for p in params for _ in range(2)], strict=True)
    expected = np.stack([target_probs(row, param) for row, param in rows])
    assert np.abs(found.numpy().reshape(expected.shape) - expected).max() < bound


@pytest.mark.parametrize("sampling", [SamplingParams(1.0), SamplingParams(0.8, top_k=5, top_p=0.9)])
def test_two_tokens_after_a_tree_follow_the_target_s_distributions(sampling):
    """Whatever is proposed: the first by its distribution, and after a node that was followed the
    second by its own.
    """
    rng, vocab, texts = np.random.default_rng(1), 8, 20_000
    logits = torch.from_numpy(rng.normal(size=(5, vocab)) * 1.5)
    probs = np.stack([target_probs(row, sampling) for row in logits.numpy()])
    tree = {"tokens": [*probs[0].argsort()[-2:].tolist(), 1, 5], "parents": [ROOT, ROOT, 0, 1]}
    requests = [VerifyRequest(replace(sampling, seed=seed), 9, **tree) for seed in range(texts)]
    compiled, emitted = Compiled(DRAWN, F32, vocab), list[list[int]]()
    for first in range(0, texts, 1000):
        some = requests[first : first + 1000]
        verdicts = compiled.verdicts(some, logits.float().expand(len(some), -1, -1))
        emitted += [[*(tree["tokens"][node] for node in one.path), one.column] for one in verdicts]
    fits([text[0] for text in emitted], probs[0])
    for node in (0, 1):
        fits([text[1] for text in emitted if text[0] == tree["tokens"][node]], probs[node + 1])


@pytest.mark.parametrize("spread", [0.0, 0.7, 3.0])
def test_tokens_follow_a_distribution_with_a_tail_of_any_mass(spread):
    """Flat, its head is empty; steep, its tail is all but that."""
    rng, draws = np.random.default_rng(2), 4000
    logits = torch.from_numpy(rng.normal(size=(1, MANY)) * spread)
    probs = logits.softmax(-1)[0].numpy()
    compiled, drawn = Compiled(DRAWN, F32, MANY), []
    for first in range(0, draws, 250):
        some = [
            VerifyRequest(SamplingParams(1.0, seed=seed), 3) for seed in range(first, first + 250)
        ]
        verdicts = compiled.verdicts(some, logits.float().expand(250, 1, -1))
        drawn += [verdict.column for verdict in verdicts]
    order = np.argsort(probs, kind="stable")  # bins of like tokens, those of the tail among them
    bins = np.empty(MANY, np.int64)
    bins[order] = np.minimum(probs[order].cumsum() * 20, 19.0).astype(np.int64)
    fits(bins[drawn], np.bincount(bins, probs, 20))


def fits(found, probs, limit=4.5):
    """Chi-square against a distribution, as a normal deviate (Wilson and Hilferty): beyond 4.5 once
    in 300,000.
    """
    counts, possible = np.bincount(found, minlength=len(probs)), probs > 0
    assert not counts[~possible].any()
    expected, free = probs[possible] / probs[possible].sum() * len(found), possible.sum() - 1
    square = ((counts[possible] - expected) ** 2 / expected).sum()
    deviate = ((square / free) ** (1 / 3) - 1 + 2 / (9 * free)) / (2 / (9 * free)) ** 0.5
    assert deviate < limit, (square, free)


def test_what_is_compiled_in():
    plain = VerifyRequest(SamplingParams(0.8), 1, tokens=[1, 2], parents=[ROOT, 0])
    assert suits(plain)
    for option in ("log_probs", "repetition_penalty", "top_p_decay", "bias", "min_p"):
        value = {"log_probs": True, "bias": ((1, 1.0),)}.get(option, 0.9)
        assert not suits(replace(plain, sampling=replace(plain.sampling, **{option: value})))
    greedy = replace(plain, sampling=SamplingParams())
    assert network_for([greedy]) == GREEDY
    assert network_for([greedy, plain]) == DRAWN
