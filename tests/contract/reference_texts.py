"""A checkpoint's logits along texts, and its own answers, by the reference engine's model."""

from __future__ import annotations

from pathlib import Path

import torch

from backend.engines.models.loading import load_decoder
from backend.engines.models.reading import read_spec
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.engines.torch.decoder import Decoder
from backend.sequence import BLOCK_TOKENS

MAX_TOKENS = 1024


class Model:
    """A checkpoint folder as the serving engine runs it, with room for ``rows`` texts of
    ``MAX_TOKENS`` tokens.
    """

    def __init__(self, folder: Path, dtype: str, rows: int = 1) -> None:
        spec, blocks = read_spec(folder), MAX_TOKENS // BLOCK_TOKENS
        self.vocab_size = spec.vocab_size
        lm = load_decoder(folder, dtype)
        self._decoder = Decoder(lm, spec.layers, kv_blocks=rows * blocks)
        self._tables = [
            KVTable(list(range(row * blocks, (row + 1) * blocks))) for row in range(rows)
        ]

    @torch.inference_mode()
    def logits(self, tokens: list[int], first: int) -> torch.Tensor:
        """Return the logits after every prefix of ``tokens`` from that of ``first`` tokens on, the
        whole left out: [n - first, vocab].
        """
        chunk = PassChunk(tokens[:-1], 0, self._tables[0], len(tokens) - first)
        return torch.from_numpy(self._decoder.forward([chunk])).float()

    @torch.inference_mode()
    def answers(
        self,
        prompts: list[list[int]],
        temperature: float,
        length: int,
        ends: frozenset[int],
        seed: int,
    ) -> list[list[int]]:
        """Return what follows each prompt, up to ``length`` tokens or an end token; the full
        distribution at ``temperature``, 0 being greedy.
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
                    PassChunk(new, len(prompts[row]) + len(own) - len(new), self._tables[row], 1)
                )
            logits = torch.from_numpy(self._decoder.forward(chunks)).float()
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
