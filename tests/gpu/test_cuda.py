"""The engine on CUDA: the exactness suite, and the stream beside. Skipped where there is no GPU."""

import threading
from contextlib import nullcontext

import pytest
import torch

from backend.engines.torch.side_stream import SideStream
from tests.contract import checks
from tests.contract.on_device import engines_on
from tests.contract.scenarios import BUSY, MIXED, in_cohorts, in_earnest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]


@pytest.mark.parametrize("scenario", [BUSY, MIXED], ids=["busy", "options"])
def test_texts_in_fp64_are_those_of_plain_decoding_on_the_host(scenario):
    with engines_on(torch.device("cuda")):
        served = checks.exact(scenario, checks.texts)
    assert served.deployment.target._model.device.type == "cuda"


@pytest.mark.parametrize("scenario", [in_cohorts(BUSY), in_earnest(BUSY), in_earnest(MIXED)])
def test_texts_of_cohorts_on_two_streams_are_those_of_plain_decoding_on_the_host(
    scenario,
):
    with engines_on(torch.device("cuda")):
        served = checks.exact(scenario, checks.texts)
    assert served.deployment.verifier._behind != nullcontext


def test_the_target_s_thread_runs_on_another_stream_and_finds_what_the_loop_queued():
    here, device = torch.cuda.current_stream(), torch.device("cuda")
    side, seen = SideStream(device), []
    made = torch.zeros(1 << 24, device=device)
    for _ in range(50):
        made += 1.0  # for longer than a thread takes to begin

    def run(under):
        with under, torch.inference_mode():
            seen.append((torch.cuda.current_stream(), float(made.amin())))

    thread = threading.Thread(target=run, args=(side.behind(),))
    thread.start()
    thread.join()
    ((stream, least),) = seen
    assert stream != here == torch.cuda.current_stream()
    assert least == 50.0
