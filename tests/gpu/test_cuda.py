"""The engine on CUDA: the exactness suite, graphs, and what a step waits for. Skipped where there
is no GPU.
"""

import threading
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from backend.engines.port import Turn
from backend.engines.stepping.chunks import Chunk, KVTable
from backend.engines.torch.engine import TorchEngine
from backend.engines.torch.padded import partial_by_products
from backend.engines.torch.side_stream import SideStream
from backend.request import SamplingParams
from backend.sequence import Proposal, Sequence
from tests.contract import checks
from tests.contract.deployment import VOCAB, tiny_config, tiny_engine
from tests.contract.on_device import engines_on
from tests.contract.scenarios import BUSY, MIXED, in_cohorts, in_earnest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU here"),
]

ATTENTIONS = ("ragged", "tiled", "padded", "graphs")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("scenario", [BUSY, MIXED], ids=["busy", "options"])
def test_texts_in_fp64_are_those_of_plain_decoding_on_the_host(attention, scenario):
    pieces = (16, 0, 32) if attention == "padded" else ()
    with engines_on(torch.device("cuda")):
        served = checks.exact(replace(scenario, attention=attention, pieces=pieces), checks.texts)
    assert served.deployment.target._model.device.type == "cuda"


@pytest.mark.parametrize("attention", ["ragged", "tiled", "graphs"])
@pytest.mark.parametrize("scenario", [in_cohorts(BUSY), in_earnest(BUSY), in_earnest(MIXED)])
def test_texts_of_cohorts_on_two_streams_are_those_of_plain_decoding_on_the_host(
    attention, scenario
):
    """Graphs are recorded by the target's thread while the drafts run, too."""
    with engines_on(torch.device("cuda")):
        served = checks.exact(replace(scenario, attention=attention), checks.texts)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_replayed_graph_gives_what_a_plain_pass_gives(dtype):
    torch.manual_seed(0)
    with engines_on(torch.device("cuda")), torch.inference_mode():
        graphs, plain = (
            tiny_engine(attention=attention, dtype=dtype)._model
            for attention in ("graphs", "ragged")
        )
        for lengths in ((5, 2, 9), (1, 1, 1), (4, 3, 8), (5, 2, 9)):
            tables = [KVTable(range(6 * n, 6 * n + 6), "cuda") for n in range(3)]
            chunks = [
                Chunk(torch.randint(0, VOCAB, (k,)).tolist(), 0, table, k)
                for k, table in zip(lengths, tables, strict=True)
            ]
            tolerance = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.5}[dtype]
            assert torch.allclose(
                graphs.forward(chunks), plain.forward(chunks), rtol=0.0, atol=tolerance
            )
    assert len(graphs._static._passes) == 2


def test_a_greedy_step_of_a_recorded_size_waits_once():
    weights = {
        key: torch.randn(shape, device="cuda") for key, shape in tiny_config().shapes().items()
    }
    engine = TorchEngine.from_weights(
        "target", tiny_config(), weights, kv_blocks=8, max_context_tokens=64, attention="graphs"
    )
    sequences = [Sequence(n, [1, 2, 3], 3, SamplingParams(), {"target": [n]}) for n in range(3)]

    def step():
        engine.submit(
            [Turn(sequence, 3, proposal=Proposal.chain("draft", [4, 5])) for sequence in sequences]
        )
        assert not any(completion.error for completion in engine.poll(0.0))

    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchroniz" in str(warning.message)]
    assert len(waits) == 1, waits


def test_pieces_of_attention_are_merged_as_on_the_host():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 2, 4, 8, dtype=torch.float64).unbind()
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.float64)
    host = partial_by_products(queries, keys, values, mask)
    there = partial_by_products(*(tensor.cuda() for tensor in (queries, keys, values, mask)))
    assert all(torch.allclose(a, b.cpu(), atol=1e-12) for a, b in zip(host, there, strict=True))
