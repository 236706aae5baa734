"""The ledger as a state machine: whatever is admitted, run, committed, released, pre-empted or
lost, blocks are shared by content only.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.core.block_pool import block_key, root_key
from backend.core.kv_ledger import KVLedger
from backend.engines.port import Turn
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence
from tests.fakes.fake_engine import FakeEngine

HEADROOM = 5
texts = st.tuples(st.integers(1, 3 * BLOCK_TOKENS + 2), st.integers(0, 30), st.sampled_from([1, 2]))


class Events:
    """A router's view of the blocks: their keys, by what was reported."""

    def __init__(self):
        self.texts = {}
        self.reported = {}

    def add_block(self, key, parent, tokens):
        assert key not in self.texts
        before = [] if parent is None else self.reported[parent]
        self.texts[key] = self.reported[key] = [*before, *tokens]

    def remove_block(self, key):
        self.texts.pop(key, None)


class Reuse(RuleBasedStateMachine):
    """Sequences over few distinct texts; the fake target's pool refuses a slot that does not hold
    the text it should.
    """

    def __init__(self):
        super().__init__()
        self.number, self.size, self.live, self.paused = 0, 24, {}, []
        self.target = FakeEngine("target", kv_blocks=self.size, max_draft_tokens=8)
        self.ledger = KVLedger(
            {"target": self.size, "draft": self.size}, HEADROOM, growth_blocks=0, target=self.target
        )
        self.events = Events()
        self.ledger.observe(self.events)

    def admit(self, sequence):
        before = self.ledger.usage()
        if self.ledger.reserve(sequence, len(sequence.tokens) + 40):
            self.live[sequence.id] = sequence
            return True
        assert self.ledger.usage() == before
        assert not sequence.blocks
        return False

    @rule(text=texts, salt=st.sampled_from(["", "tenant"]))
    def a_request_comes(self, text, salt):
        alike, other, kind = text
        tokens = [kind] * alike + [3 + other % 3] * (other // 3)
        self.number += 1
        self.admit(Sequence(self.number, tokens, len(tokens), SamplingParams(), salt=salt))

    @precondition(lambda self: self.paused)
    @rule()
    def one_that_was_pre_empted_comes_back(self):
        if self.admit(self.paused[0]):
            self.paused.pop(0)

    def some(self, data):
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), share=st.floats(0.1, 1.0))
    def a_chunk_is_run(self, data, share):
        sequence = self.some(data)
        unseen = self.target.unseen(sequence)
        end = (
            len(sequence.tokens) - unseen + max(1, int(unseen * share))
            if unseen
            else len(sequence.tokens)
        )
        self.complete(Turn(sequence, end, run=0))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def a_token_is_committed(self, data):
        sequence = self.some(data)
        if self.ledger.grow(sequence) and len(sequence.tokens) < 6 * BLOCK_TOKENS - HEADROOM:
            sequence.tokens.append(
                self.complete(Turn(sequence, len(sequence.tokens))).tokens[0] % 2 + 1
            )

    @precondition(lambda self: self.live)
    @rule(data=st.data(), preempted=st.booleans())
    def one_ends_or_is_pre_empted(self, data, preempted):
        sequence = self.live.pop(self.some(data).id)
        self.ledger.release(sequence)
        self.target.cancel([sequence.id])
        if preempted:
            self.paused.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def the_engine_forgets_one(self, data):
        self.target.cancel([self.some(data).id])

    def complete(self, turn):
        self.target.submit([turn])
        (completion,) = self.target.poll(0.0)
        assert completion.error is None
        return completion

    @invariant()
    def shared_blocks_are_of_one_text_and_everything_is_accounted_for(self):
        self.ledger.check(self.live.values())

    @invariant()
    def a_router_knows_the_blocks_that_can_be_found_but_none_with_a_salt(self):
        def keys(text, salt):
            parent, made = root_key(salt), []
            for start in range(0, len(text), BLOCK_TOKENS):
                parent = block_key(parent, text[start : start + BLOCK_TOKENS])
                made.append(parent)
            return made

        for key, text in self.events.texts.items():
            assert keys(text, "")[-1] == key
            assert len(self.ledger.pool.find([key])) == 1
        for sequence in self.live.values():
            whole = len(sequence.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
            known = [self.ledger.pool.find([key]) != [] for key in sequence.keys]
            reported = [key in self.events.texts for key in keys(sequence.tokens[:whole], "")]
            if not sequence.salt:
                assert reported[: len(known)] == known

    def teardown(self):
        for sequence in self.live.values():
            self.ledger.release(sequence)
        self.ledger.check([])
        assert self.ledger.usage()["used"] == 0


Reuse.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestReuse = pytest.mark.medium(Reuse.TestCase)
