"""An entry of the registry: what server, simulator and benches know of a baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from policy.latency import LatencyModel
from policy.plan import AnyPolicy, Plan, View


@dataclass(frozen=True, slots=True)
class BaselineSettings:
    """The inputs that a baseline is made from."""

    drafts: tuple[str, ...]
    latency: LatencyModel
    k_max: int = 8
    draft: str = ""
    length: int = 0
    schedule: Mapping[int, int] = field(default_factory=dict)  # length by the largest batch
    options: Mapping[str, int] = field(default_factory=dict)  # those of ``Baseline.options``


@dataclass(frozen=True, slots=True)
class Baseline:
    """A policy to compare the planner with: what server, simulator and benches know of it."""

    make: Callable[[BaselineSettings], AnyPolicy]
    label: str  # in tables
    needs: tuple[str, ...] = ()  # the fields of BaselineSettings that must be set
    options: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole numbers of its own, by name: the default, and what else tuning may try."""
    compared: bool = True  # whether comparisons run it unless they are asked not to
    colour: str = "#6f5a3a"  # in plots
    marker: str = "X"  # in plots, as matplotlib names it
    path: str = ""  # the dotted path by which it is served; empty: its name

    @classmethod
    def by_path(
        cls, policy: Callable[..., AnyPolicy], label: str, *, needs: tuple[str, ...], **rest: Any
    ) -> Baseline:
        """Return the entry of a class that is made as a user's policy is (``policy.custom``), what
        it needs among its options.
        """

        def make(settings: BaselineSettings) -> AnyPolicy:
            options = {need: getattr(settings, need) for need in needs}
            first = settings.drafts, settings.latency, settings.k_max
            return policy(*first, **options, **settings.options)

        path = f"{policy.__module__}.{policy.__qualname__}"
        return cls(make, label, needs, path=path, **rest)


def same_for_all(view: View, draft: str, length: int) -> Plan:
    """Return the plan of one choice. Raises ValueError when the view does not have the draft."""
    if draft not in view.drafts:
        raise ValueError(f"draft must be one of {view.drafts}, got {draft!r}")
    return Plan.within(view, view.drafts.index(draft), length)
