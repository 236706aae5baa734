"""Random and adversarial verifications for compiled networks, and what the torch rule says of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnxruntime
import torch

from backend.engines import verification
from backend.engines.laws import Law
from backend.engines.trees import Tree
from backend.engines.trt_graph.inputs import COUPLED, GREEDY, SAMPLED, Inputs, Verification
from backend.engines.verification import Request, Verdict, verify
from backend.ports import Proposal
from backend.request import SamplingParams
from engines_build.trt_graph.network_graph import F32, F64
from engines_build.trt_graph.network_laws import Vocabulary
from engines_build.trt_graph.network_onnx import OnnxGraph
from engines_build.trt_graph.network_verification import verify as describe

VOCAB, LENGTH, WIDTH = 40, 5, 3
KINDS = [Verification(mode, *shape) for mode in (GREEDY, SAMPLED, COUPLED) for shape in ((0, 0), (WIDTH, LENGTH))]
DTYPES = {F32: torch.float32, F64: torch.float64}
TEMPERATURES, TOP_KS, TOP_PS = (0.3, 0.8, 1.0, 2.0), (0, 0, 2, 7, 40, 99), (1.0, 1.0, 0.5, 0.9, 0.999)


def session(kind: Verification, dtype: str, vocab: int = VOCAB) -> onnxruntime.InferenceSession:
    """The verification alone, from logits on, in ONNX Runtime."""
    graph = OnnxGraph()
    describe(graph, graph.input("logits", dtype, "batch", "rows", vocab), Vocabulary(graph, vocab, dtype), kind)
    return open_session(graph)


def open_session(graph: OnnxGraph) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graph.model().SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(network: onnxruntime.InferenceSession, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [output.name for output in network.get_outputs()]
    found = network.run(names, {name: tensor.numpy() for name, tensor in tensors.items()})
    return dict(zip(names, map(torch.from_numpy, found), strict=True))


class Cases:
    """Requests with their logits: flat and sharp laws, ties, drafts that are close, far or point masses, every option of a law."""

    def __init__(self, kind: Verification, dtype: str, seed: int, vocab: int = VOCAB) -> None:
        self._kind, self._dtype, self._vocab = kind, DTYPES[dtype], vocab
        self._rng = np.random.default_rng(seed)
        self._next_seed = seed * 1_000_003

    def batch(self, size: int) -> tuple[list[Request], torch.Tensor]:
        """Return requests and their logits [requests, rows, vocab]."""
        requests = [self._request() for _ in range(size)]
        rows = max(request.rows for request in requests)
        return requests, torch.stack([self._logits(request, rows) for request in requests])

    def _request(self) -> Request:
        rng, self._next_seed = self._rng, self._next_seed + 1
        greedy = self._kind.mode == GREEDY or rng.random() < 0.1
        sampling = SamplingParams(
            0.0 if greedy else float(rng.choice(TEMPERATURES)),
            int(rng.choice(TOP_KS)),
            float(rng.choice(TOP_PS)),
            seed=self._next_seed,
            coupled=self._kind.mode == COUPLED,
        )
        proposal = self._proposal(int(rng.integers(0, LENGTH + 1)))
        request = Request(sampling, int(rng.integers(1, 1000)), int(rng.integers(0, 50)), proposal.tokens, prompt_tokens=1)
        drawn = self._kind.mode == SAMPLED and not greedy
        if self._kind.width:
            tree = Tree.of(proposal, drawn=drawn)
            return Request(sampling, request.position, request.attempt, tree.tokens, tree=tree)
        return request if not drawn else Request(sampling, request.position, request.attempt, proposal.tokens, proposal.probs)

    def _proposal(self, length: int) -> Proposal:
        rng = self._rng
        columns = self._vocab if rng.random() < 0.7 else self._vocab // 2
        ids = None if columns == self._vocab else torch.from_numpy(rng.permutation(self._vocab)[:columns].copy())
        rows = rng.dirichlet([rng.choice([0.05, 1.0])] * columns, size=length) * (rng.random((length, columns)) > 0.2)
        rows = np.maximum(rows, 1e-3 * (np.arange(columns) == 0)) if length else rows.reshape(0, columns)
        law = None if rng.random() < 0.3 else Law(torch.from_numpy(rows).to(self._dtype), ids)
        widths = rng.integers(1, WIDTH + 1, length) if self._kind.width else np.ones(length, int)
        drawn = [rng.choice(columns, size=width, p=row / row.sum()) for row, width in zip(rows, widths, strict=True)]
        tokens = [[int(column) if ids is None else int(ids[column]) for column in place] for place in drawn]
        siblings = [place[1:] for place in tokens] if self._kind.width else ()
        return Proposal("draft", [place[0] for place in tokens], law, siblings)

    def _logits(self, request: Request, rows: int) -> torch.Tensor:
        """Logits of which some have ties, and some make the proposed tokens likely."""
        rng = self._rng
        logits = rng.normal(size=(rows, self._vocab)) * rng.choice([0.5, 3.0, 20.0])
        if rng.random() < 0.3:
            logits = np.round(logits)
        parents = request.tree.parents if request.tree else range(-1, len(request.tokens) - 1)
        for token, parent in zip(request.tokens, parents, strict=True):
            if rng.random() < 0.7:
                logits[parent + 1, token] = logits[parent + 1].max() + rng.choice([0.0, 0.5, 3.0])
        return torch.from_numpy(logits).to(self._dtype)


def disagreements(
    kind: Verification, dtype: str, cases: int, seed: int, batch: int = 250
) -> list[tuple[Request, torch.Tensor, Verdict, Verdict]]:
    """Return the cases whose verdict is not the torch rule's: request, logits, the rule's verdict and the network's."""
    network, inputs, found = session(kind, dtype), Inputs(VOCAB, DTYPES[dtype]), []
    source = Cases(kind, dtype, seed)
    for _ in range(cases // batch):
        requests, logits = source.batch(batch)
        outputs = run(network, {"logits": logits, **inputs.of(kind, requests)})
        packed = torch.cat([logits[number, : request.rows] for number, request in enumerate(requests)])
        pairs = zip(requests, logits, verify(packed, requests), inputs.verdicts(kind, requests, outputs), strict=True)
        found += [pair for pair in pairs if outcome(pair[2]) != outcome(pair[3])]
    return found


def is_tie(request: Request, logits: torch.Tensor, theirs: Verdict, width: float = 1e-6) -> bool:
    """Whether the rule says what the network said when all its uniforms are moved by at most ``width``."""
    exact = verification.uniforms
    try:
        for shift in np.linspace(-width, width, 21):
            verification.uniforms = lambda *key, shift=shift: np.clip(exact(*key) + shift, 0.0, 1.0 - 2.0**-53)
            (verdict,) = verify(logits[: request.rows], [request])
            if outcome(verdict) == outcome(theirs):
                return True
    finally:
        verification.uniforms = exact
    return False


def outcome(verdict: Verdict) -> tuple[int, int, list[int]]:
    return verdict.accepted, verdict.column, list(verdict.path)
