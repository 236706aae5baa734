"""Verification steps on the device: the text is that of plain decoding, for any proposal."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from backend.engines.cuda import plain, trees
from backend.engines.cuda.forward import DecodePass, Size
from backend.engines.cuda.model import PagedModel
from backend.engines.cuda.pages import ancestor_words
from backend.engines.cuda.plain import mix
from backend.engines.cuda.step import Slots, VerifyStep
from backend.sampling.randomness import seed_word, word
from tests.cuda.families import models

pytestmark = [
    pytest.mark.slow,
    # Triton's interpreter, by itself
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:triton.runtime.interpreter"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, TOKENS = 3, 24
CHAIN = [-1, 0, 1, 2]
WIDE = [-1, -1, -1, 0, 0, 1, 1, 3, 5, 5, 8]


def prepared(model: PagedModel, temperature: float) -> Slots:
    """Return slots with a text of one token each, in shuffled blocks of their own."""
    slots = Slots(ROWS + 1, model.row_pages, model.device)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(2)).int()
    slots.table[:, :4] = order[: 4 * (ROWS + 1)].view(ROWS + 1, 4)
    slots.last.copy_(torch.arange(ROWS + 1) + 5)
    seeds = [seed_word(seed) for seed in range(ROWS + 1)]
    slots.options["seed"].copy_(torch.tensor([seed - (seed >> 63 << 64) for seed in seeds]))
    slots.options["temperature"].fill_(temperature)
    slots.options["top_k"].copy_(torch.tensor([0, 0, 5, 0]))
    slots.options["top_p"].copy_(torch.tensor([1.0, 1.0, 0.9, 0.7]))
    return slots


Proposer = Callable[[VerifyStep, list[list[int]]], None]


def texts(
    slots: Slots, step: VerifyStep, propose: Proposer | None = None, *, bounded: bool
) -> tuple[torch.Tensor, int]:
    """Return the texts of ``TOKENS`` tokens and the steps taken."""
    step.slot.copy_(torch.arange(ROWS) + 1)
    found: list[list[int]] = [[] for _ in range(ROWS)]
    steps = 0
    while min(map(len, found)) < TOKENS:
        if propose is not None:
            propose(step, found)
        step.run(bounded=bounded)
        steps += 1
        for row, count in enumerate(step.count.tolist()):
            found[row] += step.emitted[row, :count].tolist()
            assert int(slots.length[row + 1]) == len(found[row])
            assert int(slots.last[row + 1]) == found[row][-1]
    return torch.tensor([text[:TOKENS] for text in found]), steps


def verified(
    temperature: float, columns: int, tokens: int, propose: Proposer | None = None
) -> tuple[torch.Tensor, int]:
    """Return ``texts`` of a fresh tiny model, by steps of one bucket."""
    _, model = models("llama")
    model.fuse()
    slots = prepared(model, temperature)
    target = DecodePass(model, Size(ROWS, tokens), columns + 1)
    step = VerifyStep(target, slots, columns, most=6)
    with model.stream.current():
        return texts(slots, step, propose, bounded=temperature > 0.0)


def chains(guess: torch.Tensor) -> Proposer:
    """Return what proposes the tokens ``guess`` [rows, tokens] at their places."""

    def propose(step: VerifyStep, found: list[list[int]]) -> None:
        step.chance.zero_()
        for row, text in enumerate(found):
            own = guess[row, len(text) : len(text) + step.token.shape[1]]
            step.token[row, : len(own)] = own
            step.chance[row, : len(own)] = 1.0

    return propose


def trees_with(text: torch.Tensor, seed: int) -> Proposer:
    """Return what proposes trees in which some paths are the text's, at random columns."""
    generator = torch.Generator().manual_seed(seed)

    def propose(step: VerifyStep, found: list[list[int]]) -> None:
        step.parent.copy_(torch.tensor(WIDE, dtype=torch.int32).expand(ROWS, -1))
        step.token.copy_(torch.randint(0, 199, (ROWS, len(WIDE)), generator=generator))
        chance = torch.rand(ROWS, len(WIDE), generator=generator)
        for node, parent in enumerate(WIDE):
            if parent >= 0:
                chance[:, node] *= chance[:, parent]
        step.chance.copy_(chance)
        for row, written in enumerate(found):
            right, at = -1, len(written)
            while at < TOKENS:
                children = [node for node, parent in enumerate(WIDE) if parent == right]
                if not children:
                    break
                pick = int(torch.randint(0, len(children), (1,), generator=generator))
                right = children[pick]
                step.token[row, right] = text[row, at]
                at += 1

    return propose


def test_mixing_is_the_hosts() -> None:
    seed = seed_word(77)
    words = mix(torch.tensor([seed - (seed >> 63 << 64)]) ^ torch.arange(50))
    assert [w % (1 << 64) for w in words.tolist()] == [word(77, at) for at in range(50)]


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@torch.inference_mode()
def test_text_is_that_of_plain_decoding(temperature: float) -> None:
    decoded, steps = verified(temperature, 0, ROWS)
    assert steps == TOKENS
    if temperature == 0.0:
        reference, _ = models("llama")
        for row, text in enumerate(decoded):
            tokens = torch.cat((torch.tensor([row + 6]), text))
            logits = reference(tokens[None]).logits[0]
            assert torch.equal(logits.argmax(-1)[:-1], text)
    text, steps = verified(temperature, 4, 5 * ROWS, chains(decoded))
    assert torch.equal(text, decoded)
    assert steps == -(-TOKENS // 5)  # all that was proposed is accepted
    wrong = decoded.clone()
    wrong[:, 3::5] += 1
    wrong[1] = 4
    text, steps = verified(temperature, 3, 4 * ROWS, chains(wrong))
    assert torch.equal(text, decoded)
    assert steps > TOKENS // 4
    for seed, budget in ((1, 4), (2, 13), (3, len(WIDE) * ROWS)):
        text, steps = verified(temperature, len(WIDE), ROWS + budget, trees_with(decoded, seed))
        assert torch.equal(text, decoded)
        assert steps < TOKENS - 1, "no node was accepted"


def test_the_likeliest_nodes_are_chosen_with_their_parents() -> None:
    chance = torch.tensor([[0.9, 0.9, 0.2, 0.2], [0.5, 0.3, 0.0, 0.0]])
    assert trees.choose(chance, 3).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert trees.choose(chance, 5).tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert trees.choose(chance, 8).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert trees.choose(chance, 0).tolist() == [[0] * 4] * 2
    room = torch.tensor([1, 3], dtype=torch.int32)
    assert trees.choose(chance, 8, room).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]


def random_pass(seed: int) -> dict[str, torch.Tensor]:
    """Return what ``pack`` reads for rows of random trees."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 4, 13
    parent = torch.full((rows, columns), -1, dtype=torch.int32)
    for row, column in itertools.product(range(rows), range(1, columns)):
        parent[row, column] = int(torch.randint(-1, column, (1,), generator=generator))
    chance = torch.rand(rows, columns, generator=generator)
    for row, column in itertools.product(range(rows), range(columns)):
        if parent[row, column] >= 0:
            chance[row, column] *= chance[row, int(parent[row, column])]
    chance[2] = 0.0
    chosen = trees.choose(chance, 19)
    first = torch.zeros(rows + 1, dtype=torch.int32)
    first[1:] = (chosen.sum(1) + 1).cumsum(0)
    return {
        "is_verified": chosen,
        "token": torch.randint(0, 3, (rows, columns), generator=generator),
        "parent": parent,
        "length": torch.tensor([0, 30, 31, 63]),
        "last": torch.arange(rows) + 50,
        "table": torch.randperm(16, generator=generator).int().view(rows, 4),
        "first": first,
    }


def packed(given: dict[str, torch.Tensor], pack: Callable[..., None]) -> dict[str, torch.Tensor]:
    """Return the columns of a pass of 30 tokens."""
    long, short = (
        {"dtype": kind, "device": given["is_verified"].device}
        for kind in (torch.int64, torch.int32)
    )
    out = {name: torch.full((30,), 77, **long) for name in ("ids", "position", "ancestors")}
    out |= {name: torch.full((30,), 77, **short) for name in ("place", "origin", "owner")}
    pack(*given.values(), *out.values(), page=32, scratch=999)
    return out


@pytest.mark.parametrize("seed", range(4))
def test_layout_walk_and_moves_are_those_of_plain_torch(seed: int) -> None:
    given = random_pass(seed)
    wanted = packed(given, plain.pack)
    on_device = {name: column.to(DEVICE) for name, column in given.items()}
    found = packed(on_device, trees.pack)
    for name, column in wanted.items():
        assert torch.equal(found[name].cpu(), column), name
    assert wanted["ids"][int(given["first"][-1]) :].tolist() == [0] * 7
    rows, columns = given["is_verified"].shape
    drawn = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(seed)).int()
    results = []
    for kernels, device in ((plain, "cpu"), (trees, DEVICE)):
        emitted = torch.zeros(rows, 5, dtype=torch.int64, device=device)
        path = torch.zeros(rows, 5, dtype=torch.int32, device=device)
        count = torch.zeros(rows, dtype=torch.int64, device=device)
        columns_of = wanted if device == "cpu" else found
        kernels.walk(  # type: ignore[attr-defined]
            drawn.to(device),
            columns_of["ids"],
            columns_of["origin"],
            given["first"].to(device),
            emitted,
            path,
            count,
            places=columns + 1,
        )
        kv = torch.arange(2 * 16 * 2 * 2 * 32 * 4, dtype=torch.float32, device=device)
        kv = kv.view(2, 16, 2, 2, 32, 4)
        start, table = given["length"].int().to(device), given["table"].to(device)
        kernels.move(kv, table, start, path, count)  # type: ignore[attr-defined]
        is_emitted = torch.arange(5) < count.cpu()[:, None]
        results.append((emitted.cpu() * is_emitted, path.cpu() * is_emitted, count.cpu(), kv.cpu()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert results[0][2].tolist()[2] == 1


def test_a_wide_tree_has_the_hosts_words() -> None:
    columns = 63
    parent = torch.tensor([max(-1, node - 3) for node in range(columns)], dtype=torch.int32)
    given = {
        "is_verified": torch.ones(1, columns, dtype=torch.int32),
        "token": torch.arange(columns)[None],
        "parent": parent[None],
        "length": torch.tensor([5]),
        "last": torch.tensor([9]),
        "table": torch.arange(4, dtype=torch.int32)[None],
        "first": torch.tensor([0, 64], dtype=torch.int32),
    }
    columns_of = {
        name: torch.zeros(64, dtype=kind, device=DEVICE)
        for name, kind in (
            ("ids", torch.int64),
            ("position", torch.int64),
            ("ancestors", torch.int64),
            ("place", torch.int32),
            ("origin", torch.int32),
            ("owner", torch.int32),
        )
    }
    on_device = {name: column.to(DEVICE) for name, column in given.items()}
    trees.pack(*on_device.values(), *columns_of.values(), page=32, scratch=0)
    words = ancestor_words(parent.tolist())
    assert columns_of["ancestors"].tolist() == words
    depths = [bin(word % (1 << 64)).count("1") for word in words]
    assert columns_of["position"].tolist() == [4 + depth for depth in depths]
