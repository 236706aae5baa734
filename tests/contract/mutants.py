"""Deliberate faults, one a function: each patches one place of the product and names the check of the suite that must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from backend import block_pool, kv_ledger, session
from backend.block_pool import BlockPool
from backend.drafting import Drafting
from backend.engines import coupling, kv_caches, llama, processing, torch_engine, verification
from backend.engines.laws import Law
from backend.engines.torch_engine import TorchEngine
from backend.engines.verification import Verdict
from backend.kv_ledger import KVLedger
from backend.ports import BLOCK_TOKENS, Proposal
from backend.randomness import Purpose
from backend.request import FinishReason, SamplingParams
from tests.contract import checks
from tests.contract.deployment import K_MAX

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A fault and the check that kills it."""

    plant: Callable[[Patch], None]
    killer: Callable[[], None]


MUTANTS: dict[str, Mutant] = {}


def killed_by(killer: Callable[[], None]) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a fault into ``MUTANTS``."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS[plant.__name__] = Mutant(plant, killer)
        return plant

    return enter


def wrap(patch: Patch, owner: object, name: str, around: Callable) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **options: around(original, *arguments, **options))


# -- acceptance and the token behind it


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def accept_one_wrong_token(patch: Patch) -> None:
    def verify(original, logits, requests, columns):
        verdicts = zip(original(logits, requests, columns), requests, strict=True)
        return [replace(v, accepted=min(v.accepted + 1, len(r.tokens))) for v, r in verdicts]

    wrap(patch, torch_engine, "verify", verify)


@killed_by(checks.an_always_wrong_draft_gives_one_token_a_step)
def accept_everything(patch: Patch) -> None:
    def verify(original, logits, requests, columns):
        return [replace(v, accepted=len(r.tokens)) for v, r in zip(original(logits, requests, columns), requests, strict=True)]

    wrap(patch, torch_engine, "verify", verify)


@killed_by(checks.an_oracle_gives_k_plus_one_tokens_a_step)
def never_accept_the_last_proposed_token(patch: Patch) -> None:
    def leading(original, flags):
        flags = list(flags)
        return original([*flags[:-1], False]) if len(flags) > 1 else original(flags)

    wrap(patch, verification, "leading", leading)


def bonus_row(patch: Patch, shift: int) -> None:
    def greedy(original, rows, requests, firsts):
        best = rows.argmax(-1).tolist()
        verdicts = zip(original(rows, requests, firsts), requests, firsts, strict=True)
        return [Verdict(v.accepted, best[first + min(max(v.accepted + shift, 0), len(r.tokens))]) for v, r, first in verdicts]

    wrap(patch, verification, "_verify_greedy", greedy)


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def take_the_bonus_from_the_row_before(patch: Patch) -> None:
    bonus_row(patch, -1)


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def take_the_bonus_from_the_row_after(patch: Patch) -> None:
    bonus_row(patch, 1)


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def count_no_row_for_the_bonus(patch: Patch) -> None:
    """From the second request of a batch on, rows are those of another."""

    def firsts(original, requests):
        places = original(requests)
        return [max(place - index, 0) for index, place in enumerate(places)]

    wrap(patch, verification, "_firsts", firsts)


# -- KV


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def skip_the_rollback(patch: Patch) -> None:
    """The target goes on behind everything that it has written, rejected tokens included."""
    written: dict[int, int] = {}

    def prepare(original, engine, turn):
        job = original(engine, turn)
        if engine.name == "target" and job.chunk:
            start = min(max(job.chunk.start, written.get(turn.sequence.id, 0)), len(job.cache.table) - len(job.chunk.tokens))
            written[turn.sequence.id] = start + len(job.chunk.tokens)
            job.chunk = replace(job.chunk, start=start)
        return job

    wrap(patch, TorchEngine, "_prepare", prepare)


@killed_by(checks.kv_is_that_of_a_fresh_prefill)
def keep_the_kv_of_rejected_tokens(patch: Patch) -> None:
    def seen(original, cache, tokens):
        return min(len(cache.ran), len(tokens))

    wrap(patch, kv_caches.Cache, "seen", seen)


@killed_by(checks.drafts_propose_what_they_would_decode)
def keep_the_kv_of_a_draft_s_rejected_tokens(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def prepare(original, engine, turn):
        if engine.name != "target":
            cache = engine._caches.of(turn.sequence)
            cache.agreed = min(len(cache.ran), len(turn.sequence.tokens))
        return original(engine, turn)

    wrap(patch, TorchEngine, "_prepare", prepare)


@killed_by(checks.the_target_lacks_one_token_behind_a_verification)
def forget_the_kv_of_accepted_tokens(patch: Patch) -> None:
    """Costs time, never exactness."""

    def run(original, engine, jobs):
        original(engine, jobs)
        for job in jobs:
            job.cache.roll_back(job.turn.end)

    wrap(patch, TorchEngine, "_run", run)


@killed_by(checks.kv_is_that_of_a_fresh_prefill)
def count_positions_of_a_run_one_too_high(patch: Patch) -> None:
    def chunk(original, tokens, start, *others):
        return original(tokens, start + (len(tokens) > 2), *others)

    wrap(patch, torch_engine, "Chunk", chunk)


@killed_by(checks.greedy_texts_are_those_of_plain_decoding)
def let_a_row_see_the_next_proposed_token(patch: Patch) -> None:
    def mask(original, model, chunk):
        made = original(model, chunk)
        return made if made is None or len(chunk.tokens) < 2 else made.roll(-1, -2)

    wrap(patch, llama.Llama, "_mask", mask)


# -- prefix reuse


@killed_by(checks.texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding)
def share_a_block_that_is_run_in_part(patch: Patch) -> None:
    def seen(original, caches, sequence):
        count = original(caches, sequence)
        begun = min(-(-count // BLOCK_TOKENS), len(sequence.keys))
        caches.contents.update(zip(sequence.blocks.get(caches._name, [])[:begun], sequence.keys, strict=False))
        return count

    wrap(patch, kv_caches.Caches, "seen", seen)


@killed_by(checks.texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding)
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

    wrap(patch, TorchEngine, "_prepare", prepare)


@killed_by(checks.tenants_share_nothing)
def ignore_the_salt(patch: Patch) -> None:
    patch.setattr(kv_ledger, "root_key", lambda salt: block_pool.root_key(""))


@killed_by(checks.texts_that_begin_alike_share_a_pool_that_is_too_small)
def evict_a_block_that_others_refer_to(patch: Patch) -> None:
    def drop(original, pool, table, valid):
        for block in table:
            pool._references[block] = 1
        original(pool, table, valid)

    wrap(patch, BlockPool, "drop", drop)


@killed_by(checks.texts_that_begin_alike_share_a_pool_that_is_too_small)
def find_a_block_that_was_evicted(patch: Patch) -> None:
    patch.setattr(BlockPool, "_forget", lambda pool, block: None)


@killed_by(checks.texts_that_begin_alike_share_kv_and_are_those_of_plain_decoding)
def trust_the_content_of_a_block_that_was_given_to_another(patch: Patch) -> None:
    """The engine takes the ledger's word for KV that it may never have run."""

    def shared(original, caches, sequence, blocks):
        return min((len(sequence.tokens) - 1) // BLOCK_TOKENS, len(sequence.keys))

    wrap(patch, kv_caches.Caches, "shared_blocks", shared)


# -- the law


@killed_by(checks.no_number_decides_twice)
def reuse_the_accept_uniform_for_the_residual(patch: Patch) -> None:
    def uniforms(original, seed, position, purpose, attempt, lane=0):
        return original(seed, position, Purpose.ACCEPT if purpose is Purpose.EMIT else purpose, attempt, lane)

    wrap(patch, verification, "uniforms", uniforms)


@killed_by(checks.no_number_decides_twice)
def draw_the_same_numbers_in_every_step(patch: Patch) -> None:
    """Keeps the law (nobody looks at a number that a rejection discards) until an estimator scores discarded proposals."""

    def uniforms(original, seed, position, purpose, attempt, lane=0):
        return original(seed, position, purpose, 0, lane)

    wrap(patch, verification, "uniforms", uniforms)


@killed_by(checks.texts_sampled_with_a_draft_s_law_follow_the_target_s)
def ignore_the_seed(patch: Patch) -> None:
    def uniforms(original, seed, position, purpose, attempt, lane=0):
        return original(0, position, purpose, attempt, lane)

    wrap(patch, verification, "uniforms", uniforms)


@killed_by(checks.texts_sampled_with_a_draft_s_law_follow_the_target_s)
def correlate_a_rejection_with_its_replacement(patch: Patch) -> None:
    """The accept uniform again, seen from its effect on the law."""
    reuse_the_accept_uniform_for_the_residual(patch)


@killed_by(checks.texts_sampled_with_a_draft_s_law_follow_the_target_s)
def replace_a_rejected_token_from_the_whole_law(patch: Patch) -> None:
    patch.setattr(verification, "residual", lambda target, token, law, row: target)


@killed_by(checks.texts_sampled_with_a_reduced_law_follow_the_target_s)
def keep_a_law_that_is_not_the_one_drawn_from(patch: Patch) -> None:
    """q without temperature, top-k and top-p, of tokens drawn with them."""
    drawn_from, sample = [], torch_engine.sample

    def target_laws(original, scores, params):
        drawn_from[:] = [original(scores, params)]
        return scores.softmax(-1)

    wrap(patch, torch_engine, "target_laws", target_laws)
    patch.setattr(torch_engine, "sample", lambda laws, requests, purpose, lane: sample(drawn_from[0], requests, purpose, lane=lane))


@killed_by(checks.texts_sampled_with_a_draft_s_law_follow_the_target_s)
def take_a_greedy_draft_s_softmax_for_its_law(patch: Patch) -> None:
    patch.setattr(torch_engine, "sample", lambda laws, requests, purpose, lane: laws.argmax(-1).tolist())


@killed_by(checks.texts_sampled_with_a_shortlist_follow_the_target_s_law)
def take_columns_of_a_shortlist_for_tokens(patch: Patch) -> None:
    def dense(original, law, row, vocab_size):
        return original(law if law.token_ids is None else Law(law.probs, torch.arange(law.probs.shape[1])), row, vocab_size)

    wrap(patch, Law, "dense", dense)


@killed_by(checks.texts_sampled_with_lookup_follow_the_target_s_law)
def accept_a_point_mass_with_certainty_where_it_is_likely(patch: Patch) -> None:
    def acceptance(original, laws, tokens, law):
        chances = original(laws, tokens, law)
        return chances if law is not None else torch.where(chances > 0.15, torch.ones_like(chances), chances)

    wrap(patch, verification, "acceptance", acceptance)


@killed_by(checks.texts_sampled_with_a_draft_s_law_follow_the_target_s)
def drop_proposed_tokens_that_look_unlikely(patch: Patch) -> None:
    """A length that depends on the tokens drawn (trap T2)."""

    def propose(original, drafting, sequences, view, plan, log):
        proposals = original(drafting, sequences, view, plan, log)
        for row in proposals.values():
            if row.chosen and row.chosen.probs is not None:
                chances = row.chosen.probs.of(row.chosen.tokens).tolist()
                length = next((i for i, chance in enumerate(chances) if chance < 0.3), len(chances))
                row.chosen = Proposal(row.chosen.draft, row.chosen.tokens[:length], row.chosen.probs) if length else None
        return proposals

    wrap(patch, Drafting, "propose", propose)


# -- plan-invariant sampling


@killed_by(checks.plan_invariant_texts_follow_the_target_s_law)
def key_the_noise_without_the_position(patch: Patch) -> None:
    def key(original, seed, position, purpose):
        return original(seed, 0, purpose)

    wrap(patch, coupling, "key", key)


@killed_by(checks.texts_with_options_are_those_of_plain_decoding)
def key_the_noise_with_the_step(patch: Patch) -> None:
    def coupled(original, columns, rows, requests, firsts):
        moved = [replace(r, sampling=replace(r.sampling, seed=r.sampling.seed + r.attempt)) for r in requests]
        return original(columns, rows, moved, firsts)

    wrap(patch, verification, "_verify_coupled", coupled)


@killed_by(checks.plan_invariant_texts_follow_the_target_s_law)
def give_every_token_the_same_noise(patch: Patch) -> None:
    def exponentials(original, word, tokens):
        return original(word, torch.zeros_like(tokens))

    wrap(patch, coupling, "exponentials", exponentials)


# -- options, log-probabilities, ends


@killed_by(checks.texts_with_options_are_those_of_plain_decoding)
def blind_penalties_to_the_run(patch: Patch) -> None:
    def penalise(original, logits, sampling, before, proposed, columns):
        original(logits, sampling, before, [], columns)

    wrap(patch, processing, "_penalise", penalise)


@killed_by(checks.texts_with_options_are_those_of_plain_decoding)
def blind_bad_words_to_the_run(patch: Patch) -> None:
    def ban(original, logits, sampling, before, proposed, columns):
        for row in range(len(logits)):
            original(logits[row : row + 1], sampling, before, [], columns)

    wrap(patch, processing, "_ban", ban)


@killed_by(checks.texts_with_options_are_those_of_plain_decoding)
def count_min_tokens_from_the_start_of_the_step(patch: Patch) -> None:
    def process(original, logits, sampling, before, output_tokens, proposed, columns):
        whole_run = sampling.min_tokens if output_tokens >= sampling.min_tokens else output_tokens + len(logits)
        original(logits, replace(sampling, min_tokens=whole_run), before, output_tokens, proposed, columns)

    wrap(patch, verification, "process", process)


@killed_by(checks.a_copy_of_the_target_is_never_rejected)
def let_drafts_ignore_the_options(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def prepare(original, engine, turn):
        job = original(engine, turn)
        if engine.name != "target":
            kept = job.request.sampling
            bare = SamplingParams(kept.temperature, kept.top_k, kept.top_p, kept.seed, kept.coupled)
            job.request = replace(job.request, sampling=bare)
        return job

    wrap(patch, TorchEngine, "_prepare", prepare)


@killed_by(checks.log_probs_are_those_of_the_text)
def take_log_probabilities_from_the_next_row(patch: Patch) -> None:
    def with_log_probs(original, rows, request, first, verdict):
        return original(rows.roll(-1, 0), request, first, verdict)

    wrap(patch, verification, "_with_log_probs", with_log_probs)


@killed_by(checks.nothing_is_committed_beyond_an_end)
def commit_what_was_accepted_behind_an_end(patch: Patch) -> None:
    def commit(original, self, tokens, *told):
        taken = original(self, tokens, *told)
        self.sequence.tokens += tokens[taken:]
        self.output_tokens += len(tokens) - taken
        return len(tokens)

    wrap(patch, session.Session, "commit", commit)


@killed_by(checks.nothing_is_committed_beyond_an_end)
def look_at_max_tokens_between_steps_only(patch: Patch) -> None:
    """The planner's ceiling would hide it: the last token of ``max_tokens`` is never a proposed one."""
    wrap(patch, Drafting, "ceilings", lambda original, drafting, seqs, most, **free: original(drafting, seqs, [K_MAX] * len(most), **free))

    def commit(original, self, tokens, *told):
        beyond = max(0, len(tokens) - self.remaining)
        taken = original(self, tokens, *told)
        if self.finish_reason is FinishReason.LENGTH:
            self.sequence.tokens += tokens[taken:]
            self.output_tokens += beyond
        return taken

    wrap(patch, session.Session, "commit", commit)
