"""The longest match first: a free draft where it matches enough, another draft elsewhere.

TensorRT-LLM's ``SAEnhancerConfig`` (1.3.0rc27): a suffix automaton overrides the tokens of EAGLE-3
or MTP where at least ``threshold`` tokens match, 4 unless it is set. vLLM's pull request 24344
(``ngram-eagle``, open) prefers n-grams wherever there are any. Both draft with EAGLE for every row;
here only for the rows that use it, which helps. vLLM's ``suffix_decoding_max_spec_factor`` bounds
proposals by the match, as ``own=0`` does. A view has the length of a match in classes
(``policy.evidence``); the least of the class counts.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator as Rng

from policy.baselines import Baseline
from policy.evidence import EVIDENCE_BINS, MATCH_EDGES, bin_of_match
from policy.latency import LatencyModel
from policy.plan import Plan, Policy, View

_TOKENS = np.zeros(EVIDENCE_BINS, np.int64)
"""The least tokens of a match by the bin that it shows."""
for _tokens in reversed(range(1, MATCH_EDGES[-1] + 1)):
    _TOKENS[[bin_of_match(_tokens), bin_of_match(_tokens, agree=True)]] = _tokens

_FREE_SHARE = 0.03
"""Share of a pass of the target that a forward of a free draft may take."""


class SuffixElse(Policy[None]):
    """A one-line rule: the free draft where at least ``least`` tokens match, else ``draft``.

    The free draft is the one of the others that takes least time, if that is next to none. It
    proposes ``own`` tokens, with 0 as many as match. ``draft`` proposes ``length``. A free draft
    that shows no evidence matches wherever it can propose.
    """

    def __init__(
        self,
        drafts: tuple[str, ...],
        latency: LatencyModel,
        k_max: int,
        *,
        draft: str,
        length: int,
        least: int = 4,
        own: int = 0,
    ) -> None:
        """Raise ValueError for an unknown draft."""
        if draft not in drafts:
            raise ValueError(f"draft must be one of {drafts}, got {draft!r}")
        seconds = {
            name: curve.seconds(1)
            for name, curve in zip(drafts, latency.drafts, strict=True)
            if name != draft and curve.seconds(1) <= _FREE_SHARE * latency.target.seconds(1)
        }
        self.draft, self.length, self.own = draft, length, own
        self.free = min(seconds, key=seconds.__getitem__, default=draft)
        self._least = min(least, MATCH_EDGES[-1])

    def plan(self, view: View, state: None, now: float, rng: Rng) -> tuple[Plan, None]:
        for name in (self.draft, self.free):
            if name not in view.drafts:
                raise ValueError(f"draft must be one of {view.drafts}, got {name!r}")
        free, other = view.drafts.index(self.free), view.drafts.index(self.draft)
        ceiling = view.ceiling[:, free]
        matches = np.zeros_like(ceiling) if view.evidence is None else view.evidence[:, free]
        tokens = np.where(matches > 0, _TOKENS[matches], ceiling)
        matched = (ceiling > 0) & ((matches == 0) | (tokens >= self._least)) & (free != other)
        lengths = tokens if self.own == 0 else self.own
        draft, length = np.where(matched, free, other), np.where(matched, lengths, self.length)
        return Plan.within(view, draft, length), None


ENTRIES = {
    "suffix-else-eagle": Baseline.by_path(
        SuffixElse,
        "suffix if it matches",
        needs=("draft", "length"),
        options={"least": (4, 1, 3, 8, 12, 16), "own": (0, 4, 8, 16)},
        colour="#c2507a",
        marker="h",
    ),
}
