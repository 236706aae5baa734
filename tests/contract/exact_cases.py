"""Scenarios of the exactness suite, and the properties that hold of each."""

from dataclasses import replace

from backend.request import SamplingParams
from tests.contract import checks
from tests.contract.scenarios import (
    ALIKE,
    BUSY,
    CRAMPED,
    CROWDED,
    MIXED,
    TAILED,
    UNEVEN,
    Ask,
    Scenario,
    asks_of,
)

SETTLED = (*checks.ALL, checks.one_token_is_unseen)
LATE = Scenario(tuple(Ask(n % 6, 24, n, n + 3 + n % 4 if n % 2 else None) for n in range(14)))
"""Clients that leave while others go on."""

DECAYING = SamplingParams(1.0, top_p=0.95, top_p_decay=0.6, top_p_min=0.2, top_p_reset_id=2)
DECAYED = tuple(replace(DECAYING, temperature=1.5, seed=n) for n in range(2))
SCENARIOS = {
    "busy": (BUSY, SETTLED),
    "options": (MIXED, SETTLED),
    "chains only": (replace(MIXED, nodes=0), SETTLED),
    "tokens of the tail": (TAILED, SETTLED),
    "decaying top-p": (Scenario(asks_of(*DECAYED), max_active=4), SETTLED),
    "plain": (replace(MIXED, script=((-1, 0),)), SETTLED),
    "oracle": (replace(MIXED, script=((6, 4),)), SETTLED),
    "alike": (ALIKE, checks.ALL),
    "crowded": (CROWDED, checks.ALL),
    "pre-empted": (CRAMPED, checks.ALL),
    "pre-empted, nothing kept": (replace(CRAMPED, reuse=False), checks.ALL),
    "uneven": (UNEVEN, SETTLED),
    "late": (LATE, checks.ALL),
}
CHECKS = (
    checks.branches_are_taken_and_trees_are_trimmed,
    checks.a_copy_of_the_target_is_rejected_for_its_tail_only,
    checks.tenants_share_nothing,
    checks.an_always_wrong_draft_gives_one_token_a_step,
    checks.an_oracle_gives_k_plus_one_tokens_a_step,
    checks.nothing_is_committed_beyond_an_end,
)
SAMPLINGS = {
    "wide": checks.WIDE,
    "sharp": checks.SHARP,
    "options": checks.OPTIONS,
    "decaying": DECAYING,
}
