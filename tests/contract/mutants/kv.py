"""Faults of KV and of prefix reuse."""

from __future__ import annotations

from dataclasses import replace

from backend.core import block_pool, kv_ledger
from backend.core.block_pool import BlockPool
from backend.core.kv_ledger import KVLedger
from backend.engines.stepping import kv_caches
from backend.engines.stepping.engine import StepEngine
from backend.engines.torch.decoder import Decoder
from backend.sequence import BLOCK_TOKENS
from tests.contract import checks
from tests.contract.mutants.planting import Patch, killed_by, wrap
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED, greedily

# -- KV


@killed_by(checks.kv_is_fresh, BUSY)
def leave_the_kv_of_accepted_nodes_where_it_was(patch: Patch) -> None:
    patch.setattr(Decoder, "keep", lambda model, accepted: None)


@killed_by(checks.one_token_is_unseen, BUSY)
def forget_the_kv_of_accepted_leaves(patch: Patch) -> None:
    """Costs time, never exactness."""

    def keep(original, engine, accepted):
        original(engine, [each for each in accepted if each[0].path[-1] == len(each[0].path) - 1])

    wrap(patch, StepEngine, "_keep", keep)


@killed_by(checks.kv_is_fresh, BUSY)
def keep_the_kv_of_all_nodes(patch: Patch) -> None:
    """As if a tree were the chain of its nodes."""

    def keep(original, engine, accepted):
        for job, _ in accepted:
            job.cache.ran += [job.request.tokens[node] for node in job.path]

    wrap(patch, StepEngine, "_keep", keep)


@killed_by(checks.texts, greedily(BUSY))
def skip_the_rollback(patch: Patch) -> None:
    """The target continues after everything that it has written, rejected tokens included."""
    written: dict[int, int] = {}

    def prepare(original, engine, turn):
        job = original(engine, turn)
        if engine.name == "target" and job.chunk:
            room = len(job.cache.table) - len(job.chunk.tokens)
            start = min(max(job.chunk.start, written.get(turn.sequence.id, 0)), room)
            written[turn.sequence.id] = start + len(job.chunk.tokens)
            job.chunk = replace(job.chunk, start=start)
        return job

    wrap(patch, StepEngine, "_prepare", prepare)


@killed_by(checks.kv_is_fresh, BUSY)
def keep_the_kv_of_a_rejected_branch(patch: Patch) -> None:
    """All nodes are taken for text, whatever was drawn."""

    def keep(original, engine, accepted):
        original(engine, accepted)
        for job, _ in accepted:
            job.cache.ran += job.request.tokens[len(job.path) :]

    def matching(original, cache, tokens):
        return min(len(cache.ran), len(tokens))

    wrap(patch, StepEngine, "_keep", keep)
    wrap(patch, kv_caches.Cache, "matching", matching)


@killed_by(checks.proposals, BUSY)
def keep_the_kv_of_a_draft_s_rejected_tokens(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def prepare(original, engine, turn):
        if engine.name != "target":
            cache = engine.caches.of(turn.sequence)
            cache.agreed = min(len(cache.ran), len(turn.sequence.tokens))
        return original(engine, turn)

    wrap(patch, StepEngine, "_prepare", prepare)


@killed_by(checks.one_token_is_unseen, BUSY)
def forget_the_kv_of_accepted_tokens(patch: Patch) -> None:
    """Costs time, never exactness."""

    def run(original, engine, jobs):
        original(engine, jobs)
        for job in jobs:
            job.cache.roll_back(job.turn.end)

    wrap(patch, StepEngine, "_run", run)


# -- prefix reuse


@killed_by(checks.kv_is_fresh, ALIKE)
def share_a_block_that_is_run_in_part(patch: Patch) -> None:
    def matching(original, caches, sequence):
        count = original(caches, sequence)
        begun = min(-(-count // BLOCK_TOKENS), len(sequence.keys))
        blocks = sequence.blocks.get(caches._name, [])[:begun]
        caches.contents.update(zip(blocks, sequence.keys, strict=False))
        return count

    wrap(patch, kv_caches.Caches, "matching", matching)


@killed_by(checks.blocks_are_of_one_text, BUSY)
def share_blocks_of_proposed_tokens(patch: Patch) -> None:
    """The target names a block by the proposal that it has just written there, accepted or not."""

    def prepare(original, engine, turn):
        job = original(engine, turn)
        text, sequence = [*turn.sequence.tokens, *job.request.tokens], turn.sequence
        if len(text) // BLOCK_TOKENS > len(sequence.keys):
            ahead = replace(sequence, tokens=text, keys=list(sequence.keys))
            KVLedger({}, 0)._name_blocks(ahead)
            sequence.keys[:] = ahead.keys
        return job

    wrap(patch, StepEngine, "_prepare", prepare)


@killed_by(checks.tenants_share_nothing)
def ignore_the_salt(patch: Patch) -> None:
    patch.setattr(kv_ledger, "root_key", lambda salt: block_pool.root_key(""))


@killed_by(checks.blocks_are_of_one_text, CROWDED)
def evict_a_block_that_others_refer_to(patch: Patch) -> None:
    def drop(original, pool, table, valid):
        for block in table:
            pool._references[block] = 1
        original(pool, table, valid)

    wrap(patch, BlockPool, "drop", drop)


@killed_by(checks.blocks_are_of_one_text, CROWDED)
def find_a_block_that_was_evicted(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda pool, block: None)


@killed_by(checks.kv_is_fresh, ALIKE)
def trust_the_content_of_a_block_that_was_given_to_another(patch: Patch) -> None:
    """The engine takes the ledger's word for KV that it may never have run."""

    def shared(original, caches, sequence, blocks):
        return min((len(sequence.tokens) - 1) // BLOCK_TOKENS, len(sequence.keys))

    wrap(patch, kv_caches.Caches, "shared_blocks", shared)


@killed_by(checks.texts, greedily(CRAMPED))
def go_on_without_the_kv_that_was_given_back(patch: Patch) -> None:
    """Engines do not learn of a lost block table."""
    patch.setattr(StepEngine, "cancel", lambda engine, ids: None)
    patch.setattr(kv_caches.Cache, "grew_into", lambda cache, blocks: True)
