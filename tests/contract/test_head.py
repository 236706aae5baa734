"""A head as a draft: it reads the target's state of the text's last token, however that token
came about, and no text depends on it.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from backend.config import parse_config
from backend.engines.head.engine import HeadEngine
from backend.engines.head.folder import HeadConfig
from backend.engines.head.kind import convert, latency_cases
from backend.engines.head.network import HeadNetwork, TorchHead
from backend.engines.head.openvino import OpenvinoHead
from backend.engines.models.reading import bring_embeddings
from backend.engines.port import HiddenStates, Turn
from backend.engines.registry import Service
from backend.request import SamplingParams
from backend.sampling.randomness import word
from backend.sequence import Sequence
from engines_build.timing import Rig
from tests.contract import checks, deployment, scenarios
from tests.contract.deployment import K_MAX, TAPS, VOCAB
from tests.contract.heads import HEAD, SCENARIOS, absorb_another_row, serve
from tests.contract.openvino_engines import on_openvino, with_larger_heads
from tests.contract.scenarios import BUSY, CROWDED


def network(seed=0):
    torch.manual_seed(seed)
    config = HeadConfig(VOCAB, deployment.tiny_config().hidden_size, 8, TAPS, rows=15)
    return HeadNetwork(config).double().requires_grad_(requires_grad=False)


def weights():
    shape = deployment.tiny_config().shapes()["model.embed_tokens.weight"]
    return np.random.default_rng(0).standard_normal(shape)


class RecordedHead(HeadEngine):
    """Notes what it was asked with, and what it proposed."""

    def __init__(self, most=K_MAX):
        ids, table = np.random.default_rng(1).permutation(VOCAB)[:15], weights()
        made = network()
        head = TorchHead(made, table[ids])
        super().__init__("near", made.config, head, ids, table, table, max_draft_tokens=most)
        self.noted = []

    def poll(self, timeout_s):
        asked = {
            turn.sequence.id: (list(turn.sequence.tokens), turn.sequence, turn.run)
            for turn in self._turns
            if turn.nodes
        }
        found = super().poll(timeout_s)
        for completion in found:
            if completion.sequence_id in asked:
                tokens, sequence, run = asked[completion.sequence_id]
                states = self.states[sequence.id].row.copy()
                self.noted.append((tokens, sequence, run, states, completion.proposal))
        return found


def check_states(done, tolerance=1e-5):
    """Every proposal was made of the states of the text but its last token."""
    noted = done.deployment.drafts[HEAD].noted
    assert len(noted) > 20
    for tokens, sequence, _, states, _ in noted:
        expected = scenarios.hidden_states(sequence, len(tokens) - 1)[-1]
        np.testing.assert_allclose(states, expected, rtol=0, atol=tolerance, err_msg=str(tokens))


def check_proposals(done):
    """Its proposal for a row depends on that row alone."""
    for tokens, sequence, run, states, proposal in done.deployment.drafts[HEAD].noted:
        alone, again = (
            RecordedHead(),
            Sequence(1, tokens, sequence.prompt_tokens, sequence.sampling),
        )
        alone.absorb([(again, HiddenStates(len(tokens) - 2, TAPS, states[None]))])
        alone.submit([Turn(again, len(tokens), run=run, nodes=256)])
        assert alone.poll(0.0)[0].proposal.tokens == proposal.tokens


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_it_reads_the_state_of_the_last_token_and_no_text_depends_on_it(scenario):
    done = serve(scenario, RecordedHead)
    checks.texts(done)
    check_states(done)
    check_proposals(done)


@pytest.mark.parametrize("scenario", [BUSY, CROWDED], ids=["busy", "crowded"])
def test_openvino_gives_the_same_states(scenario):
    with with_larger_heads():
        with on_openvino(scenario):
            done = serve(scenario, RecordedHead)
        check_states(done, 1e-3)


def old_state(patch):
    kept = HeadEngine.absorb

    def absorbed(engine, states):
        before = dict(engine.states)
        kept(engine, states)
        for sequence, _ in states:
            if sequence.id in before:
                now = engine.states[sequence.id]
                engine.states[sequence.id] = replace(now, row=before[sequence.id].row)

    patch.setattr(HeadEngine, "absorb", absorbed)


@pytest.mark.parametrize("mutant", [absorb_another_row, old_state])
def test_another_row_s_or_an_old_state_is_noticed(mutant):
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        done = serve(BUSY, RecordedHead)
    with pytest.raises(AssertionError):
        check_states(done)


def asked(engine, tokens, run=3, nodes=8, **options):
    sequence = Sequence(5, tokens, len(tokens), SamplingParams(**options))
    engine.assume(sequence, 0)
    engine.submit([Turn(sequence, len(tokens), run=run, nodes=nodes)])
    (completion,) = engine.poll(0.0)
    return completion


def test_it_proposes_its_static_tokens_and_those_of_the_text_only():
    engine = RecordedHead()
    static = set(engine.columns.token_ids.tolist())
    others = sorted(set(range(VOCAB)) - static)
    found = set()
    for seed in range(40):
        torch.manual_seed(seed)
        engine.head._network.load_state_dict(network(seed).state_dict())
        engine.cancel([5])
        tokens = [others[0], 3, others[1], 7]
        proposal = asked(engine, tokens).proposal
        assert set(proposal.tokens) <= static | set(tokens)
        found |= set(proposal.tokens)
    assert found & {others[0], others[1]}


def test_a_text_without_its_state_has_nothing_available_and_a_turn_for_it_fails_alone():
    engine = RecordedHead()
    sequence = Sequence(5, [1, 2, 3], 3, SamplingParams())
    assert engine.available(sequence, 4) == 0
    engine.assume(sequence, 0)
    assert engine.available(sequence, 9) == K_MAX
    sequence.tokens.append(4)
    assert engine.available(sequence, 4) == 0
    engine.submit([Turn(sequence, 4, run=2, nodes=2)])
    assert "given no state of its 4 tokens" in engine.poll(0.0)[0].error
    assert asked(engine, [1, 2], run=K_MAX + 1).error.endswith(f"must be in 1..{K_MAX}, got 5")


@pytest.mark.parametrize("case", latency_cases(target=False))
def test_what_is_timed_of_a_head_is_its_passes(case):
    engine = RecordedHead(most=case.run)
    passes, step = [], engine.head.step

    def noted(state, token):
        passes.append(len(state))
        return step(state, token)

    engine.head.step = noted
    Rig(engine, random.Random(0)).time(case)
    assert passes == [case.rows] * case.run


def test_a_sampled_row_s_candidates_are_those_of_its_noise():
    engine = RecordedHead()
    drawn = {
        tuple(asked(engine, [1, 2], temperature=1.5, seed=s).proposal.tokens) for s in range(9)
    }
    assert len(drawn) > 3
    assert word(1, 2) != word(2, 2)


@pytest.mark.parametrize(
    ("dtype", "narrow", "error", "likeness"),
    [
        ("int8", False, 0.05, 0.999),
        ("bf16", True, 0.1, 0.999),
        ("bf16", False, 0.03, 0.9999),
        ("fp32", False, 1e-4, 0.999999),
    ],
)
def test_on_openvino_it_proposes_nearly_what_it_does_on_torch(dtype, narrow, error, likeness):
    torch.manual_seed(0)
    config = HeadConfig(4096, 256, 512, (1, 2), rows=4096)
    made = HeadNetwork(config).requires_grad_(requires_grad=False)
    rows = torch.randn(4096, 256).numpy()
    tensors = {name: tensor.numpy() for name, tensor in made.state_dict().items()}
    ours = OpenvinoHead(config, tensors, rows, dtype=dtype, narrow=narrow, threads=1)
    wide = TorchHead(made, rows)
    hidden = torch.randn(3, 2, 256).numpy() * 4
    state, token = wide.begin(hidden), torch.randn(3, 256).numpy()
    np.testing.assert_allclose(ours.begin(hidden), state, rtol=0, atol=error)
    for exact, near in zip(wide.step(state, token), ours.step(state, token), strict=True):
        lengths = np.linalg.norm(exact, axis=1) * np.linalg.norm(near, axis=1)
        assert ((exact * near).sum(1) / lengths).min() > likeness


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_embedding_is_widened_once_and_then_read_without_torch(
    monkeypatch, tmp_path, tied
):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "target"
    target.mkdir()
    table = torch.randint(-127, 128, (64, 32), dtype=torch.int8)
    scale = torch.rand(64, 1)
    tensors = {"model.embed_tokens.weight": table, "model.embed_tokens.weight_scale": scale}
    rows = (table * scale).bfloat16().float()
    if not tied:
        tensors["lm_head.weight"] = torch.randn(64, 32).bfloat16()
    head = rows if tied else tensors["lm_head.weight"].float()
    save_file(tensors, target / "model.safetensors")
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    config = {"tie_word_embeddings": tied, "quantization_config": quantization}
    (target / "config.json").write_text(json.dumps(config))
    raw = {"target": {"model": str(target), "engine": "openvino", "dtype": "fp32"}}
    service = Service(parse_config(raw), 1, lambda engine: target)
    lines = []

    def read():
        convert(None, tmp_path, service, lines.append)
        return bring_embeddings(target)

    for _ in range(2):
        ours = read()
        for matrix, expected in zip(ours, (rows, head), strict=True):
            np.testing.assert_array_equal(matrix[[3, 60]], expected[[3, 60]].numpy())
        monkeypatch.setitem(sys.modules, "torch", None)
    assert lines == [f"widening the embedding of {target}, once"]
