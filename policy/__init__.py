"""Pure decisions: which draft and how many tokens, for every request, before every step."""

from .acceptance import AcceptanceConfig
from .baselines import (
    FixedLength,
    NoSpeculation,
    RandomChoice,
)
from .latency import LatencyCurve, LatencyError, LatencyModel, LatencyTable, Provenance
from .plan import (
    NO_DRAFT,
    AnyPolicy,
    BoolArray,
    DraftNodes,
    FreeChains,
    IntArray,
    Outcome,
    Plan,
    Policy,
    StepNodes,
    StepRows,
    StepTimes,
    View,
)
from .planner import AdaptivePlanner, PlannerConfig, PlannerState
from .wrappers import SwitchedPolicy, Switches, Wrapper

__all__ = [
    "NO_DRAFT",
    "AcceptanceConfig",
    "AdaptivePlanner",
    "AnyPolicy",
    "BoolArray",
    "DraftNodes",
    "FixedLength",
    "FreeChains",
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
    "RandomChoice",
    "StepNodes",
    "StepRows",
    "StepTimes",
    "SwitchedPolicy",
    "Switches",
    "View",
    "Wrapper",
]
