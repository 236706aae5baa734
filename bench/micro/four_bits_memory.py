"""Memory of converting a folder of 4 bits and of starting its engine: ``python -m
bench.micro.four_bits_memory --out FILE``.

Each is a process of its own whose memory is sampled: ``private``, and ``resident`` with pages of
mapped files, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from backend.storage.weight_files import weight_files
from bench import records
from bench.micro.four_bits import SHAPES, write_folder

WORK = {
    "convert": "from backend.engines.openvino.graph_cache import bring_graph; "
    "bring_graph(folder, 'int4', say=print, head=head)",
    "start": "from backend.engines.openvino.engine import OpenvinoEngine; "
    "OpenvinoEngine.load('target', folder, dtype='int4', lm_head=head, kv_blocks=64, "
    "max_context_tokens=1024)",
}
FIELDS = {"RssAnon": "private", "VmRSS": "resident"}
EVERY_S = 0.02


def peaks(work: str, folder: Path, head: str) -> dict[str, float]:
    """Return the peaks of a process in bytes."""
    preamble = f"import pathlib, sys; folder, head = pathlib.Path({str(folder)!r}), {head!r}; "
    process = subprocess.Popen([sys.executable, "-c", preamble + WORK[work]])
    most = dict.fromkeys(FIELDS.values(), 0.0)
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name, _, value in (line.partition(":") for line in lines):
            if name in FIELDS:
                most[FIELDS[name]] = max(most[FIELDS[name]], 1024.0 * int(value.split()[0]))
        time.sleep(EVERY_S)
    if process.wait():
        raise RuntimeError(f"{work} ended with status {process.returncode}")
    return most


def main() -> None:
    """Measure and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", default="3b", choices=SHAPES)
    parser.add_argument("--head", default="int4", choices=["", "int8", "int4"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["SPINDLE_CACHE"] = f"{place}/cache"
        folder = write_folder(dict(SHAPES[args.shape]), Path(place) / args.shape)
        stored = sum(file.stat().st_size for file in weight_files(folder))
        memory = {work: peaks(work, folder, args.head) for work in WORK}
    over = {
        work: {name: round(most / stored, 2) for name, most in each.items()}
        for work, each in memory.items()
    }
    record = {
        "file_bytes": stored,
        "peak_bytes": memory,
        "peak_over_file_bytes": over,
    }
    records.write(args.out, record)
    print(json.dumps(over))


if __name__ == "__main__":
    main()
