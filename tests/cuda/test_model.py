"""Decoder families of transformers over our pages, against the same models' plain forward."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from backend.engines.cuda.pages import PAGE, PassLayout, ancestor_words
from backend.engines.cuda.prompts import PromptPass
from tests.cuda.families import ALL_FUSED, FAMILIES, models

pytestmark = pytest.mark.slow


def rows(texts: list[tuple[list[int], int, list[int], list[int]]]) -> tuple[Any, ...]:
    """Return ids, positions and layout of rows: new tokens, committed ones, blocks, parents."""
    ids, position, words, place, first = [], [], [], [], [0]
    for tokens, start, table, parents in texts:
        chain = len(tokens) - len(parents)
        tree = [*range(-1, chain - 2), *(chain - 1 + p if p >= 0 else chain - 2 for p in parents)]
        own = ancestor_words(tree) if len(tokens) <= 63 else [0] * len(tokens)
        depth = [bin(word % (1 << 64)).count("1") - 1 for word in own]
        position += (
            [start + d for d in depth] if len(tokens) <= 63 else range(start, start + len(tokens))
        )
        words += own
        place += [table[at // PAGE] * PAGE + at % PAGE for at in range(start, start + len(tokens))]
        ids += tokens
        first.append(len(ids))
    width = max(len(text[2]) for text in texts)
    table = torch.tensor(
        [text[2] + [0] * (width - len(text[2])) for text in texts], dtype=torch.int32
    )
    firsts = torch.tensor(first, dtype=torch.int32)
    spans = [(text[1], len(text[0])) for text in texts]
    layout = PassLayout(
        table,
        torch.tensor([text[1] for text in texts], dtype=torch.int32),
        firsts,
        torch.tensor(words),
        torch.tensor(place, dtype=torch.int32),
        max(b - a for a, b in itertools.pairwise(first)),
        PromptPass(spans, table, firsts) if max(new for _, new in spans) > 63 else None,
    )
    return torch.tensor(ids), torch.tensor(position), layout, first


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, fused: bool) -> None:
    plain_model, paged = models(family)
    if fused:
        paged.fuse()
        if family in ALL_FUSED:
            assert paged.refused == []
            assert paged.fused["attentions"] == paged.fused["units"] == 4
        assert paged.fused["norms"] >= 9
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 199, (n,), generator=generator).tolist() for n in (40, 95)]
    tables = [[3, 9, 4, 20], [11, 5, 30, 2]]

    def check(logits: torch.Tensor, tokens: list[int]) -> None:
        with torch.inference_mode():
            wanted = plain_model(torch.tensor([tokens]), use_cache=False).logits[0, -len(logits) :]
        assert float((logits - wanted).norm() / wanted.norm()) < 2e-5

    def run(*batch: tuple[list[int], int, list[int], list[int]]) -> tuple[torch.Tensor, list[int]]:
        ids, position, layout, first = rows(list(batch))
        with torch.inference_mode():
            return paged.run(ids, position, layout), first

    # two prompts at once, one of them longer than an ancestor word
    logits, first = run((texts[0][:-1], 0, tables[0], []), (texts[1][:70], 0, tables[1], []))
    check(logits[: first[1]], texts[0][:-1])
    check(logits[first[1] :], texts[1][:70])
    # a decoding row and a chunk of a prompt
    logits, first = run((texts[0][-1:], 39, tables[0], []), (texts[1][70:-1], 70, tables[1], []))
    check(logits[:1], texts[0])
    check(logits[1:], texts[1][:-1])
    # a tree of five nodes and a chain of three
    nodes, tree = [5, 6, 8, 9, 10], [-1, -1, 0, 0, 1]
    logits, first = run(
        ([7, *nodes], 40, tables[0], tree), ([texts[1][-1], 5, 6, 8], 94, tables[1], [-1, 0, 1])
    )
    check(logits[first[1] :], [*texts[1], 5, 6, 8])
    for node, path in enumerate(([0], [1], [0, 2], [0, 3], [1, 4])):
        check(logits[1 + node][None], [*texts[0], 7, *(nodes[n] for n in path)])


def test_a_leaf_whose_kernel_is_too_large_for_the_gpu_stays_as_it_is() -> None:
    class OutOfResources(Exception):  # Triton's is neither a RuntimeError nor a ValueError
        pass

    def too_large(*_: object) -> None:
        raise OutOfResources

    plain_model, paged = models("llama")
    paged.kernels = replace(paged.kernels, apply_gate=too_large)
    paged.fuse()
    assert paged.fused["units"] == 0
    assert paged.fused["attentions"] == 4
    ids, position, layout, _ = rows([([5, 6, 7], 0, [1], [])])
    with torch.inference_mode():
        wanted = plain_model(ids[None], use_cache=False).logits[0]
        found = paged.run(ids, position, layout)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-5
