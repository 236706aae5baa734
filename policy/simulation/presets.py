"""Deployments and mixes to simulate, each with where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from policy.latency import LatencyCurve, LatencyModel, LatencyTable, nonnegative_least_squares
from policy.plan import FloatArray

from .deployment import Deployment
from .workload import Category, Mix

TELLING, SUFFIX_TELLING = 0.7, 0.35
"""How far confidences tell (``workload.Acceptance.confidence``): of a token that holds and one that
does not, a model ranks the right one above in 84 of 100 pairs, the length of a match in 69.
"""

_GRID_TOKENS = 4096
_SPECULATION_SHARE = 0.05  # of a target step: the published models' overhead of speculating


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Milliseconds of a forward: ``fixed + token * tokens + row * rows + context * cached``."""

    fixed: float
    token: float
    row: float
    context: float

    def curve(self) -> LatencyCurve:
        """Return the curve of this line."""
        base: FloatArray = (self.fixed + self.token * np.arange(_GRID_TOKENS + 1)) / 1e3
        base[0] = base[1]
        return LatencyCurve(base, self.token / 1e3, self.row / 1e3, self.context / 1e3)

    def repair(self) -> LinearCost:
        """Return the line without negative terms that is nearest (least squares of the relative
        error) where this one was fitted.

        That is over the batches, contexts and lengths of the published profiling grid. A negative
        term is an artefact of collinearity.
        """
        batches, contexts, lengths = (
            [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128],
            range(128, 2049, 240),
            range(8),
        )
        cells = np.array(
            [(1, b * (k + 1), b, b * c) for b in batches for c in contexts for k in lengths], float
        )
        milliseconds = cells @ np.array([self.fixed, self.token, self.row, self.context])
        fixed, token, row, context = nonnegative_least_squares(
            cells / milliseconds[:, None], np.ones(len(cells))
        ).tolist()
        return LinearCost(fixed, token, row, context)


# Published coefficients: config.py and the EAGLE draft of LiuXiaoxuanPKU/vllm, branch batch-dsd at
# b08a7d37 (milliseconds).
LLAMA_8B = LinearCost(6.938699571857084, 1.84383603e-2, -4.33144783e-2, 4.85907942e-5)
LLAMA_70B = LinearCost(18.34535, 6.40216301e-2, -3.97382298e-2, 6.24369264e-5)
EAGLE_8B = LinearCost(0.452175870, 4.38694070e-5, 5.52805909e-3, 2.89700974e-6)
EAGLE_8B_STEP_MS = 0.4471109584
# Derived, not measured: a memory-bound forward scales with the bytes that it reads (weights 1.24 /
# 8.03, KV per token a quarter).
LLAMA_1B = LinearCost(
    6.938699571857084 * 1.24 / 8.03, 1.84383603e-2 * 1.24 / 8.03, 0.0, 4.85907942e-5 / 4
)
_PUBLISHED = (
    "SmartSpec authors' fits on H100 (vLLM fork, batch-dsd b08a7d37), negative terms "
    "repaired by NNLS on their profiling grid"
)
_DERIVED = "Llama-1B draft derived from the 8B's by bytes read"


def llama_8b_h100() -> Deployment:
    """Llama-8B on one H100 with an EAGLE head and a 1B draft; KV for 40 GiB at 128 KiB a token."""
    latency = LatencyModel(
        LLAMA_8B.repair().curve(),
        (EAGLE_8B.curve(), LLAMA_1B.curve()),
        speculation_s=(EAGLE_8B_STEP_MS + _SPECULATION_SHARE * LLAMA_8B.fixed) / 1e3,
    )
    provenance = f"{_PUBLISHED}; {_DERIVED}"
    drafts = ("eagle", "1b")
    two = (False,) * 2, (TELLING,) * 2
    deployment = Deployment("llama-8b-h100", provenance, drafts, latency, *two)
    return replace(deployment, max_active=128, kv_tokens=327_680)


def llama_70b_h100() -> Deployment:
    """Llama-70B on four H100 with two 1B drafts distilled on different text, as in SPIN; KV for 100
    GiB at 320 KiB a token.
    """
    latency = LatencyModel(
        LLAMA_70B.repair().curve(),
        (LLAMA_1B.curve(), LLAMA_1B.curve()),
        speculation_s=_SPECULATION_SHARE * LLAMA_70B.fixed / 1e3,
    )
    provenance = f"{_PUBLISHED} (TP4); {_DERIVED}"
    drafts = ("1b-prose", "1b-code")
    two = (False,) * 2, (TELLING,) * 2
    deployment = Deployment("llama-70b-4xh100", provenance, drafts, latency, *two)
    return replace(deployment, max_active=128, kv_tokens=327_680)


def specialists(good: float, poor: float) -> tuple[Deployment, Mix]:
    """Return the 8B with four heads, each for one of four workloads, and their mix.

    A head is accepted at ``good`` on its own workload and ``poor`` elsewhere; its token takes 5 %
    of a target pass.
    """
    names = tuple(f"head-{kind}" for kind in ("chat", "code", "summary", "sql"))
    pass_ms = LLAMA_8B.repair().fixed
    head = LinearCost(0.05 * pass_ms, 4.4e-5, 0.0, 2.9e-6).curve()
    latency = LatencyModel(
        LLAMA_8B.repair().curve(), (head,) * 4, speculation_s=0.05 * pass_ms / 1e3
    )
    categories = tuple(
        Category(
            name.removeprefix("head-"),
            0.25,
            300,
            200,
            {n: good if n == name else poor for n in names},
        )
        for name in names
    )
    mix = Mix(f"specialists-{good:g}", categories, spread=0.3, draft_spread=0.2)
    provenance = f"{_PUBLISHED}; heads made up"
    telling = (TELLING,) * 4
    return Deployment("llama-8b-4-heads", provenance, names, latency, (False,) * 4, telling), mix


def smollm2_cpu(tables: Mapping[str, LatencyTable]) -> Deployment:
    """SmolLM2-135M on a CPU with the drafts that are shipped for it, a head and ``suffix``, from
    measured tables ``target`` and ``head``.
    """
    suffix = LatencyCurve(np.full(2, 2e-5), 0.0)
    latency = LatencyModel(
        LatencyCurve.fit(tables["target"]),
        (LatencyCurve.fit(tables["head"]), suffix),
        overhead_s=8e-4,  # both as served (docs/results/sweep-avx2.json.gz), rounded
        speculation_s=5e-4,
    )
    source = tables["target"].provenance
    provenance = (
        f"measured: {source.machine}, {source.dtype}, {source.threads} threads, {source.date}"
    )
    telling = (TELLING, SUFFIX_TELLING)
    deployment = Deployment(
        "smollm2-cpu", provenance, ("head", "suffix"), latency, (False, True), telling
    )
    return replace(deployment, max_active=32, prefill_chunk_tokens=256, kv_tokens=32768)


# Mixes are made up, in the range of acceptance that the published microbenchmarks sweep (0.3 to
# 0.9); hazards by draft name. EAGLE's fall with depth as in the authors' measured table. Those of
# the head and of suffix, and how often that finds something, are measured ones of SmolLM2
# (docs/results/hazards-heads.json): greedy, and for _HARD the least at temperature 0.8.
_DECAY = {
    "eagle": 0.93,
    "1b": 0.98,
    "1b-prose": 0.98,
    "1b-code": 0.98,
    "head": 1.0,
    "suffix": 1.0,
}
_CHAT = {
    "eagle": 0.70,
    "1b": 0.62,
    "1b-prose": 0.72,
    "1b-code": 0.50,
    "head": 0.49,
    "suffix": 0.66,
}
_CODE = {
    "eagle": 0.55,
    "1b": 0.86,
    "1b-prose": 0.55,
    "1b-code": 0.90,
    "head": 0.47,
    "suffix": 0.85,
}
_SUMMARY = {
    "eagle": 0.80,
    "1b": 0.66,
    "1b-prose": 0.80,
    "1b-code": 0.60,
    "head": 0.33,
    "suffix": 0.71,
}
_HARD = {
    "eagle": 0.25,
    "1b": 0.30,
    "1b-prose": 0.35,
    "1b-code": 0.30,
    "head": 0.27,
    "suffix": 0.49,
}
_FOUND = {
    "chat": {"suffix": 0.28},
    "code": {"suffix": 0.71},
    "summary": {"suffix": 0.59},
    "hard": {"suffix": 0.21},
}


CHAT = Mix("chat", (Category("chat", 1.0, 300, 150, _CHAT, match_rate=_FOUND["chat"]),), _DECAY)
"""One kind of request, its acceptance steady: what a fixed choice is made for."""

MIXED = Mix(
    "mix",
    (
        Category(
            "chat",
            0.35,
            300,
            150,
            _CHAT,
            {"eagle": 0.8, "1b-prose": 0.8, "head": 0.8},
            _FOUND["chat"],
        ),
        Category(
            "code",
            0.30,
            400,
            200,
            _CODE,
            {"1b": 0.8, "1b-code": 0.8, "suffix": 0.8},
            _FOUND["code"],
        ),
        Category(
            "summary",
            0.20,
            1000,
            100,
            _SUMMARY,
            {"eagle": 0.8, "1b-prose": 0.8, "suffix": 0.8},
            _FOUND["summary"],
        ),
        Category("hard", 0.15, 200, 200, _HARD, {}, _FOUND["hard"]),
    ),
    _DECAY,
)
"""Four kinds that like different drafts, and drift."""

PREFILL_HEAVY = Mix(
    "prefill-heavy",
    (Category("summary", 1.0, 1500, 60, _SUMMARY, match_rate=_FOUND["summary"]),),
    _DECAY,
)
"""Long prompts, short answers: most steps carry a chunk of somebody's prompt."""

MIXES = {mix.name: mix for mix in (CHAT, MIXED, PREFILL_HEAVY)}
