"""A head's proposal on the device is the host's, and the texts it is verified in are the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from backend.engines.cuda.forward import DecodePass, Size
from backend.engines.cuda.heads import DeviceHead, HeadProposal
from backend.engines.cuda.kernels import plain_kernels
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.step import Slots, VerifyStep
from backend.engines.head.engine import HeadEngine
from backend.engines.head.folder import HeadConfig
from backend.engines.head.network import HeadNetwork, TorchHead
from backend.engines.port import HiddenStates, Turn
from backend.engines.spine import CANDIDATES
from backend.request import SamplingParams
from backend.sampling.randomness import seed_word
from backend.sequence import Sequence
from tests.cuda.families import models

pytestmark = pytest.mark.slow
ROWS, DEPTH, TAPS, VOCAB, HIDDEN, OWN = 4, 3, (1, 3), 199, 64, 16
OPTIONS = [
    SamplingParams(seed=7),
    SamplingParams(seed=8, temperature=1.2),
    SamplingParams(seed=9, temperature=0.9, top_k=20, top_p=0.95),
    SamplingParams(seed=10, temperature=1.5, min_p=0.01),
]


@dataclass
class Case:
    """A head over a tiny target, on the device and on the host."""

    proposal: HeadProposal
    step: VerifyStep
    host: HeadEngine


def case() -> Case:
    torch.manual_seed(1)
    _, model = models("llama")
    lm = model.lm
    model = PagedModel(lm, plain_kernels(), blocks=64, row_pages=4, taps=TAPS)
    network = HeadNetwork(HeadConfig(VOCAB, HIDDEN, 32, TAPS, rows=60))
    network.norm.data.fill_(3.0)
    network.requires_grad_(requires_grad=False)
    token_ids = torch.randperm(VOCAB)[:60].sort().values
    embedding, head = (
        module.weight.detach() for module in (lm.get_input_embeddings(), lm.get_output_embeddings())
    )
    slots = Slots(ROWS + 1, 4, model.device, states=(len(TAPS), HIDDEN), text_rows=OWN)
    for row, options in enumerate(OPTIONS):
        slots.table[row] = torch.arange(4) + 4 * row
        seed = seed_word(options.seed)
        slots.options["seed"][row] = seed - (seed >> 63 << 64)
        slots.options["temperature"][row] = options.temperature
        slots.options["top_k"][row], slots.options["top_p"][row] = options.top_k, options.top_p
        slots.options["min_p"][row] = options.min_p
    target = DecodePass(model, Size(ROWS, ROWS + 14), DEPTH * CANDIDATES + 1)
    step = VerifyStep(target, slots, DEPTH * CANDIDATES, most=DEPTH + 1)
    on_device = DeviceHead("head", network, token_ids, embedding, head)
    proposal = HeadProposal(on_device, step, DEPTH, bounded=True)
    ids, *tables = (tensor.numpy() for tensor in (token_ids, embedding, head))
    on_host = TorchHead(network, tables[1][ids])
    config = network.config
    host = HeadEngine("head", config, on_host, ids, *tables, max_draft_tokens=DEPTH)
    return Case(proposal, step, host)


def host_nodes(
    engine: HeadEngine, row: int, tokens: list[int], states: torch.Tensor
) -> list[tuple[tuple[int, ...], float]]:
    """Return the paths that the host's head proposes after a text, with their confidences."""
    sequence = Sequence(row, tokens, 1, OPTIONS[row])
    engine.absorb([(sequence, HiddenStates(len(tokens) - 2, TAPS, states[None].numpy()))])
    nodes = DEPTH * CANDIDATES
    engine.submit([Turn(sequence, len(tokens), run=DEPTH, nodes=nodes)])
    (completion,) = engine.poll(0.0)
    assert completion.proposal is not None, completion.error
    found = completion.proposal
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return sorted(zip(paths, found.confidence, strict=True))


def device_nodes(step: VerifyStep, row: int) -> list[tuple[tuple[int, ...], float]]:
    """Return the same of a row of the step's columns."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(step.token[row].tolist(), step.parent[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    chance = step.chance[row].tolist()
    return sorted((path, p) for path, p in zip(paths, chance, strict=True) if p > 0.0)


def test_a_heads_tokens_are_where_the_targets_weights_are() -> None:
    network = HeadNetwork(HeadConfig(VOCAB, HIDDEN, 32, TAPS, rows=60))
    weights = torch.empty(VOCAB, HIDDEN, device="meta")
    head = DeviceHead("head", network, torch.arange(60), weights, weights)
    assert (head.token_ids.device, head.static.shape) == (weights.device, (60, HIDDEN))


@torch.inference_mode()
def test_proposals_are_the_hosts_and_texts_those_of_plain_decoding() -> None:
    decoded = plain_texts()
    with_head = case()
    accepted = 0
    texts = [[row + 6] for row in range(ROWS)]
    start(with_head.step, texts)
    with_head.step.run(
        bounded=True
    )  # nothing is proposed yet: the states of the last token are missing
    extend(texts, with_head.step)
    while min(map(len, texts)) < 20:
        slots = with_head.step.slots
        static = set(with_head.proposal._head.token_ids.tolist())
        for row, text in enumerate(texts):
            own = list(dict.fromkeys(token for token in text if token not in static))
            slots.text_tokens[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
        states = slots.states.clone()
        with_head.proposal.run()
        for row, text in enumerate(texts):
            mine = device_nodes(with_head.step, row)
            theirs = host_nodes(with_head.host, row, text, states[row])
            assert [path for path, _ in mine] == [path for path, _ in theirs]
            assert [p for _, p in mine] == pytest.approx([p for _, p in theirs], rel=1e-4)
        with_head.step.run(bounded=True)
        extend(texts, with_head.step)
        accepted += int(with_head.step.count.sum()) - ROWS
    for text, plain in zip(texts, decoded, strict=True):
        assert text[:20] == plain[:20]
    assert accepted > 0


def start(step: VerifyStep, texts: list[list[int]]) -> None:
    step.chance.zero_()
    step.slots.last[:ROWS] = torch.tensor([text[-1] for text in texts])


def extend(texts: list[list[int]], step: VerifyStep) -> None:
    for row, count in enumerate(step.count.tolist()):
        texts[row] += step.emitted[row, :count].tolist()


def plain_texts() -> list[list[int]]:
    """Return the rows' texts of plain decoding."""
    plain = case().step
    texts = [[row + 6] for row in range(ROWS)]
    start(plain, texts)
    for _ in range(20):
        plain.run(bounded=True)
        extend(texts, plain)
    return texts
