"""The engine over compiled networks, every network executed by ONNX Runtime in the place of
TensorRT: the exactness suite once more.
"""

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import ROOT, Proposal, Sequence
from tests.contract import checks, deployment
from tests.contract.deployment import K_MAX, VOCAB, tiny_engine
from tests.contract.exact_cases import SCENARIOS
from tests.contract.onnx_runtime import onnx_engine
from tests.contract.reference import Reference
from tests.fakes.llamas import torch_engine

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Make every tiny engine one of compiled networks, and compare it with the torch engine of the
    same weights.
    """
    reference = Reference.__init__

    def make_engine(*arguments, **options):
        engine = onnx_engine(*arguments, **options)
        engine.of_torch = lambda: torch_engine(*arguments, **options)
        return engine

    monkeypatch.setattr(deployment, "make_engine", make_engine)
    monkeypatch.setattr(
        Reference, "__init__", lambda self, engine: reference(self, engine.of_torch())
    )


@pytest.mark.parametrize("name", SCENARIOS)
def test_over_compiled_networks_it_is_exact(name):
    scenario, properties = SCENARIOS[name]
    checks.exact(scenario, *properties)


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(0.8, seed=1),
    SamplingParams(1.5, top_k=9, top_p=0.9, seed=2),
    SamplingParams(0.8, seed=3, log_probs=True),
    SamplingParams(top_k=1, temperature=1.0, repetition_penalty=1.3),
    SamplingParams(1.0, seed=5, top_p=0.9, top_p_decay=0.9),
)


def test_texts_are_those_of_the_torch_engine_and_trees_are_followed_in_every_network():
    """Requests side by side, some to be decided inside and some not; trees hold the text's tokens
    among others.
    """
    engine, rng = tiny_engine(), np.random.default_rng(0)
    texts = [plain(engine.of_torch(), sampling) for sampling in SAMPLINGS]
    sequences = [new_sequence(engine, number) for number in range(len(SAMPLINGS))]
    engine.submit([Turn(one, 2, run=0) for one in sequences])
    assert not any(done.tokens or done.error for done in engine.poll(0.0))
    followed = 0
    while going := [one for one in sequences if len(one.tokens) + K_MAX + 1 < len(texts[one.id])]:
        chosen = [one for one in going if rng.random() < 0.8]
        trees = [tree(texts[one.id][len(one.tokens) :], rng) for one in chosen]
        turns = [
            Turn(one, len(one.tokens), proposal=nodes)
            for one, nodes in zip(chosen, trees, strict=True)
        ]
        engine.submit(turns)
        for done, one in zip(engine.poll(0.0), chosen, strict=True):
            assert done.error is None
            one.tokens += done.tokens
            followed += done.accepted
            assert one.tokens == texts[one.id][: len(one.tokens)]
    assert followed > 20
    assert set(engine.model._runtime.ran) == {"logits", "greedy", "drawn"}


def new_sequence(engine, number):
    sampling, blocks = SAMPLINGS[number], list(range(4 * number, 4 * number + 4))
    return Sequence(number, [1, 2, 3 + number], 3, sampling, blocks={engine.name: blocks})


def plain(engine, sampling):
    sequence = new_sequence(engine, SAMPLINGS.index(sampling))
    while len(sequence.tokens) < 40:
        engine.submit([Turn(sequence, len(sequence.tokens))])
        sequence.tokens += engine.poll(0.0)[0].tokens
    return sequence.tokens


def tree(text, rng):
    """Nodes, some of them the text's, in any order of siblings."""
    edges, path = [], ROOT
    for depth in range(int(rng.integers(0, K_MAX // 2 + 1))):
        wrong = (int(text[depth] + 1) % VOCAB, path)
        pair = [(text[depth], path), wrong][:: rng.choice([1, -1])]
        edges += pair
        path = edges.index((text[depth], path) if rng.random() < 0.8 else wrong)
    return Proposal(
        "draft", [token for token, _ in edges], [parent for _, parent in edges], [1.0] * len(edges)
    )
