"""The requests sent to a deployment: arrivals, lengths, and the true acceptance of every draft,
with random numbers that all arms share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from policy.plan import FloatArray, IntArray

_MIN_HAZARD, _MAX_HAZARD = 0.001, 0.999
_SWING_KNOTS = 16
_CLAIM_EDGES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.995)
"""The least claim in bins 1, 2, ... of made-up evidence."""


@dataclass(frozen=True, slots=True)
class Category:
    """A kind of request: its share of the mix, mean lengths in tokens, and per draft name the
    acceptance of a first proposed token.

    ``swing`` is how far (in logits, by draft) acceptance drifts up and down over a period;
    ``match_rate`` the chance that a draft which needs a match (lookup) has one.
    """

    name: str
    share: float
    prompt_tokens: int
    output_tokens: int
    hazard: Mapping[str, float]
    swing: Mapping[str, float] = field(default_factory=dict)
    match_rate: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Mix:
    """Categories, and how requests of one category differ."""

    name: str
    categories: tuple[Category, ...]
    decay: Mapping[str, float] = field(default_factory=dict)
    """By draft the factor from one position's hazard to the next."""
    spread: float = 0.5
    """Standard deviation of a request's logits, common to the drafts."""
    draft_spread: float = 0.4
    """The same of each draft by itself."""
    length_spread: float = 0.6
    """Standard deviation of a length's logarithm; at 0.6 the longest of a hundred is four times
    the median.
    """
    period_requests: int = 100
    """A drift's period in mean gaps."""


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """Logits added to the acceptance of a category and draft, linear between knots."""

    knots_s: FloatArray  # [knots]
    offset: FloatArray  # [knots, categories, D]

    @classmethod
    def none(cls, categories: int, drafts: int) -> Drift:
        """Return no drift."""
        return cls(np.zeros(1), np.zeros((1, categories, drafts)))

    @classmethod
    def swing(cls, mix: Mix, drafts: tuple[str, ...], period_s: float, horizon_s: float) -> Drift:
        """Return a sine per category and draft; neighbouring categories and drafts are out of
        phase, so that the best draft changes.
        """
        amplitude = np.array(
            [[category.swing.get(name, 0.0) for name in drafts] for category in mix.categories]
        )
        knots_s = np.arange(0.0, horizon_s + period_s, period_s / _SWING_KNOTS)
        phase = (
            np.arange(len(mix.categories))[:, None] / len(mix.categories)
            + np.arange(len(drafts)) / 2
        )
        return cls(
            knots_s, amplitude * np.sin(2 * np.pi * (knots_s[:, None, None] / period_s + phase))
        )

    def at(self, now: float) -> FloatArray:
        """Return the offsets [categories, drafts] at a time, the last ones beyond the last knot."""
        after = int(np.searchsorted(self.knots_s, now, side="right"))
        if after == len(self.knots_s) or after == 0:
            edge: FloatArray = self.offset[min(after, len(self.knots_s) - 1)]
            return edge
        start_s, end_s = self.knots_s[after - 1 : after + 1]
        part = (now - start_s) / (end_s - start_s)
        between: FloatArray = (1 - part) * self.offset[after - 1] + part * self.offset[after]
        return between


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The truth that a policy estimates: hazards of N requests, D drafts and K positions.

    A draft's token at an output position is accepted if the position's uniform number is below the
    draft's hazard. So all arms, drafts and lengths share one random number per position.
    """

    logit: FloatArray  # [N, D]
    category: IntArray  # [N]
    decay: FloatArray  # [D, K]
    drift: Drift
    match_rate: FloatArray  # [N, D]
    start: IntArray
    """[N] where a request's positions begin in ``uniform``, ``match`` and ``normal``."""
    uniform: FloatArray  # [positions]
    match: FloatArray  # [positions]
    normal: FloatArray  # [positions]

    def first_hazard(self, request: IntArray, now: float) -> FloatArray:
        """Return the acceptance of a first proposed token, float64[n, D]."""
        logit = self.logit[request] + self.drift.at(now)[self.category[request]]
        hazard: FloatArray = np.clip(1 / (1 + np.exp(-logit)), _MIN_HAZARD, _MAX_HAZARD)
        return hazard

    def hazard(self, request: IntArray, now: float) -> FloatArray:
        """Return all hazards, float64[n, D, K]."""
        return self.first_hazard(request, now)[:, :, None] * self.decay

    def draw_accepted(
        self,
        request: IntArray,  # [n]
        position: IntArray,  # [n]
        draft: IntArray,  # [n]
        length: IntArray,  # [n]
        now: float,
    ) -> IntArray:
        """Return how many of ``length`` tokens proposed by ``draft`` from output ``position`` on
        are accepted, int64[n].
        """
        depth = np.arange(int(length.max(initial=0)))
        hazard = (
            self.first_hazard(request, now)[np.arange(len(request)), draft][:, None]
            * self.decay[draft, : len(depth)]
        )
        uniform = self.uniform[(self.start[request] + position)[:, None] + depth]
        matched = (uniform < hazard) & (depth < length[:, None])
        run: IntArray = np.logical_and.accumulate(matched, axis=1).sum(1)
        return run

    def confidence(
        self,
        request: IntArray,  # [n]
        position: IntArray,  # [n]
        draft: IntArray,  # [n]
        telling: FloatArray,  # [n]
        now: float,
    ) -> FloatArray:
        """Return what drafts claim of the next tokens that they propose, float64[n, K].

        A draft knows its hazard h and sees, through noise, whether its token holds: x, normal about
        +m or -m with the deviation 1, m = ``telling``. It claims what then is likely, the logit
        of h plus 2 m x; so claims hold as often as they say, and tell the more the greater m is.
        """
        decay = self.decay[draft]
        hazard = self.first_hazard(request, now)[np.arange(len(request)), draft][:, None] * decay
        place = (self.start[request] + position)[:, None] + np.arange(decay.shape[1])
        return _claims(hazard, self.uniform[place], self.normal[place], telling[:, None])

    def evidence(
        self,
        request: IntArray,  # [n]
        position: IntArray,  # [n]
        showing: FloatArray,  # [D]
        now: float,
    ) -> IntArray:
        """Return bins of what drafts show of the first token that they would propose, int64[n, D]:
        of a claim as in ``confidence`` with m = ``showing[d]``, but through other noise.
        """
        place, later = self.start[request] + position, self.decay.shape[1]
        noise, uniform = self.normal[place + later], self.uniform[place]
        hazard = self.first_hazard(request, now)
        claims = _claims(hazard, uniform[:, None], noise[:, None], showing)
        bins: IntArray = np.searchsorted(_CLAIM_EDGES, claims, side="right")
        return np.where(showing > 0, bins, 0)

    def score_chains(
        self, request: int, draft: int, begin: int, end: int, k_max: int, now: float
    ) -> list[tuple[int, int]]:
        """Return (accepted, scored) of the chains that a draft would have made of the output
        positions begin..end-1, in order.

        A chain ends at its first mismatch, which the target's own token repairs, or after ``k_max``
        tokens and the bonus token after them.
        """
        first = float(self.first_hazard(np.array([request]), now)[0, draft])
        hazard = (first * self.decay[draft]).tolist()
        uniform = self.uniform[self.start[request] + begin : self.start[request] + end].tolist()
        chains, at = [], 0
        while at < len(uniform):
            most = min(k_max, len(uniform) - at)
            matched = next((j for j in range(most) if uniform[at + j] >= hazard[j]), most)
            chains.append((matched, most))
            at += matched + 1
        return chains

    def has_match(
        self,
        request: IntArray,  # [n]
        position: IntArray,  # [n]
    ) -> FloatArray:
        """Return bool[n, D]: whether each draft can propose anything at an output position."""
        has_match: FloatArray = (
            self.match[self.start[request] + position][:, None] < self.match_rate[request]
        )
        return has_match


def _claims(
    hazard: FloatArray,  # [n, K] or [n, D]
    uniform: FloatArray,  # [n, K] or [n, 1]
    noise: FloatArray,  # [n, K] or [n, 1]
    telling: FloatArray,  # [n, 1] or [D]
) -> FloatArray:
    side = np.where(uniform < hazard, 1.0, -1.0) * telling
    logit = np.log(hazard / (1 - hazard)) + 2 * telling * (side + noise)
    claims: FloatArray = 1 / (1 + np.exp(-logit))
    return claims


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """The requests of a run, in order of arrival."""

    arrival_s: FloatArray  # [N]
    prompt_tokens: IntArray  # [N]
    output_tokens: IntArray
    """[N] the true number, which policies do not see."""
    max_tokens: IntArray
    """[N] the most that the client allows."""
    acceptance: Acceptance
    tenant: IntArray | None = None
    """[N] the requests' tenants, if there are several."""

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True, eq=False)
class RequestLog:
    """Requests of a log, in order of arrival; categories by their place in the mix."""

    arrival_s: FloatArray  # [N]
    prompt_tokens: IntArray  # [N]
    output_tokens: IntArray  # [N]
    category: IntArray  # [N]


def bursty(requests: int, rate_hz: float, variation: float, seed: int) -> FloatArray:
    """Return arrival times with gamma gaps of a coefficient of variation (1: Poisson, above:
    bursts).
    """
    shape = 1 / variation**2
    gaps = np.random.default_rng([seed, 2]).gamma(shape, 1 / (shape * rate_hz), requests)
    times: FloatArray = np.cumsum(gaps)
    return times


def backlog(requests: int) -> FloatArray:
    """Return arrivals all at once."""
    return np.zeros(requests)


def draw(
    mix: Mix,
    drafts: tuple[str, ...],
    arrivals: FloatArray | RequestLog,  # [N]
    seed: int,
    k_max: int,
    period_s: float,
    drift: Drift | None = None,
) -> Workload:
    """Draw the requests of a mix; all but their arrivals depends on the seed alone. Acceptance
    drifts by the mix, unless it is given.
    """
    times = arrivals.arrival_s if isinstance(arrivals, RequestLog) else arrivals
    rng = np.random.default_rng([seed, 1])
    shares = np.array([category.share for category in mix.categories])
    category: IntArray = rng.choice(len(shares), len(times), p=shares / shares.sum())
    prompt = _lengths(
        rng, np.array([c.prompt_tokens for c in mix.categories])[category], mix.length_spread
    )
    output = _lengths(
        rng, np.array([c.output_tokens for c in mix.categories])[category], mix.length_spread
    )
    deviation = mix.spread * rng.standard_normal(
        (len(times), 1)
    ) + mix.draft_spread * rng.standard_normal((len(times), len(drafts)))
    if isinstance(arrivals, RequestLog):
        category, prompt, output = arrivals.category, arrivals.prompt_tokens, arrivals.output_tokens
    most = 4 * np.array([c.output_tokens for c in mix.categories])[category]
    output = np.minimum(output, most)
    level = np.array([[c.hazard[name] for name in drafts] for c in mix.categories])
    match_rate = np.array(
        [[c.match_rate.get(name, 1.0) for name in drafts] for c in mix.categories]
    )
    room = output + k_max
    start = np.concatenate([[0], np.cumsum(room)[:-1]])
    index = (
        np.repeat(np.arange(len(times)), room),
        np.arange(int(room.sum())) - np.repeat(start, room),
    )
    acceptance = Acceptance(
        logit=np.log(level / (1 - level))[category] + deviation,
        category=category,
        decay=np.array([[mix.decay.get(name, 1.0) ** j for j in range(k_max)] for name in drafts]),
        drift=drift or Drift.swing(mix, drafts, period_s, 2 * float(times[-1]) + period_s),
        match_rate=match_rate[category],
        start=start,
        uniform=uniform(seed, 3, *index),
        match=uniform(seed, 4, *index),
        normal=standard_normal(uniform(seed, 5, *index), uniform(seed, 6, *index)),
    )
    return Workload(times, prompt, output, most, acceptance)


def _lengths(
    rng: np.random.Generator,
    mean: IntArray,  # [N]
    spread: float,
) -> IntArray:
    factor = np.exp(spread * rng.standard_normal(len(mean)) - spread**2 / 2)
    lengths: IntArray = np.maximum((mean * factor).round().astype(np.int64), 1)
    return lengths


def standard_normal(one: FloatArray, other: FloatArray) -> FloatArray:
    """Return standard normal numbers of two uniform ones, [n] each (Box and Muller 1958)."""
    normal: FloatArray = np.sqrt(-2 * np.log1p(-one)) * np.cos(2 * np.pi * other)
    return normal


def uniform(seed: int, purpose: int, request: IntArray, position: IntArray) -> FloatArray:
    """Return numbers in [0, 1) by a counter: splitmix64's finaliser (Steele et al. 2014) over
    (seed, purpose, ``request[n]``, ``position[n]``).
    """
    word = np.full(len(request), (seed << 8) + purpose, np.uint64)
    for counter in (request, position):
        word = (word ^ counter.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return (word >> np.uint64(11)).astype(np.float64) * 2.0**-53
