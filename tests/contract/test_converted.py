"""Converted families under the loads of the contract: the same texts to the last bit."""

from dataclasses import replace

import pytest

from backend.engines.openvino import engine as engines
from backend.engines.openvino.engine import OpenvinoEngine
from tests.contract.deployment import K_MAX, MAX_CONTEXT_TOKENS, VOCAB
from tests.contract.test_openvino import DTYPES, same_texts_of
from tests.models.test_conversion import random_folder

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 2}
FAMILIES = {
    "qwen 3": SMALL,
    "gemma 3": {**SMALL, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen 3 moe": {**SMALL, "moe_intermediate_size": 64},
}


LOADS, REQUESTS = 6, 60
"""Fewer than those of a Llama, whose layout of passes is the same."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES[-1:])
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_have_the_same_bits_under_loads(family, dtype, threads, tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path / "cache"))
    promised(monkeypatch)
    random_folder(family, FAMILIES[family], tmp_path / "model")
    engine = OpenvinoEngine.load(
        "target",
        tmp_path / "model",
        kv_blocks=20,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        max_draft_tokens=K_MAX,
        dtype=dtype,
        threads=threads,
    )
    assert engine.limits.invariant
    same_texts_of(engine, range(1, LOADS), REQUESTS)


def promised(monkeypatch):
    """Make engines run row by row, also with experts, whose bits are not promised."""
    complete = engines.complete
    monkeypatch.setattr(
        engines, "complete", lambda *a, **k: replace(complete(*a, **k), has_experts=False)
    )
