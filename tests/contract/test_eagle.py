"""An EAGLE-3 head proposes what its published forward says, over chunks, accepted and rejected
trees, steps of other drafts, shared blocks and pre-emption.
"""

from __future__ import annotations

import hashlib
import math
import random

import pytest
import torch

from backend.engines.eagle.engine import EagleEngine
from backend.engines.eagle.kind import latency_cases
from backend.engines.eagle.model import TorchModel
from backend.engines.eagle.openvino import OpenvinoModel
from backend.engines.latency_cases import blocks_for
from backend.engines.port import HiddenStates, Turn
from backend.engines.spine import CANDIDATES
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from engines_build.timing import Rig
from policy.evidence import PAST_TRAINED
from tests.contract.eagle_reference import EagleReference
from tests.fakes.checkpoints import LLAMA3
from tests.fakes.eagle import random_head

BLOCKS = 24
KINDS = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": 96},
    "the target's head": {"own_head": False, "fc_bias": True},
    "wide heads": {"head_dim": 16, "rope_theta": 500000.0},
    "joint norm, llama3 rope": {"fuse": "joint", "rope": LLAMA3},
    "norm of each, normed output": {"fuse": "each", "norm_output": True, "own_embedding": True},
    "four layers": {"layers": (2, 3, 5, 7)},
    "normed residual": {"norm_before_residual": True, "own_embedding": True},
    "qwen 3": {"qk_norm": True, "fuse": "joint", "norm_output": True, "head_dim": 16},
    "window": {"sliding_window": 20, "target_hidden_size": 24},
}


def poison(engine: EagleEngine) -> None:
    """Fill all rows that no text has written with NaN, as those of what was rejected would be."""
    caches = [text.cache for text in engine._texts.values()]
    live = {
        cache.blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
        for cache in caches
        for p in range(1, len(cache.ran))
    }
    known = [b * BLOCK_TOKENS + o for b in engine._caches.contents for o in range(BLOCK_TOKENS)]
    pool = engine._model._pool
    kept = sorted({*live, *known, len(pool) - 1})
    rows = pool[kept]
    pool[:] = math.nan
    pool[kept] = rows


ROOM = {"positions": 256, "slots": BLOCKS * BLOCK_TOKENS}


def on_torch(shape, tensors, embedding, head):
    """A model in fp64."""
    tables = {"embedding": embedding, "lm_head": head}
    return TorchModel(shape, tensors, **tables, **ROOM, dtype=torch.float64)


def on_openvino(shape, tensors, embedding, head):
    """A model in fp32."""
    arrays = {name: one.numpy() for name, one in tensors.items()}
    tables = {"embedding": embedding.float().numpy(), "lm_head": head.float().numpy()}
    how = {"rounded": False, "narrow": False, "threads": 1}
    return OpenvinoModel(shape, arrays, **tables, **ROOM, **how)


class Life:
    """Sequences of a head's engine, whose target is a function of the text: the states of a token
    are a mean over those before it.
    """

    def __init__(
        self, kind: dict[str, object], seed: int, width: int, runtime: str = "torch"
    ) -> None:
        self.shape, tensors = random_head(seed, **kind)
        tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
        generator = torch.Generator().manual_seed(seed)

        def weights(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        tables = weights(vocab, hidden), weights(vocab, hidden)
        model = (on_torch if runtime == "torch" else on_openvino)(self.shape, tensors, *tables)
        self.reference = EagleReference(self.shape, tensors, *tables).double().eval()
        sizes = {"kv_blocks": BLOCKS, "max_context_tokens": 240, "max_draft_tokens": 8}
        self.counted: list[tuple[str, str]] = []
        self.engine = EagleEngine("eagle", model, **sizes, width=width, count=self.count)
        self.width, self.rng, self.nodes = width, random.Random(seed), 0
        self._taps = weights(vocab, len(self.shape.layers), self.shape.target_hidden_size)

    def count(self, metric: str, *, draft: str) -> None:
        """Note what the engine counts."""
        self.counted.append((metric, draft))

    def states(self, tokens: list[int]) -> torch.Tensor:
        """The target's states [n, layers, hidden] of a text."""
        counts = torch.arange(1, len(tokens) + 1).sqrt()[:, None, None]
        return self._taps[tokens].cumsum(0) / counts

    def drawn(self, count: int) -> list[int]:
        """Random tokens."""
        return [self.rng.randrange(self.shape.vocab_size) for _ in range(count)]

    def new(self, number: int, prompt: list[int], blocks: list[int]) -> Sequence:
        """A sequence before anything of it has run."""
        sequence = Sequence(
            number, list(prompt), len(prompt), SamplingParams(), {"eagle": list(blocks)}
        )
        self.name_blocks(sequence)
        return sequence

    def name_blocks(self, sequence: Sequence) -> None:
        """Give a sequence the keys of its complete blocks."""
        for index in range(len(sequence.keys), len(sequence.tokens) // BLOCK_TOKENS):
            text = str(sequence.tokens[: (index + 1) * BLOCK_TOKENS])
            sequence.keys.append(hashlib.sha256(text.encode()).digest())

    def absorb(self, *parts: tuple[Sequence, int, int]) -> None:
        """Give the engine the states of tokens from ``first`` to ``end`` of sequences."""
        poison(self.engine)
        self.engine.absorb(
            [
                (one, HiddenStates(first, (1, *self.shape.layers), self._rows(one, first, end)))
                for one, first, end in parts
            ]
        )

    def _rows(self, sequence: Sequence, first: int, end: int) -> torch.Tensor:
        rows = self.states(sequence.tokens)[first:end]
        return torch.cat([torch.full_like(rows[:, :1], torch.nan), rows], 1)  # not the head's

    def advance(self, sequence: Sequence, tokens: list[int]) -> tuple[Sequence, int, int]:
        """Commit tokens, which the target drew one after the other."""
        first = len(sequence.tokens) - 1
        sequence.tokens += tokens
        return sequence, first, len(sequence.tokens) - 1

    def check(self, depths: dict[Sequence, int]) -> dict[Sequence, list[tuple[int, ...]]]:
        """Compare all proposals of one poll with the reference, node by node; return their
        paths.
        """
        poison(self.engine)
        turns = [Turn(s, len(s.tokens), run=depth, nodes=256) for s, depth in depths.items()]
        assert all(self.engine.available(s, depth) == depth for s, depth in depths.items())
        self.engine.submit(turns)
        found = {c.sequence_id: c for c in self.engine.poll(0.0)}
        paths: dict[Sequence, list[tuple[int, ...]]] = {}
        for sequence, depth in depths.items():
            completion = found[sequence.id]
            assert completion.error is None
            proposal, own = completion.proposal, paths.setdefault(sequence, [])
            for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
                own.append((*(own[parent] if parent != ROOT else ()), token))
            expected = self.reference.tree(
                sequence.tokens,
                self.states(sequence.tokens[:-1]),
                self.width,
                depth,
                CANDIDATES,
            )
            mine = dict(zip(own, proposal.confidence, strict=True))
            for path, confidence in mine.items():
                assert math.log(confidence) == pytest.approx(expected[path], abs=1e-4)
            left_out = {path: p for path, p in expected.items() if path not in mine}
            assert all(self._is_faint(path, expected) for path in left_out)
            self.nodes += len(mine)
        return paths

    def _is_faint(self, path: tuple[int, ...], expected: dict[tuple[int, ...], float]) -> bool:
        """Whether a node is far less likely than its likeliest sibling, or its parent is."""
        if not path:
            return False
        siblings = [p for other, p in expected.items() if other[:-1] == path[:-1]]
        return expected[path] < max(siblings) - 3.0 or self._is_faint(path[:-1], expected)


def live(
    kind: dict[str, object], seed: int, width: int, steps: int, runtime: str = "torch"
) -> Life:
    """Three requests from their first chunk to a pre-emption."""
    life = Life(kind, seed, width, runtime)
    rng = life.rng
    first = life.new(1, life.drawn(75), [3, 7, 1, 9, 5, 2])
    short = life.new(2, life.drawn(2), [12, 13, 14])
    chunk = rng.choice([7, 32, 75])
    for begin in range(0, 74, chunk):
        life.absorb((first, begin, min(74, begin + chunk)))
        assert life.engine.available(first, 4) == (4 if begin + chunk >= 74 else 0)
    life.absorb(life.advance(first, life.drawn(1)), (short, 0, 1))
    third: Sequence | None = None
    for step in range(steps):
        life.name_blocks(first)
        alive = [one for one in (first, short, third) if one is not None]
        asked = {one: rng.randrange(1, 6) for one in alive if rng.random() < 0.8}
        paths = life.check(asked) if asked else {}
        parts = []
        for one in alive:
            accepted = rng.choice([(), *paths.get(one, [tuple(life.drawn(rng.randrange(4)))])])
            parts.append(life.advance(one, [*accepted, *life.drawn(1)]))
        life.absorb(*parts)
        if step == steps // 3:  # one that begins as the first does
            text = [*first.tokens[: 2 * BLOCK_TOKENS], *life.drawn(20)]
            third = life.new(3, text, [3, 7, 11, 10])
            life.absorb((third, 2 * BLOCK_TOKENS, len(text) - 1))
            life.check({third: 3, first: 2})
        if step == 2 * steps // 3:  # pre-empted, with other blocks but for those that are known
            life.name_blocks(first)
            life.engine.cancel([1])
            first = life.new(1, first.tokens, [3, 7, 15, 16, 17, 18])
            life.absorb((first, 2 * BLOCK_TOKENS, 80), (short, 1, 2))
            life.absorb((first, 79, len(first.tokens) - 1))
            life.check({first: 3})
    life.check(dict.fromkeys(alive, 3))
    return life


@pytest.mark.parametrize(("width", "runtime"), [(1, "torch"), (3, "openvino")])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_node_is_that_of_the_whole_text_run_again(kind, width, runtime):
    assert live(kind, 0, width, 6, runtime).nodes > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_node_is_that_of_the_whole_text_run_again_for_many_lives(kind, seed):
    runtime = "openvino" if seed == 1 else "torch"
    assert live(kind, seed, 1 + seed % 3, 14, runtime).nodes > 200


def started(runtime="torch", tokens=40):
    """A life with one request whose prompt has run."""
    life = Life({}, 0, 1, runtime)
    sequence = life.new(1, life.drawn(tokens), [3, 7, 1, 9])
    life.absorb((sequence, 0, tokens - 1))
    return life, sequence


def asked(life, sequence, run=3, **options):
    life.engine.submit([Turn(sequence, len(sequence.tokens), run=run, nodes=256, **options)])
    return life.engine.poll(0.0)[0]


def test_a_text_with_missing_states_gets_no_proposals_until_it_starts_again():
    life, sequence = started()
    assert life.engine.available(sequence, 9) == 8
    sequence.tokens += life.drawn(3)
    life.absorb((sequence, 41, 42))
    assert life.engine.available(sequence, 4) == 0
    life.absorb((sequence, 39, 42))
    assert life.engine.available(sequence, 4) == 0
    assert "not given the states of all its 43 tokens" in asked(life, sequence).error
    assert life.counted == [("spindle_draft_holes_total", "eagle")]
    assert life.engine.holes() == 1
    life.engine.cancel([1])
    assert life.engine.holes() == 0
    again = life.new(2, sequence.tokens, [4, 5])
    life.absorb((again, 0, 42))
    life.check({again: 3})


def test_states_that_came_before_change_nothing():
    life, sequence = started()
    before = life.engine._model._pool.clone()
    life.absorb((sequence, 20, 39), (sequence, 38, 39))
    torch.testing.assert_close(life.engine._model._pool, before, equal_nan=True)


def test_every_turn_may_bring_another_record_of_the_same_text():
    life, sequence = started()
    for _ in range(3):
        sequence = life.new(1, sequence.tokens, [3, 7, 1, 9])
        life.absorb(life.advance(sequence, life.drawn(2)))
    life.check({sequence: 3})


def test_the_blocks_of_a_text_that_has_ended_serve_the_next_one_up_to_its_last_token():
    life, sequence = started(tokens=65)
    life.engine.cancel([1])
    following = life.new(2, sequence.tokens, [3, 7, 5])
    life.absorb((following, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS))
    assert life.engine.available(following, 2) == 2
    life.check({following: 2})


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
def test_a_state_without_numbers_ends_its_own_proposal_only(runtime):
    life, sequence = started(runtime)
    other = life.new(2, life.drawn(20), [4])
    life.absorb((other, 0, 19))
    life.engine._texts[2].state = life.engine._texts[2].state * math.nan
    turns = [Turn(one, len(one.tokens), run=3, nodes=256) for one in (sequence, other)]
    life.engine.submit(turns)
    sound, none = (completion.proposal for completion in life.engine.poll(0.0))
    assert (len(sound.spine()), len(none)) == (3, 0)


def test_a_sampled_row_s_candidates_are_those_of_its_noise():
    life, sequence = started()
    drawn = set()
    for seed in range(9):
        sequence.sampling = SamplingParams(temperature=1.5, seed=seed)
        drawn.add(tuple(asked(life, sequence).proposal.tokens))
    assert len(drawn) > 3


def test_a_text_longer_than_those_of_its_training_is_evidence_of_its_own():
    life = Life({"trained_tokens": 40}, 0, 1)
    sequence = life.new(1, life.drawn(40), [3, 7, 1, 9])
    assert life.engine.evidence(sequence) == 0
    sequence.tokens += life.drawn(1)
    assert life.engine.evidence(sequence) == PAST_TRAINED


def test_a_turn_that_it_cannot_run_fails_alone():
    life, sequence = started()
    assert asked(life, sequence, run=9).error.endswith("run must be in 1..8, got 9")
    assert "cannot verify" in asked(life, sequence, proposal=Proposal.chain("", [1])).error
    assert len(asked(life, sequence).proposal.spine()) == 3


@pytest.mark.parametrize("case", latency_cases(target=False))
def test_what_is_timed_of_a_head_is_its_passes(case):
    shape, tensors = random_head(0)
    table = torch.zeros(shape.vocab_size, shape.hidden_size)
    sizes = {"kv_blocks": blocks_for([case]), "max_context_tokens": 2000}
    room = {"positions": 2048, "slots": sizes["kv_blocks"] * BLOCK_TOKENS}
    model = TorchModel(shape, tensors, embedding=table, lm_head=table, **room)
    engine = EagleEngine("eagle", model, max_draft_tokens=case.run, **sizes)
    passes, run = [], model.run

    def noted(rows, mask):
        passes.append(len(rows.tokens))
        return run(rows, mask)

    model.run = noted
    Rig(engine, random.Random(0)).time(case)
    assert passes == [case.rows] * case.run
