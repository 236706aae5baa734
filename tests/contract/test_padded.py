"""Rows side by side, padded or cut into pieces, are what each would be by itself."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.port import Turn
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.torch import llama, padded
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from policy import AdaptivePlanner, LatencyModel, LatencyTable, PlannerConfig
from policy.decomposition import Decomposition
from tests.contract.deployment import BLOCKS, VOCAB, Deployment, tiny_engine
from tests.contract.scenarios import PROMPTS, reference

pieces = st.sampled_from([None, 0, 16, 32, 48])


@st.composite
def chunks(draw):
    """Chunks of contexts with KV: (context, new tokens, parents of the last of them, piece)."""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 6))
        nodes = draw(st.integers(0, new - 1))
        parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
        made.append((draw(st.integers(0, 70)), new, parents, draw(pieces)))
    return made


@pytest.mark.parametrize("tile_tokens", [32, 4096])
@pytest.mark.parametrize("attention", ["tiled", "padded"])
@pytest.mark.parametrize("partial", [padded.partial, padded.partial_by_products])
def test_a_pass_of_rows_side_by_side_and_cut_gives_every_row_what_it_gets_alone(
    partial, attention, tile_tokens, monkeypatch
):
    monkeypatch.setattr(padded, "partial", partial)
    monkeypatch.setattr(padded, "TILE_TOKENS", tile_tokens)
    model = tiny_engine(attention=attention)._model
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


@pytest.mark.parametrize(
    ("attention", "groups"), [("tiled", [[1, 1, 1], [3, 3]]), ("padded", [[1, 3, 1, 6, 3, 1]])]
)
def test_in_tiles_a_long_proposal_pads_no_other_row(attention, groups, monkeypatch):
    seen = []

    class Noting(padded.Padded):
        def __init__(self, chunks, *rest, **options):
            seen.append([len(chunk.tokens) for chunk in chunks])
            super().__init__(chunks, *rest, **options)

    monkeypatch.setattr(llama, "Padded", Noting)
    model = tiny_engine(attention=attention)._model
    chunks = [
        Chunk([1] * rows, 0, KVTable([number], "cpu"), rows, piece_tokens=0)
        for number, rows in enumerate([1, 3, 1, 6, 3, 1])
    ]
    with torch.inference_mode():
        model.forward(chunks)
    assert sorted(seen) == sorted(groups)


@pytest.mark.parametrize("piece", [-16, 8, 24])
def test_pieces_that_are_not_of_whole_blocks_end_their_turn_alone(piece):
    engine = tiny_engine(attention="padded")
    sequences = [
        Sequence(number, [1, 2, 3], 3, SamplingParams(), {"target": [number]})
        for number in range(2)
    ]
    engine.submit(
        [
            Turn(sequence, 3, piece_tokens=tokens)
            for sequence, tokens in zip(sequences, (piece, 16), strict=True)
        ]
    )
    errors = {completion.sequence_id: completion.error for completion in engine.poll(0.0)}
    assert f"piece_tokens must be whole blocks of 16, got {piece}" in errors[0]
    assert errors[1] is None


def test_the_planner_cuts_uneven_contexts_of_a_target_that_pads_and_leaves_even_ones():
    target = LatencyTable.synthetic("target", {1: 1.0, 64: 1.1})
    latency = LatencyModel.from_tables(
        target, {"near": LatencyTable.synthetic("near", {1: 0.05, 64: 0.06})}, 1e-3, 1e-3
    )
    planner = AdaptivePlanner(("near",), latency, PlannerConfig(k_max=4), Decomposition(8.0, 16))
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
    assert set(cut["uneven"]) == {16}
    assert set(cut["even"]) == {0}
