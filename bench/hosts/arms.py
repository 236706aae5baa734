"""Arms of ``bench.hosts.vllm_speed``: their names, and what they have in common."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from backend import PROJECT_ROOT

ENVIRONMENT = PROJECT_ROOT / ".venv-vllm"
PLAIN, SPINDLE, LENGTHS = "plain", "spindle", "ngram-planned"
OWN, OPENAI, TRITON = "vllm", "spindle-openai", "spindle-triton"
PLANNED, FIXED, BEST = "planned", "fixed", "fixed-best"
OURS = (SPINDLE, LENGTHS, OPENAI, TRITON, PLANNED)
K_MAX = 8
NGRAMS = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
Run = dict[str, Any]


class Prompt(NamedTuple):
    """A prompt as text, and as vLLM's tokens."""

    text: str
    ids: list[int]


class Arm(Protocol):
    """Something that serves."""

    def serve(self, prompts: list[Prompt], max_tokens: int) -> Run:
        """Serve prompts all at once; return ``tokens``, ``wall_s`` and ``texts``."""
        ...
