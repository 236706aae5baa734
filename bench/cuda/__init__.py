"""Benches of the CUDA engine."""

from bench.cuda.loops import allow_without_numba

PLANNER = allow_without_numba()
"""How the policy's loops run here."""
