"""The files to paste: one advice in the words of each engine and its version."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from backend.advise.goodput import LoadRange

Version = tuple[int, int]
TABLES_SINCE: Version = (0, 27)
"""vLLM before this left tables out with its newer drafters (vllm-project/vllm#51510)."""


def version_of(text: str, default: Version) -> Version:
    """Return the first two numbers of a version; the default if there are none."""
    numbers = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(numbers[1]), int(numbers[2])) if numbers else default


def vllm(table: Sequence[LoadRange], spec: Mapping[str, Any], version: Version, fixed: int) -> str:
    """Return the options of ``vllm serve``. Ranges include both ends and begin at 1; gaps and
    numbers beyond the last range keep the length before. ``fixed`` is for versions without tables.
    """
    longest = max(one.length for one in table)
    if not longest:
        return "# no --speculative-config: the advice is a plain server\n"
    other_keys = {
        name: v for name, v in spec.items() if not name.startswith("num_speculative_tokens")
    }
    note = ""
    if len(table) > 1 and version < TABLES_SINCE:
        table, longest = [LoadRange(1, table[-1].last, fixed)], fixed
        note = "# vLLM before 0.27 ignores tables with its newer drafters: the best single length\n"
    config = {**other_keys, "num_speculative_tokens": longest}
    if len(table) > 1:
        config["num_speculative_tokens_per_batch_size"] = [[*one] for one in table]
        note = (
            "# With --data-parallel-size above 1 vLLM drops the table with a warning.\n"
            "# Check that it follows the table: spindle advise verify\n"
        )
    return f"{note}--speculative-config '{json.dumps(config)}'\n"


def sglang(table: Sequence[LoadRange]) -> str:
    """Return the file of ``--speculative-adaptive-config``. A key is the least batch of a range;
    with one candidate each, its moving average has nothing to choose.
    """
    return json.dumps({str(r.first): {"candidate_steps": [r.length]} for r in table}) + "\n"


def tensorrt_llm(table: Sequence[LoadRange], version: Version) -> str:
    """Return ``speculative_config`` of model.yaml. Before 1.3 a key of the schedule is the least
    batch of its range, and that of 1 has the longest length; from 1.3 on it is the largest batch,
    with no speculation above the last one.
    """
    longest = max(one.length for one in table)
    if not longest:
        return "# no speculative_config: the advice is a plain server\n"
    note, rows = "", {r.last: r.length for r in table}
    if table[-1].length == 0:
        rows.pop(table[-1].last)
    if version < (1, 3):
        falling = [*table]
        if table[0].length != longest:
            falling[0] = table[0]._replace(length=longest)
            note = (
                f"# 1.2 needs the longest length at batch 1: {longest}, where {table[0].length} "
                "was advised\n"
            )
        rows = {r.first: r.length for r in falling}
    lines = "".join(f"    {n}: {length}\n" for n, length in rows.items())
    where = (
        "before 1.3: keys are the smallest batch"
        if version < (1, 3)
        else ("from 1.3 on: keys are the largest batch")
    )
    return (
        f"# TensorRT-LLM {where} of a range\n{note}"
        "speculative_config:\n  # your decoding_type and model\n"
        f"  max_draft_len: {longest}\n  draft_len_schedule:\n{lines}"
    )


def aiconfigurator(emitted: float, length: int) -> str:
    """Return its options for one fixed length, accepted tokens rounded down."""
    accepted = min(max(math.floor(1e3 * (emitted - 1)) / 1e3, 0.0), length)
    return f"--nextn {length} --nextn-accepted {accepted}\n"


def files(
    table: Sequence[LoadRange],
    spec: Mapping[str, Any],
    engine: str,
    version: str,
    fixed: int,
    emitted: float,
) -> dict[str, str]:
    """Return the files of an advice by name. ``version`` is that of the engine that was measured;
    of the others, the newest known formats are written. ``fixed`` is the best single length, and
    ``emitted`` what its steps bring.
    """

    def version_for(name: str, newest: Version) -> Version:
        return version_of(version, newest) if engine == name else newest

    speculates = any(one.length for one in table)
    texts = {
        "vllm.txt": vllm(table, spec, version_for("vllm", (0, 32)), fixed),
        "model.yaml": tensorrt_llm(table, version_for("tensorrt_llm", (1, 3))),
        "model-1.2.yaml": tensorrt_llm(table, (1, 2)),
    }
    if version_for("tensorrt_llm", (1, 3)) < (1, 3):
        texts["model.yaml"] = texts.pop("model-1.2.yaml")
    if speculates:
        texts["sglang.json"] = sglang(table)
        texts["aiconfigurator.txt"] = aiconfigurator(emitted, fixed)
    return texts
