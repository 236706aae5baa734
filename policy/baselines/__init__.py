"""Policies that the adaptive planner is compared with, and the random one that tests exactness.

Those of others are rebuilt from what is published; the docstring of each names its source. Every
choice that had to be made helps the baseline: evidence that is not biased by short chains, a draft
that catches up instead of being lost for good, times from this project's tables. A view without a
policy's draft raises ValueError.

A module of this package is a family; its ``ENTRIES`` are in the registry (``registry``), which
settings, simulator, benches, tables and pictures read.
"""

from .always import FixedLength, NoSpeculation, RandomChoice
from .bandit import BanditDrafts, BanditLengths
from .batch_schedule import BatchSchedule, GatedSchedule, GateState
from .ema import AcceptanceEma
from .entry import Baseline, BaselineSettings, same_for_all
from .hedge import HedgeSpec
from .nightjar import Nightjar
from .registry import BASELINES, compared
from .smartspec import SmartSpec, expected_tokens
from .spin import SpinSelection
from .suffix_else import SuffixElse
from .verification import AdaptiveVerification

__all__ = [
    "BASELINES",
    "AcceptanceEma",
    "AdaptiveVerification",
    "BanditDrafts",
    "BanditLengths",
    "Baseline",
    "BaselineSettings",
    "BatchSchedule",
    "FixedLength",
    "GateState",
    "GatedSchedule",
    "HedgeSpec",
    "Nightjar",
    "NoSpeculation",
    "RandomChoice",
    "SmartSpec",
    "SpinSelection",
    "SuffixElse",
    "compared",
    "expected_tokens",
    "same_for_all",
]
