"""``metrics.speculative_decoding`` of an answer: how its proposals did, in the format of vLLM's
``--per-request-spec-decode-metrics``, which AIPerf reads.
"""

from __future__ import annotations

from typing import Any

from backend.openai_frontend.triton import Piece


class Speculation:
    """Adds up the proposals of an answer's texts."""

    def __init__(self, level: str) -> None:
        """``level``: ``none``, ``summary`` or ``detailed``, as in vLLM."""
        self._level = level
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Count a text's last piece; the others carry no counts."""
        if piece.finish_reason is not None:
            self._pieces.append(piece)

    def metrics(self) -> dict[str, Any]:
        """Return the fields to add at the root of the response. Steps keep their order only where
        there is one text.
        """
        if self._level == "none" or not self._pieces:
            return {}
        columns = zip(*(piece.acceptance_histogram for piece in self._pieces), strict=True)
        histogram = [sum(column) for column in columns]
        steps, drafted = sum(histogram), sum(piece.draft_tokens for piece in self._pieces)
        accepted = sum(tokens * count for tokens, count in enumerate(histogram))
        counts: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": len(histogram) - 1,
        }
        if self._level == "detailed" and len(self._pieces) == 1:
            counts["per_step_accepted"] = self._pieces[0].per_step_accepted
            counts["per_step_drafted"] = self._pieces[0].per_step_drafted
        return {"metrics": {"speculative_decoding": counts}}
