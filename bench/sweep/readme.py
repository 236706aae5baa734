"""The measured tables of README and docs/benchmarks.md: ``python -m bench.sweep.readme`` writes
them from docs/results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is there is replaced.
A test holds the pages against the records.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from backend.triton_adapter.paths import PROJECT_ROOT
from bench import records
from bench.records import RESULTS
from bench.sweep.arms import ADAPTING, NONE, SPINDLE
from bench.sweep.figures import BEST_FIXED, EVERY, interval, is_closed, of_spindle

PAGES = (PROJECT_ROOT / "README.md", PROJECT_ROOT / "docs" / "benchmarks.md")
PLACE = re.compile(r"(<!-- table: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
RECORDS = ("sweep-avx2", "sampled-avx2")
"""Records of SmolLM2 through tritonserver in closed loops; those alike count together."""
WORKLOADS = "workloads-avx2"
"""The record of each workload by itself."""
POLICIES = "sweep-cpu-avx2"
"""The sweep with all policies."""
STACKS = {
    "transformers-plain": "transformers",
    "vllm-plain": "vLLM",
    "openvino-plain": "OpenVINO GenAI",
    "llamacpp-plain": "llama.cpp",
}
"""The other stacks, each without speculation."""
FAMILIES = {"smollm2": "SmolLM2-135M", "tiny": "test model of 4 M"}
OVER = {
    NONE: "plain decoding",
    BEST_FIXED: "the best fixed choice",
    "without-suffix": "itself with the head only",
    "without-head": "itself with `suffix` only",
}

Pairs = tuple[list[float], list[float]]
Kind = tuple[str, float, int, str]
"""Processor, temperature, tokens a request, and what Spindle is compared with."""
ON_README = (
    ("AVX2", 0.0, 48, NONE),
    ("AVX2", 0.0, 48, BEST_FIXED),
    ("AVX2", 0.0, 48, "without-suffix"),
    ("AVX2", 0.0, 48, "without-head"),
    ("AVX2", 0.8, 48, NONE),
)


def written(page: str) -> str:
    """Return a page with its tables anew. Raises KeyError for a name that no table has."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], page)


def _record(name: str) -> dict[str, Any]:
    return records.read(RESULTS / f"{name}.json")


def _processor(record: dict[str, Any]) -> str:
    """Return a record's processor by its instructions: a name alone ("AMD EPYC") may be several."""
    return re.sub(r".*\((.*)\)", r"\1", record["machine"]["processor"])


def _table(*rows: list[str]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body, ""])


def _interval(ends: list[float] | tuple[float, float] | None) -> str:
    return "one block" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


def measured() -> dict[Kind, dict[str, Pairs]]:
    """Return the speeds of Spindle and of what it is compared with, by kind and load."""
    found: dict[Kind, dict[str, Pairs]] = {}
    for record in map(_record, RECORDS):
        settings = record["settings"]
        for (load, over), (ours, theirs) in of_spindle(record["runs"]).items():
            if over in OVER and is_closed(load):
                kind = (_processor(record), settings["temperature"], settings["max_tokens"], over)
                before = found.setdefault(kind, {}).get(load, ([], []))
                found[kind][load] = (before[0] + ours, before[1] + theirs)
    return found


def _speeds(kinds: list[Kind], *, counts: bool) -> str:
    """Return a row a kind, a column a load; ``counts``: also how many blocks it is of."""
    every = measured()
    loads = list(dict.fromkeys(load for kind in kinds for load in every[kind]))
    rows = []
    for kind in kinds:
        processor, temperature, tokens, over = kind
        sampled = f"temperature {temperature:g}" if temperature else "greedy"
        name = f"{OVER[over]}, {processor}, {sampled}{f', {tokens} tokens' if counts else ''}"
        rows.append([name, *(_cell(every[kind].get(load), counts=counts) for load in loads)])
    levels = (f"{load.removeprefix('closed-')} in flight" for load in loads)
    return _table(["Spindle's tokens/s over", *levels], *rows)


def _cell(pair: Pairs | None, *, counts: bool) -> str:
    if pair is None:
        return ""
    return _told(interval(*pair), counts=counts)


def _told(row: dict[str, Any], *, counts: bool = False) -> str:
    """Return a ratio with its interval; ``counts``: also how many blocks it is of."""
    count = f"; {row['blocks']}" if counts else ""
    return f"{row['ratio']:.2f} ({_interval(row['interval_95'])}{count})"


def headline() -> str:
    """Return README's rows."""
    return _speeds([*ON_README], counts=False)


def speed() -> str:
    """Return Spindle over all of ``OVER``, all that was measured."""
    order = [*OVER]
    kinds = sorted(measured(), key=lambda kind: (*kind[:3], order.index(kind[3])))
    return _speeds(kinds, counts=True)


def by_workload() -> str:
    """Return Spindle over plain decoding, one in flight, a column a workload."""
    rows = [
        row
        for row in _record(WORKLOADS)["ratios"]
        if (row["policy"], row["over"]) == (SPINDLE, NONE) and row["workload"] != EVERY
    ]
    cells = (_told(row, counts=True) for row in rows)
    names = (row["workload"] for row in rows)
    return _table(["Spindle's tokens/s over", *names], ["plain decoding", *cells])


def policies() -> str:
    """Return Spindle against the other policies, all loads of a sweep together."""
    record = _record(POLICIES)
    own = {row["over"]: row for row in record["overall"]}
    others = (BEST_FIXED, *ADAPTING)
    cells = (_told(own[name]) for name in others)
    names = {
        "schedule": "table by batch size",
        "ema": "acceptance EMA",
        "smartspec": "SmartSpec",
        "spin": "SPIN's selection",
    }
    return _table(
        ["Spindle's speed over", BEST_FIXED, *(names.get(name, name) for name in ADAPTING)],
        [_processor(record), *cells],
    )


def stacks() -> str:
    """Return Spindle over the other stacks, each without speculation, by model and load."""
    head = ["Spindle's tokens/s over", "in flight", *STACKS.values()]
    rows = []
    for record in map(_record, ("peers-smollm2-avx2", "peers", "peers-avx2")):
        for family in record["families"]:
            over = {(row["arm"], row["in_flight"]): row["spindle_over"] for row in family["rows"]}
            for level in sorted({level for _, level in over}):
                found = (over.get((arm, level)) for arm in STACKS)
                cells = (
                    ""
                    if each is None
                    else f"{each['median']:.2f} ({_interval(each['interval_95'])})"
                    for each in found
                )
                rows.append(
                    [f"{FAMILIES[family['family']]}, {_processor(record)}", str(level), *cells]
                )
    return _table(
        head, *sorted(rows, key=lambda row: (not row[0].startswith("SmolLM2"), row[0], int(row[1])))
    )


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "speed": speed,
    "workloads": by_workload,
    "policies": policies,
    "stacks": stacks,
}


def main() -> None:
    """Write the pages' tables."""
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
