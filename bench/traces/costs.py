"""Times of a step: the fit of the traces' authors for one H100, or measured tables."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from policy.latency import LatencyCurve, LatencyError, LatencyModel, LatencyTable
from policy.simulation.deployment import Work, step_parts

EAGLE, SUFFIX = "eagle", "suffix"
DRAFTS = EAGLE, SUFFIX

AUTHORS = {
    "kv_s": 3.926e-8,
    "token_s": 2.101e-5,
    "pass_s": 5.886e-3,
    "head_kv_s": 2.378e-9,
    "head_token_s": 8.414e-7,
    "head_s": 2.135e-3,
    "step_s": 1.207e-3,
    "lookup_share": 5.875e-3,
}
"""Seconds of Llama-3.1-8B and an EAGLE head on one H100, as the authors of the traces fit them:
the target's by cached token, query token and pass; those of a chain of the head; those of the rest
of a step; and the look-up's share of the target's pass.
"""
CHAIN = 5
"""Tokens of the chain that the authors' seconds of the head are taken to be of: it runs once for
each.
"""
_GRID = 4096
_LOOKUP = LatencyCurve(np.full(2, 1e-6), 0.0)


@dataclass(frozen=True)
class Costs:
    """The times of a deployment: what is charged, and without error what policies read."""

    name: str
    target: LatencyCurve
    head: LatencyCurve
    """A forward of it."""
    step_s: float
    """Every step, besides forwards."""
    lookup_share: float
    """A look-up for all rows, of the target's pass."""
    constants: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def authors(cls) -> Costs:
        """Return the fit of the traces' authors, the head paid by the token."""
        a, tokens = AUTHORS, np.arange(_GRID + 1)
        target_s = a["pass_s"] + a["token_s"] * tokens
        head_s = a["head_s"] / CHAIN + a["head_token_s"] * tokens
        return cls(
            "authors",
            LatencyCurve(target_s, a["token_s"], 0.0, a["kv_s"]),
            LatencyCurve(head_s, a["head_token_s"], 0.0, a["head_kv_s"] / CHAIN),
            a["step_s"],
            a["lookup_share"],
            {**a, "chain": CHAIN},
        )

    @classmethod
    def measured(cls, path: Path) -> Costs:
        """Read measured tables: an object with ``target`` and ``eagle``, each as
        ``LatencyTable.to_dict`` writes it, and ``step_s``, the seconds of the rest of a step.

        Raises LatencyError naming file and field.
        """
        try:
            data = json.loads(path.read_text("utf-8"))
            for name in ("target", EAGLE, "step_s"):
                if not isinstance(data, dict) or name not in data:
                    raise LatencyError(f"lacks the field {name!r}")
            tables = [LatencyTable.from_dict(data[name]) for name in ("target", EAGLE)]
            step_s = data["step_s"]
            if type(step_s) not in (int, float) or not 0 <= step_s < np.inf:
                raise LatencyError(f"step_s must be a finite number >= 0, got {step_s!r}")
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise LatencyError(f"{path}: {error}") from error
        target, head = (LatencyCurve.fit(table) for table in tables)
        share = AUTHORS["lookup_share"]
        return cls(path.name, target, head, step_s, share, {**data, "lookup_share": share})

    def model(self, drafts: tuple[str, ...] = DRAFTS) -> LatencyModel:
        """Return the tables of these drafts that a policy reads."""
        curves = tuple(self.head if name == EAGLE else _LOOKUP for name in drafts)
        return LatencyModel(self.target, curves, overhead_s=self.step_s)

    def parts_s(
        self, work: Work, nodes_context: int, model: LatencyModel, drafts: tuple[str, ...]
    ) -> dict[str, float]:
        """Return the seconds of a step by part; ``nodes_context`` are the cached tokens before its
        nodes, each node's by itself. A look-up among the drafts runs in every step, used or not.
        """
        parts = step_parts(model, work, drafts)
        parts["verify"] += model.target.node_context_s * nodes_context
        if SUFFIX in drafts:
            parts[f"draft:{SUFFIX}"] = self.lookup_share * parts["verify"]
        return parts
