"""The default engine on CPUs."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from openvino import Model

from backend.engines.openvino.converted import complete, read
from backend.engines.openvino.decoder import (
    OpenvinoDecoder,
    check_precision,
    most_branches,
    stored_as,
)
from backend.engines.openvino.graph_cache import bring_graph
from backend.engines.openvino.layout import paths
from backend.engines.openvino.paged_attention import check_version
from backend.engines.port import Completion, Turn
from backend.engines.spine import CANDIDATES
from backend.engines.stepping.engine import StepEngine, TurnJob, step_limits
from backend.sampling.distributions import Floats
from backend.sampling.verification import VerifyRequest
from backend.sequence import Sequence

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
        graph: Model,
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
        """Serve a converted graph with its marks, made for this ``dtype`` and these ``taps``, the
        layers whose output drafts read.

        ``invariant``: texts have the same bits under any load, where the products allow it.
        ``verifies``: it is a target. Raises VersionError for another OpenVINO than is known, and
        CheckpointError as ``OpenvinoDecoder`` does.
        """
        check_version()
        check_precision(precision_of(dtype))
        repeats, best = verifies or invariant, 0 if verifies else CANDIDATES
        converted = complete(
            graph,
            positions=max_context_tokens + max_draft_tokens,
            repeats=repeats,
            best=best,
            stored=stored_as(precision_of(dtype)),
        )
        invariant = invariant and not converted.has_experts and keeps_sums(converted.sums, dtype)
        self.model: OpenvinoDecoder
        model = OpenvinoDecoder(
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

    @classmethod
    def load(
        cls,
        name: str,
        folder: Path,
        *,
        dtype: str = "fp32",
        taps: Seq[int] = (),
        lm_head: str = "",
        **sizes: Any,
    ) -> OpenvinoEngine:
        """Serve a folder, which is converted first unless the cache has its graph; ``lm_head``: the
        dtype of the head, if it is another. Raises CheckpointError for a folder that cannot be
        served.
        """
        check_version()
        check_precision(precision_of(dtype))
        graph = read(bring_graph(folder, dtype, taps, head=lm_head))
        return cls(name, graph, dtype=dtype, taps=taps, **sizes)

    def assume(self, sequence: Sequence, tokens: int) -> None:
        """For measuring only (``StepEngine.assume``): the pass to come is the first, too."""
        super().assume(sequence, tokens)
        self.model.seen_none()

    def width(self) -> tuple[int, int]:
        """Return the rows of the last pass and the price of a change (``port.KeepsWidth``)."""
        return self.model.width()

    def poll(self, timeout_s: float) -> list[Completion]:
        """Run all queued turns to their end (``StepEngine.poll``)."""
        self._branches_left = self._most_branches
        return super().poll(timeout_s)

    def _candidates(
        self,
        logits: Floats,  # [places, vocab]
        places: Seq[VerifyRequest],
        most: int,
    ) -> list[list[tuple[int, float]]]:
        if all(place.sampling.plain for place in places):
            best = self.model.best(logits, most)
            if best is not None:
                return best
        return super()._candidates(logits, places, most)

    def _prepare(self, turn: Turn) -> TurnJob:
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


def keeps_sums(sums: Iterable[int], dtype: str) -> bool:
    """Return whether products whose sums have this many terms are the same bits among any rows.

    In bf16 on AMX few rows go through other kernels than many where a sum is not of whole tiles
    (asked of every processor: models that are served have no other sums).
    """
    return dtype != "bf16" or all(terms % AMX_TERMS == 0 and terms > AMX_TERMS for terms in sums)
