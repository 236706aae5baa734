"""Faults of options, log-probabilities and ends, and of two submissions in flight."""

from __future__ import annotations

from dataclasses import replace

from backend.core import session
from backend.core.batch import Batch
from backend.engines.port import AFTER
from backend.engines.stepping.engine import StepEngine
from backend.request import FinishReason, SamplingParams
from backend.sampling import verification
from backend.speculation.drafting import Drafting
from tests.contract import ahead, checks
from tests.contract.deployment import K_MAX
from tests.contract.mutants.planting import Patch, change_verdicts, killed_by, wrap
from tests.contract.scenarios import MIXED
from tests.fakes.fake_engine import FakeEngine

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

    def scores(original, logits, place, columns):
        RUNS.append(place.before[: len(place.before) - len(place.run)])
        changed = original(logits, place, columns)
        RUNS.pop()
        return changed

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

    wrap(patch, verification, "_note_log_probs", tell)


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
