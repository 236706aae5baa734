"""Every baseline by name: the ``ENTRIES`` of each module of this package."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .entry import Baseline


def collected() -> dict[str, Baseline]:
    """Return the entries of all modules of the package, in the order of the modules' names."""
    package, _, own = __name__.rpartition(".")
    modules = [module.name for module in iter_modules(import_module(package).__path__)]
    return {
        name: baseline
        for module in modules
        if module != own
        for name, baseline in getattr(import_module(f"{package}.{module}"), "ENTRIES", {}).items()
    }


BASELINES: dict[str, Baseline] = collected()
"""By the name that settings, the simulator and the benches give it; another one is a module."""


def compared() -> dict[str, Baseline]:
    """Return the baselines that comparisons run."""
    return {name: baseline for name, baseline in BASELINES.items() if baseline.compared}
