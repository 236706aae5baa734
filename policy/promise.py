"""What speculation keeps of what it promises: the best of many estimates is flattered, and a choice that is kept for some steps ages."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from .plan import Outcome, Plan

_MEMORY_TOKENS = 2000.0  # emitted, with speculation or without: what was promised in another hour says nothing
_PRIOR_TOKENS = 100.0  # for which a promise is taken at its word


def promised_gain(share: float, margin: float, held: float) -> float:
    """Return what speculation must promise, as a multiple of plain decoding's goodput, to be chosen
    for this ``share`` of the rows.

    It is ``margin`` more; and it is not to lose if no more than ``held`` of its goodput comes true,
    as so far.
    """
    return max(1 + share * margin, 1 / held)


@dataclass(frozen=True, slots=True)
class Promise:
    """Tokens ``promised`` by fading steps that speculated, and how many of them were ``held``: as many as the step would have emitted in
    the time that was predicted for it, had it gone on at the pace that it had.

    ``tokens`` and ``seconds`` are what the step in hand promises; no seconds where it does not speculate.
    """

    promised: float = 0.0
    held: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    @property
    def kept(self) -> float:
        """The share of a promise that is kept, at most 1."""
        return min((_PRIOR_TOKENS + self.held) / (_PRIOR_TOKENS + self.promised), 1.0)

    def of(self, plan: Plan) -> Promise:
        """Return the same with what a plan promises for the step in hand."""
        return replace(self, tokens=plan.predicted_tokens, seconds=plan.predicted_s if plan.length.any() else 0.0)

    def after(self, outcome: Outcome) -> Promise:
        """Return the same after the step.

        One beside a prompt tells nothing, for most of its time is the prompt's; nor does one whose drafts found nothing, or one of several
        that share the target's time.
        """
        emitted = float(outcome.emitted.sum())
        fade = math.exp(-emitted / _MEMORY_TOKENS)
        promised, held = fade * self.promised, fade * self.held
        took_s = outcome.measured_s - outcome.parts_s.get("planning", 0.0) - outcome.parts_s.get("learning", 0.0)
        shared = outcome.ran is not None or (outcome.shape is not None and outcome.shape.cohort is not None)
        if self.seconds and took_s > 0 and outcome.length.any() and not outcome.prefill_tokens and not shared:
            promised, held = promised + self.tokens, held + emitted * self.seconds / took_s
        return Promise(promised, held)
