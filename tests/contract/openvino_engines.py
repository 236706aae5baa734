"""OpenVINO's engines in the place of torch's, under the same scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.torch.engine import TorchEngine
from tests.contract.scenarios import Scenario, plain_text


@contextmanager
def on_openvino(*scenarios: Scenario, invariant: bool = True) -> Iterator[None]:
    """Make every engine of weights one of OpenVINO in fp32; what is compared with has been made on
    torch, in fp64, before.
    """
    for scenario in scenarios:
        for ask in scenario.asks:
            plain_text(ask)

    def made(name, config, weights, *, attention="ragged", **sizes):
        assert attention == "ragged"
        narrow = {k: w.float() if w.is_floating_point() else w for k, w in weights.items()}
        exact = invariant and name == "target"
        return OpenvinoEngine.from_weights(name, config, narrow, invariant=exact, **sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "from_weights", made)
        yield
