"""Earlier scores of arms: of those that do not change with the planner, kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

from backend import PROJECT_ROOT
from bench.traces.costs import Costs
from bench.traces.world import World
from policy.plan import IntArray

_SOURCES = (
    *("bench/traces/*.py", "bench/baselines/*.py", "policy/baselines/*.py", "policy/plan.py"),
    *("policy/latency.py", "policy/evidence.py", "policy/simulation/deployment.py"),
)
"""The code that a score of other arms depends on."""


class ArmScore(NamedTuple):
    """An arm's results on some requests."""

    speed: float
    """Tokens per second."""
    planning_s: float
    """CPU time of plan, trim and observe, the mean of the steps."""


Scores = dict[str, ArmScore]
"""By the arm's key."""


def file(cache: Path, world: World, order: IntArray, in_flight: int, costs: Costs) -> Path:
    """Return where the scores on some requests are kept: by everything that they depend on."""
    digest = hashlib.sha256(f"{world.source} {in_flight} {costs.constants}".encode())
    digest.update(order.tobytes())
    for pattern in _SOURCES:
        for path in sorted(PROJECT_ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return cache / f"scores-{digest.hexdigest()[:16]}.json"


def read(path: Path) -> Scores:
    """Return the scores in a file, none where there is none."""
    if not path.exists():
        return {}
    return {key: ArmScore(*values) for key, values in json.loads(path.read_text("utf-8")).items()}


def write(path: Path, scores: Scores) -> None:
    """Write scores to a file, at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part-{os.getpid()}.json")
    part.write_text(json.dumps(scores), "utf-8")
    part.replace(path)
