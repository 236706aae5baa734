"""An engine of its own (``serving.json``'s ``"engine": "bench.micro.scripted_draft"``): a draft
that knows each text from the first time that it was written, and is right as often as a request's
seed says in thousandths. So random weights, which accept nothing, are verified at a given rate.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import numpy as np

from backend.engine_config import EngineConfig
from backend.engines.port import EngineLimits, Turn
from backend.engines.proposer import UNLIMITED, Proposer
from backend.engines.registry import Service
from backend.kinds import Kind
from backend.sequence import Proposal, Sequence

KIND = Kind(__name__, model=False, target=False, known_s=2e-5)

THOUSAND = 1000


class ScriptedDraft(Proposer):
    """A draft that keeps the tokens of every prompt's first request."""

    def __init__(self, name: str, max_draft_tokens: int) -> None:
        most = max_draft_tokens, max_draft_tokens
        super().__init__(name, EngineLimits(UNLIMITED, UNLIMITED, *most, kv_blocks=0, free=True))
        self._texts: dict[tuple[int, ...], list[int]] = {}

    def _missing(self, sequence: Sequence) -> str:
        return "" if self._look_up(sequence, 1) else "its text is not known yet"

    def _look_up(self, sequence: Sequence, length: int) -> list[int]:
        prompt = tuple(sequence.tokens[: sequence.prompt_tokens])
        text = self._texts.setdefault(prompt, sequence.tokens)  # which grows
        place = len(sequence.tokens)
        return text[place : place + length]

    def _propose(self, turns: Seq[Turn]) -> Iterable[Proposal | None]:
        for turn in turns:
            sequence, place = turn.sequence, len(turn.sequence.tokens)
            tokens = self._look_up(sequence, min(turn.nodes, self.limits.max_draft_tokens))
            coins = np.random.default_rng(sum(sequence.tokens[: sequence.prompt_tokens]))
            is_right = coins.random(place + len(tokens))[place:] < sequence.sampling.seed / THOUSAND
            pairs = zip(tokens, is_right, strict=True)
            proposed = [token if right else token + 1 for token, right in pairs]
            yield Proposal.chain(self.name, proposed)


def make(engine: EngineConfig, service: Service) -> ScriptedDraft:
    """Make an engine of this kind."""
    return ScriptedDraft(engine.name, service.sizes["max_draft_tokens"])
