"""The default engine on CPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from backend.engines.checkpoint import Weights
from backend.engines.models.llama import load_llama
from backend.engines.models.reading import read_spec
from backend.engines.models.spec import PlainLlama
from backend.engines.openvino.converted import complete, read
from backend.engines.openvino.graph_cache import bring_graph
from backend.engines.openvino.layout import paths
from backend.engines.openvino.llama import (
    OpenvinoConverted,
    OpenvinoDecoder,
    OpenvinoLlama,
    check_precision,
    most_branches,
    stored_as,
)
from backend.engines.openvino.paged_attention import check_version
from backend.engines.port import Completion, Turn
from backend.engines.spine import CANDIDATES
from backend.engines.stepping.engine import Job, StepEngine, step_limits
from backend.sampling.verification import Row
from backend.sequence import Sequence

logger = logging.getLogger(__name__)

INT8_GROUP = 32
"""Columns with one scale where activations are rounded to be multiplied by int8; 128 is faster and
further from fp32 (ADR 0068).
"""

INT4_ROWS = 2
"""Least rows of a pass in int4: one alone takes 1.2x the time of two, in the same bits."""

AMX_TERMS = 32
"""Terms of a sum in bf16 that a tile of AMX holds."""


class OpenvinoEngine(StepEngine):
    """A step engine on OpenVINO, for targets and drafts."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        dtype: str = "fp32",
        threads: int = 1,
        lm_head: str = "",
        **sizes: int | bool | Seq[int],
    ) -> None:
        """Load a Hugging Face folder; ``sizes`` are those of ``from_weights``. A family without a
        graph of our own is converted first, unless that is in the cache.

        Raises CheckpointError for a folder that cannot be served, VersionError for another OpenVINO
        than is known.
        """
        torch.set_num_threads(1)  # between passes it only moves rows: waking a thread takes longer
        if dtype != "int4" and read_spec(folder).llama:
            stored = "bf16" if dtype == "bf16" else "fp32"
            config, weights = load_llama(folder, stored)
            self._set_up(name, config, weights, dtype=dtype, threads=threads, **sizes)  # type: ignore[arg-type]
        else:
            check_version()
            check_precision(precision_of(dtype))
            form = {"dtype": dtype, "lm_head": lm_head}
            self._set_up_converted(name, folder, threads=threads, **form, **sizes)  # type: ignore[arg-type]

    @classmethod
    def from_weights(
        cls, name: str, config: PlainLlama, weights: Weights, **sizes: int | bool | str | Seq[int]
    ) -> OpenvinoEngine:
        """Build an engine of weights in memory, which are fp32 or bf16.

        ``sizes``: ``kv_blocks``, ``max_context_tokens``, ``max_draft_tokens`` (8), ``dtype``
        (``fp32``, ``bf16``, ``int8``), ``threads`` (1), ``invariant`` (``OpenvinoLlama``; never
        where ``keeps_bits`` says no), ``verifies``: it is a target, and ``taps``: the layers whose
        output drafts read (none).
        """
        engine = cls.__new__(cls)
        engine._set_up(name, config, dict(weights), **sizes)  # type: ignore[arg-type]
        return engine

    _llama: OpenvinoDecoder

    def _set_up(
        self,
        name: str,
        config: PlainLlama,
        weights: Weights,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        dtype: str = "fp32",
        threads: int = 1,
        invariant: bool = True,
        verifies: bool = True,
        taps: Seq[int] = (),
    ) -> None:
        precision = precision_of(dtype)
        invariant = invariant and keeps_bits(config, dtype)
        limits = step_limits(
            config.vocab_size, kv_blocks, max_context_tokens, max_draft_tokens, invariant=invariant
        )
        model = self._llama = OpenvinoLlama(
            config,
            weights,
            kv_blocks=kv_blocks,
            max_positions=max_context_tokens + max_draft_tokens,
            precision=precision,
            int8=dtype == "int8",
            group=INT8_GROUP if dtype == "int8" else None,
            threads=threads,
            invariant=invariant,
            trees=verifies,
            best=0 if verifies else CANDIDATES,
            taps=taps,
        )
        self._branches_left = self._most_branches = most_branches(max_draft_tokens)
        super().__init__(name, model, limits)

    def _set_up_converted(
        self,
        name: str,
        folder: Path,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
        dtype: str = "fp32",
        threads: int = 1,
        invariant: bool = True,
        verifies: bool = True,
        taps: Seq[int] = (),
        lm_head: str = "",
    ) -> None:
        repeats, best = verifies or invariant, 0 if verifies else CANDIDATES
        converted = complete(
            read(bring_graph(folder, dtype, taps, head=lm_head)),
            positions=max_context_tokens + max_draft_tokens,
            repeats=repeats,
            best=best,
            stored=stored_as(precision_of(dtype)),
        )
        invariant = invariant and not converted.has_experts and keeps_sums(converted.sums, dtype)
        model = self._llama = OpenvinoConverted(
            converted,
            kv_blocks=kv_blocks,
            precision=precision_of(dtype),
            threads=threads,
            invariant=invariant,
            repeats=repeats,
            ranks=best > 0,
            taps=taps,
            group=INT8_GROUP if dtype == "int8" else converted.group,
            least_rows=INT4_ROWS if dtype == "int4" else 1,
        )
        self._branches_left = self._most_branches = most_branches(max_draft_tokens)
        limits = step_limits(
            converted.vocab_size,
            kv_blocks,
            max_context_tokens,
            max_draft_tokens,
            invariant=invariant,
        )
        super().__init__(name, model, limits)

    def close(self) -> None:
        """Release the model and its KV; the engine is of no use afterwards."""
        super().close()
        del self._llama

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """For measuring only (``StepEngine.assume``): the pass to come is the first, too."""
        super().assume(sequence, tokens)
        self._llama.seen_none()

    def width(self) -> tuple[int, int]:
        """Return the rows of the last pass and the price of a change (``port.KeepsWidth``)."""
        return self._llama.width()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run all queued turns to their end (``StepEngine.poll``)."""
        self._branches_left = self._most_branches
        return super().poll(timeout_s)

    def _candidates(
        self,
        logits: torch.Tensor,  # [places, vocab]
        places: Seq[Row],
        most: int,
    ) -> list[list[tuple[int, float]]]:
        if all(place.sampling.plain for place in places):
            found = self._llama.best(logits, most)
            if found is not None:
                return found
        return super()._candidates(logits, places, most)

    def _prepare(self, turn: Turn) -> Job:
        """Prepare a turn; of a tree with more branches than a pass has room for, the likeliest path
        is verified.
        """
        if turn.proposal is not None and not turn.proposal.is_chain:
            branches = len(paths(turn.proposal.parents)) - 1
            if branches > self._branches_left:
                turn = replace(turn, proposal=turn.proposal.spine())
            else:
                self._branches_left -= branches
        return super()._prepare(turn)


def precision_of(dtype: str) -> str:
    """Return what activations and KV are stored in.

    int8 and int4 round matrices, and activations to int8 for a product: so a row has the same bits
    in any pass. With activations in bf16, AMX has other kernels for few rows than for many.
    """
    return "bf16" if dtype == "bf16" else "fp32"


def keeps_bits(config: PlainLlama, dtype: str) -> bool:
    """Return whether a row's products are the same bits among any other rows.

    In bf16 on AMX few rows go through other kernels than many where a sum is not of whole tiles
    (asked of every processor: models that are served have no other sums).
    """
    sums = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size
    return keeps_sums(sums, dtype)


def keeps_sums(sums: Iterable[int], dtype: str) -> bool:
    """Return the same of products whose sums have this many terms."""
    return dtype != "bf16" or all(terms % AMX_TERMS == 0 and terms > AMX_TERMS for terms in sums)
