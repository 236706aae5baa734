"""What a simulated server is: its true times, limits, and what of its tables a policy is given to read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from policy.latency import LatencyCurve, LatencyModel
from policy.plan import FloatArray, IntArray
from policy.shapes import Shapes

BLOCK_TOKENS = 16
_KNOT_FACTOR = 8


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """One replica. ``latency`` is the truth; ``free[d]`` marks a draft without model (lookup), which is scored in every step.

    ``noise`` is the standard deviation of the logarithm of a step's time; ``planning_s`` what a planning policy adds to each step;
    ``full_information`` lets policies learn in every step how each draft would have guessed, which no real server can.
    ``shapes`` is what the engine can do beyond a chain a row.
    """

    name: str
    provenance: str
    drafts: tuple[str, ...]
    latency: LatencyModel
    free: tuple[bool, ...]
    k_max: int = 8
    max_active: int = 64
    prefill_chunk_tokens: int = 2048
    kv_tokens: int = 1 << 17
    noise: float = 0.03
    planning_s: float = 0.0
    full_information: bool = False
    shapes: Shapes = field(default_factory=Shapes)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step runs: the tokens of the contexts in all, and of each chain, int64[n], its draft,
    its length and what that draft has not seen yet.
    """

    draft: IntArray
    length: IntArray
    catchup: IntArray
    rows: int
    context_tokens: int
    prefill_tokens: int = 0
    free_rows: dict[int, int] = field(default_factory=dict)


def step_parts(latency: LatencyModel, work: Work, drafts: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds of a step by part, in the names of ``Outcome.parts_s``.

    A draft's first forward reads the tokens that each row of its group lacks, each further one a token per row still drafting; the target
    verifies everything with the prompts' chunks in one pass. ``rows`` and ``context_tokens`` include those of the chunks.
    """
    proposed = int(work.length.sum())
    tokens = len(work.length) + proposed + work.prefill_tokens
    parts = {"verify": latency.target.seconds(tokens, work.rows, work.context_tokens)}
    parts["overhead"] = latency.overhead_s + latency.speculation_s * bool(proposed)
    for d, rows in work.free_rows.items():
        parts[f"draft:{drafts[d]}"] = latency.drafts[d].seconds(rows, rows)
    for d in set(work.draft[work.length > 0].tolist()) - set(work.free_rows):
        group = work.draft == d
        length, curve = work.length[group], latency.drafts[d]
        alive = (length[:, None] > np.arange(1, int(length.max()))).sum(0)
        forwards = np.concatenate([[np.maximum(work.catchup[group], 1).sum()], alive])
        mean_context = work.context_tokens / max(work.rows, 1)
        parts[f"draft:{drafts[d]}"] = float(curve.base(forwards).sum() + length.sum() * (curve.row_s + curve.context_s * mean_context))
    return parts


def perturbed(latency: LatencyModel, share: float, seed: int) -> LatencyModel:
    """Return what a policy reads: every entry off by up to ``share``, independently at 1, 8, 64, ... tokens of every engine.

    Between these the error is linear in the logarithm of the tokens, so that both level and shape of a curve are wrong.
    """
    rng = np.random.default_rng([seed, 5])

    def factor(count: int = 1) -> FloatArray:
        return 1 + share * rng.uniform(-1, 1, count)

    def curve(true: LatencyCurve) -> LatencyCurve:
        tokens = np.arange(1, len(true.base_s) + 1)
        knots = np.arange(int(np.ceil(np.log(len(tokens)) / np.log(_KNOT_FACTOR))) + 2)
        wrong = np.interp(np.log(tokens) / np.log(_KNOT_FACTOR), knots, factor(len(knots)))
        base_s = np.maximum.accumulate(true.base_s * np.concatenate([wrong[:1], wrong[:-1]]))
        return LatencyCurve(base_s, true.slope_s * float(factor()[0]), true.row_s * float(factor()[0]), true.context_s * float(factor()[0]))

    return replace(
        latency,
        target=curve(latency.target),
        drafts=tuple(curve(draft) for draft in latency.drafts),
        overhead_s=latency.overhead_s * float(factor()[0]),
        speculation_s=latency.speculation_s * float(factor()[0]),
    )


def blocks(tokens: IntArray) -> IntArray:
    """Return the KV blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)
