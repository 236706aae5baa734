"""The compiled verification against the torch rule, through ONNX Runtime: ``python -m
bench.micro.network --out FILE``.

Of both verifications so many random cases (``tests/contract/network_cases.py``), in the float32
that TensorRT compiles and in float64. A verdict that differs is a tie where moving the logits by
1e-6 brings it about; the rest are errors, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import onnxruntime
import torch

from engines_build.trt_graph.graph import F32, F64
from tests.contract.network_cases import VERIFICATIONS, disagreements, is_tie


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--cases", type=int, default=100_000, help="of each verification, in float32"
    )
    parser.add_argument("--wide-cases", type=int, default=10_000, help="the same in float64")
    parser.add_argument("--only", choices=VERIFICATIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for network in [args.only] if args.only else VERIFICATIONS:
        for dtype, cases in ((F32, args.cases), (F64, args.wide_cases)):
            begin = time.monotonic()
            found = disagreements(network, dtype, cases, args.seed)
            ties = sum(is_tie(request, logits, theirs) for request, logits, _, theirs in found)
            seconds = round(time.monotonic() - begin, 1)
            row = {"verification": network, "dtype": dtype, "cases": cases}
            row |= {"different": len(found), "ties": ties, "seconds": seconds}
            rows.append(row)
            print(json.dumps(row), flush=True)
    record = {
        "command": "python -m bench.micro.network " + " ".join(sys.argv[1:]),
        "versions": {
            "onnxruntime": onnxruntime.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    sys.exit(any(row["different"] > row["ties"] for row in rows))


if __name__ == "__main__":
    main()
