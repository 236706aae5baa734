"""The kind of a host's own engine and drafter: they have plans and tables, and are never made."""

from __future__ import annotations

from backend.kinds import Kind

KIND = Kind(__name__, model=False, tokenizer=False, known_s=1e-6)
