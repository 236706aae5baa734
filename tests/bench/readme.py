"""The tables of README and of docs/figures.md, written from the records in docs/results: ``python -m tests.bench.readme``.

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``; what is there is replaced. A test holds the pages against
the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePath
from statistics import median
from typing import Any

from backend.triton_adapter.paths import PROJECT_ROOT
from tests.bench.sweep_arms import ADAPTING, AGAIN, NONE, SPINDLE, fixed_choice
from tests.bench.sweep_figures import BEST_FIXED, EVERY, interval, is_closed, of_spindle
from tests.bench.sweep_simulation import WITHIN

PAGES = (PROJECT_ROOT / "README.md", PROJECT_ROOT / "docs" / "figures.md")
RESULTS = PROJECT_ROOT / "docs" / "results"
PICTURES = PROJECT_ROOT / "docs" / "pictures"
PLACE = re.compile(r"(<!-- figures: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WHOLE = ("workloads", "workloads-sampled", "workloads-avx2", "level-avx2", "sweep-cpu-avx2", "sampled-avx2", "saturated-avx2")
"""Records of a target's workloads, greedy and sampled, on each processor."""
SWEEPS = ("sweep-cpu", "sweep-cpu-avx2", "open-avx2")
"""Load sweeps on each processor, through tritonserver; of several with the same point the first has it."""
PICTURED = ("sweep-cpu-avx2", "sweep-cpu")
"""Sweeps with pictures, the newest first."""
STACKS = {"transformers-plain": "transformers", "vllm-plain": "vLLM", "openvino-plain": "OpenVINO GenAI", "llamacpp-plain": "llama.cpp"}
"""The arms of the other stacks without speculation."""
WORKLOADS = {
    "summarise": "summarisation (news)",
    "chat": "chat (MT-Bench)",
    "qa": "questions (Wikipedia)",
    "sql": "text-to-SQL (own generator)",
    "code": "code (standard library)",
}


def written(page: str) -> str:
    """Return a page with its tables anew. Raises KeyError for a name that no table has."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], page)


def _record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return record


def _records(*names: str) -> list[dict[str, Any]]:
    """Return those that there are of some records."""
    return [_record(name) for name in names if (RESULTS / f"{name}.json").is_file()]


def _processor(record: dict[str, Any]) -> str:
    """Return a record's processor by its instructions: a name alone ("AMD EPYC") may be several."""
    return re.sub(r".*\((.*)\)", r"\1", record["machine"]["processor"])


def _table(*rows: list[str]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body, ""])


def _interval(ends: list[float] | None, places: int = 2) -> str:
    if ends is None:
        return "(one block)"
    return f"({ends[0]:.{places}f} to {ends[1]:.{places}f})"


def serving() -> str:
    """Return tables of tokens per second by workload: none, each fixed choice, Spindle; of every workload, ratios. One a processor and
    temperature of SmolLM2, one of the tiny family.
    """
    return "\n".join(map(_serving_of, _records(*WHOLE, "tiny", "tiny-avx2")))


def _serving_of(record: dict[str, Any]) -> str:
    speed = {(row["workload"], row["load"], row["policy"]): f"{row['tokens_per_s']:.1f}" for row in record["summary"]}
    ratios = {(row["workload"], row["load"], row["policy"], row["over"]): row for row in record["ratios"]}
    noise = {(row["workload"], row["load"]): row["ratio"] for row in record["noise"]}
    fixed = [policy for policy in dict.fromkeys(policy for *_, policy in speed) if policy.startswith("fixed-")]
    rows = []
    for point in dict.fromkeys(key[:2] for key in ratios):
        cells = [speed.get((*point, policy), "") for policy in (NONE, *fixed, SPINDLE)]
        if point[0] == EVERY:
            cells = ["", *(f"{ratios[(*point, policy, NONE)]['ratio']:.2f} of none" for policy in fixed), ""]
        found = (ratios.get((*point, SPINDLE, over)) for over in (NONE, BEST_FIXED))
        cells += ["" if row is None else f"**{row['ratio']:.2f}** {_interval(row['interval_95'])}" for row in found]
        name = f"{WORKLOADS.get(point[0], point[0])}, {point[1].removeprefix('closed-')}"
        rows.append([name, *cells, f"{noise[point]:.2f}" if point in noise else ""])
    blocks, settings = {row["warm_blocks"] for row in record["summary"]}, record["settings"]
    model, temperature = PurePath(settings["config"]["target"]["model"]).name, settings["temperature"]
    head = [
        f"{model}, {_processor(record)}: tokens/s at temperature {temperature:g}, by workload and requests in flight "
        f"(warm blocks: {min(blocks)})",
        *(NONE, *(" ".join(map(str, fixed_choice(policy))) for policy in fixed), "Spindle"),
        *("Spindle over none (95 %)", "over the best fixed choice", "none over itself"),
    ]
    return _table(head, *rows)


def headline() -> str:
    """Return the table of what Spindle brings in closed loops, over all workloads together, by processor, length, temperature and load;
    records that agree in these count together.
    """
    found: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for record in _records(*WHOLE, "open-avx2"):
        settings = record["settings"]
        which = f"{_processor(record)}, {settings['max_tokens']} tokens, temperature {settings['temperature']:g}"
        for (load, over), pair in of_spindle(record["runs"]).items():
            if over in (NONE, BEST_FIXED) and is_closed(load):
                every = found.setdefault(f"{which}: over {'no speculation' if over == NONE else f'the {over}'}", {})
                every[load] = (every[load][0] + pair[0], every[load][1] + pair[1]) if load in every else pair
    loads = dict.fromkeys(load for pairs in found.values() for load in pairs)
    head = ["Spindle's tokens/s (95 % interval; warm blocks)", *(f"{load.removeprefix('closed-')} in flight" for load in loads)]
    return _table(head, *([which, *(_headlined(pairs.get(load)) for load in loads)] for which, pairs in found.items()))


def _headlined(pair: tuple[list[float], list[float]] | None) -> str:
    if pair is None:
        return ""
    found = interval(*pair)
    return f"**{found['ratio']:.2f}** " + (
        "(one block)" if found["interval_95"] is None else "({:.2f} to {:.2f}; {})".format(*found["interval_95"], found["blocks"])
    )


def forward() -> str:
    """Return the table of a pass of the engine against transformers'."""
    records = _records("forward-bf16", "forward-fp32", "forward-fp16")
    tokens = [row["tokens"] for row in records[0]["results"]]
    head = ["engine step against transformers' eager forward, KV 256", *(f"{n} token{'s'[: n > 1]}" for n in tokens)]
    cells = ([f"{row['ms']['engine']:.1f} ms, {row['ratio']:.2f}x" for row in record["results"]] for record in records)
    names = (f"{record['dtype']}, {_processor(record)}" for record in records)
    return _table(head, *([name, *row] for name, row in zip(names, cells, strict=True)))


def streaming() -> str:
    """Return the table of what a streamed token costs."""
    record = _record("streaming")
    rows = record["rows"]
    head = [f"{_processor(record)}: a streamed token, emission in the engine to the client (20 ms steps, Python client on the same cores)"]
    head += [f"{row['streams']} stream{'s'[: row['streams'] > 1]}" for row in rows]
    return _table(head, ["p50 / p99", *("{p50:.2g} / {p99:.2g} ms".format(**row["overhead_ms"]) for row in rows)])


def invariance() -> str:
    """Return the table of what plan-invariance costs in acceptance."""
    rows = [row for row in _record("plan-invariance-acceptance")["rows"] if row["workload"] == "all"]
    rules = ("rejection", "plan_invariant")
    cells = ([f"{row[rule]['accepted_share']:.3f} {_interval(row[rule]['interval'], 3)}" for rule in rules] for row in rows)
    names = {"small": "distilled"}
    head = ["draft, temperature", "rejection sampling", "plan-invariant"]
    return _table(head, *([f"{names.get(r['draft'], r['draft'])}, {r['temperature']}", *cell] for r, cell in zip(rows, cells, strict=True)))


def sweep() -> str:
    """Return the table of the load sweep: mean latency by policy, processors and GPUs apart; what has not been run is empty."""
    parts = []
    for names, title in ((SWEEPS, "2 CPU cores, tritonserver"), (("sweep-gpu",), "GPU, in process")):
        rows: dict[str, dict[tuple[str, str], list[dict[str, Any]]]] = {}
        for record in _records(*names):
            points = rows.setdefault(f"{_processor(record)}, {title}", {})
            found: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for row in record["summary"]:
                found.setdefault((row["workload"], row["load"]), []).append(row)
            points |= {point: its for point, its in found.items() if point not in points}
        parts += [_sweep_of(points, title) for title, points in rows.items()]
        if not rows:
            parts.append(_table([f"{title}: not run", NONE, "best fixed", *ADAPTING, SPINDLE], ["", "", "", *[""] * len(ADAPTING), ""]))
    return "\n".join(parts)


def _sweep_of(points: dict[tuple[str, str], list[dict[str, Any]]], title: str) -> str:
    """Return the closed and the open loops' tables."""
    tables = []
    for words, closed in (("closed loop, in flight", True), ("open loop, share of capacity", False)):
        own = {point: rows for point, rows in points.items() if is_closed(point[1]) is closed}
        blocks = [row["warm_blocks"] for rows in own.values() for row in rows]
        head = [f"{title}: mean latency, s, {words} (warm blocks: {min(blocks, default=0)} or more)"]
        head += [NONE, "best fixed", *ADAPTING, SPINDLE]
        tables += [_table(head, *(_latencies(point, rows) for point, rows in own.items()))] if own else []
    return "\n".join(tables)


def policies() -> str:
    """Return the table of Spindle against the other policies, over all loads of a sweep together."""
    found = [(_processor(record), {row["over"]: row for row in record["overall"]}) for record in _records(*SWEEPS) if record.get("overall")]
    rows = []
    for name, own in found:
        blocks = " to ".join(map(str, sorted({row["blocks"] for row in own.values()})))
        rows.append([f"{name} (warm blocks: {blocks})", *(_ratio(own.get(over)) for over in (BEST_FIXED, *ADAPTING))])
    head = ["Spindle's speed over, all loads together (95 %)", f"the {BEST_FIXED}", *ADAPTING]
    return _table(head, *(rows or [["not run", *[""] * (len(head) - 1)]]))


def _latencies(point: tuple[str, str], rows: list[dict[str, Any]]) -> list[str]:
    """Return a row of mean latencies; a policy that was not run leaves its cell empty, the best fixed choice is that in hindsight."""
    own = {row["policy"]: row["mean_latency_s"] for row in rows}
    fixed = [value for policy, value in own.items() if policy.startswith("fixed-")]
    cells = [own.get(NONE), min(fixed, default=None), *(own.get(policy) for policy in (*ADAPTING, SPINDLE))]
    return [", ".join(point), *("" if value is None else f"{value:.3f}" for value in cells)]


def pictures() -> str:
    """Return the sweeps' pictures, those that were made: of each kind the first processor's that has it."""
    words = {
        "latency": "mean latency against the rate of requests, by policy",
        "throughput": "tokens per second over no speculation against requests in flight, by policy",
        "speed": "speed over no speculation by draft, length and load",
        "ablations": "what each part brings",
        "simulation": "simulated against measured mean latency",
    }
    lines = []
    for name, text in words.items():
        made = [sweep for sweep in PICTURED if (PICTURES / f"{sweep}-{name}.png").is_file()]
        lines += [f"![{text}, {_processor(_record(sweep))}](docs/pictures/{sweep}-{name}.png)" for sweep in made[:1]]
    return "\n".join([*lines, ""])


def ablations() -> str:
    """Return a table a record of what each part and draft brings, by load; one line where it was not run."""
    records = _records("ablations", "ablations-avx2")
    return "\n".join(map(_ablations_of, records)) or _table(["Spindle's speed with a part over that without it: not run"], [""])


def _ablations_of(record: dict[str, Any]) -> str:
    rows = record["ablations"]
    points = list(dict.fromkeys((row["workload"], row["load"]) for row in rows))
    parts = list(dict.fromkeys((row["part"], row["by_default"]) for row in rows))
    ratios = {(row["part"], row["workload"], row["load"]): _ratio(row, 3) for row in rows}
    how = f"({record['through']}; warm blocks: {rows[0]['blocks']})"
    head = [f"{_processor(record)}: Spindle's speed with a part over that without it {how}", *map(", ".join, points)]
    lines = [[f"{part}{'' if default else ' (off by default)'}", *(ratios[(part, *point)] for point in points)] for part, default in parts]
    return _table(head, *lines)


def _ratio(row: dict[str, Any] | None, places: int = 2) -> str:
    return "" if row is None else f"{row['ratio']:.{places}f} {_interval(row['interval_95'], places)}"


def simulation() -> str:
    """Return the table of the simulation's error by kind of policy, in per cent of the measured mean latency."""
    found = [(_processor(record), record["simulation"]) for record in _records(*SWEEPS, "sampled-avx2") if "simulation" in record]
    rows = [row for processor in dict.fromkeys(name for name, _ in found) for row in _simulated(processor, found)]
    head = ["simulated over measured mean latency, below saturation", "within 10 %", "median error", "largest"]
    return _table(head, *(rows or [["not run", "", "", ""]]))


def _simulated(processor: str, found: list[tuple[str, list[dict[str, Any]]]]) -> list[list[str]]:
    """Return the rows of a processor's records."""
    points = [row for name, rows in found for row in rows if name == processor and row["below_saturation"]]
    errors = {policy: [row["error"] for row in points if row["policy"] == policy] for policy in {row["policy"] for row in points}}
    kinds = {"no speculation": [NONE], "fixed choices": [name for name in errors if name.startswith("fixed-")]}
    kinds |= {"the other policies": [*ADAPTING], "Spindle": [SPINDLE]}
    cells = {kind: _errors([error for name in names for error in errors.get(name, [])]) for kind, names in kinds.items()}
    return [[f"{processor}: {kind}", *row] for kind, row in cells.items() if any(row)]


def _errors(errors: list[float]) -> list[str]:
    if not errors:
        return ["", "", ""]
    near = sum(abs(error) <= WITHIN for error in errors)
    return [f"{near} of {len(errors)}", f"{median(errors):+.1%}", f"{max(errors, key=abs):+.1%}"]


def stacks() -> str:
    """Return the short table of the other stacks: Spindle over itself without speculation and over each of them, plain, by load."""
    head = ["Spindle's tokens/s over", "in flight", "its own plain decoding", *STACKS.values()]
    rows = []
    for family, processor in _families():
        over = {(row["arm"], row["in_flight"]): row["spindle_over"] for row in family["rows"]}
        for level in sorted({level for _, level in over}):
            cells = [over.get((arm, level)) for arm in (NONE, *STACKS)]
            blocks = max(each["blocks"] for each in cells if each)
            name = f"{family['family']}, {processor} (blocks: {blocks})"
            rows.append([name, str(level), *("" if each is None else _over(each) for each in cells)])
    return _table(head, *(rows or [["not run", *[""] * (len(head) - 1)]]))


def peers() -> str:
    """Return a table a family of other stacks beside Spindle; one line where they were not run."""
    return "\n".join(_peers_of(*each) for each in _families()) or _table(["other stacks on the same weights: not run"], [""])


def _families() -> list[tuple[dict[str, Any], str]]:
    """Return the families that were run beside other stacks, each with its processor."""
    return [
        (family, _processor(record)) for record in _records("peers", "peers-avx2", "peers-smollm2-avx2") for family in record["families"]
    ]


def _over(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.2f} {_interval(ratio['interval_95'])}"


def _peers_of(family: dict[str, Any], processor: str) -> str:
    at = {(row["arm"], row["in_flight"]): row for row in family["rows"]}
    levels = sorted({in_flight for _, in_flight in at})
    blocks, load = max(row["spindle_over"]["blocks"] for row in family["rows"]), " to ".join(map(str, family["load_average"]))
    head = [f"{family['family']}, {processor}, tokens/s (blocks: {blocks}; load average of the machine: {load})", "reads"]
    for level in levels:
        head += [f"{level} in flight", "over its plain", "Spindle over it", "texts as its plain", "as Spindle's plain"]
    names = dict.fromkeys(name for name, _ in at)
    words = {NONE: "Spindle, no speculation", SPINDLE: "**Spindle**", AGAIN: "Spindle, no speculation, again (noise)"}
    rows = [
        [words.get(name, name), family["weights"].get(name, ""), *(cell for level in levels for cell in _peer(at.get((name, level))))]
        for name in names
    ]
    rows += [[name, f"not run: {reason}", *[""] * (len(head) - 2)] for name, reason in family["skipped"].items()]
    return _table(head, *rows)


def _peer(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return [""] * 5
    same = (f"{row[key]['same']} of {row[key]['texts']}" for key in ("as_plain", "as_none"))
    return [
        f"{row['tokens_per_s']:.0f}",
        f"{row['over_plain']['median']:.2f}",
        _over(row["spindle_over"]),
        *same,
    ]


def planning() -> str:
    """Return the table of what planning and learning cost, by batch size."""
    record = _record("policy")
    by_rows = record["planning"]
    kinds = {"planning": "plan_p50_us", "learning from the step": "observe_p50_us"}
    head = [f"{_processor(record)}: CPU time a step, ms, by batch size", *by_rows]
    return _table(head, *([name, *(f"{figures[key] / 1e3:.2f}" for figures in by_rows.values())] for name, key in kinds.items()))


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "serving": serving,
    "forward": forward,
    "streaming": streaming,
    "invariance": invariance,
    "sweep": sweep,
    "policies": policies,
    "stacks": stacks,
    "peers": peers,
    "pictures": pictures,
    "ablations": ablations,
    "simulation": simulation,
    "planning": planning,
}


def main() -> None:
    """Write the pages' tables."""
    for page in PAGES:
        page.write_text(written(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
