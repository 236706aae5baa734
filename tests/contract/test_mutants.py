"""Deliberate faults in verification and rollback, each of which the identity check must notice: proof that the check can fail."""

import dataclasses
import itertools

import pytest
import torch

import backend.engines.torch_engine as module
from backend.admission import Admission
from backend.drafting import Drafting
from backend.engines.checkpoint import LlamaConfig
from backend.engines.verification import Verdict
from backend.kv_ledger import KVLedger
from backend.orchestrator import Orchestrator
from backend.ports import Sequence
from backend.request import GenerationRequest, SamplingParams
from backend.session import Session
from backend.stats import Stats, StepStats
from policy import NoSpeculation, RandomChoice

VOCAB, BLOCKS = 40, 24


class Sink:
    cancelled = False
    ended = False

    def final(self, delta, reason, usage):
        self.ended = True

    def error(self, code, message):
        raise AssertionError(message)


class Nothing:
    def push(self, token_id):
        return ""

    def finish(self):
        return ""


def engine(name, seed):
    """A random model in fp64; the draft is the target with a little noise, so that it is right about half of the time."""
    config = LlamaConfig(VOCAB, 16, 24, 2, 4, 2, 4)
    made = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=made, dtype=torch.float64) * 0.5 for key, shape in config.shapes().items()}
    noise = torch.Generator().manual_seed(seed)
    weights = {key: w + (0.04 * torch.randn(w.shape, generator=noise, dtype=torch.float64) if seed else 0) for key, w in weights.items()}
    return module.TorchEngine.from_weights(name, config, weights, kv_blocks=BLOCKS, max_context_tokens=96, max_draft_tokens=4)


def generate(policy):
    """Three requests together; return their tokens and how many proposals were accepted and rejected."""
    target, draft = engine("target", 0), engine("draft", 1)
    stats, clock = StepStats(Stats()), itertools.count().__next__
    ledger = KVLedger({"target": BLOCKS, "draft": BLOCKS}, headroom_tokens=5)
    loop = Orchestrator(
        target, Drafting([draft], stats, clock), policy, ledger, Admission(ledger, 8, 8), stats, clock, k_max=4, prefill_chunk_tokens=8
    )
    sessions = []
    for number, prompt in enumerate(([3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3]), start=1):
        sequence = Sequence(number, list(prompt), len(prompt), SamplingParams())
        sessions.append(Session(sequence, GenerationRequest("", 40), frozenset(), Nothing(), Sink()))
        loop.submit(sessions[-1])
    while loop.step():
        pass
    assert all(session.sink.ended for session in sessions)
    accepted = sum(session.accepted for session in sessions)
    return [session.sequence.tokens for session in sessions], accepted, sum(session.drafted for session in sessions) - accepted


@pytest.fixture(scope="module")
def plain():
    return generate(NoSpeculation())[0]


def accept_one_wrong_token(logits, requests, columns, verify=module.verify):
    verdicts = zip(verify(logits, requests, columns), requests, strict=True)
    return [Verdict(min(v.accepted + 1, len(r.tokens)), v.column) for v, r in verdicts]


def take_the_bonus_from_the_first_row(logits, requests, columns, verify=module.verify):
    best, row, results = logits.argmax(-1).tolist(), 0, []
    for verdict, request in zip(verify(logits, requests, columns), requests, strict=True):
        results.append(Verdict(verdict.accepted, best[row]))
        row += request.rows
    return results


def reject_nothing(logits, requests, columns, verify=module.verify):
    return [Verdict(len(r.tokens), v.column) for v, r in zip(verify(logits, requests, columns), requests, strict=True)]


def keep_what_was_rejected(patch):
    """The target goes on behind everything that it has written, rejected tokens included."""
    prepare, written = module.TorchEngine._prepare, {}

    def prepare_behind(self, turn):
        job = prepare(self, turn)
        if self.name != "target":
            return job
        start = min(max(job.chunk.start, written.get(turn.sequence.id, 0)), len(job.cache.table) - len(job.chunk.tokens))
        written[turn.sequence.id] = start + len(job.chunk.tokens)
        return dataclasses.replace(job, chunk=dataclasses.replace(job.chunk, start=start))

    patch.setattr(module.TorchEngine, "_prepare", prepare_behind)


def write_kv_one_position_late(patch):
    chunk = module.Chunk
    patch.setattr(module, "Chunk", lambda tokens, start, table, logits: chunk(tokens, start + (len(tokens) > 2), table, logits))


MUTANTS = {
    "accept one wrong token": lambda patch: patch.setattr(module, "verify", accept_one_wrong_token),
    "bonus from the wrong row": lambda patch: patch.setattr(module, "verify", take_the_bonus_from_the_first_row),
    "reject nothing": lambda patch: patch.setattr(module, "verify", reject_nothing),
    "skip rollback": keep_what_was_rejected,
    "positions off by one": write_kv_one_position_late,
}


def test_without_a_fault_speculation_changes_nothing(plain):
    tokens, accepted, rejected = generate(RandomChoice())
    assert tokens == plain
    assert accepted > 10
    assert rejected > 10


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_fault_changes_the_text(fault, plain, monkeypatch):
    MUTANTS[fault](monkeypatch)
    assert generate(RandomChoice())[0] != plain
