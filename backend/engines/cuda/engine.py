"""The engine of NVIDIA GPUs: decoders of transformers over paged KV, with Triton kernels and CUDA
graphs. On a CPU it runs the same passes in plain torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from backend.engines.cuda.forward import TOKEN_SIZES, PagedForward
from backend.engines.cuda.kernels import has_own_product, plain_kernels, triton_kernels
from backend.engines.cuda.leaves import Product
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import MAX_NEW_TOKENS, row_pages
from backend.engines.cuda.stream import NO_NUMBERS
from backend.engines.models.comparison import compare
from backend.engines.port import Completion, Engine, EngineLimits
from backend.engines.stepping.chunks import PassChunk
from backend.engines.stepping.engine import StepEngine, TurnJob
from backend.sampling.distributions import Floats

logger = logging.getLogger(__name__)


class CudaEngine(StepEngine):
    """A step engine over a causal language model of transformers, for targets and drafts.

    ``lm`` was made with ``attn_implementation=ATTENTION`` and is on its device. With ``invariant``
    a row's logits have the same bits in every batch (its cost: docs/adr/0041). Graphs have at most
    ``graph_tokens`` tokens; ``count(reason)`` is called where one cannot be captured.
    """

    def __init__(
        self,
        name: str,
        lm: nn.Module,
        *,
        vocab_size: int,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        taps: Sequence[int] = (),
        invariant: bool = True,
        lookahead: int = 0,
        graph_tokens: int = TOKEN_SIZES[-1],
        count: Callable[[str], None] | None = None,
    ) -> None:
        device = next(lm.parameters()).device
        is_cuda = device.type == "cuda"
        own_product = is_cuda and has_own_product(device)
        kernels = (
            triton_kernels(invariant=invariant, own_product=own_product)
            if is_cuda
            else plain_kernels()
        )
        pages = row_pages(max_context_tokens, max_draft_tokens)
        model = PagedModel(lm, kernels, blocks=kv_blocks + 1, row_pages=pages, taps=taps)
        with model.stream.current():
            model.fuse()
        logger.info("%s: fused %s, kept %s", name, model.fused, sorted(set(model.refused)))
        logger.info("%s: prompts by %s", name, ", ".join(sorted(model.prompts_by)))
        odd = _without_tiling(model.lm) if own_product else ["all, on this GPU"]
        if is_cuda and invariant and odd:
            logger.warning("%s: not invariant: products by cuBLAS for weights %s", name, odd)
            if count is not None:
                count("not_invariant")
        limits = EngineLimits(
            vocab_size=vocab_size,
            max_context_tokens=max_context_tokens,
            max_draft_tokens=min(max_draft_tokens, MAX_NEW_TOKENS - 1),
            max_run_tokens=max(1, max_draft_tokens),
            kv_blocks=kv_blocks,
            tree=True,
            scores=True,
            lookahead=lookahead,
            widths=TOKEN_SIZES if is_cuda else (),
        )
        self._stream = model.stream
        forward = PagedForward(
            model, most=limits.max_draft_tokens + 1, graph_tokens=graph_tokens, count=count
        )
        super().__init__(name, forward, limits)
        self.model: PagedForward

    def prepare(self, drafts: Sequence[Engine], rows: int) -> None:  # noqa: ARG002 (it runs none)
        """Capture the graphs of all passes (``port.Prepares``)."""
        if self.model.graphs.captures:
            with self._stream.current(), torch.inference_mode():
                self.model.capture(rows)

    def check(self, expected: torch.Tensor, name: str) -> float:
        """Compare passes with transformers' own logits [TOKENS, vocab] (``models.comparison``), of
        a prompt and then of a few tokens each. Raises CheckpointError, beginning with ``name``.
        """

        def forward(chunks: Sequence[PassChunk]) -> Floats:
            pieces = [[*chunks]]
            if chunks[0].start:
                pieces = _pieces(chunks[0], self.limits.max_draft_tokens + 1)
            return np.concatenate([self.model.forward(piece) for piece in pieces])

        with self._stream.current(), torch.inference_mode():
            return compare(self.model.paged.lm, forward, name, expected)

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run all queued turns. Raises EngineLostError."""
        with self._stream.serving(self.name), torch.inference_mode():
            return super().poll(timeout_s)

    def _decide(self, logits: Floats, jobs: list[TurnJob]) -> None:
        """Decide; a row whose logits [rows, vocab] are no numbers ends, and no other."""
        places = np.flatnonzero(~np.isfinite(logits.max(-1))).tolist()
        if places:
            logits = logits.copy()
            logits[places] = 0.0
        super()._decide(logits, jobs)
        first = 0
        for job in jobs if places else ():
            on_path = {first, *(first + 1 + node for node in job.path)}
            if not on_path.isdisjoint(places):
                job.error, job.path = NO_NUMBERS, []
            first += job.request.rows


def _without_tiling(lm: nn.Module) -> list[Any]:
    """Return the shapes of weights that our own product does not multiply."""
    from backend.engines.cuda.linear import tiling_for

    products = (module for module in lm.modules() if isinstance(module, Product | nn.Linear))
    shapes = {tuple(product.weight.shape) for product in products}
    return sorted(shape for shape in shapes if tiling_for(shape[0], shape[1], 1) is None)


def _pieces(chunk: PassChunk, tokens: int) -> list[list[PassChunk]]:
    """Cut a chunk into passes of a few tokens."""
    ends = [*range(tokens, len(chunk.tokens), tokens), len(chunk.tokens)]
    return [
        [PassChunk(chunk.tokens[begin:end], chunk.start + begin, chunk.table, end - begin)]
        for begin, end in pairwise([0, *ends])
    ]
