"""How a fault is entered and planted: each names the check that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from backend.engines.stepping import engine as stepping
from tests.contract import checks
from tests.contract.scenarios import Scenario

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A fault and the check that kills it."""

    plant: Callable[[Patch], None]
    killer: Callable[[], object]


MUTANTS: dict[str, Mutant] = {}


def killed_by(
    killer: Callable[..., Any], scenario: Scenario | None = None
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a fault into ``MUTANTS``; with a scenario the killer is a property of it."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        check = partial(checks.exact, scenario, killer) if scenario else killer
        MUTANTS[plant.__name__] = Mutant(plant, check)
        return plant

    return enter


def wrap(patch: Patch, owner: object, name: str, around: Callable) -> None:
    """Replace ``owner.name`` by ``around(original, *arguments)``."""
    original = getattr(owner, name)
    patch.setattr(
        owner, name, lambda *arguments, **options: around(original, *arguments, **options)
    )


def change_verdicts(patch: Patch, change: Callable) -> None:
    """Have ``change(verdict, request, rows of logits)`` change every verdict on a proposal."""

    def verify(original, logits, requests, columns):
        verdicts, row = original(logits, requests, columns), 0
        for verdict, request in zip(verdicts, requests, strict=True):
            if request.tokens:
                change(verdict, request, logits[row : row + request.rows])
            row += request.rows
        return verdicts

    wrap(patch, stepping, "verify", verify)
