"""The description of a simulated server: its true times and limits, and what of its tables a policy
reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from policy.latency import LatencyCurve, LatencyModel
from policy.plan import FloatArray, IntArray, View

BLOCK_TOKENS = 16
_KNOT_FACTOR = 8


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """One simulated replica."""

    name: str
    provenance: str
    drafts: tuple[str, ...]
    latency: LatencyModel
    """The true times."""
    free: tuple[bool, ...]
    """Drafts without a model (lookup), which are scored in every step."""
    telling: tuple[float, ...] = ()
    """How much a draft's confidence in a token says of whether it is accepted
    (``workload.Acceptance.confidence``); 0: nothing beyond its hazard.
    """
    showing: tuple[float, ...] = ()
    """How much its evidence says of that (``workload.Acceptance.shown``); 0: it shows none."""
    k_max: int = 8
    max_active: int = 64
    prefill_chunk_tokens: int = 2048
    kv_tokens: int = 1 << 17
    proposing_factor: float = 1.0
    """Multiplies what the decoding rows take in passes that verify proposals; no table shows it."""
    noise: float = 0.03
    """Standard deviation of the logarithm of a step's time."""
    planning_s: tuple[tuple[int, float], ...] = ()
    """(Rows, seconds) in order: what planning and learning add to a planned step."""
    change_tokens: int = 0
    """A pass of another width than the last one takes as much longer as these tokens do; 0: the
    engine has no width to keep.
    """
    full_information: bool = False
    """Lets policies learn in every step how each draft would have guessed; no server can."""

    def planned_s(self, rows: int) -> float:
        """Return what planning for a number of rows takes, linear between the batch sizes."""
        if not self.planning_s:
            return 0.0
        sizes, seconds = zip(*self.planning_s, strict=True)
        return float(np.interp(rows, sizes, seconds))


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step."""

    draft: IntArray  # [n]
    length: IntArray
    """[n] tokens that are drafted."""
    verified: IntArray
    """[n] nodes that are verified."""
    catchup: IntArray
    """[n] tokens that the draft has not seen yet."""
    rows: int
    context_tokens: int
    """Tokens of all contexts together."""
    prefill_tokens: int = 0
    free_rows: dict[int, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The tokens that the target's pass needs room for."""
        return len(self.length) + int(self.verified.sum()) + self.prefill_tokens


@dataclass(slots=True)
class PaddedWidth:
    """The width of passes on an engine that prefers to keep it.

    A slightly smaller pass is padded to the width of the last one, until the padding has cost more
    than a change does (as ``backend.engines.openvino.width``).
    """

    change_tokens: int
    tokens: int = 0
    """The width of the last pass."""
    padded: int = 0
    """Tokens of padding since the last change."""

    def widen(self, tokens: int) -> bool:
        """Set the width of a pass that needs room for some tokens; return whether it changed."""
        more = self.tokens - tokens
        changed = more < 0 or self.padded + more > self.change_tokens
        if changed:
            self.tokens, more = tokens, 0
        self.padded = self.padded + more if more else 0
        return changed


def step_parts(latency: LatencyModel, work: Work, drafts: tuple[str, ...]) -> dict[str, float]:
    """Return the seconds of a step by part, in the names of ``StepTimes.parts_s``.

    A draft's first forward reads the tokens that each row of its group lacks, each further one a
    token per row still drafting; the target verifies everything with the prompts' chunks in one
    pass. ``rows`` and ``context_tokens`` include those of the chunks.
    """
    parts = {"verify": latency.target.seconds(work.tokens, work.rows, work.context_tokens)}
    parts["overhead"] = latency.overhead_s + latency.speculation_s * bool(work.length.any())
    for d, rows in work.free_rows.items():
        parts[f"draft:{drafts[d]}"] = latency.drafts[d].seconds(rows, rows)
    for d in set(work.draft[work.length > 0].tolist()) - set(work.free_rows):
        group = work.draft == d
        length, curve = work.length[group], latency.drafts[d]
        alive = (length[:, None] > np.arange(1, int(length.max()))).sum(0)
        forwards = np.concatenate([[np.maximum(work.catchup[group], 1).sum()], alive])
        row_s = curve.row_s + curve.context_s * work.context_tokens / max(work.rows, 1)
        parts[f"draft:{drafts[d]}"] = float(curve.base(forwards).sum() + length.sum() * row_s)
    return parts


def step_time(
    deployment: Deployment, view: View, work: Work, width: PaddedWidth
) -> dict[str, float]:
    """Return the seconds of a step by part, and set the width of its pass."""
    parts_s, latency = step_parts(deployment.latency, work, view.drafts), deployment.latency
    if width.change_tokens:
        last = width.tokens
        paid = width.change_tokens if width.widen(work.tokens) and last else 0
        target = latency.target
        parts_s["verify"] += target.at(width.tokens + paid) - target.at(work.tokens)
    parts_s["verify"] += latency.target.node_context_s * int(work.verified @ view.context)
    if deployment.proposing_factor != 1 and work.verified.any():
        tokens, context = len(view) + int(work.verified.sum()), int(view.context.sum())
        decoding_s = latency.target.seconds(tokens, len(view), context)
        parts_s["verify"] += (deployment.proposing_factor - 1) * decoding_s
    return parts_s


def perturb(latency: LatencyModel, share: float, seed: int) -> LatencyModel:
    """Return what a policy reads: every entry off by up to ``share``, independently at 1, 8, 64,
    ... tokens of every engine.

    Between these the error is linear in the logarithm of the tokens, so that both level and shape
    of a curve are wrong.
    """
    rng = np.random.default_rng([seed, 5])

    def factor(count: int = 1) -> FloatArray:
        return 1 + share * rng.uniform(-1, 1, count)

    def curve(true: LatencyCurve) -> LatencyCurve:
        tokens = np.arange(1, len(true.base_s) + 1)
        knots = np.arange(int(np.ceil(np.log(len(tokens)) / np.log(_KNOT_FACTOR))) + 2)
        wrong = np.interp(np.log(tokens) / np.log(_KNOT_FACTOR), knots, factor(len(knots)))
        base_s = np.maximum.accumulate(true.base_s * np.concatenate([wrong[:1], wrong[:-1]]))
        slope, row, context = factor(3).tolist()
        return LatencyCurve(
            base_s,
            slope * true.slope_s,
            row * true.row_s,
            context * true.context_s,
            context * true.node_context_s,
        )

    return replace(
        latency,
        target=curve(latency.target),
        drafts=tuple(curve(draft) for draft in latency.drafts),
        overhead_s=latency.overhead_s * float(factor()[0]),
        speculation_s=latency.speculation_s * float(factor()[0]),
    )


def blocks(tokens: IntArray) -> IntArray:
    """Return how many KV blocks numbers of tokens, [n] or a single one, need."""
    return -(-tokens // BLOCK_TOKENS)
