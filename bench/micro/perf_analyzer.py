"""NVIDIA's perf_analyzer against the served models: time to the first token and between tokens at
1, 16 and 64 streams.

    python -m bench.micro.perf_analyzer

It comes with ``tritonclient``; the libraries that it wants and Debian lacks are those of
``nvidia-pytriton``. The fake engine writes a token every 20 ms, so that what is above that is the
service's. Prints each command as it is run, and writes a record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from backend import PROJECT_ROOT
from bench import records
from bench.load import percentiles_ms
from tests.server.harness import Service

STEP_S = 0.02
FAKE = {"target": {"engine": "tests.fakes.fake", "options": {"step_s": STEP_S}}}
TOKENS = 50
LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
LIMIT_S = 120


def command(folder: Path, port: int, model: str, streams: int, requests: int) -> list[str]:
    """Return the command line; its files are in ``folder``."""
    tool = Path(sysconfig.get_path("scripts")) / "perf_analyzer"
    inputs = [
        "--input-data",
        str(folder / "in.json"),
        "--profile-export-file",
        str(folder / f"profile-{streams}.json"),
    ]
    load = ["--concurrency-range", str(streams), "--request-count", str(requests)]
    return [
        str(tool),
        "-m",
        model,
        "-i",
        "grpc",
        "--streaming",
        "--async",
        "-u",
        f"localhost:{port}",
        *inputs,
        *load,
    ]


def prepare(folder: Path) -> dict[str, str]:
    """Write the input and link the libraries; return the environment."""
    prompt = {
        "text_input": ["Tell me a story."],
        "max_tokens": [TOKENS],
        "stream": [True],
        "end_id": [-1],
    }
    (folder / "in.json").write_text(json.dumps({"data": [prompt]}))
    for name, pattern in LIBRARIES.items():
        (library, *_) = (Path(sysconfig.get_path("purelib")) / "nvidia_pytriton.libs").glob(pattern)
        (folder / name).symlink_to(library)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def figures(profile: Path) -> dict[str, Any]:
    """Return the percentiles of the times to the first response and between responses."""
    (experiment,) = json.loads(profile.read_text())["experiments"]
    first, between = [], []
    for request in experiment["requests"]:
        times_s = [at_ns / 1e9 for at_ns in request["response_timestamps"]]
        first.append(times_s[0] - request["timestamp"] / 1e9)
        between += [later - earlier for earlier, later in itertools.pairwise(times_s)]
    return {
        "requests": len(first),
        "first_token_ms": percentiles_ms(first),
        "inter_token_ms": percentiles_ms(between),
    }


def main() -> int:
    """Run, print and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--model", default="tensorrt_llm_bls")
    parser.add_argument(
        "--out", type=Path, default=PROJECT_ROOT / "docs" / "results" / "perf-analyzer.json"
    )
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "serving.json").write_text(json.dumps(FAKE))
        service, environment = (
            Service(folder / "log", folder / "serving.json").wait_ready(),
            prepare(folder),
        )
        try:
            for streams in args.streams:
                line = command(folder, service.grpc, args.model, streams, max(10, 3 * streams))
                print(" ".join(line), flush=True)
                subprocess.run(line, env=environment, check=True, timeout=LIMIT_S)
                rows[str(streams)] = figures(folder / f"profile-{streams}.json")
        finally:
            service.stop()
    record = {
        "benchmark": "perf_analyzer: streamed requests of 50 tokens, a step of the fake engine "
        "every "
        "20 ms",
        "config": FAKE,
        "streams": rows,
    }
    records.write(args.out, record)
    print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
