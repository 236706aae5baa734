"""Every baseline that is a setting, by name: the ``ENTRIES`` of each module of this package."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .entry import Baseline


def collect(package: str) -> dict[str, Baseline]:
    """Return the entries of all modules of a package, in the order of the modules' names."""
    names = [f"{package}.{module.name}" for module in iter_modules(import_module(package).__path__)]
    modules = [import_module(name) for name in names if name != __name__]
    return {
        name: baseline
        for module in modules
        for name, baseline in getattr(module, "ENTRIES", {}).items()
    }


BASELINES: dict[str, Baseline] = collect(__name__.rpartition(".")[0])
"""By the name that settings and the simulator give it; another one is a module."""
