"""Deliberate faults, one a function: each patches one place of the product and names what of the
suite must notice.
"""

from tests.contract.mutants import kv, proposals, requests, sampling
from tests.contract.mutants.planting import MUTANTS

__all__ = ["MUTANTS", "kv", "proposals", "requests", "sampling"]
