"""The policies compared over the traces: fixed choices, rules, the policies of others, the planner
with and without its parts, and oracles.

A policy with settings is tuned on other requests than it is scored on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from bench.baselines import compared_baselines
from bench.baselines.suffix_else import SuffixElse
from bench.traces.costs import DRAFTS, EAGLE, SUFFIX, Costs
from bench.traces.replay import (
    HEAD_TOKENS,
    LOOKUP_TOKENS,
    MEASURED,
    HindsightPolicy,
    ReplayOptions,
    ReplayRun,
    made_up,
    run,
)
from bench.traces.scores import ArmScore, Scores
from bench.traces.world import DEEPEST, World
from policy import AdaptivePlanner, PlannerConfig
from policy.baselines import BaselineSettings, FixedLength, NoSpeculation
from policy.custom import load_policy, parse_path
from policy.plan import AnyPolicy, FloatArray, IntArray, Plan, Policy, View

NONE, FIXED_EAGLE, PLANNER = "none", "fixed-eagle", "planner"
LENGTHS = 1, 2, 3, 4, 5, 6, 7, 8
MATCHES, LOOKUPS = (1, 3, 5, 8, 12), (3, 5, 8, DEEPEST)
"""The least match and the lengths of the look-up that rules are tuned over. A match counts as the
least of its class (``policy.evidence.MATCH_EDGES``): 1 stands for any.
"""
RULES = "fixed-suffix", "rule", "rule-8"
SHORT = 8
"""Tokens of the rule's look-up, at most, in its second form."""
QUALITIES = 0.35, 0.7, 1.2
"""Quality of the head's made-up confidence: in 69, 84 and 96 of 100 pairs it ranks the right token
above the other (``replay.made_up``).
"""
MIDDLE = QUALITIES[1]
CONFIDENT = "going-on"
"""DLoop's rule: a head goes on while it is confident."""
LEAST_CONFIDENCES = 0.1, 0.2, 0.3, 0.4, 0.5, 0.6
_HEAD_ALONE = ReplayOptions(drafts=(EAGLE,))
_LOOKUP_ALONE = ReplayOptions(drafts=(SUFFIX,), lookup_tokens=DEEPEST)
_BOTH = ReplayOptions(lookup_tokens=DEEPEST)


@dataclass(frozen=True)
class TraceArm:
    """A policy and how it is run."""

    policy: AnyPolicy
    options: ReplayOptions = field(default_factory=ReplayOptions)
    settings: dict[str, Any] = field(default_factory=dict)
    """The tuned settings."""
    key: str = ""
    """A name for all this, by which scores are kept; empty: it is run whenever it is asked for."""


@dataclass(frozen=True)
class TraceLoad:
    """Requests in a closed loop."""

    world: World
    order: IntArray  # [requests]
    in_flight: int
    costs: Costs
    scores: Scores = field(default_factory=dict)
    """Known scores of arms."""

    def run(self, arm: TraceArm) -> ReplayRun:
        """Run an arm over the requests."""
        return run(self.world, self.order, self.in_flight, arm.policy, self.costs, arm.options)

    def score(self, arm: TraceArm) -> ArmScore:
        """Return what an arm does on the requests."""
        score = self.scores.get(arm.key)
        if score is None:
            ran = self.run(arm)
            score = ArmScore(ran.speed, float(np.mean(ran.planning_s)))
            if arm.key:
                self.scores[arm.key] = score
        return score

    def best(self, arms: Iterable[TraceArm]) -> TraceArm:
        """Return the arm of most tokens per second."""
        return max(arms, key=lambda arm: self.score(arm).speed)


@dataclass(frozen=True)
class Tunable:
    """An arm with settings, and the values of each that are tried."""

    make: Callable[[dict[str, Any]], TraceArm]
    needs: dict[str, tuple[Any, ...]]
    """Those that have no default."""
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The others, the default first."""

    def first(self) -> TraceArm:
        """Return the arm of the first values."""
        return self.make(
            {name: tried[0] for name, tried in (self.needs | {**self.options}).items()}
        )

    def best(self, load: TraceLoad) -> TraceArm:
        """Return the arm of the settings that are best on these requests: of what it needs all
        combinations are tried, then each option by itself, the others as they are.
        """
        settings = self.first().settings
        tried = product(*self.needs.values())
        combined = (dict(zip(self.needs, values, strict=True)) for values in tried)
        arm = load.best(self.make({**settings, **values}) for values in combined)
        for name, values in self.options.items():
            arm = load.best(self.make({**arm.settings, name: value}) for value in values)
        return arm


class Longest(HindsightPolicy):
    """The draft that has most accepted, and exactly those tokens."""

    def choose_known(self, accepted: IntArray, view: View) -> Plan:
        draft = accepted[:, ::-1].argmax(1)  # of two alike the look-up, which costs no forward
        draft = accepted.shape[1] - 1 - draft
        return Plan.within(view, draft, accepted[np.arange(len(view)), draft])


class UntrimmedPlanner(AdaptivePlanner):
    """The planner whose plans are verified as they are."""

    def trim(self, view: View, plan: Plan, *_: Any) -> IntArray:
        return plan.length


def tune(
    load: TraceLoad, claims: dict[float, FloatArray], wanted: Collection[str] = ()
) -> dict[str, TraceArm]:
    """Return the best choice of each kind on these requests, by name: of the fixed lengths of the
    head, and of the kinds that are wanted (none named: of all).
    """

    def fixed_arms(
        draft: str, lengths: Iterable[int], options: ReplayOptions
    ) -> Iterator[TraceArm]:
        for k in lengths:
            yield TraceArm(FixedLength(draft, k), options, {"length": k}, f"fixed-{draft} {k}")

    def rule(least: int, matched: int, head: int) -> TraceArm:
        options = {"least": least, "own": matched}
        deployment = DRAFTS, load.costs.model(), HEAD_TOKENS
        policy = SuffixElse(*deployment, draft=EAGLE, length=head, least=least, own=matched)
        return TraceArm(
            policy, _BOTH, {**options, "length": head}, f"rule {least} {matched} {head}"
        )

    def best_rule(most: int) -> TraceArm:
        """Tune match and look-up with the head's best length, then the head's."""
        tried = product(MATCHES, (k for k in LOOKUPS if k <= most))
        best = load.best(rule(*pair, length) for pair in tried)
        pair = best.settings["least"], best.settings["own"]
        return load.best(rule(*pair, k) for k in LENGTHS if k <= length)

    head = load.best(fixed_arms(EAGLE, LENGTHS, _HEAD_ALONE))
    length = int(head.settings["length"])
    kinds: dict[str, Callable[[], TraceArm]] = {
        "fixed-suffix": lambda: load.best(fixed_arms(SUFFIX, LOOKUPS, _LOOKUP_ALONE)),
        "rule": lambda: best_rule(DEEPEST),
        "rule-8": lambda: best_rule(SHORT),
    }
    for quality, paths in claims.items():
        kinds[_confident(CONFIDENT, quality)] = partial(load.best, going_on(quality, paths))
    for name, tunable in of_others(load.costs, load.in_flight, claims).items():
        kinds[name] = partial(tunable.best, load)
    best_of = {name: best() for name, best in kinds.items() if not wanted or name in wanted}
    return {FIXED_EAGLE: head, **best_of}


def going_on(quality: float, paths: FloatArray) -> list[TraceArm]:
    """Return the arms of a head that goes on while it is confident."""
    arms = []
    for least in LEAST_CONFIDENCES:
        options = replace(_HEAD_ALONE, head_claims=paths, least_confidence=least)
        policy, settings = FixedLength(EAGLE, HEAD_TOKENS), {"least_confidence": least}
        arms.append(TraceArm(policy, options, settings, f"{CONFIDENT} {quality} {least}"))
    return arms


def of_others(costs: Costs, in_flight: int, claims: dict[float, FloatArray]) -> dict[str, Tunable]:
    """Return every baseline that comparisons run, by name, those that trim also with
    a made-up confidence of the head, of the middle quality. Tables by batch size have one row, of
    ``in_flight``.
    """
    schedules = tuple({in_flight: k} for k in LENGTHS)
    tried = {"draft": DRAFTS, "length": LENGTHS, "schedule": schedules}
    tunables = {}
    for name, baseline in compared_baselines().items():
        needs: dict[str, tuple[Any, ...]] = {need: tried[need] for need in baseline.needs}
        make = partial(_of_registry, costs, name)
        tunables[name] = Tunable(make, needs, baseline.options)
        if MIDDLE in claims and type(tunables[name].first().policy).trim is not Policy.trim:
            confident = partial(make, quality=MIDDLE, head_claims=claims[MIDDLE])
            tunables[_confident(name, MIDDLE)] = Tunable(confident, needs, baseline.options)
    return tunables


def _of_registry(
    costs: Costs, name: str, settings: dict[str, Any], quality: float = 0.0, **options: Any
) -> TraceArm:
    baseline = compared_baselines()[name]
    settings_taken = {name: settings[name] for name in baseline.options}
    needs = {name: settings[name] for name in baseline.needs}
    settings_of = BaselineSettings(
        DRAFTS, costs.model(), HEAD_TOKENS, options=settings_taken, **needs
    )
    policy = baseline.make(settings_of)
    key = f"{name} {quality} {settings}"
    return TraceArm(policy, ReplayOptions(looks=None, **options), settings, key)


def _confident(name: str, quality: float) -> str:
    """Return the name of an arm whose head has a confidence of some quality."""
    return f"{name}-confidence-{quality:g}"


def by_path(costs: Costs, arm: str) -> TraceArm:
    """Return the arm of ``my_package.MyPolicy[:NAME=VALUE]``. Raises PolicyError."""
    path, options = parse_path(arm)
    return TraceArm(
        load_policy(path, DRAFTS, costs.model(), HEAD_TOKENS, options), ReplayOptions(looks=None)
    )


def untuned_arms(costs: Costs, claims: dict[float, FloatArray]) -> dict[str, TraceArm]:
    """Return what has nothing to tune, by name; ``claims`` are the head's made-up confidences by
    quality. Planning is charged to ``planner`` alone.
    """

    def planner(
        drafts: tuple[str, ...] = DRAFTS,
        kind: Callable[..., AnyPolicy] = AdaptivePlanner,
        **options: Any,
    ) -> TraceArm:
        policy = kind(drafts, costs.model(drafts), PlannerConfig(k_max=LOOKUP_TOKENS))
        return TraceArm(policy, ReplayOptions(drafts=drafts, **options))

    arms = {
        NONE: TraceArm(NoSpeculation(), _HEAD_ALONE, key=NONE),
        PLANNER: planner(planning=MEASURED),
        "planner-free": planner(),
        "planner-without-evidence": planner(evidence=False),
        "planner-without-trim": planner(kind=UntrimmedPlanner),
        "planner-eagle-alone": planner((EAGLE,)),
        "oracle-eagle": TraceArm(Longest(), _HEAD_ALONE, key="oracle-eagle"),
        "oracle": TraceArm(Longest(), _BOTH, key="oracle"),
    }
    for quality, paths in claims.items():
        arms[_confident(PLANNER, quality)] = planner(head_claims=paths)
    return arms


def made_up_claims(world: World, qualities: Iterable[float] = QUALITIES) -> dict[float, FloatArray]:
    """Return the head's made-up confidences by quality."""
    return {quality: made_up(world, quality) for quality in qualities}


def known_arms(costs: Costs) -> tuple[str, ...]:
    """Return the names of all arms."""
    claims = dict.fromkeys(QUALITIES, np.zeros((0, HEAD_TOKENS)))
    deeper = (_confident(CONFIDENT, quality) for quality in claims)
    return (
        *untuned_arms(costs, claims),
        FIXED_EAGLE,
        *RULES,
        *deeper,
        *of_others(costs, 1, claims),
    )
