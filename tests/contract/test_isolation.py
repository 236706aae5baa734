"""A pass of a step engine that breaks off half-way leaves nothing that could change a text."""

import pytest

from backend.engines.stepping import engine as stepping
from backend.engines.torch.decoder import Decoder
from backend.speculation import drafting
from tests.contract import checks
from tests.contract.scenarios import BUSY


def break_now_and_then(monkeypatch, owner, name):
    """Make every seventh call raise after its work is done, so that KV is written that the
    engine does not know of.
    """
    whole, calls = getattr(owner, name), []

    def broken(*arguments):
        result = whole(*arguments)
        calls.append(1)
        if len(calls) % 7 == 0:
            raise RuntimeError("out of memory")
        return result

    monkeypatch.setattr(owner, name, broken)
    return calls


@pytest.mark.parametrize(("owner", "name"), [(Decoder, "forward"), (stepping, "verify")])
def test_passes_that_raise_change_no_text(monkeypatch, owner, name):
    calls = break_now_and_then(monkeypatch, owner, name)
    monkeypatch.setattr(drafting, "COOLDOWN_S", 0.0)
    checks.exact(BUSY, checks.texts, checks.kv_is_fresh)
    assert len(calls) > 30
