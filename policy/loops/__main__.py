"""Compile the loops, so that later processes load them: ``python -m policy.loops``."""

from . import step, trim  # noqa: F401
from .compiling import compile_all

compile_all()
