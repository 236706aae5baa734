"""Drafts of the target's tokenizer whose vocabulary is padded otherwise, as Qwen2.5's 0.5B (151,936
rows) and 7B (152,064): the text is the target's own, the rest never proposed (vLLM #13849, #10913).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from backend.engines.cuda.engine import CudaEngine
from backend.request import SamplingParams
from tests.contract.deployment import BLOCKS, K_MAX, MAX_CONTEXT_TOKENS, Deployment, Scripted
from tests.contract.openvino_engines import openvino_engine
from tests.fakes.llamas import in_modules, llama, torch_engine

FEW, MANY = 24, 40
CONFIG = llama(MANY, 64, 96, 2, 4, 2, 16)
SIZES = {
    "kv_blocks": BLOCKS,
    "max_context_tokens": MAX_CONTEXT_TOKENS,
    "max_draft_tokens": K_MAX,
}


def weights(rows: int, padding: float) -> dict[str, torch.Tensor]:
    """Random weights of ``rows`` rows, the same below ``FEW``; those of padding are scaled."""
    generator = torch.Generator().manual_seed(3)
    made = {n: 0.3 * torch.randn(s, generator=generator) for n, s in CONFIG.shapes().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made[name][FEW:] *= padding
        made[name] = made[name][:rows].contiguous()
    return made


def on_openvino(name, config, made):
    return openvino_engine(name, config, made, verifies=name == "target", **SIZES)


def cuda_engine(name, config, made):
    return CudaEngine(name, in_modules(config, made), vocab_size=config.vocab_size, **SIZES)


ENGINES = {
    "torch": partial(torch_engine, **SIZES),
    "openvino": on_openvino,
    "cuda": cuda_engine,
}
KNOWN = [5, 6, 7, 8, 9, 10]
GREEDY = SamplingParams()
REQUESTS = {
    "greedy": (KNOWN, GREEDY),
    "sampled": (KNOWN, SamplingParams(temperature=0.9, seed=11, top_k=6)),
    "an unknown token in the prompt": ([5, 30, 7, 8], GREEDY),
    "options of unknown tokens": (
        KNOWN,
        SamplingParams(
            bias=((3, 2.0), (33, -4.0)),
            bad_words=((4, 31), (32,)),
            end_ids=(35,),
            min_tokens=40,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
        ),
    ),
    "an unknown token in the answer": (KNOWN, SamplingParams(bias=((30, 50.0),))),
}


def texts(make, target_rows: int, draft_rows: int, requests, *, drafts: bool, padding: float = 1.0):
    """Return the texts, and the accepted tokens by request, with or without the draft."""
    engine = {
        name: make(name, replace(CONFIG, vocab_size=rows), weights(rows, padding))
        for name, rows in (("target", target_rows), ("draft", draft_rows))
    }
    policy = Scripted([(0, K_MAX)] if drafts else [(-1, 0)])
    made = Deployment(engine["target"], [engine["draft"]] * drafts, policy)
    sessions = [made.submit(prompt, 40, sampling) for prompt, sampling in requests]
    made.run()
    failed = {name: n for name, n in made.counters().items() if "fallback" in name[0]}
    assert not failed
    proposed = [
        token
        for asked in made.drafting.recorded
        if asked.proposals.drafted
        for token in asked.proposals.drafted.tokens
    ]
    assert max(proposed, default=0) < min(target_rows, draft_rows)
    return [session.sequence.tokens for session in sessions], len(proposed)


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_draft_of_fewer_rows_proposes_where_it_knows_the_text(make):
    run = partial(texts, make, MANY, FEW)
    known = [request for name, request in REQUESTS.items() if "prompt" not in name]
    expected, _ = run([*REQUESTS.values()], drafts=False)
    found, proposed = run([*REQUESTS.values()], drafts=True)
    assert found == expected
    assert 30 in expected[-1][len(KNOWN) :]
    assert proposed
    _, with_known = run(known, drafts=True)
    assert with_known == proposed, "the text with an unknown token has no proposals"


@pytest.mark.parametrize("padding", [0.0, 30.0], ids=["zeros", "the likeliest"])
@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_a_draft_of_more_rows_proposes_none_that_the_target_lacks(make, padding):
    run = partial(texts, make, FEW, MANY, padding=padding)
    asked = [(KNOWN, GREEDY), (KNOWN[::-1], SamplingParams(temperature=0.9, seed=11))]
    expected, _ = run(asked, drafts=False)
    found, proposed = run(asked, drafts=True)
    assert found == expected
    assert proposed or padding > 0
