"""The engine on CUDA: the exactness suite. Skipped where there is no GPU."""

import pytest
import torch

from tests.contract import checks
from tests.contract.on_device import engines_on
from tests.contract.scenarios import BUSY, MIXED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]


@pytest.mark.parametrize("scenario", [BUSY, MIXED], ids=["busy", "options"])
def test_texts_in_fp64_are_those_of_plain_decoding_on_the_host(scenario):
    with engines_on(torch.device("cuda")):
        served = checks.exact(scenario, checks.texts)
    assert served.deployment.target.model.device.type == "cuda"
