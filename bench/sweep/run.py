"""The load sweep: latency and throughput of every policy under the same requests, from one in
flight to beyond saturation.

    make bench                                     # hours; run it again to continue
    make bench ARGS="--quick --out FILE"           # under ten minutes on two cores
    make bench ARGS="--in-process --config FILE"   # without tritonserver, on a GPU too
    # against other stacks (bench/peers/peers.sh):
    make bench ARGS="--peers all --policies --closed 1 8 --shares"
    make bench ARGS="--ablations --closed 1 8 --shares"   # Spindle without each of its parts

Starts a tritonserver for each policy (see ``sweep_arms``). First, on prompts that are not scored,
it chooses the draft, the length and the table by batch size for the baselines, and measures the
capacity without speculation in requests per second. Then it runs blocks: in each, at every point
(workload and load), all policies serve the same requests at the same times, in ABBA order; block 0
is cold. Loads are ``closed-N`` in flight, and ``poisson-SHARE`` and ``bursty-SHARE`` of the
capacity. It writes FILE every 20 s and, at the end, FILE's report as HTML.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from backend.config import PolicyConfig, parse_config
from backend.machine import machine
from backend.model_folders import model_path
from bench import records, workloads
from bench.peers.arms import PEERS, Peers
from bench.servers import LoadResult, OfferedLoad
from bench.sweep import figures as sweep_figures
from bench.sweep import simulation as sweep_simulation
from bench.sweep.arms import (
    ADAPTING,
    AGAIN,
    NONE,
    SPINDLE,
    InProcess,
    Roster,
    Servers,
    Tuning,
    ablation_names,
    arm_config,
    fixed_choice,
    fixed_names,
    is_ablation,
    tables,
)
from bench.sweep.options import VARIATION, parse
from bench.sweep.report import write_report
from engines_build.prepare import prepare
from policy.custom import PolicyError, closest, import_policy, parse_path
from policy.simulation.statistics import abba
from policy.simulation.workload import bursty

MESSAGES = 240
TUNING_STEP = 4
"""Every fourth message is for choosing, the others are scored."""
SAVE_S = 20.0
FAKE_CHARACTERS = 300
"""Characters of a message that the fake engines get; they read bytes."""
FREE = ("out", "limit_s", "servers", "quick", "config")
"""Options that may differ from those of the command that began the record; the configuration is
compared by what it says.
"""


class Sweep:
    """One sweep: its settings, its record, and the roster that serves."""

    def __init__(self, options: argparse.Namespace, record: dict[str, Any], roster: Roster) -> None:
        self._options, self._record, self._roster = options, record, roster
        self._config = record["settings"]["config"]
        self._messages = {name: self._render(name) for name in options.workloads}
        self._fixed = fixed_names(self._config, options.lengths)
        parts = ablation_names(self._config)
        available = [*self._fixed, *ADAPTING, *parts]
        custom = [name for name in options.policies or () if PolicyConfig(name).is_custom]
        if unknown := sorted(set(options.policies or ()) - {*available, *custom}):
            there = f"{', '.join(available)} or a dotted path like my_package.MyPolicy"
            like = closest(unknown[0], available)
            raise SystemExit(f"--policies: {', '.join(unknown)} is none of {there}{like}")
        try:
            for name in custom:
                import_policy(parse_path(name)[0])
        except PolicyError as error:
            raise SystemExit(f"--policies: {error}") from error
        self._peers = Peers(self._config)
        record["skipped"] = {
            name: reason for name in options.peers if (reason := self._peers.missing(name))
        }
        named = [*self._fixed, *ADAPTING] if options.policies is None else options.policies
        selected = {*named, *(parts if options.ablations else ())}
        wanted = [name for name in available if name in selected]
        self.policies = [
            NONE,
            *custom,
            *(name for name in wanted if not is_ablation(name)),
            SPINDLE,
            *(name for name in wanted if is_ablation(name)),
            *(name for name in options.peers if name not in record["skipped"]),
            AGAIN,
        ]
        self._deadline_s = time.monotonic() + options.limit_s

    def run(self, save: Callable[[], None]) -> bool:
        """Do what the record lacks, saving now and then; return whether all is done."""
        if {*self.policies} & {*ADAPTING}:
            if "tuning" not in self._record:
                self._record["tuning"] = self._tune()
                save()
            tuning = self._record["tuning"]
            self._roster.tuning = Tuning(
                tuning["draft"],
                tuning["length"],
                tuple((batch, length) for batch, length in tuning["schedule"]),
            )
        if "capacity_requests_per_s" not in self._record:
            self._record["capacity_requests_per_s"] = {
                name: round(self._capacity(name), 4) for name in self._messages
            }
            save()
        return self._measure(save)

    def close(self) -> None:
        """End all that serves."""
        self._roster.close()
        self._peers.close()

    def _measure(self, save: Callable[[], None]) -> bool:
        done = {
            (run["workload"], run["load"], run["block"], run["policy"])
            for run in self._record["runs"]
        }
        wanted = [key for key in self._keys() if key not in done]
        saved_s = time.monotonic()
        with _progress(wanted, "sweep") as progress:
            for workload, load, block, policy in progress:
                if block and time.monotonic() > self._deadline_s:
                    return False
                progress.set_postfix_str(
                    f"block {block}, {workload} {load}, {policy}", refresh=False
                )
                self._record["runs"].append(self.serve_block(workload, load, block, policy))
                if time.monotonic() > saved_s + SAVE_S:
                    save()
                    saved_s = time.monotonic()
        return True

    def _keys(self) -> Iterator[tuple[str, str, int, str]]:
        """Yield all runs in their order: a block of every point before the next block of any.

        The direction also changes from point to point, so that a server that ran last runs first
        and need not be started again.
        """
        options = self._options
        rates = [
            f"{arrivals}-{share:.2f}" for arrivals in options.arrivals for share in options.shares
        ]
        loads = [*(f"closed-{level}" for level in options.closed), *rates]
        for block in range(options.blocks + 1):
            for number, (workload, load) in enumerate(itertools.product(options.workloads, loads)):
                for policy in abba(self.policies, block + number):
                    yield workload, load, block, policy

    def serve_block(self, workload: str, load: str, block: int, policy: str) -> dict[str, Any]:
        """Serve a block of a point by a policy and return its figures."""
        arm, fresh = (self._peers if policy in PEERS else self._roster).arm(policy)
        if fresh and block:
            arm.run(
                self._offer(workload, load, 0, policy)
            )  # it went through block 0 before this command was stopped, or before its server was
        offer = self._offer(workload, load, block, policy)
        if self._options.prefix == "warm":
            arm.run(
                OfferedLoad(
                    [{**request, "max_tokens": 1} for request in offer.requests],
                    self._options.active,
                )
            )
        result = arm.run(offer)
        return {
            "workload": workload,
            "load": load,
            "block": block,
            "policy": policy,
            **describe(result),
        }

    def _offer(self, workload: str, load: str, block: int, policy: str) -> OfferedLoad:
        """Return a block's requests, the same for every policy; the bursts and pauses of a block
        are those of every rate, stretched.

        Policies that share a server share no KV.
        """
        kind, _, at = load.rpartition("-")
        if kind == "closed":
            requests = self._requests(
                workload,
                load,
                block,
                max(self._options.requests_closed, self._options.rounds * int(at)),
                policy,
            )
            return OfferedLoad(requests, int(at))
        rate = float(at) * self._record["capacity_requests_per_s"][workload]
        requests = self._requests(workload, load, block, self._options.requests, policy)
        arrivals = bursty(len(requests), rate, VARIATION[kind], self._options.seed * 1000 + block)
        return OfferedLoad(requests, at_s=arrivals.tolist())

    def _requests(
        self, workload: str, load: str, block: int, count: int, policy: str
    ) -> list[dict[str, Any]]:
        """Draw requests that are scored, or, in the load ``tuning-N``, from those that are not; no
        KV is reused from other runs.
        """
        every = self._messages[workload]
        tuning = load.startswith("tuning")
        pool = [
            message for number, message in enumerate(every) if (number % TUNING_STEP == 0) is tuning
        ]
        rng = random.Random(f"{self._options.seed}/{workload}/{load}/{block}")
        texts = rng.sample(pool, count) if count <= len(pool) else rng.choices(pool, k=count)
        options: dict[str, Any] = {
            "max_tokens": self._options.max_tokens,
            "cache_salt": f"{workload}/{load}/{block}/{policy}",
        }
        if self._options.temperature:
            options["temperature"] = self._options.temperature
            return [{"text_input": text, **options, "seed": rng.randrange(2**62)} for text in texts]
        return [{"text_input": text, **options} for text in texts]

    def _render(self, name: str) -> list[str]:
        target = parse_config(self._config).target
        messages = workloads.load(name, MESSAGES, self._options.seed).messages
        if not target.kind.tokenizer:
            return [message[:FAKE_CHARACTERS] for message in messages]
        return [
            message if self._options.raw else workloads.render(message, model_path(target))
            for message in messages
        ]

    def _tuning_speed(self, policy: str, workload: str, in_flight: int) -> float:
        requests = self._requests(
            workload,
            f"tuning-{in_flight}",
            0,
            max(self._options.requests_closed, 2 * in_flight),
            policy,
        )
        arm, _ = self._roster.arm(policy)
        result = arm.run(OfferedLoad(requests, in_flight))
        return sum(reply.output_tokens for reply in result.replies) / result.wall_s

    def _tune(self) -> dict[str, Any]:
        """Choose what the baselines know beforehand: the best fixed choices by tokens per second
        on prompts that are not scored.
        """
        workload = self._options.workloads[-1]
        levels = sorted(
            {level for level in self._options.closed if level < self._options.active}
            | {self._options.active}
        )
        rates: dict[str, dict[str, float]] = {policy: {} for policy in [NONE, *self._fixed]}
        work = [
            (level, policy) for level in levels for policy in abba([*rates], levels.index(level))
        ]
        self._roster.arm(NONE)[0].run(
            OfferedLoad(self._requests(workload, "tuning-warm", 0, 2, NONE))
        )
        for level, policy in _progress(work, "tuning"):
            rates[policy][str(level)] = round(self._tuning_speed(policy, workload, level), 2)
        return {"workload": workload, "tokens_per_s": rates, **best_choice(rates, self._fixed)}

    def _capacity(self, workload: str) -> float:
        """Return the requests per second of no speculation with every place taken."""
        count = max(self._options.requests_closed, 3 * self._options.active)
        arm, _ = self._roster.arm(NONE)
        requests = self._requests(workload, "tuning-capacity", 0, count, NONE)
        wall_s: float = arm.run(OfferedLoad(requests, self._options.active)).wall_s
        return float(count / wall_s)


def best_choice(rates: dict[str, dict[str, float]], fixed: list[str]) -> dict[str, Any]:
    """Return the draft and length that are best over all batch sizes (geometric mean), and that
    draft's best length at each of them.
    """
    best = max(fixed, key=lambda name: math.prod(rates[name].values()))
    draft, length = fixed_choice(best)
    lengths = {NONE: 0} | {
        name: fixed_choice(name)[1] for name in fixed if fixed_choice(name)[0] == draft
    }
    schedule = [
        [int(level), lengths[max(lengths, key=lambda name, at=level: rates[name][at])]]  # type: ignore[misc]
        for level in rates[NONE]
    ]
    return {"draft": draft, "length": length, "schedule": schedule}


def _progress(work: list[Any], name: str) -> tqdm[Any]:
    """Return the work under a bar with the time left; a log file gets a line in half a minute."""
    return tqdm(
        work,
        desc=name,
        unit="run",
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 30,
    )


def repeated_share(text: str, size: int = 4) -> float:
    """Return the share of word n-grams of a text that occurred in it before: near 1 for a text that
    goes round in circles.
    """
    words = text.split()
    grams = [tuple(words[i : i + size]) for i in range(len(words) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def describe(result: LoadResult) -> dict[str, Any]:
    """Return a run's figures; texts may quote a corpus that must not be copied, so they are kept as
    hashes.
    """
    gaps = [gap for reply in result.replies for gap in reply.gaps_s]
    replies = [
        {
            **{
                key: _short(value)
                for key, value in asdict(reply).items()
                if key not in ("text", "gaps_s")
            },
            "text": hashlib.sha256(reply.text.encode()).hexdigest()[:16],
            "repeated_4grams": round(repeated_share(reply.text), 4),
            "token_s": _short((reply.total_s - reply.first_s) / (reply.output_tokens - 1))
            if reply.output_tokens > 1
            else None,
        }
        for reply in result.replies
    ]
    gap_p99_s = _short(float(np.quantile(gaps, 0.99)) if gaps else 0.0)
    counts = {name: _short(value) for name, value in result.counts.items()}
    return {
        "wall_s": _short(result.wall_s),
        "gap_p99_s": gap_p99_s,
        "replies": replies,
        "counts": counts,
    }


def _short(value: Any) -> Any:
    """Return seconds to the microsecond, and anything else as it is: a record is kept."""
    return round(value, 6) if isinstance(value, float) else value


def open_record(options: argparse.Namespace) -> dict[str, Any]:
    """Return the record to go on with. Raises SystemExit for a file of other settings, which is not
    overwritten.
    """
    settings = {key: value for key, value in vars(options).items() if key not in FREE}
    settings["config"] = json.loads(options.config.read_text("utf-8"))
    if options.out.exists():
        record: dict[str, Any] = json.loads(options.out.read_text("utf-8"))
        if record["settings"] != settings:
            differ = [key for key in settings if record["settings"].get(key) != settings[key]]
            raise SystemExit(
                f"{options.out} is of other settings ({', '.join(differ)}): give another --out"
            )
        if (there := record["machine"]["processor"]) != (here := machine.processor()):
            raise SystemExit(
                f"{options.out} is of another processor ({there}; here: {here}): give another --out"
            )
        return record
    return {
        **records.stamp(),
        "benchmark": "load sweep: policies under the same requests",
        "through": "loop in process" if options.in_process else "tritonserver, gRPC streaming",
        "settings": settings,
        "runs": [],
    }


def write(record: dict[str, Any], policies: list[str], path: Path) -> None:
    """Write the record with the figures of its runs so far."""
    by_point = sweep_figures.blocks(record["runs"], policies)
    ratios = sweep_figures.compare(by_point, policies)
    record |= {
        "summary": sweep_figures.summary(by_point, policies),
        "ratios": ratios,
        "overall": sweep_figures.overall(by_point, policies),
        "claims": sweep_figures.claims(ratios),
        "ablations": sweep_figures.ablations(by_point, policies),
        "noise": sweep_figures.noise(by_point),
    }
    records.write(path, record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sweep, or go on with it, and write its record and report."""
    if arguments is None:
        text = "stopped: the same command goes on"
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(text))  # its servers end with it
    command = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(command, __doc__ or "")
    record = open_record(options)
    config = record["settings"]["config"]
    prepare(parse_config(arm_config(config, SPINDLE, Tuning(), options.active)))
    measured = tables(parse_config(config))
    record["tables"] = {name: table.to_dict() for name, table in measured.items()}
    if options.ablations or any(map(is_ablation, options.policies or ())):
        # an arm with tables of its own would have a number of threads of its own
        config = {
            **config,
            "threads": next((table.provenance.threads for table in measured.values()), 1),
        }
        for name in (SPINDLE, *ablation_names(config)):
            prepare(parse_config(arm_config(config, name, Tuning(), options.active)))
    with tempfile.TemporaryDirectory() as folder:
        roster: Roster = (
            InProcess(config, options.active, options.servers)
            if options.in_process
            else Servers(config, options.active, Path(folder), options.servers)
        )
        sweep = Sweep(options, record, roster)
        try:
            whole = sweep.run(lambda: write(record, sweep.policies, options.out))
        finally:
            sweep.close()
            write(record, sweep.policies, options.out)
    record |= sweep_simulation.compare(record)
    write(record, sweep.policies, options.out)
    report = options.out.with_suffix(".html")
    write_report(record, report)
    print(
        f"wrote {options.out} and {report}"
        + ("" if whole else "; the time is up: the same command goes on")
    )


if __name__ == "__main__":
    main()
