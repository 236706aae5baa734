"""Passes in static shapes, as CUDA graphs replay them (here run anew each time): every row is as it
is alone.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.engines.torch.chunks import Chunk, KVTable
from backend.engines.torch.static import MOST_QUERIES, Inputs, Size
from backend.sequence import BLOCK_TOKENS
from tests.contract.deployment import BLOCKS, VOCAB, tiny_engine


@st.composite
def chunks(draw):
    """(context, new tokens, parents of the last of them, rows that want logits)"""
    made = []
    for _ in range(draw(st.integers(1, 5))):
        new = draw(st.integers(1, 7))
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, new - 1)))]
        made.append((draw(st.integers(0, 70)), new, parents, draw(st.integers(0, new))))
    return made


def test_every_row_of_a_static_pass_is_what_it_is_alone():
    model, plain = tiny_engine(attention="graphs")._model, tiny_engine()._model
    blocks = itertools.cycle(range(BLOCKS))

    @settings(max_examples=80, deadline=None)
    @given(chunks(), st.integers(0, 2**32 - 1))
    def holds(drawn, seed):
        rng = np.random.default_rng(seed)
        with torch.inference_mode():
            model._pool.fill_(torch.nan)
            plain._pool.fill_(torch.nan)
            together, alone = [], []
            for context, new, parents, logits in drawn:
                table = KVTable(
                    [next(blocks) for _ in range(-(-(context + new) // BLOCK_TOKENS))], "cpu"
                )
                tokens = rng.integers(0, VOCAB, context + new).tolist()
                if context:
                    for each in (model, plain):
                        each.forward([Chunk(tokens[:context], 0, table, 0)])
                together.append(Chunk(tokens[context:], context, table, logits, parents))
                alone.append(plain.forward(together[-1:]))
            assert torch.allclose(model.forward(together), torch.cat(alone), rtol=0.0, atol=1e-11)
            for chunk in together:
                slots = chunk.table.slots[: chunk.start + len(chunk.tokens)]
                assert torch.allclose(
                    model._pool[:, slots], plain._pool[:, slots], rtol=0.0, atol=1e-11
                )

    holds()
    assert 1 < len(model._static._passes) <= 60


def test_a_size_is_recorded_once_and_repeated_for_other_chunks():
    model, recorded = tiny_engine(attention="graphs")._model, []
    model._static._record = lambda work: recorded.append(work) or work
    table = KVTable([0, 1, 2], "cpu")
    with torch.inference_mode():
        for start, count in ((0, 4), (4, 5), (9, 4), (13, 1), (14, 5), (19, MOST_QUERIES + 1)):
            model.forward([Chunk([1] * count, start, table, 1)])
    assert len(recorded) == 2


@pytest.mark.parametrize(
    ("lengths", "size"),
    [
        ([1], (1, 1, 8)),
        ([1, 2], (2, 2, 8)),
        ([3, 1, 1], (4, 3, 8)),
        ([4], (1, 5, 8)),
        ([9], (1, 9, 8)),
    ],
)
def test_sizes_grow_by_powers_of_two(lengths, size):
    table = KVTable(range(20), "cpu")
    assert Size.of([Chunk([0] * length, 3, table, 1) for length in lengths]) == size
    assert Size.of([Chunk([0], 16 * 8, table, 1)]).blocks == 16


def test_nothing_of_an_earlier_pass_is_left_in_the_inputs_of_the_next():
    size, table = Size(2, 3, 8), KVTable([5, 6], "cpu")
    used, fresh = Inputs(size, 9, torch.device("cpu")), Inputs(size, 9, torch.device("cpu"))
    small = [Chunk([4], 2, table, 1)]
    used.send([Chunk([1, 2, 3], 17, table, 3, [-1, -1]), Chunk([7, 7], 0, KVTable([1], "cpu"), 2)])
    for inputs in (used, fresh):
        wanted = inputs.send(small)
    for name in used._shapes:
        kept = wanted if name == "wanted" else None
        assert torch.equal(used[name][:kept], fresh[name][:kept]), name
