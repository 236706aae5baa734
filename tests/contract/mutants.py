"""Deliberate faults, one a function: each patches one place of the product and names what of the
suite must notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from backend.core import block_pool, kv_ledger, session
from backend.core.batch import Batch
from backend.core.block_pool import BlockPool
from backend.core.kv_ledger import KVLedger
from backend.engines.fake import FakeEngine
from backend.engines.port import AFTER
from backend.engines.stepping import engine as stepping
from backend.engines.stepping import kv_caches
from backend.engines.stepping.chunks import Chunk
from backend.engines.stepping.engine import StepEngine
from backend.engines.torch import llama
from backend.request import FinishReason, SamplingParams
from backend.sampling import draw, verification
from backend.sampling.randomness import exponentials
from backend.sequence import BLOCK_TOKENS, Proposal
from backend.speculation.drafting import Drafting
from backend.speculation.step_log import StepLog
from tests.contract import ahead, checks
from tests.contract.deployment import K_MAX
from tests.contract.scenarios import (
    ALIKE,
    BUSY,
    CRAMPED,
    CROWDED,
    MIXED,
    TAILED,
    Scenario,
    greedily,
)

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A fault and the check that kills it."""

    plant: Callable[[Patch], None]
    killer: Callable[[], object]


MUTANTS: dict[str, Mutant] = {}


def killed_by(
    killer: Callable[..., Any], scenario: Scenario | None = None
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a fault into ``MUTANTS``; with a scenario the killer is a property of it."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        check = partial(checks.exact, scenario, killer) if scenario else killer
        MUTANTS[plant.__name__] = Mutant(plant, check)
        return plant

    return enter


def wrap(patch: Patch, owner: object, name: str, around: Callable) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    patch.setattr(
        owner, name, lambda *arguments, **options: around(original, *arguments, **options)
    )


# -- acceptance and the token after it


def change_verdicts(patch: Patch, change: Callable) -> None:
    """Have ``change(verdict, request, rows of logits)`` change every verdict on a proposal."""

    def verify(original, logits, requests, columns):
        verdicts, row = original(logits, requests, columns), 0
        for verdict, request in zip(verdicts, requests, strict=True):
            if request.tokens:
                change(verdict, request, logits[row : row + request.rows])
            row += request.rows
        return verdicts

    wrap(patch, stepping, "verify", verify)


def tell_alike(verdict) -> None:
    """Have as many log-probabilities as tokens, so that it is the tokens that are noticed."""
    wanted = len(verdict.path) + 1
    verdict.log_probs = (verdict.log_probs * wanted)[:wanted] if verdict.log_probs else []


def children(request, node: int) -> list[int]:
    return [child for child, parent in enumerate(request.parents) if parent == node]


@killed_by(checks.texts, BUSY)
def accept_the_first_child_where_none_was_drawn(patch: Patch) -> None:
    def change(verdict, request, rows):
        verdict.path += children(request, verdict.path[-1] if verdict.path else -1)[:1]

    change_verdicts(patch, change)


@killed_by(checks.an_always_wrong_draft_gives_one_token_a_step)
def accept_everything(patch: Patch) -> None:
    def change(verdict, request, rows):
        verdict.path[:] = range(len(request.tokens))

    change_verdicts(patch, change)


@killed_by(checks.texts, BUSY)
def accept_a_sibling_of_the_token_drawn(patch: Patch) -> None:
    def change(verdict, request, rows):
        if verdict.path:
            verdict.path[-1] = children(request, request.parents[verdict.path[-1]])[0]

    change_verdicts(patch, change)


@killed_by(checks.texts, BUSY)
def accept_a_node_whose_parent_was_not_accepted(patch: Patch) -> None:
    """Any node with the token drawn will do."""

    def step(original, verdict, request):
        last = verdict.path[-1] if verdict.path else -1
        for node in range(last + 1, len(request.tokens)):
            if request.tokens[node] == verdict.column:
                verdict.path.append(node)
                return True
        return False

    wrap(patch, verification, "_step", step)


@killed_by(checks.counts, BUSY)
def never_accept_the_last_node(patch: Patch) -> None:
    """Costs time, never exactness: its token is the one drawn."""

    def step(original, verdict, request):
        found = original(verdict, request)
        if found and verdict.path[-1] == len(request.tokens) - 1:
            verdict.path.pop()
            return False
        return found

    wrap(patch, verification, "_step", step)


@killed_by(checks.texts, BUSY)
def look_at_the_first_child_only(patch: Patch) -> None:
    """Draws the same, but counts on the spine."""

    def step(original, verdict, request):
        found = original(verdict, request)
        if found and len(verdict.path) > 1 and verdict.path[-1] != verdict.path[-2] + 1:
            verdict.path[-1] = verdict.path[-2] + 1
        return found

    wrap(patch, verification, "_step", step)


def take_the_bonus_from(patch: Patch, shift: int) -> None:
    def change(verdict, request, rows):
        row = max(
            0, min(len(request.tokens), (verdict.path[-1] if verdict.path else -1) + 1 + shift)
        )
        verdict.column = int(rows[row].argmax())

    change_verdicts(patch, change)


@killed_by(checks.texts, greedily(BUSY))
def take_the_bonus_from_the_row_before(patch: Patch) -> None:
    take_the_bonus_from(patch, -1)


@killed_by(checks.texts, greedily(BUSY))
def take_the_bonus_from_the_row_after(patch: Patch) -> None:
    take_the_bonus_from(patch, 1)


@killed_by(checks.texts, BUSY)
def count_no_row_for_the_bonus(patch: Patch) -> None:
    """After the first request of a batch, rows are those of another."""

    def firsts(original, requests):
        return [max(place - index, 0) for index, place in enumerate(original(requests))]

    wrap(patch, verification, "_firsts", firsts)


# -- the draw


def change_words(patch: Patch, change: Callable) -> None:
    """Have ``change(word, seed, position)`` give the noise of a place."""
    wrap(patch, verification, "word", change)


@killed_by(checks.texts, BUSY)
def ignore_the_seed(patch: Patch) -> None:
    change_words(patch, lambda word, seed, position: word(0, position))


@killed_by(checks.texts, BUSY)
def draw_without_the_position(patch: Patch) -> None:
    change_words(patch, lambda word, seed, position: word(seed, 0))


@killed_by(checks.texts, BUSY)
def draw_for_the_place_before(patch: Patch) -> None:
    """With noise that has been used: a token would tell of the next."""
    change_words(patch, lambda word, seed, position: word(seed, position - 1))


@killed_by(checks.texts, BUSY)
def draw_a_run_with_the_noise_of_its_first_place(patch: Patch) -> None:
    def after(original, request, run):
        return replace(original(request, run), position=request.position)

    wrap(patch, verification.Row, "after", after)


@killed_by(checks.texts, BUSY)
def give_every_token_the_same_noise(patch: Patch) -> None:
    def exponentials(original, words):
        return original(words & ~np.uint64(31))

    wrap(patch, draw, "exponentials", exponentials)


def change_times(patch: Patch, change: Callable) -> None:
    """Have ``change(times, tails, words)`` give the tails' exponentials of the target's race."""
    times_of = draw._times

    def race(original, heads, words, *others):
        def times(*arguments):
            times, tails, ends = times_of(*arguments)
            return times, change(times, tails, words), ends

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(draw, "_times", times)
            return original(heads, words, *others)

    wrap(patch, draw, "race", race)


@killed_by(checks.texts, TAILED)
def never_let_the_tail_win(patch: Patch) -> None:
    change_times(patch, lambda times, tails, words: np.full_like(tails, np.inf))


@killed_by(checks.texts, TAILED)
def let_the_tail_run_with_a_token_s_noise(patch: Patch) -> None:
    change_times(patch, lambda times, tails, words: exponentials(words))


@killed_by(checks.texts, TAILED)
def draw_from_the_tail_with_the_head_s_token(patch: Patch) -> None:
    wrap(patch, draw, "_in_tail", lambda original, probs, word, head, ids: head)


@killed_by(checks.texts, TAILED)
def race_for_a_head_that_depends_on_the_batch(patch: Patch) -> None:
    def of(original, probs):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(draw, "HEAD", 0.02 * len(probs))
            return original(probs)

    original = draw.Heads.of
    patch.setattr(draw.Heads, "of", lambda probs: of(original, probs))


@killed_by(checks.proposals, BUSY)
def race_for_columns_of_a_shortlist(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def finishers(original, probs, words, most, token_ids=None):
        return original(probs, words, most)

    wrap(patch, verification, "finishers", finishers)


@killed_by(checks.proposals, BUSY)
def propose_with_noise_of_its_own(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def finishers(original, probs, words, *others):
        return original(probs, words + np.uint64(1), *others)

    wrap(patch, verification, "finishers", finishers)


# -- the tree in a pass


@killed_by(checks.texts, BUSY)
def let_a_node_see_its_siblings(patch: Patch) -> None:
    def ancestors(original, parents):
        seen = original(parents)
        for node, parent in enumerate(parents):
            seen[node] |= torch.tensor([other == parent for other in parents])
        return seen

    wrap(patch, llama, "ancestors", ancestors)


@killed_by(checks.texts, BUSY)
def let_a_node_see_all_before_it(patch: Patch) -> None:
    def ancestors(parents):
        return torch.ones(len(parents), len(parents), dtype=torch.bool).tril()

    patch.setattr(llama, "ancestors", ancestors)


@killed_by(checks.texts, BUSY)
def let_a_row_see_the_next_proposed_token(patch: Patch) -> None:
    def mask(original, model, chunk):
        made = original(model, chunk)
        return made if made is None or len(chunk.tokens) < 2 else made.roll(-1, -2)

    wrap(patch, llama.Llama, "_mask", mask)


def move_nodes(patch: Patch, positions: Callable) -> None:
    original = vars(Chunk)["positions"].fget

    def moved(chunk):
        first = len(chunk.tokens) - len(chunk.parents)
        return positions(original(chunk), first, chunk.parents)

    patch.setattr(Chunk, "positions", property(moved))


@killed_by(checks.texts, BUSY)
def put_leaves_one_position_too_far(patch: Patch) -> None:
    def positions(right, first, parents):
        beyond = [row > first and row - first not in parents for row in range(len(right))]
        return [at + far for at, far in zip(right, beyond, strict=True)]

    move_nodes(patch, positions)


@killed_by(checks.kv_is_fresh, BUSY)
def give_nodes_the_positions_of_their_rows(patch: Patch) -> None:
    move_nodes(patch, lambda right, first, parents: [*range(right[0], right[0] + len(right))])


@killed_by(checks.kv_is_fresh, BUSY)
def count_positions_of_a_run_one_too_high(patch: Patch) -> None:
    def chunk(original, tokens, start, *others, **options):
        return original(tokens, start + (len(tokens) > 2), *others, **options)

    wrap(patch, stepping, "Chunk", chunk)


# -- proposals and trims


@killed_by(checks.counts, BUSY)
def cut_a_parent_before_its_child(patch: Patch) -> None:
    """The last nodes of a tree are verified, not the best: each gets what is left of its path."""

    def first(original, proposal, nodes):
        if nodes >= len(proposal):
            return proposal
        away = len(proposal) - nodes
        parents = [max(parent - away, -1) for parent in proposal.parents[away:]]
        return Proposal(proposal.draft, proposal.tokens[away:], parents, proposal.confidence[away:])

    wrap(patch, Proposal, "first", first)


@killed_by(checks.counts, BUSY)
def verify_all_that_was_proposed(patch: Patch) -> None:
    """Costs time, never exactness: a trim that is not heard."""
    wrap(
        patch,
        Drafting,
        "choose",
        lambda original, drafting, drafted, nodes: original(drafting, drafted, 99),
    )


@killed_by(checks.counts, BUSY)
def forget_what_was_cut(patch: Patch) -> None:
    """Outcomes tell of verified nodes only."""

    def record(original, log, request, drafted, verified, emitted, **options):
        cut = (drafted and drafted.first(verified)) or None
        original(log, request, cut, verified, emitted, **options)

    wrap(patch, StepLog, "record", record)


@killed_by(checks.counts, BUSY)
def count_all_emitted_but_the_last_as_accepted(patch: Patch) -> None:
    """The last may be a node that was not verified."""

    def record(original, log, *arguments, **options):
        original(log, *arguments, **options)
        row = list(log.rows[-1])
        row[3] = min(row[2], row[4] - 1)
        log.rows[-1] = tuple(row)

    wrap(patch, StepLog, "record", record)


# -- KV


@killed_by(checks.kv_is_fresh, BUSY)
def leave_the_kv_of_accepted_nodes_where_it_was(patch: Patch) -> None:
    patch.setattr(llama.Llama, "keep", lambda model, accepted: None)


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
            cache = engine._caches.of(turn.sequence)
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


@killed_by(checks.blocks_are_of_one_text, ALIKE)
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


# -- options, log-probabilities, ends


def blind_to_the_run(patch: Patch, **options) -> None:
    """Have these options see the committed text only."""

    def process(original, logits, sampling, before, prompt_tokens, columns):
        committed = RUNS[-1] if RUNS else before
        blind = {name: getattr(sampling, name) for name in options}
        original(logits, replace(sampling, **options), before, prompt_tokens, columns)
        original(
            logits,
            replace(SamplingParams(sampling.temperature), **blind),
            committed,
            prompt_tokens,
            columns,
        )

    RUNS: list[list[int]] = []

    def scores(original, logits, places, columns):
        found = []
        for row, place in enumerate(places):
            RUNS.append(place.before[: len(place.before) - len(place.run)])
            found.append(original(logits[row : row + 1], [place], columns))
            RUNS.pop()
        return torch.cat(found)

    wrap(patch, verification, "scores", scores)
    wrap(patch, verification, "process", process)


@killed_by(checks.texts, MIXED)
def blind_penalties_to_the_run(patch: Patch) -> None:
    blind_to_the_run(patch, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)


@killed_by(checks.texts, MIXED)
def blind_bad_words_to_the_run(patch: Patch) -> None:
    blind_to_the_run(patch, bad_words=())


@killed_by(checks.texts, MIXED)
def count_min_tokens_without_the_run(patch: Patch) -> None:
    blind_to_the_run(patch, min_tokens=0, end_ids=())


@killed_by(checks.texts, MIXED)
def count_min_tokens_from_the_prompt(patch: Patch) -> None:
    def process(original, logits, sampling, before, prompt_tokens, columns):
        original(logits, sampling, before, 0, columns)

    wrap(patch, verification, "process", process)


@killed_by(checks.a_copy_of_the_target_is_rejected_for_its_tail_only)
def let_drafts_ignore_the_options(patch: Patch) -> None:
    """Costs acceptance, never exactness."""

    def prepare(original, engine, turn):
        job = original(engine, turn)
        if engine.name != "target":
            kept = job.request.sampling
            bare = SamplingParams(kept.temperature, kept.top_k, kept.top_p, kept.seed)
            job.request = replace(job.request, sampling=bare)
        return job

    wrap(patch, StepEngine, "_prepare", prepare)


@killed_by(checks.log_probs, MIXED)
def take_log_probabilities_without_the_temperature(patch: Patch) -> None:
    def tell(original, verdict, row, sampling):
        original(verdict, row, replace(sampling, temperature=1.0))

    wrap(patch, verification, "_tell", tell)


@killed_by(checks.log_probs, MIXED)
def give_each_token_the_log_probability_of_the_next(patch: Patch) -> None:
    def change(verdict, request, rows):
        verdict.log_probs = verdict.log_probs[1:] + verdict.log_probs[:1]

    change_verdicts(patch, change)


@killed_by(checks.nothing_is_committed_beyond_an_end)
def commit_what_was_accepted_after_an_end(patch: Patch) -> None:
    def commit(original, self, tokens, *scores):
        taken = original(self, tokens, *scores)
        self.sequence.tokens += tokens[taken:]
        self.output_tokens += len(tokens) - taken
        return len(tokens)

    wrap(patch, session.Session, "commit", commit)


@killed_by(checks.nothing_is_committed_beyond_an_end)
def look_at_max_tokens_between_steps_only(patch: Patch) -> None:
    """The planner's ceiling would hide it: the last token of ``max_tokens`` is never a proposed
    one.
    """

    def ceilings(original, drafting, sequences, most, **options):
        return original(drafting, sequences, [K_MAX] * len(most), **options)

    def commit(original, self, tokens, *scores):
        beyond = max(0, len(tokens) - self.remaining)
        taken = original(self, tokens, *scores)
        if self.finish_reason is FinishReason.LENGTH:
            self.sequence.tokens += tokens[taken:]
            self.output_tokens += beyond
        return taken

    wrap(patch, Drafting, "ceilings", ceilings)
    wrap(patch, session.Session, "commit", commit)


# -- two submissions in flight


@killed_by(ahead.texts_ahead)
def follow_from_a_stale_length(patch: Patch) -> None:
    def turn(original, batch, session, step):
        found = original(batch, session, step)
        if found.end == AFTER:
            found.end = len(session.sequence.tokens)
        return found

    wrap(patch, Batch, "_turn", turn)


@killed_by(ahead.texts_ahead)
def commit_the_last_token_of_a_turn_twice(patch: Patch) -> None:
    """The device goes on from the token before the last one."""

    def keep(original, engine, job, tokens, proposal, new):
        original(engine, job, tokens, proposal, new)
        if new:
            job.text.tokens.pop()

    wrap(patch, FakeEngine, "_keep", keep)


@killed_by(ahead.stop_words_end_texts_ahead)
def miss_a_stop_word_across_two_turns(patch: Patch) -> None:
    def commit(original, self, *turn):
        self._searched = len(self._withheld)
        return original(self, *turn)

    wrap(patch, session.Session, "commit", commit)
