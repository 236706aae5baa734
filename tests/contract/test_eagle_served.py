"""An EAGLE-3 head in the loop: it proposes from all states of the text, however its tokens came
about, and no text depends on it.
"""

from __future__ import annotations

from functools import partial
from math import log

import numpy as np
import pytest
import torch

from backend.engines.eagle.engine import EagleEngine
from backend.engines.eagle.model import TorchModel
from backend.engines.port import HiddenStates, Turn
from backend.engines.spine import CANDIDATES
from backend.sequence import BLOCK_TOKENS, Sequence
from tests.contract import checks, deployment, scenarios
from tests.contract.cuda_engines import on_cuda_engine
from tests.contract.deployment import BLOCKS, K_MAX, MAX_CONTEXT_TOKENS, TAPS, VOCAB
from tests.contract.eagle_reference import EagleReference
from tests.contract.heads import HEAD, SCENARIOS, absorb_another_row, serve
from tests.contract.openvino_engines import on_openvino, with_larger_heads
from tests.contract.scenarios import BUSY, CROWDED
from tests.contract.test_eagle import poison
from tests.fakes.eagle import random_head


def head():
    """A shape, tensors, and the target's embedding and head."""
    shape, tensors = random_head(
        vocab_size=VOCAB,
        draft_vocab_size=15,
        target_hidden_size=deployment.tiny_config().hidden_size,
        layers=TAPS[::-1],
        own_embedding=True,
    )
    tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    return shape, tensors, torch.zeros(VOCAB, shape.hidden_size).double()


class RecordedEagle(EagleEngine):
    """Notes what it was asked with and what it proposed; what no text has written is no number."""

    def __init__(self, width=1):
        shape, tensors, table = head()
        model = TorchModel(
            shape,
            tensors,
            embedding=table,
            lm_head=table,
            positions=MAX_CONTEXT_TOKENS + K_MAX,
            slots=BLOCKS * BLOCK_TOKENS,
            dtype=torch.float64,
        )
        sizes = {"kv_blocks": BLOCKS, "max_context_tokens": MAX_CONTEXT_TOKENS}
        super().__init__("near", model, max_draft_tokens=K_MAX, width=width, **sizes)
        self.noted, self.holes = [], []

    def absorb(self, states):
        poison(self)
        super().absorb(states)
        self.holes += [text.sequence.tokens for text in self._texts.values() if text.has_hole]

    def poll(self, timeout_s):
        poison(self)
        asked = {t.sequence.id: (list(t.sequence.tokens), t.sequence, t.run) for t in self._turns}
        found = super().poll(timeout_s)
        for completion in found:
            tokens, sequence, run = asked[completion.sequence_id]
            self.noted.append((tokens, sequence, run, completion))
        return found


def alone(tokens, states, sequence, run, width):
    """Its proposal for one text whose states all come at once."""
    engine = RecordedEagle(width)
    blocks = {"near": list(range(6))}
    text = Sequence(1, tokens, sequence.prompt_tokens, sequence.sampling, blocks)
    engine.absorb([(text, HiddenStates(0, TAPS[::-1], states))])
    engine.submit([Turn(text, len(tokens), run=run, nodes=256)])
    return engine.poll(0.0)[0].proposal


def check_proposals(done, width=1, tolerance=1e-4):
    """Every proposal is that for the text alone; those for plain greedy requests are also those of
    the reference, node by node.
    """
    draft = done.deployment.drafts[HEAD]
    noted = draft.noted
    assert len(noted) > 20
    assert not draft.holes
    shape, tensors, table = head()
    reference = EagleReference(shape, tensors, table, table).double().eval()
    for tokens, sequence, run, completion in noted:
        assert completion.error is None
        proposal, paths = completion.proposal, []
        states = scenarios.hidden_states(sequence, len(tokens) - 1, TAPS[::-1])
        same = alone(tokens, states, sequence, run, width)
        assert proposal.tokens == same.tokens
        for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if sequence.sampling.plain:
            expected = reference.tree(tokens, torch.from_numpy(states), width, run, CANDIDATES)
            for path, confidence in zip(paths, proposal.confidence, strict=True):
                assert log(confidence) == pytest.approx(expected[path], abs=tolerance), tokens


@pytest.mark.parametrize(
    ("scenario", "width"),
    [*((scenario, 1) for scenario in SCENARIOS.values()), (BUSY, 3)],
    ids=[*SCENARIOS, "several paths"],
)
def test_it_proposes_from_all_states_of_the_text_and_no_text_depends_on_it(scenario, width):
    done = serve(scenario, partial(RecordedEagle, width))
    checks.texts(done)
    check_proposals(done, width)


@pytest.mark.parametrize("scenario", [BUSY, CROWDED], ids=["busy", "crowded"])
def test_openvino_gives_the_same_states(scenario):
    with with_larger_heads():
        with on_openvino(scenario):
            done = serve(scenario, RecordedEagle)
        check_proposals(done, tolerance=5e-3)


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_the_cuda_engine_gives_the_same_states(padded):
    with on_cuda_engine(CROWDED, padded=padded):
        done = serve(CROWDED, RecordedEagle)
        checks.texts(done)
    check_proposals(done)


def state_of_its_own_token(patch):
    absorb = EagleEngine.absorb

    def absorbed(engine, states):
        later = [
            (s, HiddenStates(one.first, one.layers, np.roll(one.rows, 1, 0))) for s, one in states
        ]
        absorb(engine, later)

    patch.setattr(EagleEngine, "absorb", absorbed)


@pytest.mark.parametrize("mutant", [absorb_another_row, state_of_its_own_token])
def test_another_row_s_state_is_noticed(mutant):
    with pytest.MonkeyPatch.context() as patch:
        mutant(patch)
        done = serve(BUSY, RecordedEagle)
    with pytest.raises((AssertionError, KeyError)):
        check_proposals(done)
