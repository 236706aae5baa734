"""Distributions of the next token as network layers: what ``backend.sampling.distributions`` does
with torch, in arithmetic that TensorRT has.

TensorRT has no float64, sorts no more than 3,840 elements and breaks ties as it likes. So there is
no sort here: top-k and top-p keep what has less than a limit above it, and that threshold is found
bit by bit; of equals the first is taken by its number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engines_build.trt_graph.graph import F64, Graph, GraphTensor, where

EXPONENT_STEPS = {F64: 10}
"""Powers of two down to 2**-1023; 7 steps, to 2**-127, for f32."""

FRACTION_STEPS = {F64: 52}
"""Bits of a significand after its first; 23 for f32."""


@dataclass(frozen=True, slots=True)
class DistributionOptions:
    """Options that make a distribution of logits, each [batch, 1, 1]: ``temperature`` (0: greedy),
    ``top_k`` (vocabulary size: all), ``top_p`` (2: all).
    """

    temperature: GraphTensor
    top_k: GraphTensor
    top_p: GraphTensor

    @classmethod
    def declare(cls, graph: Graph, dtype: str) -> DistributionOptions:
        """Declare them as inputs [batch]."""
        return cls(
            *(
                graph.input(name, dtype, "batch").reshape(0, 1, 1)
                for name in ("temperature", "top_k", "top_p")
            )
        )


class VocabularyRows:
    """Arithmetic on rows [batch, rows, size]; ``dtype`` is that of distributions (f32, or f64 where
    there is no TensorRT).
    """

    def __init__(self, graph: Graph, size: int, dtype: str) -> None:
        self.size, self.dtype = size, dtype
        self._columns = graph.constant(np.arange(size, dtype=np.int32)[None, None])

    def arg_max(self, values: GraphTensor) -> GraphTensor:
        """Return the column [batch, rows, 1] of the greatest of each row's values [batch, rows,
        size], the first of equals.
        """
        return where(values >= values.amax(-1), self._columns, self.size).amin(-1)

    def probs(self, logits: GraphTensor, options: DistributionOptions) -> GraphTensor:
        """Return the distributions that logits [batch, rows, size] stand for, each summing to one:
        temperature, then top-k, then top-p.

        Ties with the last that is kept are kept. At temperature 0 a distribution is a point mass.
        """
        greedy = options.temperature.equals(0.0)
        scores = logits.to(self.dtype)
        scores = scores - scores.amax(-1)
        masses = (scores / where(greedy, options.temperature + 1.0, options.temperature)).exp()
        masses = self._keep(masses, (masses > -1.0).to(self.dtype), options.top_k)
        masses = self._keep(masses, masses, options.top_p * masses.sum(-1))
        point = self._columns.equals(self.arg_max(scores)).to(self.dtype)
        return where(greedy, point, masses / masses.sum(-1))

    def _keep(self, masses: GraphTensor, weights: GraphTensor, limit: GraphTensor) -> GraphTensor:
        """Zero all but the columns that have less than ``limit`` [batch, rows or 1, 1] of weight on
        greater masses, both [batch, rows, size]; the greatest mass is 1.

        That weight falls with the mass, so the least mass that may stay is found by descending,
        first over powers of two, then over the bits of the fraction, down to neighbouring floats.
        """
        threshold = limit * 0.0 + 1.0

        def descend(
            threshold: GraphTensor,  # [batch, rows or 1, 1]
            lower: GraphTensor,  # [batch, rows or 1, 1]
        ) -> GraphTensor:
            above = where(masses > lower, weights, 0.0).sum(-1)
            return where(above < limit, lower, threshold)

        for step in reversed(range(EXPONENT_STEPS.get(self.dtype, 7))):
            threshold = descend(threshold, threshold * 2.0 ** -(2**step))
        unit = threshold
        for step in range(FRACTION_STEPS.get(self.dtype, 23)):
            threshold = descend(threshold, threshold - unit * 2.0 ** -(step + 2))
        return where(masses >= threshold, masses, 0.0)
