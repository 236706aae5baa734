"""Steps of changing batches on the device, some of them launched before the last was collected."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from backend.engines.cuda.device import DeviceSteps
from backend.engines.cuda.forward import PagedForward
from backend.engines.cuda.heads import DeviceHead
from backend.engines.cuda.kernels import plain_kernels
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.step_columns import MOST_HEADS, DeviceRow
from backend.engines.head.folder import HeadConfig
from backend.engines.head.network import HeadNetwork
from backend.request import SamplingParams
from backend.sampling.randomness import seed_word
from tests.cuda.families import models

pytestmark = pytest.mark.slow
TAPS, VOCAB, HIDDEN, TOKENS, ROOM, OWN = (1, 3), 199, 64, 40, 6, 16
OPTIONS = [
    SamplingParams(seed=7),
    SamplingParams(seed=8, temperature=1.2),
    SamplingParams(seed=9, temperature=0.9, top_k=20, top_p=0.95),
    SamplingParams(seed=10, temperature=0.7, min_p=0.01),
    SamplingParams(seed=11),
]


def steps() -> DeviceSteps:
    torch.manual_seed(1)
    lm = models("llama")[1].lm
    model = PagedModel(lm, plain_kernels(), blocks=64, row_pages=4, taps=TAPS)
    network = HeadNetwork(HeadConfig(VOCAB, HIDDEN, 32, TAPS, rows=60))
    network.norm.data.fill_(3.0)
    network.requires_grad_(requires_grad=False)
    embedding, head = (
        module.weight.detach() for module in (lm.get_input_embeddings(), lm.get_output_embeddings())
    )
    token_ids = torch.randperm(VOCAB)[:60].sort().values
    heads = {"head": DeviceHead("head", network, token_ids, embedding, head)}
    forward, states = PagedForward(model, most=9), (len(TAPS), HIDDEN)
    made = DeviceSteps(forward, heads, slots=8, most=9, text_rows=OWN, states=states)
    for slot in range(len(OPTIONS)):
        made.place_blocks(slot, 0, [4 * slot + at for at in range(4)])
    return made


@pytest.fixture(autouse=True)
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the device of each ``DeviceSteps`` current, as the engine does."""
    with ExitStack() as stack:
        made = DeviceSteps.__init__

        def enter(self: DeviceSteps, *args: object, **options: object) -> None:
            made(self, *args, **options)  # type: ignore[arg-type]
            stack.enter_context(self.stream.current())

        monkeypatch.setattr(DeviceSteps, "__init__", enter)
        yield


def row_of(number: int, text: list[int], *, follows: bool = False) -> DeviceRow:
    """Return a plain row of text ``number``, which has slot 4 - ``number``."""
    seed = seed_word(OPTIONS[number].seed)
    signed = seed - (seed >> 63 << 64)
    slot = len(OPTIONS) - 1 - number
    return DeviceRow(slot, len(text) - 1, text[-1], follows, OPTIONS[number], signed)


def plain_texts() -> list[list[int]]:
    run, texts = steps(), [[number + 6] for number in range(len(OPTIONS))]
    for _ in range(TOKENS):
        rows = [row_of(number, text) for number, text in enumerate(texts)]
        results, _seconds = run.collect(run.launch(rows))
        for text, result in zip(texts, results, strict=True):
            assert len(result.emitted) == 1
            text.extend(result.emitted)
    return texts


@pytest.mark.parametrize("seed", range(3))
@torch.inference_mode()
def test_texts_of_changing_batches_are_those_of_plain_decoding(seed: int) -> None:
    wanted, chance = plain_texts(), random.Random(seed)
    run, texts = steps(), [[number + 6] for number in range(len(OPTIONS))]
    in_flight: list[tuple[list[int], object]] = []
    accepted = proposed = 0

    def collect() -> None:
        nonlocal accepted, proposed
        numbers, launched = in_flight.pop(0)
        results, seconds = run.collect(launched)  # type: ignore[arg-type]
        assert set(seconds) == {"draft", "verify"}
        for number, result in zip(numbers, results, strict=True):
            texts[number] += result.emitted
            accepted += len(result.emitted) - 1
            proposed += len(result.tokens)
            assert all(parent < node for node, parent in enumerate(result.parents))
            assert result.confidence == sorted(result.confidence, reverse=True)
            assert result.verified <= ROOM
            assert len(result.emitted) - 1 <= result.verified

    while min(map(len, texts)) < TOKENS or in_flight:
        alive = [number for number, text in enumerate(texts) if len(text) < TOKENS]
        numbers = chance.sample(alive, chance.randint(1, len(alive))) if alive else []
        flying = in_flight[-1][0] if in_flight else []
        rows = []
        for number in numbers:
            text = texts[number]
            row = row_of(number, text, follows=number in flying)
            kind = chance.choice(["head", "host", ""])
            if kind == "head":
                row.head, row.places = "head", chance.randint(1, 3)
                row.budget, row.room = chance.randint(1, 4), ROOM
            elif kind == "host" and not row.follows:
                right = wanted[number][len(text) : len(text) + 3]
                row.tokens = [*right, 5, 6][: chance.randint(1, 5)]
                row.parents = list(range(-1, len(row.tokens) - 1))
                row.budget = row.room = len(row.tokens)
            rows.append(row)
        if rows:
            in_flight.append((numbers, run.launch(rows)))
        if in_flight and (len(in_flight) == 2 or not rows or chance.random() < 0.5):
            collect()
    for text, plain in zip(texts, wanted, strict=True):
        assert text[: TOKENS + 1] == plain[: len(text)][: TOKENS + 1]
    assert accepted > 10
    assert proposed > 100


@torch.inference_mode()
def test_more_updates_than_a_step_has_room_for_are_written_in_their_order() -> None:
    made = steps()
    for first in (0, 100, 200):  # 16 tokens of 8 slots: 384 updates; one row has 264 of them
        for slot in range(8):
            made.place_text_tokens(slot, 0, [first + slot + at for at in range(OWN)])
    made.collect(made.launch([row_of(0, [1, 2, 3])]))
    wanted = torch.arange(8)[:, None] + torch.arange(OWN) + 200
    assert torch.equal(made.slots.text_tokens[:8], wanted)


@torch.inference_mode()
def test_steps_of_as_many_rows_and_tokens_share_a_pass() -> None:
    run = steps()
    sizes = run._forward._passes

    def launch(places: int, budget: int, *, heat: int = 0, length: int = 1) -> None:
        row = row_of(heat, [5] * length)
        row.head, row.places, row.room, row.budget = "head" * (places > 0), places, ROOM, budget
        run.collect(run.launch([row]))

    counts = []
    for places, budget in ((3, 4), (3, 5), (3, 9), (4, 9), (0, 0)):
        launch(places, budget)
        counts.append((len(sizes), len(run._proposals)))
    # more nodes, as many tokens; more tokens; another depth; nothing proposed
    assert counts == [(2, 1), (2, 1), (3, 1), (3, 2), (3, 2)]
    launch(4, 9, heat=2, length=60)  # longer, and with top-k and top-p
    assert (len(sizes), len(run._proposals)) == (3, 3)


@torch.inference_mode()
def test_a_server_that_captured_before_it_was_ready_captures_nothing_more() -> None:
    run = steps()
    run.capture(4)
    before = run.graphs
    for places, budget, heat in itertools.product((0, 1, 8), (0, 1, 5), range(len(OPTIONS))):
        row = row_of(heat, [5])
        row.head, row.places, row.room, row.budget = "head" * (places > 0), places, 8, budget
        for count in (1, 3, 4):
            rows = [row, *(row_of(n, [5]) for n in range(5) if n != heat)]
            run.collect(run.launch(rows[:count]))
    assert run.graphs == before
    assert before < 200


def test_more_heads_than_there_is_room_for_are_refused() -> None:
    run = steps()
    head = run.heads["head"]
    for number in range(MOST_HEADS):
        head.name = f"h{number}"
        if number == MOST_HEADS - 1:
            with pytest.raises(ValueError, match="at most 8 heads can propose, 'h7' is one more"):
                run.set_head(head)
        else:
            run.set_head(head)


def test_a_step_verifies_at_most_the_nodes_of_its_largest_size() -> None:
    run = steps()
    rows = [row_of(0, [5]) for _ in range(256)]
    for row in rows:
        row.budget, row.room, row.places, row.head = 8, 8, 4, "head"
    assert run._bucket(rows)[0] == (256, 1024)


def test_a_step_of_too_many_rows_names_them() -> None:
    with pytest.raises(ValueError, match="at most 256 rows, got 300"):
        steps().launch([row_of(0, [5])] * 300)
