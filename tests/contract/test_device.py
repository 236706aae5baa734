"""The engine on a device that is not the host's: the exactness suite on a pretended one, and what a
step makes the host wait for.
"""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from tests.contract import checks
from tests.contract.on_device import engines_on
from tests.contract.pretend_device import DEVICE, OnDevice, PretendDevice
from tests.contract.scenarios import BUSY, MIXED, serve


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
        assert isinstance(served.deployment.target.model.pools[0][0], OnDevice)
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
