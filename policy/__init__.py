"""Pure decisions: which draft and how many tokens, for every request, before every step."""

from .acceptance import AcceptanceConfig
from .baselines import BatchSchedule, FixedLength, NoSpeculation, RandomChoice
from .carrying import carried
from .latency import LatencyCurve, LatencyError, LatencyModel, LatencyTable, Provenance
from .plan import NO_DRAFT, BoolArray, Drafted, IntArray, Outcome, Plan, Policy, Ran, TurnShape, View
from .planner import AdaptivePlanner
from .planner_state import PlannerConfig, PlannerState
from .published import AcceptanceEma, SmartSpec, SpinSelection, ThroughputBandit
from .switched import SwitchedPolicy, SwitchedState, Switches

__all__ = [
    "NO_DRAFT",
    "AcceptanceConfig",
    "AcceptanceEma",
    "AdaptivePlanner",
    "BatchSchedule",
    "BoolArray",
    "Drafted",
    "FixedLength",
    "IntArray",
    "LatencyCurve",
    "LatencyError",
    "LatencyModel",
    "LatencyTable",
    "NoSpeculation",
    "Outcome",
    "Plan",
    "PlannerConfig",
    "PlannerState",
    "Policy",
    "Provenance",
    "Ran",
    "RandomChoice",
    "SmartSpec",
    "SpinSelection",
    "SwitchedPolicy",
    "SwitchedState",
    "Switches",
    "ThroughputBandit",
    "TurnShape",
    "View",
    "carried",
]
