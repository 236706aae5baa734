"""Random and adversarial verifications for compiled networks, and what the torch rule says of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import onnxruntime
import torch

from backend.engines.models.arrays import to_array
from backend.engines.trt_graph.inputs import DRAWN, GREEDY, inputs_of, verdicts_of
from backend.request import SamplingParams
from backend.sampling.verification import Verdict, VerifyRequest, verify
from backend.sequence import ROOT
from engines_build.trt_graph.distributions import VocabularyRows
from engines_build.trt_graph.graph import F32, F64
from engines_build.trt_graph.verification import verify as describe
from tests.contract.onnx_graph import OnnxGraph

VOCAB, NODES = 40, 6
VERIFICATIONS = (GREEDY, DRAWN)
DTYPES = {F32: torch.float32, F64: torch.float64}
TEMPERATURES, TOP_KS = (0.3, 0.8, 1.0, 2.0), (0, 0, 2, 7, 40, 99)
TOP_PS = (1.0, 1.0, 0.5, 0.9, 0.999)


def session(network: str, dtype: str, vocab: int = VOCAB) -> onnxruntime.InferenceSession:
    """The verification alone, from logits on, in ONNX Runtime."""
    graph = OnnxGraph()
    logits = graph.input("logits", dtype, "batch", "rows", vocab)
    describe(graph, logits, VocabularyRows(graph, vocab, dtype), network)
    return open_session(graph)


def open_session(graph: OnnxGraph) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        graph.model().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(
    network: onnxruntime.InferenceSession, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    names = [output.name for output in network.get_outputs()]
    found = network.run(names, {name: tensor.numpy() for name, tensor in tensors.items()})
    return dict(zip(names, map(torch.from_numpy, found), strict=True))


class Compiled:
    """A verification in ONNX Runtime, from requests and logits [requests, rows, vocab] to
    verdicts.
    """

    def __init__(self, network: str, dtype: str, vocab: int = VOCAB) -> None:
        self._network, self._dtype, self._vocab = network, DTYPES[dtype], vocab
        self._session = session(network, dtype, vocab)

    def outputs(
        self, requests: Seq[VerifyRequest], logits: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        inputs = inputs_of(self._network, requests, self._vocab, self._dtype)
        return run(self._session, {"logits": logits, **inputs})

    def verdicts(self, requests: Seq[VerifyRequest], logits: torch.Tensor) -> list[Verdict]:
        return verdicts_of(self._network, requests, self.outputs(requests, logits))


class Cases:
    """Requests with their logits: flat and sharp distributions, ties, trees and chains, every
    option of a distribution.
    """

    def __init__(self, network: str, dtype: str, seed: int, vocab: int = VOCAB) -> None:
        self._network, self._dtype, self._vocab = network, DTYPES[dtype], vocab
        self._rng = np.random.default_rng(seed)

    def batch(self, size: int) -> tuple[list[VerifyRequest], torch.Tensor]:
        """Return requests and their logits [requests, rows, vocab]; the last rows are padding."""
        requests = [self._request() for _ in range(size)]
        rows = max(request.rows for request in requests)
        return requests, torch.stack([self._logits(request, rows) for request in requests])

    def _request(self) -> VerifyRequest:
        rng = self._rng
        greedy = self._network == GREEDY or rng.random() < 0.1
        sampling = SamplingParams(
            0.0 if greedy else float(rng.choice(TEMPERATURES)),
            int(rng.choice(TOP_KS)),
            float(rng.choice(TOP_PS)),
            seed=int(rng.integers(1 << 62)),
        )
        tokens, parents = self._tree(int(rng.integers(0, NODES + 1)))
        position = int(rng.integers(1, 1000))
        return VerifyRequest(sampling, position, tokens=tokens, parents=parents)

    def _tree(self, nodes: int) -> tuple[list[int], list[int]]:
        """A chain, or nodes that continue any before them; children of a node differ."""
        rng, chain = self._rng, self._rng.random() < 0.3
        edges: list[tuple[int, int]] = []
        while len(edges) < nodes:
            last = len(edges) - 1
            parent = last if chain else int(rng.integers(ROOT, last + 1))
            edge = int(rng.integers(self._vocab)), parent
            if edge not in edges:
                edges.append(edge)
        return [token for token, _ in edges], [parent for _, parent in edges]

    def _logits(self, request: VerifyRequest, rows: int) -> torch.Tensor:
        """Logits: some have ties, and some make the proposed tokens likely."""
        rng = self._rng
        logits = rng.normal(size=(rows, self._vocab)) * rng.choice([0.5, 3.0, 20.0])
        if rng.random() < 0.3:
            logits = np.round(logits)
        for token, parent in zip(request.tokens, request.parents, strict=True):
            if rng.random() < 0.7:
                logits[parent + 1, token] = logits[parent + 1].max() + rng.choice([0.0, 0.5, 3.0])
        return torch.from_numpy(logits).to(self._dtype)


def by_rule(requests: Seq[VerifyRequest], logits: torch.Tensor) -> list[Verdict]:
    """The rule's verdicts from logits [requests, rows, vocab]."""
    packed = [rows[: request.rows] for request, rows in zip(requests, logits, strict=True)]
    return verify(to_array(torch.cat(packed)), requests)


Disagreement = tuple[VerifyRequest, torch.Tensor, Verdict, Verdict]


def disagreements(
    network: str, dtype: str, cases: int, seed: int, vocab: int = VOCAB, batch: int = 250
) -> list[Disagreement]:
    """Return the cases whose verdict is not the rule's: request, logits, its verdict and the
    network's.
    """
    compiled, source = Compiled(network, dtype, vocab), Cases(network, dtype, seed, vocab)
    found: list[Disagreement] = []
    for _ in range(cases // batch):
        requests, logits = source.batch(batch)
        both = by_rule(requests, logits), compiled.verdicts(requests, logits)
        found += [
            case
            for case in zip(requests, logits, *both, strict=True)
            if outcome(case[2]) != outcome(case[3])
        ]
    return found


def is_tie(
    request: VerifyRequest, logits: torch.Tensor, theirs: Verdict, width: float = 1e-6
) -> bool:
    """Whether the rule says what the network said when the logits are moved by at most ``width`` of
    themselves and of 1.
    """
    rng = np.random.default_rng(0)
    for _ in range(30):
        moves = torch.from_numpy(rng.uniform(-width, width, logits.shape))
        moved = (logits.double() * (1.0 + moves) + moves.flip(-1))[: request.rows]
        if outcome(verify(moved.numpy(), [request])[0]) == outcome(theirs):
            return True
    return False


def outcome(verdict: Verdict) -> tuple[list[int], int]:
    return verdict.path, verdict.column
