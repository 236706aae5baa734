"""A draft without a model, which proposes what followed the text's end in earlier answers of the
same tenant, or before in the text itself.

As in SuffixDecoding (Oliaro et al., 2024): where the same is asked again and again, answers share
long pieces. The places with the longest match vote, in a request's own text as ``lookup`` finds
them and among the answers that were kept; what most of them agree on comes first. The text of a
request is kept when it ends, unless it asks not to be remembered; prompts are not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.engine_config import EngineConfig
from backend.engines.answers import CONTEXT, LONGEST, Answers, PastMatch, PastText, tenant_of
from backend.engines.lookup import (
    LONGEST_MATCH,
    Continuation,
    LookupEngine,
    Match,
    continuation,
)
from backend.engines.registry import Service
from backend.sequence import Sequence
from backend.storage import cache
from backend.storage.manifest import weights_sha256
from policy.evidence import bin_of_match

logger = logging.getLogger(__name__)

PLACES = 8
"""How many places in kept answers vote."""
PATHS = 4
"""Different continuations that are read whole; of the others only the first token is."""
OTHERS = 1
"""Tokens by which a match in another text counts as shorter: a text's own say more (fitted)."""


@dataclass(frozen=True, slots=True)
class _Matches:
    """Places where a text of ``length`` tokens goes on, by what was kept up to answer number
    ``answers``. Places in kept answers are good for nothing once another one is kept.
    """

    length: int
    answers: int
    in_text: list[Match]
    """With sizes of at most ``LONGEST_MATCH``."""
    in_answers: list[PastMatch]
    """With sizes of at most ``LONGEST``, the longest first."""


class SuffixEngine(LookupEngine):
    """A draft over all that was answered to a tenant; it keeps no KV.

    ``count`` counts kept and forgotten tokens. With a ``file`` what is kept outlasts the engine.
    """

    def __init__(
        self,
        name: str,
        *,
        remembered_tokens: int,
        file: Path | None = None,
        count: Callable[..., None] | None = None,
        **options: int,
    ) -> None:
        super().__init__(name, **options)
        self.answers = Answers(remembered_tokens)
        self._matched: dict[int, _Matches] = {}
        self._tenants: dict[int, bytes] = {}
        self._file, self._count = file, count
        self._unsaved = False
        if file is not None:
            self._load(file)

    @property
    def remembered_tokens(self) -> int:
        """How many tokens are kept now, a border after each answer counted."""
        return self.answers.tokens

    def remember(self, sequence: Sequence) -> None:
        """Keep what was written for a request, unless it is not to be remembered."""
        if not sequence.remember:
            return
        context = min(CONTEXT, sequence.prompt_tokens)
        tokens = sequence.tokens[sequence.prompt_tokens - context :]
        self._keep(PastText(self._tenant(sequence), tokens, context))

    def _forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget the sequences' indices; answers that were kept stay."""
        for sequence_id in sequence_ids:
            self._matched.pop(sequence_id, None)
            self._tenants.pop(sequence_id, None)
        super()._forget(sequence_ids)

    def evidence(self, sequence: Sequence) -> int:
        """Return the bin of the longest match's tokens, in the text itself or in an answer, and of
        whether all places with as long an n-gram go on alike.
        """
        matches, tokens = self._matches(sequence), sequence.tokens
        sizes = [match.size for match in matches.in_text]
        if matches.in_answers:
            sizes.append(self.answers.reach(matches.in_answers[0], tokens, LONGEST_MATCH))
        size = max(sizes, default=0)
        least = min(size, self._ngrams[1])
        following = {tokens[match.position] for match in matches.in_text if match.size >= least}
        for place in matches.in_answers:
            if place.size >= least:
                following.add(self.answers.token(place.slot))
        return bin_of_match(size, agree=len(following) == 1)

    def close(self) -> None:
        """Forget everything, once it is saved where it is to be."""
        super().close()
        if self._file is not None and self._unsaved:
            self._save(self._file)
        self._matched.clear()
        self._tenants.clear()
        self.answers = Answers(self.answers.capacity)

    def _has_match(self, sequence: Sequence) -> bool:
        matches = self._matches(sequence)
        return bool(matches.in_text or matches.in_answers)

    def _paths(self, sequence: Sequence, length: int) -> list[Continuation]:
        """Return the paths after the longest matches, equal ones as one; those of ``lookup`` where
        no answer has a match.
        """
        matches, tokens = self._matches(sequence), sequence.tokens
        if not matches.in_answers:
            return super()._paths(sequence, length)
        in_text = [
            (min(m.size, LONGEST), continuation(tokens, m.position, length))
            for m in matches.in_text
        ]
        in_answers = [
            (f.size - OTHERS, self.answers.read(f.slot, length)) for f in matches.in_answers
        ]
        paths = in_text + in_answers
        longest = max(size for size, _ in paths)
        votes: dict[tuple[int, ...], int] = {}
        for size, path in paths:
            if size == longest:
                key = tuple(path)
                votes[key] = votes.get(key, 0) + 1
        best = sorted(votes.items(), key=lambda item: -item[1])  # stable: own, then newest first
        return [
            Continuation(longest * many, many, list(path if place < PATHS else path[:1]))
            for place, (path, many) in enumerate(best)
        ]

    def _matches(self, sequence: Sequence) -> _Matches:
        """Return the matches of a text as it is; each is looked for once."""
        tokens, added = sequence.tokens, self.answers.count
        matches = self._matched.get(sequence.id)
        if matches is None or (matches.length, matches.answers) != (len(tokens), added):
            in_text = self._index(sequence).matches(tokens)
            in_answers = self.answers.find(self._tenant(sequence), tokens, PLACES)
            matches = self._matched[sequence.id] = _Matches(len(tokens), added, in_text, in_answers)
        return matches

    def _tenant(self, sequence: Sequence) -> bytes:
        tenant = self._tenants.get(sequence.id)
        if tenant is None:
            tenant = self._tenants[sequence.id] = tenant_of(sequence.salt)
        return tenant

    def _keep(self, text: PastText) -> None:
        tokens, forgotten = self.answers.add(text)
        self._unsaved |= tokens > 0
        if self._count is not None and tokens:
            name = "spindle_remembered_tokens_total"
            self._count(name, tokens, draft=self.name, event="kept")
            self._count(name, forgotten, draft=self.name, event="forgotten")

    # -- over restarts

    def _load(self, file: Path) -> None:
        """Take up what an engine before kept; a file that cannot be used is left, with a metric."""
        try:
            for text in Answers.unpack(file.read_bytes()):
                self._keep(text)
        except FileNotFoundError:
            logger.info("draft %s: no saved answers to restore", self.name)
        except (OSError, ValueError, TypeError, KeyError, EOFError) as error:
            logger.warning("draft %s cannot restore answers from %s: %r", self.name, file, error)
            self._fallback("remembered_unusable")
        else:
            logger.info("draft %s restored %d tokens of answers", self.name, self.remembered_tokens)
        self._unsaved = False

    def _save(self, file: Path) -> None:
        try:
            cache.publish_file(file, self.answers.pack(), mode=0o600)
        except OSError as error:
            logger.error("draft %s cannot save its answers: %s: %s", self.name, file, error)
            self._fallback("remembered_unsaved")

    def _fallback(self, reason: str) -> None:
        if self._count is not None:
            self._count("spindle_fallback_total", reason=reason)


def _file(engine: EngineConfig, service: Service) -> Path:
    """Return where a draft's answers are kept: token ids of one target, so by its weights."""
    target = service.config.target
    weights = weights_sha256(service.path(target)) if target.kind.checkpoint else target.model
    depends: dict[str, Any] = {"draft": engine.name, "target": target.engine, "weights": weights}
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    return cache.remembered_file(key)


def make(engine: EngineConfig, service: Service) -> SuffixEngine:
    """Make an engine of this kind (``backend.engines.registry``)."""
    return SuffixEngine(
        engine.name,
        remembered_tokens=engine.remembered_tokens,
        file=_file(engine, service) if engine.keep_remembered else None,
        count=service.count,
        min_ngram=engine.min_ngram,
        max_ngram=engine.max_ngram,
        max_draft_tokens=service.sizes["max_draft_tokens"],
    )
