"""What drafts are worth to a target, scored along the target's own texts and along human ones.

Speculative decoding along a text: where the target's law is p and the draft's q, a proposed token
is accepted with probability ``sum_v min(p_v, q_v)``, and the emitted token has law p. Taking the
emitted token x ~ p first and accepting with probability ``min(1, q_x / p_x)`` has the same joint
law (Leviathan et al., 2023), so the steps that speculation would have taken can be read off one
sampled text for every draft and length, with one coin a position. Greedy: accepted where the
draft's choice is the token. A proposal without a law (prompt lookup) is accepted where it is the
token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from backend.engines.checkpoint import load
from backend.engines.lookup import LookupEngine
from backend.engines.port import Turn
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.torch.llama import Llama
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Sequence

POSITIONS = 8
MAX_TOKENS = 1024

Run = Callable[[int, int], int]
"""How many of k proposed tokens are accepted by a step that starts at a position of the text's own
tokens.
"""


class Model:
    """A checkpoint folder as the serving engine runs it, with room for ``rows`` texts of
    ``MAX_TOKENS`` tokens.
    """

    def __init__(self, folder: Path, dtype: str, rows: int = 1) -> None:
        config, weights = load(folder, dtype)
        blocks = MAX_TOKENS // BLOCK_TOKENS
        self.vocab_size = config.vocab_size
        with torch.inference_mode():
            self._llama = Llama(config, weights, kv_blocks=rows * blocks, max_positions=MAX_TOKENS)
        self.token_ids = self._llama.token_ids
        self._tables = [
            KVTable(list(range(row * blocks, (row + 1) * blocks)), "cpu") for row in range(rows)
        ]

    @torch.inference_mode()
    def logits(self, tokens: list[int], first: int) -> torch.Tensor:
        """Return the logits behind every prefix of ``tokens`` from that of ``first`` tokens on, the
        whole left out: [n - first, vocab].

        A shortlisted draft has -inf for what it cannot propose.
        """
        found = self._llama.forward(
            [Chunk(tokens[:-1], 0, self._tables[0], len(tokens) - first)]
        ).float()
        if self.token_ids is None:
            return found
        whole = found.new_full((len(found), self.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.token_ids, found)

    @torch.inference_mode()
    def answers(
        self,
        prompts: list[list[int]],
        temperature: float,
        length: int,
        ends: frozenset[int],
        seed: int,
    ) -> list[list[int]]:
        """Return what follows each prompt, up to ``length`` tokens or an end token; the full law at
        ``temperature``, 0 being greedy.
        """
        noise = torch.Generator().manual_seed(seed)
        texts: list[list[int]] = [[] for _ in prompts]
        running = list(range(len(prompts)))
        while running:
            chunks = []
            for row in running:
                own = texts[row]
                new = own[-1:] or prompts[row]
                chunks.append(
                    Chunk(new, len(prompts[row]) + len(own) - len(new), self._tables[row], 1)
                )
            logits = self._llama.forward(chunks).float()
            if temperature > 0:
                logits = (
                    logits / temperature
                    - torch.empty_like(logits).exponential_(generator=noise).log()
                )
            for row, token in zip(running, logits.argmax(dim=1).tolist(), strict=True):
                texts[row].append(token)
            running = [
                row for row in running if len(texts[row]) < length and texts[row][-1] not in ends
            ]
        return texts


def accepting(
    draft: torch.Tensor, target: torch.Tensor, tokens: list[int], temperature: float
) -> np.ndarray:
    """Return the probability that each of ``tokens`` [n] would have been accepted, from the logits
    [n, vocab] before it.
    """
    ids = torch.tensor(tokens)
    if temperature == 0:
        return (draft.argmax(dim=1) == ids).double().numpy()
    p, q = (
        (logits / temperature).log_softmax(dim=1).gather(1, ids[:, None])[:, 0]
        for logits in (target, draft)
    )
    return (q - p).exp().clamp(max=1).double().numpy()


def overlap(draft: torch.Tensor, target: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the probability [n] that a sampled proposal is accepted, ``sum min(p, q)``; at
    temperature 0 whether both choose the same.
    """
    if temperature == 0:
        return (draft.argmax(dim=1) == target.argmax(dim=1)).double()
    return (
        torch.minimum((draft / temperature).softmax(dim=1), (target / temperature).softmax(dim=1))
        .sum(dim=1)
        .double()
    )


def by_coins(accepting: np.ndarray, coins: np.ndarray) -> Run:
    """Return the runs of a draft whose tokens are accepted with these probabilities, given one
    uniform number a position.
    """
    hits = (coins < accepting).tolist()

    def run(at: int, length: int) -> int:
        window = hits[at : at + length]
        return window.index(False) if False in window else len(window)

    return run


def by_lookup(prompt: list[int], text: list[int]) -> Run:
    """Return the runs of prompt lookup."""
    engine = LookupEngine("lookup", max_draft_tokens=POSITIONS)

    def run(at: int, length: int) -> int:
        sequence = Sequence(at, prompt + text[:at], len(prompt), SamplingParams(), {})
        engine.submit([Turn(sequence, len(sequence.tokens), run=length, nodes=length)])
        proposal = engine.poll(0.0)[0].proposal
        engine.cancel([at])
        return len(proposal.followed(text[at:])) if proposal else 0

    return run


def steps(run: Run, tokens: int, length: int) -> list[int]:
    """Return how many proposed tokens each step accepts that speculation with ``length`` takes
    along a text of ``tokens`` tokens.
    """
    accepted, at = [], 0
    while at < tokens:
        accepted.append(run(at, min(length, tokens - at)))
        at += accepted[-1] + 1
    return accepted


def tokens_per_step(texts: list[tuple[int, list[int]]]) -> float:
    """Return the mean tokens a step, given each text's tokens and steps."""
    return sum(tokens for tokens, _ in texts) / sum(len(taken) for _, taken in texts)


def interval(
    texts: list[tuple[int, list[int]]], rng: np.random.Generator, draws: int = 1000
) -> tuple[float, float]:
    """Return the 95 % interval of ``tokens_per_step`` by resampling texts."""
    counts = np.array([(tokens, len(taken)) for tokens, taken in texts])
    drawn = counts[rng.integers(len(counts), size=(draws, len(counts)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    return float(low), float(high)
