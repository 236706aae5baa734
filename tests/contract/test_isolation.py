"""A pass of the torch engine that breaks off half-way leaves nothing behind that could change a text."""

import pytest

from backend import drafting
from backend.engines.llama import Llama
from policy import NoSpeculation, RandomChoice
from tests.contract.test_mutants import generate, module


@pytest.fixture(scope="module")
def plain():
    return generate(NoSpeculation())[0]


def break_now_and_then(monkeypatch, owner, name):
    """Make every seventh call raise after its work is done, so that KV is written and nobody knows of it."""
    whole, calls = getattr(owner, name), []

    def broken(*arguments):
        result = whole(*arguments)
        calls.append(1)
        if len(calls) % 7 == 0:
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize(("owner", "name"), [(Llama, "forward"), (module, "verify")])
def test_passes_that_raise_change_no_text(monkeypatch, plain, owner, name):
    calls = break_now_and_then(monkeypatch, owner, name)
    monkeypatch.setattr(drafting, "COOLDOWN_S", 0.0)
    tokens, accepted, _ = generate(RandomChoice())
    assert tokens == plain
    assert accepted > 0
    assert len(calls) > 30
