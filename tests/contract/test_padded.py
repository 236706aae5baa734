"""Rows side by side, padded or cut into pieces, are what each would be by itself."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.port import Turn
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.torch import padded
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from policy import AdaptivePlanner, LatencyModel, LatencyTable, PlannerConfig
from policy.decomposition import Decomposition
from tests.contract.deployment import BLOCKS, VOCAB, Deployment, tiny_engine
from tests.contract.scenarios import PROMPTS, reference

pieces = st.sampled_from([None, *(blocks * BLOCK_TOKENS for blocks in range(4))])


@st.composite
def chunks(draw):
    """Chunks of contexts with KV: (context, new tokens, parents of the last of them, piece)."""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 6))
        nodes = draw(st.integers(0, new - 1))
        parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
        made.append((draw(st.integers(0, 140)), new, parents, draw(pieces)))
    return made


@pytest.mark.parametrize("partial", [padded.partial, padded.partial_by_products])
def test_a_pass_of_rows_side_by_side_and_cut_gives_every_row_what_it_gets_alone(
    partial, monkeypatch
):
    monkeypatch.setattr(padded, "partial", partial)
    model = tiny_engine(attention="padded")._model
    blocks = itertools.cycle(range(BLOCKS))

    @settings(max_examples=60, deadline=None)
    @given(chunks(), st.integers(0, 2**32 - 1))
    def holds(drawn, seed):
        rng = np.random.default_rng(seed)
        with torch.inference_mode():
            model._pool.fill_(torch.nan)
            together, alone = [], []
            for context, new, parents, piece in drawn:
                table = KVTable(
                    [next(blocks) for _ in range(-(-(context + new) // BLOCK_TOKENS))], "cpu"
                )
                tokens = rng.integers(0, VOCAB, context + new).tolist()
                if context:
                    model.forward([Chunk(tokens[:context], 0, table, 0)])
                together.append(Chunk(tokens[context:], context, table, new, parents, piece))
                alone.append(model.forward([Chunk(tokens[context:], context, table, new, parents)]))
            found = model.forward(together)
        assert not found.isnan().any()
        assert torch.allclose(found, torch.cat(alone), rtol=0.0, atol=1e-11)

    holds()


@pytest.mark.parametrize("piece", [-BLOCK_TOKENS, BLOCK_TOKENS // 2, BLOCK_TOKENS * 3 // 2])
def test_pieces_that_are_not_of_whole_blocks_end_their_turn_alone(piece):
    engine = tiny_engine(attention="padded")
    sequences = [
        Sequence(number, [1, 2, 3], 3, SamplingParams(), {"target": [number]})
        for number in range(2)
    ]
    engine.submit(
        [
            Turn(sequence, 3, piece_tokens=tokens)
            for sequence, tokens in zip(sequences, (piece, BLOCK_TOKENS), strict=True)
        ]
    )
    errors = {completion.sequence_id: completion.error for completion in engine.poll(0.0)}
    assert f"piece_tokens must be whole blocks of {BLOCK_TOKENS}, got {piece}" in errors[0]
    assert errors[1] is None


def test_the_planner_cuts_uneven_contexts_of_a_target_that_pads_and_leaves_even_ones():
    target = LatencyTable.synthetic("target", {1: 1.0, 64: 1.1})
    latency = LatencyModel.from_tables(
        target, {"near": LatencyTable.synthetic("near", {1: 0.05, 64: 0.06})}, 1e-3, 1e-3
    )
    planner = AdaptivePlanner(
        ("near",), latency, PlannerConfig(k_max=4), Decomposition(8.0, BLOCK_TOKENS)
    )
    cut = {}
    for name, prompts in {
        "uneven": (PROMPTS[6], *[PROMPTS[0]] * 4),
        "even": [PROMPTS[1]] * 5,
    }.items():
        deployment = Deployment(
            tiny_engine(attention="padded"), [tiny_engine("near", seed=1, noise=0.2)], planner
        )
        outcomes = []
        observe = planner.observe
        planner.observe = lambda outcome, state, now, seen=outcomes, learn=observe: (
            seen.append(outcome),
            learn(outcome, state, now),
        )[1]
        sessions = [deployment.submit(prompt, 8) for prompt in prompts]
        deployment.run()
        planner.observe = observe
        assert [session.sequence.tokens for session in sessions] == [
            reference().text(p, 8) for p in prompts
        ]
        cut[name] = [o.piece_tokens for o in outcomes if len(o.request) == len(prompts)]
    assert set(cut["uneven"]) == {BLOCK_TOKENS}
    assert set(cut["even"]) == {0}
