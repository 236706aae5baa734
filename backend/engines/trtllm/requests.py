"""Turns as requests to TensorRT-LLM's executor, and the executor's answers as completions.

The executor knows nothing of earlier turns: the text so far is a prompt to it. So everything that
depends on how much was generated is said with each request: how many tokens are left without
an end, where the stream of random numbers stands, how much KV to expect.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from backend.engines.port import Completion, Turn
from backend.engines.trtllm.folder import EngineFolder
from backend.request import SamplingParams
from backend.sampling.processing import WHOLE_VOCABULARY, process
from backend.sampling.randomness import word
from backend.sequence import Sequence

TOP_K_MAX = 1024
"""The decoder clamps a greater top_k silently (``TOP_K_MAX`` of its sampling layers)."""

RETENTION_PRIORITY, RETENTION_S = 80, 60.0
"""A text's blocks outlast its turn for so long at a priority above the default 35: the next turn
needs them.
"""

PROMPT_PRIORITY, TURN_PRIORITY = 0.5, 0.9
"""A text under way goes before a new prompt in the executor's queue."""

_NEVER = -1e30


class TurnError(ValueError):
    """A turn that this engine cannot run; the message names the option and the value."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn as it was asked of the executor: ``proposed`` may be cut."""

    turn: Turn
    request: Any
    proposed: list[int]
    cut: bool
    logits: torch.Tensor | None = None


class Requests:
    """Makes the requests of one engine."""

    def __init__(self, trtllm: Any, engine: EngineFolder, timeout_s: float) -> None:
        self._trtllm, self._engine = trtllm, engine
        self._timeout = timedelta(seconds=timeout_s)
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)  # draft logits by their rows
        self._outputs = {wants: self._output(wants) for wants in (False, True)}
        keep, config = timedelta(seconds=RETENTION_S), trtllm.KvCacheRetentionConfig
        prompt = config.TokenRangeRetentionConfig(0, None, RETENTION_PRIORITY, keep)
        # All five: without the directory its default, None, is passed, which a std::string does not
        # take.
        self._retention = config(
            [prompt], RETENTION_PRIORITY, keep, trtllm.KvCacheTransferMode.DRAM, ""
        )

    def _output(self, wants_logits: bool) -> Any:
        return self._trtllm.OutputConfig(
            exclude_input_from_output=True,
            return_generation_logits=wants_logits,
        )

    def ask(self, turn: Turn, *, begun: bool) -> Ask:
        """Make the request of a turn, one of a text that has ``begun`` or of a new one. Raises
        TurnError.

        A draft (``turn.nodes``) proposes what is likeliest, whatever the request samples. If the
        target samples, draft logits say that the chain is certain, so that the decoder takes of it
        its own distribution's share: without them it draws twice where it rejects.
        """
        sequence, sampling, engine = turn.sequence, turn.sequence.sampling, self._engine
        _check(turn)
        left = max(0, sampling.min_tokens - (turn.end - sequence.prompt_tokens))
        proposed, length, cut = _cut(turn, left)
        greedy = sampling.greedy or turn.nodes > 0
        logits = self._draft_logits(proposed) if proposed and not greedy else None
        wants_logits = sampling.log_probs and not turn.nodes
        seed = 0 if greedy else word(sampling.seed, turn.end)  # each request begins its stream
        request = self._trtllm.Request(
            sequence.tokens[: turn.end],
            length,
            sampling_config=_sampling(self._trtllm, sequence, greedy, seed),
            output_config=self._outputs[wants_logits],
            # there would be no row of logits for it: texts are cut after their end here
            end_id=None,
            bad_words=_banned(sampling, left) or None,
            embedding_bias=_bias(sampling, engine.vocab_size) if sampling.bias else None,
            external_draft_tokens_config=self._trtllm.ExternalDraftTokensConfig(proposed, logits)
            if proposed
            else None,
            kv_cache_retention_config=self._retention,
            priority=TURN_PRIORITY if begun else PROMPT_PRIORITY,
            allotted_time_ms=self._timeout,
            cache_salt_id=_salt(sequence.salt) if sequence.salt else None,
        )
        return Ask(turn, request, proposed, cut, logits)

    def over(self, asked: Ask) -> None:
        """Take back what a request that has ended does not need any more."""
        if asked.logits is not None:
            rows = len(asked.proposed)
            asked.logits[torch.arange(rows), torch.tensor(asked.proposed)] = _NEVER
            self._free[rows].append(asked.logits)

    def _draft_logits(self, proposed: list[int]) -> torch.Tensor:
        """Return logits [k, width] whose softmax is certain of a chain.

        Filling a row of 128,000 takes longer than making the request, so they are kept and used
        again once their request is over.
        """
        rows, free = len(proposed), self._free[len(proposed)]
        logits = free.pop() if free else torch.full((rows, self._engine.padded_vocab_size), _NEVER)
        logits[torch.arange(rows), torch.tensor(proposed)] = 0.0
        return logits


def completion(
    asked: Ask, output: list[int], generation_logits: Any, vocab_size: int
) -> Completion:
    """Read an answer up to its first end token: what was accepted is its beginning as far as it
    was proposed (a rejected token is never drawn again).
    """
    turn, sampling = asked.turn, asked.turn.sequence.sampling
    tokens = output[
        : next((i + 1 for i, token in enumerate(output) if token in sampling.end_ids), len(output))
    ]
    if not tokens:
        raise TurnError(f"the executor returned no token for sequence {turn.sequence.id}")
    accepted = next(
        (i for i, (a, b) in enumerate(zip(asked.proposed, tokens, strict=False)) if a != b),
        min(len(asked.proposed), len(tokens)),
    )
    log_probs = None
    if generation_logits is not None:
        rows = _processed(generation_logits, turn, tokens, vocab_size)
        scores = (rows / (sampling.temperature or 1.0)).log_softmax(-1)
        log_probs = scores[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    return Completion(turn.sequence.id, tokens, accepted, log_probs=log_probs)


def _cut(turn: Turn, left: int) -> tuple[list[int], int, bool]:
    """Return what is proposed, the most tokens of the turn, and whether it was cut.

    End tokens are forbidden for whole turns: one with places on both sides of the ``left`` tokens
    that may not end stops between them.
    """
    proposed = list(turn.proposal.tokens) if turn.proposal else []
    length = len(proposed) + 1 if proposed else min(turn.run, turn.nodes or turn.run)
    if turn.sequence.sampling.end_ids and 0 < left < length:
        return proposed[: left - 1], left, True
    return proposed, length, False


def _banned(sampling: SamplingParams, left: int) -> list[list[int]]:
    ends = [[token] for token in sampling.end_ids] if left else []
    return [list(word) for word in sampling.bad_words] + ends


def _check(turn: Turn) -> None:
    sampling = turn.sequence.sampling
    if turn.proposal is not None and not turn.proposal.is_chain:
        raise TurnError("a tree of tokens cannot be verified, a chain can")
    if sampling.top_k > TOP_K_MAX and not sampling.greedy:
        raise TurnError(f"top_k must be at most {TOP_K_MAX}, got {sampling.top_k}")


def _sampling(trtllm: Any, sequence: Sequence, greedy: bool, seed: int) -> Any:
    """Name what has an unwanted default: with neither top_k nor top_p the decoder is greedy,
    without a seed its seed is 0.
    """
    sampling = sequence.sampling
    filters = {"top_k": 1} if greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p}
    neutral = (
        *(("min_p", 0.0), ("repetition_penalty", 1.0)),
        *(("presence_penalty", 0.0), ("frequency_penalty", 0.0)),
    )
    options = {
        name: getattr(sampling, name) for name, value in neutral if getattr(sampling, name) != value
    }
    if sampling.temperature > 0.0:
        options["temperature"] = sampling.temperature
    if ignored := min(sampling.prompt_ignore_length, sequence.prompt_tokens):
        options["prompt_ignore_length"] = ignored  # output is part of the prompt of later turns
    return trtllm.SamplingConfig(1, seed=seed, **filters, **options)


def _salt(salt: str) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=7).digest(), "big")


def _bias(sampling: SamplingParams, vocab_size: int) -> torch.Tensor:
    tokens, addends = zip(*sampling.bias, strict=True)
    return torch.zeros(vocab_size).index_add_(0, torch.tensor(tokens), torch.tensor(addends))


def _processed(
    generation_logits: Any, turn: Turn, tokens: list[int], vocab_size: int
) -> torch.Tensor:
    """Return the rows [len(tokens), vocab] of the emitted tokens with the request's options;
    ``generation_logits`` are [1, rows, width].
    """
    sequence = turn.sequence
    rows = torch.as_tensor(generation_logits)[0, : len(tokens), :vocab_size].float().clone()
    if sequence.sampling.changes_logits:
        text = [*sequence.tokens[: turn.end], *tokens]
        for end, row in enumerate(rows, turn.end):
            process(row, sequence.sampling, text[:end], sequence.prompt_tokens, WHOLE_VOCABULARY)
    return rows
