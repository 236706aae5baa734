"""Engines whose decoder step, verification included, is one TensorRT network: token ids in,
accepted tokens out.

They show correctness and are no serving path. The network (``engines_build.trt_graph.network``)
runs a padded batch over gathered keys; here its inputs are made of chunks, and the keys and values
that come out are written to the pool. Anything not compiled into a verification (options that
change logits, log-probabilities, a draft's proposals) takes the same network with logits as its
output, and the rule of ``backend.sampling``.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.models.arrays import to_array
from backend.engines.models.spec import PlainLlama
from backend.engines.stepping.chunks import PassChunk, ancestors, moves
from backend.engines.stepping.engine import StepEngine, TurnJob, step_limits
from backend.engines.trt_graph.inputs import (
    LOGITS,
    Tensors,
    inputs_of,
    network_for,
    suits,
    verdicts_of,
)
from backend.sampling.distributions import Floats
from backend.sampling.verification import Verdict, VerifyRequest
from backend.sequence import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class PassShape:
    """The largest pass that is compiled: sequences, and rows of each."""

    batch: int
    queries: int


class Runtime(Protocol):
    """Compiled networks of one model on a device, with the weights.

    ``passes`` go from few queries to many; ``verifies``: the verifications are among the networks.
    """

    device: torch.device
    dtype: torch.dtype
    verifies: bool
    passes: Seq[PassShape]

    def run(self, network: str, tensors: Tensors) -> Tensors:
        """Run a network by its name; inputs, pools too, and outputs are on the device."""
        ...


class CompiledModel:
    """A compiled decoder with a KV pool of ``kv_blocks`` blocks, in the place of
    ``backend.engines.torch.decoder.Decoder``.

    After the pool lies one slot that stays zero: what a padded sequence reads in the place of
    keys.
    """

    def __init__(self, config: PlainLlama, runtime: Runtime, kv_blocks: int) -> None:
        self.taps: tuple[int, ...] = ()
        self.hidden_states: Floats | None = None
        self.config, self.device, self.dtype = config, runtime.device, runtime.dtype
        self._runtime, self._nowhere = runtime, kv_blocks * BLOCK_TOKENS
        self._longest = runtime.passes[-1].queries
        shape = (config.num_layers, self._nowhere + 1, 2 * config.num_kv_heads, config.head_dim)
        self.pool = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._pools = {f"pool_{layer}": pool for layer, pool in enumerate(self.pool)}
        self._wide = torch.float64 if self.dtype == torch.float64 else torch.float32

    @torch.inference_mode()
    def forward(self, chunks: Seq[PassChunk]) -> Floats:
        """Run the chunks, writing their KV; return the logits of the rows that want them, chunk by
        chunk: [rows, vocab].
        """
        before = [self._run_long(chunk) for chunk in chunks]
        chunks = [self._tail(chunk) for chunk in chunks]
        results: list[torch.Tensor] = [torch.empty(0)] * len(chunks)
        for group in self._passes(chunks):
            logits = self._run(LOGITS, [chunks[number] for number in group], {})["logits"]
            for row, number in enumerate(group):
                results[number] = logits[row, : chunks[number].logits]
        pairs = zip(before, results, strict=True)
        return to_array(torch.cat([part for parts, tail in pairs for part in (*parts, tail)]))

    @torch.inference_mode()
    def decide(self, chunks: Seq[PassChunk], requests: Seq[VerifyRequest]) -> list[Verdict]:
        """Run chunks whose last rows are the requests', writing their KV, and return the
        verdicts on these.
        """
        for chunk in chunks:
            self._run_long(chunk)
        chunks = [self._tail(chunk) for chunk in chunks]
        verdicts: dict[int, Verdict] = {}
        for group in self._passes(chunks):
            members = [requests[number] for number in group]
            network = network_for(members)
            inputs = inputs_of(network, members, self.config.vocab_size, self._wide)
            inputs = {name: tensor.to(self.device) for name, tensor in inputs.items()}
            outputs = self._run(network, [chunks[number] for number in group], inputs)
            verdicts |= zip(group, verdicts_of(network, members, outputs), strict=True)
        return [verdicts[number] for number in range(len(chunks))]

    @torch.inference_mode()
    def keep(self, accepted: Seq[tuple[PassChunk, Seq[int]]]) -> None:
        """Move the KV of accepted nodes to where their tokens are in the text (``Model.keep``)."""
        sources, targets = (torch.from_numpy(slots).to(self.device) for slots in moves(accepted))
        if len(sources):
            self.pool.index_copy_(1, targets, self.pool.index_select(1, sources))

    def _tail(self, chunk: PassChunk) -> PassChunk:
        """Return as much of a chunk's end as is run at once."""
        cut = max(0, len(chunk.tokens) - self._longest)
        return replace(
            chunk,
            tokens=chunk.tokens[cut:],
            start=chunk.start + cut,
            logits=min(chunk.logits, self._longest),
        )

    def _run_long(self, chunk: PassChunk) -> list[torch.Tensor]:
        """Run what comes before a chunk's tail, pass by pass; return the logits of the rows there
        that want them.
        """
        cut, results = max(0, len(chunk.tokens) - self._longest), []
        for first in range(0, cut, self._longest):
            tokens = chunk.tokens[first : min(cut, first + self._longest)]
            after = len(chunk.tokens) - first - len(tokens)
            logits = min(len(tokens), max(0, chunk.logits - after))
            outputs = self._run(
                LOGITS, [PassChunk(tokens, chunk.start + first, chunk.table, logits)], {}
            )
            results.append(outputs["logits"][0, :logits])
        return results

    def _passes(self, chunks: Seq[PassChunk]) -> Iterator[list[int]]:
        """Share the chunks out over passes: each among those of its size, so that a prefill pads no
        decoding row.
        """
        least = 0
        for shapes in self._runtime.passes:
            fitting = [
                number
                for number, chunk in enumerate(chunks)
                if least < len(chunk.tokens) <= shapes.queries
            ]
            for first in range(0, len(fitting), shapes.batch):
                yield fitting[first : first + shapes.batch]
            least = shapes.queries

    def _run(self, network: str, chunks: Seq[PassChunk], verification: Tensors) -> Tensors:
        outputs = self._runtime.run(network, self._pools | self._step(chunks) | verification)
        batch, queries = outputs["kv_0"].shape[:2]
        slots = torch.full((batch, queries), self._nowhere, device=self.device)
        for number, chunk in enumerate(chunks):
            chunk_slots = chunk.table.slots[chunk.start : chunk.start + len(chunk.tokens)]
            slots[number, : len(chunk_slots)] = torch.from_numpy(chunk_slots)
        for layer, pool in enumerate(self.pool):
            pool.index_copy_(0, slots.flatten(), outputs[f"kv_{layer}"].flatten(0, 1))
        self.pool[:, self._nowhere] = 0.0
        return outputs

    def _step(self, chunks: Seq[PassChunk]) -> Tensors:
        """Return the decoder's inputs: rows padded to the most of a chunk, keys to the longest
        context.
        """
        batch, queries = len(chunks), max(len(chunk.tokens) for chunk in chunks)
        past, rows = (
            max(1, *(chunk.start for chunk in chunks)),
            max(1, *(chunk.logits for chunk in chunks)),
        )
        ids, positions = (np.zeros((batch, queries), np.int32) for _ in range(2))
        wanted = np.zeros((batch, rows), np.int32)
        mask = np.zeros((batch, queries, past + queries), np.bool_)
        mask[:, :, past:] = np.eye(queries, dtype=np.bool_)  # a padded row sees itself
        slots = torch.full((batch, past), self._nowhere, dtype=torch.int32, device=self.device)
        for number, chunk in enumerate(chunks):
            length = len(chunk.tokens)
            ids[number, :length], positions[number, :length] = chunk.tokens, chunk.positions
            wanted[number, : chunk.logits] = number * queries + np.arange(
                length - chunk.logits, length
            )
            mask[number, :length, : chunk.start] = True
            mask[number, :length, past : past + length] = _sees(chunk)
            slots[number, : chunk.start] = torch.from_numpy(chunk.table.slots[: chunk.start])
        arrays = {"ids": ids, "positions": positions, "wanted": wanted, "mask": mask}
        return {"slots": slots} | {
            name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()
        }


def _sees(chunk: PassChunk) -> npt.NDArray[Any]:
    """Return which rows of a chunk see which [rows, rows]: those before them, of a tree their
    ancestors.
    """
    sees = np.tril(np.ones((len(chunk.tokens),) * 2, np.bool_))
    if chunk.parents:
        nodes = len(chunk.parents)
        sees[-nodes:, -nodes:] = ancestors(chunk.parents)
    return sees


class TrtGraphEngine(StepEngine):
    """The step engine over compiled networks."""

    def __init__(
        self,
        name: str,
        config: PlainLlama,
        runtime: Runtime,
        *,
        kv_blocks: int,
        max_context_tokens: int,
        max_draft_tokens: int = 8,
    ) -> None:
        with torch.inference_mode():
            model = CompiledModel(config, runtime, kv_blocks)
        limits = step_limits(config.vocab_size, kv_blocks, max_context_tokens, max_draft_tokens)
        super().__init__(name, model, limits)
        self.model: CompiledModel
        self._verifies = runtime.verifies

    def _pass(self, running: list[tuple[TurnJob, PassChunk]]) -> None:
        """Decide about chunks inside the networks where that is compiled, else from logits."""
        inside, others = list[tuple[TurnJob, PassChunk]](), list[tuple[TurnJob, PassChunk]]()
        for pair in running:
            (inside if self._verifies and _suits(*pair) else others).append(pair)
        if inside:
            jobs, chunks = zip(*inside, strict=True)
            verdicts = self.model.decide(chunks, [job.request for job in jobs])
            self._note_ran(inside)
            for job, verdict in zip(jobs, verdicts, strict=True):
                self._apply_verdict(job, verdict)
        if others:
            super()._pass(others)


def _suits(job: TurnJob, chunk: PassChunk) -> bool:
    """Whether nothing is wanted of a chunk but a verdict that is compiled in."""
    turn = job.turn
    more = turn.nodes or job.rows_scored or job.context_rows or turn.sequence.generation_logits
    return not more and chunk.logits == job.request.rows and suits(job.request)
