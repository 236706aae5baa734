"""The adaptive planner's constants, and what it remembers from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

from .acceptance import AcceptanceConfig, AcceptanceState
from .calibration import Calibration
from .correction import Shape
from .keeping import Kept
from .plan import FloatArray, Outcome, View
from .promise import Promise
from .selection import PROBING, SELECTIONS, Draws


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Constants of the planner; raises ValueError naming the one that is out of range.

    ``selection`` says how drafts to try are found (``policy.selection``), ``explore_share`` is the share of step time that trying may cost,
    ``optimism`` how many standard deviations it hopes for. ``switch_horizon_steps`` the most steps over which a catch-up is spread.
    ``margin`` is the gain in goodput that speculation must promise: of many estimates the best is flattered, and a loss weighs more than
    a gain missed. Planning and learning may take ``planning_share`` of step time: where they take more, a choice is kept for some steps; a
    large batch that does not speculate keeps to that for ``rest_steps`` at the least (``policy.keeping``).
    ``free_run_tokens`` are the most that a row runs in one turn (``policy.free_runs``).
    ``catchup_scored`` says that the engines report how a draft that catches up would have guessed what it reads (``Outcome.free_*``).
    """

    k_max: int = 8
    selection: str = PROBING
    explore_share: float = 0.005
    optimism: float = 1.5
    switch_horizon_steps: float = 16.0
    margin: float = 0.03
    rest_steps: int = 4
    planning_share: float = 0.01
    free_run_tokens: int = 1
    catchup_scored: bool = False
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)

    def __post_init__(self) -> None:
        if self.k_max < 0:
            raise ValueError(f"k_max must be >= 0, got {self.k_max}")
        if not 0 <= self.explore_share < 1:
            raise ValueError(f"explore_share must be in [0, 1), got {self.explore_share}")
        if self.free_run_tokens < 1:
            raise ValueError(f"free_run_tokens must be >= 1, got {self.free_run_tokens}")
        for name in ("margin", "rest_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("optimism", "switch_horizon_steps", "planning_share"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.selection not in SELECTIONS:
            raise ValueError(f"selection must be one of {list(SELECTIONS)}, got {self.selection!r}")


@dataclass(slots=True, eq=False)
class PlannerState:
    """What the planner remembers. ``correction`` and ``target_shape`` as in ``policy.correction``; ``calibration`` of the
    drafts' confidences; ``nodes`` float64[2, drafts] how many were verified and how many tokens planned for them (fading); ``view`` the
    last one planned for.

    ``goodput`` is the best goodput of the last batch without its prefill (tokens per second of the model's time; 0: unknown).
    ``credit_s`` is what may still be spent on probes, ``look`` the steps until the next look for one,
    ``kept`` the last choice for some steps more; ``trial_s`` is what the step in hand is to take if it probes. ``planning_s`` and
    ``learning_s`` are what a step takes that is ``planned``; of the latter the next step tells, ``behind`` one that was. ``unlearnt`` are
    steps with a kept choice, which are learnt from together when planning is due. ``promise`` is how far speculation held what it promised.
    ``draws`` belongs to Thompson's selection; ``overlap_s``, ``overlaps`` and ``flying``
    (``policy.cohorts``) to ``policy.shaped``.
    """

    acceptance: AcceptanceState
    correction: FloatArray
    calibration: Calibration
    nodes: FloatArray
    target_shape: Shape = field(default_factory=Shape.flat)
    view: View | None = None
    goodput: float = 0.0
    credit_s: float = 0.0
    look: int = 0
    kept: Kept | None = None
    trial_s: float = 0.0
    planning_s: float = 0.0
    learning_s: float = 0.0
    planned: bool = False
    behind: bool = False
    unlearnt: tuple[Outcome, ...] = ()
    promise: Promise = field(default_factory=Promise)
    draws: Draws | None = None
    overlap_s: float = 0.0
    overlaps: bool = False
    flying: dict[int, tuple[int, int, int]] | None = None
