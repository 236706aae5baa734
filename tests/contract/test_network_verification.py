"""The verification that TensorRT compiles, run by ONNX Runtime, is the torch rule: decisions, laws, and by enumeration the emitted law."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from backend.engines.laws import Law, normalised, target_laws
from backend.engines.trees import Tree
from backend.engines.trt_graph.inputs import COUPLED, SAMPLED, Inputs, Verification
from backend.engines.verification import Request
from backend.ports import Proposal
from backend.request import SamplingParams
from engines_build.trt_graph.network_graph import F32, F64
from engines_build.trt_graph.network_laws import Options, Vocabulary
from engines_build.trt_graph.network_onnx import OnnxGraph
from tests.contract.network_cases import DTYPES, KINDS, Cases, disagreements, is_tie, open_session, outcome, run, session

NAMES = [kind.name for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_verdict_is_the_torch_rule_s_in_fp64(kind):
    assert not disagreements(kind, F64, 500, seed=7)


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
def test_every_verdict_is_the_torch_rule_s_in_fp32_but_for_ties_of_a_millionth(kind):
    assert all(is_tie(request, logits, theirs) for request, logits, _, theirs in disagreements(kind, F32, 500, seed=8))


def test_a_network_that_reads_another_number_is_noticed():
    kind, seeds = Verification(SAMPLED), Cases(Verification(SAMPLED), F64, 9)
    requests, logits = seeds.batch(200)
    inputs = Inputs(logits.shape[-1], torch.float64)
    network, tensors = session(kind, F64), {"logits": logits, **inputs.of(kind, requests)}
    right = inputs.verdicts(kind, requests, run(network, tensors))
    wrong = inputs.verdicts(kind, requests, run(network, tensors | {"accept": tensors["accept"].flip(0)}))
    assert sum(outcome(a) != outcome(b) for a, b in zip(right, wrong, strict=True)) > 20


@pytest.mark.parametrize(("dtype", "bound"), [(F32, 1e-6), (F64, 1e-12)])
def test_laws_are_those_of_torch(dtype, bound):
    graph, vocab = OnnxGraph(), 300
    logits = graph.input("logits", dtype, "batch", "rows", vocab)
    graph.output("laws", Vocabulary(graph, vocab, dtype).laws(logits, Options.declare(graph, dtype)))
    rng = np.random.default_rng(0)
    values = rng.normal(size=(400, 2, vocab)) * rng.choice([0.5, 3.0, 10.0], size=(400, 1, 1))
    values[::5] = np.round(values[::5])
    tensor = torch.from_numpy(values).to(DTYPES[dtype])
    params = [
        SamplingParams(float(t), int(k), float(p))
        for t, k, p in zip(
            rng.choice([0.3, 1.0, 2.0], 400), rng.choice([0, 2, 9, 299, 300], 400), rng.choice([1.0, 0.2, 0.9, 0.999], 400), strict=True
        )
    ]
    requests = [Request(param, 1, 0, []) for param in params]
    found = run(open_session(graph), {"logits": tensor, **Inputs(vocab, DTYPES[dtype])._options(requests)})["laws"]
    expected = normalised(target_laws(tensor.flatten(0, 1), [param for param in params for _ in range(2)])).view_as(found)
    assert (found - expected).abs().max() < bound


TINY, BITS, DIGIT = 4, 24, 8


@cache
def tiny_session(kind):
    return session(kind, F32, TINY)


class Decisions:
    """What the compiled arithmetic does with its uniforms, found by bisection: the chance that a candidate passes, the law behind it."""

    def __init__(self, kind: Verification, request: Request, logits: torch.Tensor) -> None:
        self._kind, self._request, self._inputs = kind, request, Inputs(TINY, torch.float32)
        self._network = tiny_session(kind)
        self._fixed = {"logits": logits[None].float(), **self._inputs.of(kind, [request])}

    def passes(self, row: int, rank: int, before: list[tuple[int, int, float]]) -> float:
        """The chance that the candidate of a row passes, where the (row, rank) of ``before`` have these numbers."""
        return self._bisect("accept", (row, rank), before, lambda verdict: self._chose(verdict, row, rank))

    def law(self, row: int, before: list[tuple[int, int, float]]) -> list[float]:
        """The law of the token emitted at a row."""
        heights = [self._bisect("emit", (row,), before, lambda verdict, column=column: verdict.column <= column) for column in range(TINY)]
        return np.diff([0.0, *heights]).tolist()

    def _chose(self, verdict, row, rank):
        if not self._kind.width:
            return verdict.accepted > row
        children = [child for child, parent in enumerate(self._request.tree.parents) if parent == row - 1]
        return children[rank] in verdict.path

    def _bisect(self, name, place, before, predicate):
        """The share of uniforms, from 0 on, for which the predicate holds: it holds below a height and not above."""
        height = 0.0
        for digits in range(DIGIT, BITS + 1, DIGIT):
            trials = height + np.arange(1, 2**DIGIT + 1) * 2.0**-digits
            height += sum(map(predicate, self._verdicts(name, place, trials - 2.0**-BITS, before))) * 2.0**-digits
            if height == 1.0:
                break
        return height

    def _verdicts(self, name, place, numbers, before):
        tensors = {key: tensor.repeat(len(numbers), *[1] * (tensor.ndim - 1)) for key, tensor in self._fixed.items()}
        for row, rank, value in before:
            tensors["accept"][:, row, rank] = value
        tensors[name][(slice(None), *place)] = torch.from_numpy(numbers).float()
        return self._inputs.verdicts(self._kind, [self._request] * len(numbers), run(self._network, tensors))


PASS, FAIL = 0.0, 1.0 - 2.0**-24


@pytest.mark.parametrize("seed", range(2))
def test_by_enumeration_a_compiled_chain_emits_the_target_s_law(seed):
    rng = np.random.default_rng(seed)
    logits, law = torch.from_numpy(rng.normal(size=(3, TINY)) * 2), torch.from_numpy(rng.dirichlet([0.7] * TINY, size=2)).float()
    sampling = SamplingParams(0.8, top_k=3 + seed % 2, top_p=0.95)
    target = normalised(target_laws(logits.float(), [sampling] * 3)).numpy()
    emitted = np.zeros((TINY, TINY, TINY))
    for chain in itertools.product(range(TINY), repeat=2):
        request = Request(sampling, 5, 0, list(chain), Law(law))
        decisions = Decisions(Verification(SAMPLED), request, logits)
        drawn = float(normalised(law)[0, chain[0]] * normalised(law)[1, chain[1]])
        first, second = decisions.passes(0, 0, [(1, 0, FAIL)]), decisions.passes(1, 0, [(0, 0, PASS)])
        laws = [decisions.law(0, [(0, 0, FAIL)]), decisions.law(1, [(0, 0, PASS), (1, 0, FAIL)])]
        laws.append(decisions.law(2, [(0, 0, PASS), (1, 0, PASS)]))
        if first < 1.0:
            emitted += drawn * (1.0 - first) * np.array(laws[0])[:, None, None] * target[1][:, None] * target[2]
        if second < 1.0:
            emitted[chain[0]] += drawn * first * (1.0 - second) * np.array(laws[1])[:, None] * target[2]
        emitted[chain] += drawn * first * second * np.array(laws[2])
    expected = target[0][:, None, None] * target[1][:, None] * target[2]
    assert np.abs(emitted - expected).max() < 1e-6


@pytest.mark.parametrize("seed", range(2))
def test_by_enumeration_a_compiled_tree_emits_the_target_s_law(seed):
    """Two candidates drawn from one law for one place; the rows behind them are laws of their own and emit as they are."""
    rng = np.random.default_rng(10 + seed)
    logits, law = torch.from_numpy(rng.normal(size=(3, TINY)) * 2), torch.from_numpy(rng.dirichlet([0.7] * TINY, size=1)).float()
    sampling = SamplingParams(1.0, top_p=0.9)
    target = normalised(target_laws(logits[:1].float(), [sampling]))[0].numpy()
    emitted = np.zeros(TINY)
    for pair in itertools.product(range(TINY), repeat=2):
        tree = Tree.of(Proposal("draft", [pair[0]], Law(law), [[pair[1]]]), drawn=True)
        decisions = Decisions(Verification(SAMPLED, 2, 1), Request(sampling, 5, 0, tree.tokens, tree=tree), logits)
        drawn = float(normalised(law)[0, pair[0]] * normalised(law)[0, pair[1]])
        first = decisions.passes(0, 0, [(0, 1, FAIL)])
        second = decisions.passes(0, 1, [(0, 0, FAIL)]) if first < 1.0 else 0.0
        emitted[pair[0]] += drawn * first
        emitted[pair[1]] += drawn * (1.0 - first) * second
        if first < 1.0 and second < 1.0:
            emitted += drawn * (1.0 - first) * (1.0 - second) * np.array(decisions.law(0, [(0, 0, FAIL), (0, 1, FAIL)]))
    assert np.abs(emitted - target).max() < 1e-6


def test_a_verification_says_what_it_suits():
    plain, coupled = SamplingParams(0.8), SamplingParams(0.8, coupled=True)
    chain = Request(plain, 1, 0, [1, 2])
    assert Verification(SAMPLED).suits(chain)
    assert Verification(SAMPLED, 2, 2).suits(chain)
    assert not Verification(SAMPLED, 2, 1).suits(chain)
    assert Verification(COUPLED).suits(replace(chain, sampling=coupled))
    assert not Verification(COUPLED).suits(chain)
    for option in ({"log_probs": True}, {"repetition_penalty": 1.1}, {"bias": ((1, 1.0),)}):
        assert not Verification(SAMPLED).suits(replace(chain, sampling=replace(plain, **option)))
    wide = Tree.of(Proposal("draft", [1], None, [[2, 3]]), drawn=False)
    assert not Verification(SAMPLED, 2, 1).suits(replace(chain, tokens=wide.tokens, tree=wide))
