"""Policies that an operator may choose instead of the adaptive planner, and the random one that
tests exactness. The other published ones that it is compared with are in ``bench.baselines``.

Those of others are rebuilt from what is published; the docstring of each names its source. Every
choice that had to be made helps the baseline: evidence that is not biased by short chains, times
from this project's tables. A view without a policy's draft raises ValueError.

A module of this package is a family; its ``ENTRIES`` are in the registry (``registry``), which
settings and the simulator read.
"""

from .always import FixedLength, NoSpeculation, RandomChoice
from .batch_schedule import BatchSchedule, GatedSchedule, GateState
from .ema import AcceptanceEma
from .entry import Baseline, BaselineSettings, same_for_all
from .registry import BASELINES, collect
from .smartspec import SmartSpec, expected_tokens

__all__ = [
    "BASELINES",
    "AcceptanceEma",
    "Baseline",
    "BaselineSettings",
    "BatchSchedule",
    "FixedLength",
    "GateState",
    "GatedSchedule",
    "NoSpeculation",
    "RandomChoice",
    "SmartSpec",
    "collect",
    "expected_tokens",
    "same_for_all",
]
