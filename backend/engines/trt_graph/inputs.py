"""What a compiled verification reads beside the logits, made of requests, and the verdicts in what it returns.

Names and meanings of the tensors are those of ``engines_build.trt_graph.network_verification``, which compiles it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from backend.engines.coupling import exponentials
from backend.engines.laws import Law
from backend.engines.trees import ROOT
from backend.engines.verification import Request, Verdict
from backend.randomness import Purpose, key, uniforms

GREEDY, SAMPLED, COUPLED = "greedy", "sampled", "coupled"
ALL_TOP_P = 2.0
"""What stands for no top-p: no rounded sum reaches it."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verification:
    """A verification that is compiled: its mode, and for trees the most candidates for a place and the deepest path (0: chains).

    ``sampled`` tests candidates against uniforms, ``coupled`` compares with the winner of each row's race (plan-invariant mode); in both a
    request at temperature 0 is greedy. One for trees takes chains as well.
    """

    mode: str
    width: int = 0
    depth: int = 0

    @property
    def name(self) -> str:
        """What files and messages call it."""
        return f"{self.mode}_{'tree' if self.width else 'chain'}"

    def suits(self, request: Request) -> bool:
        """Whether it can decide about a request: options that change logits and log-probabilities are not compiled in."""
        sampling = request.sampling
        if sampling.changes_logits or sampling.reads_log_probs or mode_of(request) not in {self.mode, GREEDY}:
            return False
        if request.tree is None:
            return not self.width or request.depth <= self.depth
        places = range(ROOT, len(request.tokens))
        return request.depth <= self.depth and all(self._fits(request, place) for place in places)

    def _fits(self, request: Request, place: int) -> bool:
        """Whether there is room for a place's candidates, and at most one law that they come from."""
        assert request.tree is not None
        children = request.tree.children(place)
        laws = {(id(law[0]), law[1]) for node in children if (law := request.tree.laws[node])}
        return len(children) <= self.width and len(laws) <= 1


def mode_of(request: Request) -> str:
    """Return the mode that a request's sampling asks for."""
    return GREEDY if request.sampling.greedy else COUPLED if request.sampling.coupled else SAMPLED


class Inputs:
    """Tensors for verifications over ``vocab_size`` columns; ``dtype`` is that of the laws (float32, float64 in tests).

    ``token_ids`` are the columns' tokens where a draft has a shortlist; its device is that of the tensors, else ``device``.
    """

    def __init__(
        self, vocab_size: int, dtype: torch.dtype, device: torch.device | str = "cpu", token_ids: torch.Tensor | None = None
    ) -> None:
        self._vocab, self._dtype, self._device = vocab_size, dtype, torch.device(device)
        self._tokens = torch.arange(vocab_size, device=self._device) if token_ids is None else token_ids.long()

    def of(self, compiled: Verification, requests: Seq[Request]) -> Tensors:
        """Return the inputs for requests that it suits, by name."""
        layout = _Layout(requests, compiled)
        tensors: Tensors = {"proposal": self._put(layout.proposal)}
        if compiled.width:
            tensors["children"] = self._put(layout.children)
        else:
            tensors["lengths"] = self._put(np.array([len(request.tokens) for request in requests], np.int32))
        if compiled.mode != GREEDY:
            tensors |= self._options(requests)
        if compiled.mode == COUPLED:
            tensors["noise"] = self._noise(requests, layout)
        if compiled.mode == SAMPLED:
            tensors |= self._sampled(requests, layout)
        return tensors

    def verdicts(self, compiled: Verification, requests: Seq[Request], outputs: Mapping[str, torch.Tensor]) -> list[Verdict]:
        """Return the verdicts on requests from the outputs. This waits for the device."""
        accepted, tokens = outputs["accepted"].tolist(), outputs["tokens"].tolist()
        paths = outputs["path"].tolist() if compiled.width else [[]] * len(requests)
        found = zip(requests, accepted, tokens, paths, strict=True)
        return [Verdict(n, row[n], path=[place - 1 for place in path[:n]] if r.tree else ()) for r, n, row, path in found]

    def _options(self, requests: Seq[Request]) -> Tensors:
        params = [request.sampling for request in requests]
        return {
            "temperature": self._wide([0.0 if param.greedy else param.temperature for param in params]),
            "top_k": self._wide([min(param.top_k, self._vocab) or self._vocab for param in params]),
            "top_p": self._wide([param.top_p if param.top_p < 1.0 else ALL_TOP_P for param in params]),
        }

    def _noise(self, requests: Seq[Request], layout: _Layout) -> torch.Tensor:
        noise = torch.ones((*layout.proposal.shape, self._vocab), dtype=self._dtype, device=self._device)
        for number, request in enumerate(requests):
            if request.sampling.coupled:
                words = key(request.sampling.seed, request.position + layout.depths[number, : request.rows], Purpose.RACE).astype(np.int64)
                for row, word in enumerate(words.tolist()):
                    noise[number, row] = exponentials(word, self._tokens).to(self._dtype)
        return noise

    def _sampled(self, requests: Seq[Request], layout: _Layout) -> Tensors:
        probs = torch.zeros((*layout.proposal.shape, self._vocab), dtype=self._dtype, device=self._device)
        for number, places in enumerate(layout.laws):
            for row, (law, at) in places.items():
                columns: slice | torch.Tensor = slice(None) if law.token_ids is None else law.token_ids
                probs[number, row, columns] = law.probs[at].to(self._dtype)
        seeds = np.array([int(request.sampling.seed) & (1 << 64) - 1 for request in requests], np.uint64).view(np.int64)[:, None]
        attempts = np.array([request.attempt for request in requests])[:, None]
        positions = np.array([request.position for request in requests])[:, None] + layout.depths
        lanes = np.arange(layout.children.shape[2])
        accept = uniforms(seeds[..., None], positions[..., None], Purpose.ACCEPT, attempts[..., None], lanes)
        emit = uniforms(seeds, positions, Purpose.EMIT, attempts)
        return {"point": self._put(layout.point), "draft_probs": probs, "accept": self._uniforms(accept), "emit": self._uniforms(emit)}

    def _uniforms(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        """Return numbers in [0, 1), cut to 24 bits where float32 would round them up to 1."""
        return self._put(numbers if self._dtype == torch.float64 else (np.floor(numbers * 2.0**24) * 2.0**-24).astype(np.float32))

    def _wide(self, numbers: Seq[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=self._dtype, device=self._device)

    def _put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


class _Layout:
    """Rows of proposals side by side: tokens, candidates and depth of every row, and where its candidates' law is."""

    def __init__(self, requests: Seq[Request], compiled: Verification) -> None:
        rows, width = max(request.rows for request in requests), max(1, compiled.width)
        shape = (len(requests), rows)
        self._of_nodes = compiled.width > 0
        self.proposal = np.zeros(shape, np.int32)
        self.children = np.zeros((*shape, width), np.int32)
        self.point = np.ones((*shape, width), np.bool_)
        self.depths = np.zeros(shape, np.int64)
        self.laws: list[dict[int, tuple[Law, int]]] = [{} for _ in requests]
        for number, request in enumerate(requests):
            if request.tree is None:
                self._chain(number, request)
            else:
                self._tree(number, request)

    def _chain(self, number: int, request: Request) -> None:
        length = len(request.tokens)
        first = int(self._of_nodes)  # a chain among trees is one
        self.proposal[number, first : first + length] = request.tokens
        self.children[number, :length, 0] = np.arange(1, length + 1)
        self.depths[number, : length + 1] = np.arange(length + 1)
        if request.law is not None:
            self.point[number, :length] = False
            self.laws[number] = {row: (request.law, row) for row in range(length)}

    def _tree(self, number: int, request: Request) -> None:
        tree = request.tree
        assert tree is not None
        taken = [0] * request.rows
        for node, (token, parent, law) in enumerate(zip(tree.tokens, tree.parents, tree.laws, strict=True)):
            row, place = node + 1, parent + 1
            self.proposal[number, row] = token
            self.depths[number, row] = self.depths[number, place] + 1
            self.children[number, place, taken[place]] = row
            if law is not None:
                self.point[number, place, taken[place]] = False
                self.laws[number][place] = law[:2]
            taken[place] += 1
