"""The tables of the ``PAGES``: ``python -m bench.tables`` writes them from docs/results.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; what is there is replaced.
A test holds the pages against the records.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any

from backend import PROJECT_ROOT
from bench import records
from bench.baselines import BASELINES, compared_baselines
from bench.records import RESULTS
from bench.sweep.arms import ADAPTING, NONE, SPINDLE, UNTOLD, fixed_choice
from bench.sweep.figures import BEST_FIXED, EVERY, between, interval, is_closed, level, of_spindle
from bench.sweep.figures import speed as tokens_per_s
from bench.traces.arms import CONFIDENT, FIXED_EAGLE, PLANNER, QUALITIES
from bench.traces.arms import NONE as NO_SPECULATION
from bench.traces.figures import MIXED
from bench.workloads import MIX
from policy.simulation.report import load_name
from policy.simulation.statistics import ratio_of_rates

PAGES = (
    PROJECT_ROOT / "README.md",
    PROJECT_ROOT / "docs" / "benchmarks.md",
    PROJECT_ROOT / "docs" / "how-to" / "use-in-vllm.md",
    PROJECT_ROOT / "docs" / "research" / "simulator.md",
    PROJECT_ROOT / "docs" / "research" / "traces.md",
    PROJECT_ROOT / "docs" / "explanation" / "policy.md",
)
PLACE = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEADLINE, OLDER = "AVX512-BF16", ("AMX-BF16", "AVX2")
"""The processor of README's figures, and those that earlier commits were measured on."""
RECORDS = (
    *("policies-avx512", "sweep-avx512"),
    *("sweep-amx", "policies-amx", "sampled-amx", "long-amx"),
    *("sweep-avx2", "policies-avx2", "plain-avx2", "sampled-avx2"),
)
"""Records of SmolLM2 through tritonserver in closed loops; those alike count together."""
ONE_THREAD = "served-avx512"
"""The record of one thread, greedy and sampled, next to plain decoding and a fixed choice."""
FRESH = "fresh-amx"
"""The record of servers that have learnt nothing."""
WORKLOADS = "workloads-amx"
"""The record of each workload by itself."""
UNLIKE = "unlike-drafts-amx"
"""The record of the tiny family with three unlike drafts: a head, a model and ``suffix``."""
OPEN = "open-amx"
"""The record of open loops."""
PEERS = {
    OLDER[0]: ("peers-amx", "peers-int8-amx"),
    OLDER[1]: ("peers-avx2", "peers-int8-avx2"),
}
"""SmolLM2 and other stacks by processor, Spindle's target in the precision that the record
names.
"""
WITH_PEERS = OLDER[0]
"""The processor of the figures next to other stacks."""
STACKS = {
    "transformers-plain": "transformers",
    "transformers-lookup": "transformers, lookup",
    "vllm-plain": "vLLM",
    "vllm-lookup": "vLLM, n-grams",
    "openvino-16bit": "OpenVINO GenAI, 16 bits",
    "openvino-plain": "OpenVINO GenAI, 4 bits",
    "openvino-lookup": "OpenVINO GenAI, 4 bits, lookup",
    "llamacpp-16bit": "llama.cpp, 16 bits",
    "llamacpp-plain": "llama.cpp, 4 bits",
    "llamacpp-lookup": "llama.cpp, 4 bits, lookup",
}
"""The other stacks."""
TOKENS = 48
"""A request where nothing else is said."""
BETWEEN = "between"
OVER = {
    NONE: "plain decoding",
    BETWEEN: "plain decoding, between tokens",
    BEST_FIXED: "best fixed choice",
    "without-suffix": "Spindle with the head only",
    "without-head": "Spindle with `suffix` only",
}
OTHERS = {
    name: "SmartSpec, the first draft" if name == UNTOLD else BASELINES[name].label
    for name in ADAPTING
}
"""The other policies."""
DRAFT_NAMES = {"0.9m": "a model of 0.9 M parameters"}
"""Drafts whose name does not say what they are."""
WORKLOAD_NAMES = {
    "chat": "chat",
    "summarise": "news summaries",
    "qa": "questions on a text",
    "sql": "SQL",
    "code": "code",
}
ARRIVALS = {"poisson": "Poisson arrivals", "bursty": "bursts"}

SIMULATION = "simulation"
"""The simulator's record."""
WORTH = "worth"
"""The simulator's record of the planner without its parts."""
PARTS = {
    "deviation": "deviations of requests",
    "exploration": "trials",
    "waiting": "waiting requests in the price",
    "catch-up": "learning from catch-ups",
    "trim": "the trim",
    "correction": "any correction of times",
    "shape": "correction of the curve's shape",
}
"""The parts in it."""
SCENARIOS = """
`8b` and `70b` are Llamas on one and four H100s, `cpu` is SmolLM2 on a CPU. `chat` is one kind of
request, `mix` four kinds, `prefill-heavy` long prompts with short answers. `tagged` means that each
kind has its own beginning, `bursty` that requests arrive in bursts, `4-heads` that the drafts are
four specialist heads.
"""
"""The names of simulated scenarios."""

IN_VLLM = "vllm-plugin"
"""The record of the plug-in inside vLLM."""
VLLM_MODES = {
    "spindle": "Spindle's draft `suffix`",
    "ngram-planned": "vLLM's n-grams, planned lengths",
}
VLLM_OTHERS = {
    "plain": "vLLM without speculation",
    "ngram-2": "vLLM's n-grams, 2 tokens",
    "ngram-4": "vLLM's n-grams, 4 tokens",
}
FRONT = "vllm-front"
"""The record of Spindle's front and vLLM's own server."""
FRONT_MODES = {
    "spindle-openai": "Spindle's OpenAI server",
    "spindle-triton": "Spindle's Triton models",
}
PLANNED = {
    "vllm-lengths-draft": "tiny family, a draft model",
    "vllm-lengths-ngram": "tiny family, n-grams",
}
"""The records of planned lengths, and vLLM's drafter in each."""
PLANNED_OVER = {"plain": "no drafter", "fixed-best": "the best fixed length"}
TRACES = "traces"
"""The record of policies over traces."""
TRACES_OTHERS = "traces-others"
"""The record of all arms over all sets together, at two loads."""
TRACE_ARMS = {
    NO_SPECULATION: "no speculation",
    PLANNER: "Spindle's planner",
    "planner-free": "the same, not charged for planning",
    "planner-without-evidence": "the planner without evidence from the look-up",
    "planner-without-trim": "the planner, verifying all proposed tokens",
    "planner-eagle-alone": "the planner with the head only",
    "oracle-eagle": "the head, proposing just what will be accepted",
    "oracle": "the draft with the most accepted tokens, proposing just these",
    FIXED_EAGLE: "the head at its best fixed length, relative to `none`",
    "fixed-suffix": "the look-up at its best fixed length",
    "rule": "the look-up if enough tokens match, else the head",
    "rule-8": "the same with at most 8 tokens from the look-up",
    CONFIDENT: "the head, continuing while it is confident",
    "schedule": "a length by batch size",
    "schedule-gated": "the same, off for good once acceptance is low",
    "verification": "vLLM's adaptive verification",
}
"""Behaviour of the arms over traces; the others are baselines."""
RANKED = dict(zip(QUALITIES, (69, 84, 96), strict=True))
"""Pairs in 100 that a made-up confidence of some quality ranks right."""
TRACE_SETS = {
    "cnn": "summaries (cnn)",
    "gsm8k": "mathematics (gsm8k)",
    "instructcoder": "code edits (instructcoder)",
    "sharegpt": "chat (sharegpt)",
}

Pairs = tuple[list[float], list[float]]
Kind = tuple[str, float, int, str]
"""Processor, temperature, tokens a request, and what Spindle is compared with."""
ON_README = (
    (HEADLINE, 0.0, TOKENS, NONE),
    (HEADLINE, 0.0, TOKENS, BEST_FIXED),
)


def rewrite(page: str) -> str:
    """Return a page with its tables as they should be. Raises KeyError for an unknown table."""
    return PLACE.sub(lambda place: place[1] + TABLES[place[2]]() + place[3], page)


def _record(name: str) -> dict[str, Any]:
    return records.read(RESULTS / f"{name}.json")


def processor_of(record: dict[str, Any]) -> str:
    """Return a record's processor by its instructions: a name alone ("AMD EPYC") may be several."""
    return re.sub(r".*\((.*)\)", r"\1", record["machine"]["processor"])


def _table(*rows: list[str]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, f"|{' --- |' * len(rows[0])}", *body, ""])


def _interval(ends: list[float] | tuple[float, float] | None) -> str:
    return "one block" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


def read_speeds() -> dict[Kind, dict[str, Pairs]]:
    """Return the speeds of Spindle and of what it is compared with, by kind and load."""
    speeds: dict[Kind, dict[str, Pairs]] = {}
    for name in RECORDS:
        record = _record(name)
        settings, pairs = record["settings"], of_spindle(record["runs"])
        for (load, over), pair in of_spindle(record["runs"], between).items():
            if over == NONE:
                pairs[load, BETWEEN] = pair
        for (load, over), (ours, theirs) in pairs.items():
            if over in OVER | OTHERS and is_closed(load):
                kind = (processor_of(record), settings["temperature"], settings["max_tokens"], over)
                before = speeds.setdefault(kind, {}).get(load, ([], []))
                speeds[kind][load] = (before[0] + ours, before[1] + theirs)
    return speeds


def _speeds(kinds: list[Kind], *, counts: bool) -> str:
    """Return a row a kind, a column a load; ``counts``: also how many blocks it is of.

    A row says its processor where the rows differ in it, its temperature where it is not greedy,
    and its tokens a request where they are not ``TOKENS``.
    """
    every = read_speeds()
    every_load = {load for kind in kinds for load in every[kind]}
    loads = sorted(every_load, key=level)
    processors = {processor for processor, *_ in kinds}
    rows = []
    for kind in kinds:
        processor, temperature, tokens, over = kind
        name = (OVER | OTHERS)[over]
        name += f", {processor.partition('-')[0]}" * (len(processors) > 1)
        name += f", temperature {temperature:g}" * (temperature > 0)
        name += f", {tokens} tokens" * (tokens != TOKENS)
        rows.append([name, *(_cell(every[kind].get(load), counts=counts) for load in loads)])
    levels = (f"{level(load):g} in flight" for load in loads)
    return _table(["Spindle's tokens/s over", *levels], *rows)


def _cell(pair: Pairs | None, *, counts: bool) -> str:
    if pair is None:
        return ""
    return _format_ratio(interval(*pair), counts=counts)


def _format_ratio(row: dict[str, Any], *, counts: bool = False) -> str:
    """Return a ratio with its interval; ``counts``: also how many blocks it is of."""
    count = f"; {row['blocks']}" if counts else ""
    return f"{row['ratio']:.2f} ({_interval(row['interval_95'])}{count})"


def headline() -> str:
    """Return README's rows."""
    return _speeds([*ON_README], counts=False)


def speed(processor: str) -> str:
    """Return Spindle over all of ``OVER``, all that was measured."""
    return _speeds(_in_order(OVER, processor), counts=True)


def one_thread() -> str:
    """Return Spindle on one thread over plain decoding and over a fixed choice."""
    rows_by_over: dict[tuple[str, float], dict[int, str]] = {}
    for row in _record(ONE_THREAD)["ratios"]:
        if row["arm"] == "adaptive":
            ratio, *ends = row["tokens_per_s"]
            cell = f"{ratio:.2f} ({_interval(ends)}; {row['blocks']})"
            rows_by_over.setdefault((row["over"], row["temperature"]), {})[row["in_flight"]] = cell
    names = {NONE: "plain decoding", "suffix2": "`suffix`, 2 tokens"}
    loads = sorted({load for cells in rows_by_over.values() for load in cells})
    rows = [
        [
            f"{names[over]}, {f'temperature {temperature:g}' if temperature else 'greedy'}",
            *(cells.get(load, "") for load in loads),
        ]
        for (over, temperature), cells in sorted(rows_by_over.items())
    ]
    return _table(["Spindle's tokens/s over", *(f"{load} in flight" for load in loads)], *rows)


def fresh() -> str:
    """Return a fresh server over plain decoding: the newest measurement of each point."""
    cells: dict[tuple[str, float], dict[int, str]] = {}
    for record in _record(FRESH)["records"]:
        for (temperature, in_flight), runs in _by_point(record["runs"]).items():
            plain, spindle = (
                [tokens_per_s(run) for run in runs if run["policy"] == arm]
                for arm in (NONE, SPINDLE)
            )
            ratio = ratio_of_rates(spindle, plain)
            ends = _interval((ratio.low, ratio.high))
            point = cells.setdefault((_condition(record["settings"]), temperature), {})
            point[in_flight] = f"{ratio.value:.2f} ({ends}; {len(plain)})"
    loads = sorted({load for row in cells.values() for load in row})
    rows = [
        [condition, f"{temperature:g}", *(row.get(load, "") for load in loads)]
        for (condition, temperature), row in sorted(cells.items(), key=lambda row: row[0][1])
    ]
    return _table(["machine", "temperature", *(f"{load} in flight" for load in loads)], *rows)


def _by_point(runs: list[dict[str, Any]]) -> dict[tuple[float, int], list[dict[str, Any]]]:
    """Return runs by temperature and requests in flight."""
    points: dict[tuple[float, int], list[dict[str, Any]]] = {}
    for run in runs:
        in_flight = int(run["load"].removeprefix("closed-"))
        points.setdefault((run["temperature"], in_flight), []).append(run)
    return points


def _condition(settings: dict[str, Any]) -> str:
    """Return the name of a condition in which fresh servers were measured."""
    if settings["busy"]:
        return "half busy with another program"
    error = settings["table_error"]
    return f"quiet, latency tables {100 * error:.0f} % wrong" if error else "quiet"


def in_vllm() -> str:
    """Return the plug-in's two modes over vLLM's other ways, all workloads together."""
    return _table(_VLLM_HEAD, *_over(IN_VLLM, VLLM_MODES, VLLM_OTHERS))


def hosted_tables() -> str:
    """Return Spindle's front over vLLM's own server, and planned lengths over fixed ones."""
    rows = _over(FRONT, FRONT_MODES, {"vllm": "vLLM's own OpenAI server"})
    for record, drafter in PLANNED.items():
        mode = {"planned": f"{drafter}, planned lengths"}
        rows += _over(record, mode, PLANNED_OVER)
    return _table(_VLLM_HEAD, *rows)


_VLLM_HEAD = ["tokens/s of", "over", "1 in flight", "8 in flight"]


def _over(record: str, modes: dict[str, str], others: dict[str, str]) -> list[list[str]]:
    """Return the rows of each of our modes over each of the other arms of a record."""
    cells_by_arm: dict[tuple[str, str], dict[int, str]] = {}
    for row in _record(record)["summary"]:
        if row["workload"] == MIX:
            cell = f"{row['ratio']:.2f} ({_interval((row['low'], row['high']))})"
            cells_by_arm.setdefault((row["arm"], row["over"]), {})[row["in_flight"]] = cell
    return [
        [mode, other, *(cell for _, cell in sorted(cells_by_arm[arm, over].items()))]
        for arm, mode in modes.items()
        for over, other in others.items()
    ]


def policies(processor: str) -> str:
    """Return Spindle over the other policies."""
    return _speeds(_in_order(OTHERS, processor), counts=True)


def _in_order(over: dict[str, str], processor: str) -> list[Kind]:
    """Return what was measured over some policies on a processor, in their order."""
    order = [*over]
    kinds = (kind for kind in read_speeds() if kind[0] == processor and kind[3] in over)
    return sorted(kinds, key=lambda kind: (*kind[:3], order.index(kind[3])))


def by_workload() -> str:
    """Return Spindle over plain decoding, one in flight, a column a workload of three blocks."""
    rows = [
        row
        for row in _record(WORKLOADS)["ratios"]
        if (row["policy"], row["over"]) == (SPINDLE, NONE)
        and row["workload"] != EVERY
        and row["blocks"] > 2
    ]
    cells = (_format_ratio(row, counts=True) for row in rows)
    names = (WORKLOAD_NAMES[row["workload"]] for row in rows)
    return _table(["Spindle's tokens/s over", *names], ["plain decoding", *cells])


def unlike_drafts() -> str:
    """Return every policy over plain decoding and under Spindle, a column a load of each."""
    record = _record(UNLIKE)
    by_pair = {(row["policy"], row["over"], row["load"]): row for row in record["ratios"]}
    loads = list(dict.fromkeys(load for *_, load in by_pair))
    names = {SPINDLE: "Spindle", **OVER, **OTHERS}
    rows = []
    for name in dict.fromkeys([*(name for name, *_ in by_pair), BEST_FIXED]):
        is_fixed = name.startswith("fixed-")
        label = _name_fixed(name) if is_fixed else names[name]
        pairs = [(name, NONE, load) for load in loads] + [(SPINDLE, name, load) for load in loads]
        cells = (_format_ratio(by_pair[pair]) if pair in by_pair else "" for pair in pairs)
        rows.append([label, *cells])
    head = [
        f"{pair}, {level(load):g} in flight"
        for pair in ("policy over plain decoding", "Spindle over policy")
        for load in loads
    ]
    return _table(["policy", *head], *rows)


def _name_fixed(policy: str) -> str:
    """Return the label of a fixed choice."""
    draft, length = fixed_choice(policy)
    return f"{DRAFT_NAMES.get(draft, f'`{draft}`')}, {length} tokens"


def open_loops() -> str:
    """Return Spindle's speed in open loops, a row what it is over, a column a load."""
    record = _record(OPEN)
    over = {NONE: OVER[NONE]}
    over |= {name: _name_fixed(name) for name in record["settings"]["policies"]}
    cells = {
        (row["over"], row["load"]): _format_ratio(row, counts=True)
        for row in record["ratios"]
        if row["policy"] == SPINDLE and row["over"] in over and not is_closed(row["load"])
    }
    loads = list(dict.fromkeys(load for _, load in cells))
    names = [f"{ARRIVALS[load.partition('-')[0]]}, {level(load):g} of capacity" for load in loads]
    rows = [[name, *(cells[other, load] for load in loads)] for other, name in over.items()]
    return _table(["Spindle's speed over", *names], *rows)


def stacks(processor: str) -> str:
    """Return Spindle over the other stacks, a row a stack, a column a load."""
    over = over_stacks(processor)
    levels = sorted({level for _, level in over})
    rows = [
        [name, *(_median(over.get((name, level))) for level in levels)]
        for name in dict.fromkeys(name for name, _ in over)
    ]
    return _table(
        ["Spindle's tokens/s over", *(f"{level} in flight" for level in levels)],
        *rows,
    )


def over_stacks(processor: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the medians over the other stacks by name and requests in flight, in order."""
    ratios = {}
    for record in map(_record, PEERS[processor]):
        (family,) = record["families"]
        dtype = record["settings"].get("dtype", "auto")
        added = "" if dtype == "auto" else f", Spindle in {dtype}"
        for arm, name in STACKS.items():
            for row in family["rows"]:
                if row["arm"] == arm:
                    ratios[f"{name}{added}", row["in_flight"]] = row["spindle_over"]
    return ratios


def _median(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['median']:.2f} ({_interval(row['interval_95'])})"


def simulated_table() -> str:
    """Return every policy over the best fixed choice, a row a simulated scenario and load: mean
    latency, of a backlog the throughput.
    """
    rows, comparisons = [], _record(SIMULATION)["comparisons"]
    tuned_in = {name for comparison in comparisons for name in comparison["tuned"]}
    ran = {name: its for name, its in compared_baselines().items() if name in tuned_in}
    for comparison in comparisons:
        for point in comparison["points"]:
            fixed, arms, load = point["fixed"], point["arms"], load_name(point["load"])
            figure = "tokens_per_s" if load == "backlog" else "latency_s"
            value, low, high = arms[fixed]["adaptive_over_it"]
            tuned = (comparison["tuned"].get(name) for name in ran)
            others = (*tuned, "oracle", NONE)
            rows.append(
                [
                    comparison["scenario"],
                    load,
                    fixed.removeprefix("fixed:"),
                    f"{value:.3f} ({low:.3f}–{high:.3f})",
                    *(
                        f"{arms[name][figure] / arms[fixed][figure]:.3f}" if name else ""
                        for name in others
                    ),
                ]
            )
    names = (*(its.label for its in ran.values()), "oracle", NONE)
    return _table(["scenario", "load", BEST_FIXED, "adaptive", *names], *rows) + SCENARIOS


def unmet() -> str:
    """Return the criteria that the simulated planner misses."""
    rows = [
        [
            row["scenario"],
            "all" if row["load"] is None else load_name(row["load"]),
            f"{row['what']}: {row['wanted']}",
            row["found"].replace(" at none", " at no load"),
        ]
        for row in _record(SIMULATION)["criteria"]
        if not row["met"]
    ]
    return _table(["scenario", "load", "criterion", "result"], *rows)


def worth() -> str:
    """Return what is lost without each part, in percent: mean latency, of a backlog the throughput;
    the mean over a scenario's loads, and the most at any.
    """
    comparisons = _record(WORTH)["comparisons"]
    rows = []
    for part, name in PARTS.items():
        losses_of = [
            [_loss(point["load"], point["arms"][f"without:{part}"]) for point in one["points"]]
            for one in comparisons
        ]
        figures = [*(mean(losses) for losses in losses_of), max(chain(*losses_of))]
        rows.append([name, *(f"{round(figure, 1) + 0.0:.1f}" for figure in figures)])
    return _table(["without", *(one["scenario"] for one in comparisons), "maximum"], *rows)


def _loss(load: float, without: dict[str, Any]) -> float:
    ratio = without["adaptive_over_it"][0]
    return float(100 * (1 - 1 / ratio if load_name(load) == "backlog" else 1 / ratio - 1))


def over_traces(name: str) -> str:
    """Return all arms over traces of a real target, all sets mixed, a column a number of requests
    in flight: percent over the best fixed length of EAGLE, on each half; that over none.
    """
    by_arm = {(row["arm"], row["in_flight"]): row for row in _traces(MIXED, name)}
    loads = sorted({load for _, load in by_arm})
    rows = []
    for arm in dict.fromkeys(arm for arm, _ in by_arm):
        over = "over_none" if arm == FIXED_EAGLE else "over_fixed_eagle"
        halves = (by_arm[arm, load][f"{over}_by_half"] for load in loads)
        show = _times if arm == FIXED_EAGLE else _percent
        cells = (", ".join(map(show, pair)) for pair in halves)
        rows.append([f"`{arm}`", _name_arm(arm), *cells])
    return _table(["arm", "policy", *(f"{load} in flight" for load in loads)], *rows)


def _name_arm(arm: str) -> str:
    """Return what an arm over traces does."""
    name, _, quality = arm.partition("-confidence-")
    label = TRACE_ARMS[name] if name in TRACE_ARMS else BASELINES[name].label
    return f"{label}; confidence right in {RANKED[float(quality)]} %" if quality else label


def traces_by_set() -> str:
    """Return the rule and the planner over the best fixed length of EAGLE, a row a set of data."""
    every = _record(TRACES)["summary"]
    sets = [data for data in dict.fromkeys(row["data"] for row in every) if data != MIXED]
    loads = sorted({row["in_flight"] for row in every})
    rows = []
    for data in sets:
        by_arm = {(row["arm"], row["in_flight"]): row for row in _traces(data)}
        for arm in ("rule", PLANNER):
            figures = (by_arm[arm, load]["over_fixed_eagle"] for load in loads)
            rows.append([TRACE_SETS[data], f"`{arm}`", *map(_percent, figures)])
    return _table(["data", "arm", *(f"{load} in flight" for load in loads)], *rows)


def _traces(data: str, name: str = TRACES) -> list[dict[str, Any]]:
    return [row for row in _record(name)["summary"] if row["data"] == data]


def _percent(ratio: float) -> str:
    percent = round(100 * (ratio - 1), 1) + 0.0  # no -0.0
    return f"{percent:+.1f} %" if percent else "0.0 %"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}"


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "speed": partial(speed, HEADLINE),
    "stacks": partial(stacks, WITH_PEERS),
    "speed-amx": partial(speed, OLDER[0]),
    "speed-avx2": partial(speed, OLDER[1]),
    "one-thread": one_thread,
    "fresh": fresh,
    "policies": partial(policies, HEADLINE),
    "stacks-avx2": partial(stacks, OLDER[1]),
    "workloads": by_workload,
    "unlike-drafts": unlike_drafts,
    "open": open_loops,
    "simulated": simulated_table,
    "unmet": unmet,
    "worth": worth,
    "vllm": in_vllm,
    "hosted": hosted_tables,
    "traces": partial(over_traces, TRACES),
    "traces-others": partial(over_traces, TRACES_OTHERS),
    "traces-by-set": traces_by_set,
}


def main() -> None:
    """Write the pages' tables."""
    for page in PAGES:
        page.write_text(rewrite(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
