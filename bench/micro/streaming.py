"""``python -m bench.micro.streaming --out FILE``: what a streamed token costs between the
loop and the client's hands.

A real tritonserver serves the fake engine at a fixed step time; the engine process stamps every
delta with the time of its emission, the client (one process, asynchronous gRPC, raw messages)
subtracts it from the arrival. All processes share the machine. Writes JSON with, per number of
streams, percentiles in milliseconds: ``overhead`` (emission to arrival, per delta), ``first_token``
(request written to first arrival, prefill step included) and ``inter_token`` (between arrivals of a
stream).
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2_grpc

from backend import machine
from tests.server.harness import Service, infer_request, text_of, write_engine_python


async def one_stream(stub, index, tokens):
    """Return (overheads, first token, inter-token gaps), all in ms, of one request."""
    call = stub.ModelStreamInfer()
    written = time.monotonic_ns()
    inputs = {"text_input": f"stream {index}", "max_tokens": tokens, "stream": True, "end_id": -1}
    await call.write(infer_request("ensemble", str(index), empty_final=False, **inputs))
    await call.done_writing()
    overheads, arrivals = [], []
    async for message in call:
        now = time.monotonic_ns()
        assert not message.error_message, message.error_message
        arrivals.append(now)
        stamps = [
            stamp for stamp in text_of(message.infer_response).split(";") if len(stamp) > 8
        ]  # the last reply is not stamped
        overheads += [(now - int(stamp)) / 1e6 for stamp in stamps]
    return overheads, (arrivals[0] - written) / 1e6, [gap / 1e6 for gap in np.diff(arrivals)]


async def measure(port, streams, tokens):
    """Run concurrent streams, each on a channel of its own as separate clients would be; return the
    percentiles.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(streams)]
    stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in channels]
    try:
        await asyncio.gather(*(one_stream(stub, 0, 4) for stub in stubs))  # connects
        results = await asyncio.gather(
            *(one_stream(stub, i, tokens) for i, stub in enumerate(stubs))
        )
    finally:
        for channel in channels:
            await channel.close()
    return {
        "streams": streams,
        "deltas": sum(len(overheads) for overheads, _, _ in results),
        "overhead_ms": percentiles([value for overheads, _, _ in results for value in overheads]),
        "first_token_ms": percentiles([first for _, first, _ in results]),
        "inter_token_ms": percentiles([gap for _, _, gaps in results for gap in gaps]),
    }


def percentiles(values):
    return {f"p{q}": round(float(np.percentile(values, q)), 3) for q in (50, 99)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=250)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "serving.json"
        config.write_text(
            json.dumps(
                {
                    "target": {"engine": "fake", "step_s": arguments.step_s},
                    "policy": {"kind": "none"},
                }
            )
        )
        python = write_engine_python(folder / "python", "bench.micro.stamping_engine")
        service = Service(folder / "log", config, SPINDLE_PYTHON=str(python)).wait_ready()
        try:
            rows = [
                asyncio.run(measure(service.grpc, streams, arguments.tokens))
                for streams in arguments.streams
            ]
        finally:
            service.stop()
    record = {
        "benchmark": "cost of a streamed token, fake engine",
        "command": ["python", "-m", "bench.micro.streaming", *sys.argv[1:]],
        "machine": machine.describe(),
        "load_average": os.getloadavg()[0],
        "step_s": arguments.step_s,
        "tokens": arguments.tokens,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
