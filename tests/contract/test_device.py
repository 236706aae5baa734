"""The engine on a device that is not the host's: the exactness suite on a pretended one, and what a
step makes the host wait for.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from backend.engines.torch.engine import TorchEngine
from tests.contract import checks
from tests.contract.on_device import engines_on
from tests.contract.pretend_device import DEVICE, OnDevice, PretendDevice
from tests.contract.scenarios import ALIKE, BUSY, MIXED, in_earnest, serve


@contextmanager
def pretended():
    with engines_on(DEVICE), PretendDevice() as device:
        yield device
    assert not device.broken


@pytest.mark.parametrize("scenario", [BUSY, MIXED], ids=["busy", "options"])
def test_texts_of_a_device_are_those_of_plain_decoding_and_nothing_meets_the_host_s(
    scenario,
):
    with pretended():
        served = serve(scenario)
        assert isinstance(served.deployment.target._model._pool, OnDevice)
        checks.texts(served)


def test_the_device_s_rules_are_kept():
    with PretendDevice() as device:
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        with pytest.raises(AssertionError, match="on the host"):
            there + here
        with pytest.raises(AssertionError, match="on the host"):
            torch.cat([there, here])
        assert (there + here.to(DEVICE) + here.sum()).device == DEVICE
        assert there[[0, 1]].tolist() == [1.0, 1.0]
        assert +device.counted == Counter({"upload": 1, "tolist": 1})
        assert type(there.cpu()) is torch.Tensor


@contextmanager
def pretended_beside(monkeypatch, side_stream=None):
    """The same with a stream for the target's thread."""
    with pretended() as device, monkeypatch.context() as patch:
        patch.setattr(
            TorchEngine,
            "side_stream",
            lambda engine: (side_stream or PretendDevice.side_stream)(device),
        )
        yield device


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [BUSY, MIXED, ALIKE], ids=["busy", "options", "alike"])
def test_cohorts_on_a_stream_beside_wait_for_all_that_crosses_and_texts_are_those_of_plain_decoding(
    monkeypatch, scenario
):
    with pretended_beside(monkeypatch):
        served = serve(in_earnest(scenario))
        checks.texts(served)
        assert ("spindle_fallback_total", "target_error") not in served.deployment.counters()


def test_the_rules_of_streams_are_kept():
    with PretendDevice() as device:
        behind = device.side_stream()
        early, there = behind(), torch.ones(3, device=DEVICE)
        late, missed = behind(), "on stream 'side', which has not waited for default"
        with pytest.raises(AssertionError, match=missed), early:
            there + 1
        with late:
            made = there + 1
            made += 1
        with pytest.raises(
            AssertionError, match="on stream 'default', which has not waited for side"
        ):
            made.tolist()
        with pytest.raises(
            AssertionError, match="on stream 'default', which has not waited for side"
        ):
            there[0] = 2.0  # it is being read
        assert there.tolist() == [1.0, 1.0, 1.0]
        assert len(device.broken) == 3
