"""Tokens a second against the text in flight, at several token budgets: ``python -m
bench.micro.token_budget [--json FILE]``.

The loop, the planner and the adapter over fake executors in virtual time
(``tests.contract.executor_time``): an 8B target and a 1B draft that agrees in 0.8 of all places,
latencies like an H200's; nothing ran on a GPU. Every text has ``--text`` tokens when its decoding
begins. ``chunks`` is how the adapter was: 8,192 tokens an iteration, chunked context, every request
admitted at once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from backend.engines.trtllm.folder import token_budget
from policy import AcceptanceConfig, AdaptivePlanner, LatencyModel, NoSpeculation, PlannerConfig
from tests.contract import executor_time
from tests.contract.executor_time import K_MAX, Served

AGREEMENT = 0.8
CONTEXT_S = {"target": 32e-9, "draft": 8e-9}
"""Reading one cached token: 128 and 32 KiB at 4 TB/s."""


@dataclass(frozen=True)
class Arm:
    """One way to run: the budget of an iteration (0: as derived), whether texts are cut,
    ``Served``'s ``capped``, and speculation.
    """

    name: str
    max_num_tokens: int
    chunked: bool = False
    capped: float = 1.0
    speculates: bool = True


def arms(text: int, most: int) -> list[Arm]:
    """Return the arms, from what was to what would take all."""
    whole = most * token_budget(1, text + 1024, K_MAX)
    return [
        Arm("chunks of 8,192 (as it was)", 8192, chunked=True, capped=0.0),
        Arm("chunks of 8,192, no speculation", 8192, chunked=True, capped=0.0, speculates=False),
        Arm("65,536, twice it in flight (as it is)", 65_536),
        Arm("65,536, twice it, no speculation", 65_536, speculates=False),
        Arm("65,536, once in flight", 65_536, capped=0.5),
        Arm("65,536, all in flight", 65_536, capped=0.0),
        Arm(f"{whole:,}, all at once", whole),
    ]


def goodput(arm: Arm, rows: int, text: int, seconds: float) -> dict[str, float]:
    """Return tokens a second of virtual time once no prompt is left, and how many requests were
    active.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        curves = {
            name: replace(curve, context_s=CONTEXT_S[name])
            for name, curve in (("target", executor_time.TARGET), ("draft", executor_time.DRAFT))
        }
        patch.setattr(executor_time, "TARGET", curves["target"])
        patch.setattr(executor_time, "DRAFT", curves["draft"])
        patch.setattr(executor_time, "PROMPT_TOKENS", text)
        again = {
            "target": 15.5 * 20e-6,
            "draft": 15.5 * 2.5e-6,
        }  # what of a block of 32 is computed again, by row
        planned = {name: replace(curve, row_s=again[name]) for name, curve in curves.items()}
        latency = LatencyModel(planned["target"], (planned["draft"],))
        acceptance = AcceptanceConfig(prior_hazard=AGREEMENT, prior_strength=1e12)
        config = PlannerConfig(k_max=K_MAX, acceptance=acceptance, explore_share=0.0)
        policy = AdaptivePlanner(("draft",), latency, config) if arm.speculates else NoSpeculation()
        served = Served(
            patch, Path(folder), policy, rows, AGREEMENT, tokens=1024, text_tokens=text + 1024,
            max_num_tokens=arm.max_num_tokens, chunked=arm.chunked, capped=arm.capped,
        )  # fmt: skip
        served.until_decoding()
        tokens_per_s = served.goodput(seconds, seconds / 2)
        executor = served.engines[0]._executor
        return {
            "tokens_per_s": round(tokens_per_s),
            "active": served.loop.counts()[0],
            "drift": round(
                float(served.policy.drift(served.loop.planning.state).get("verify", 1.0)), 3
            ),
            "discarded": executor.discarded,
        }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--text",
        type=int,
        nargs="+",
        default=[8192, 1024],
        help="tokens of each text when it begins to be decoded",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64], help="requests")
    parser.add_argument("--seconds", type=float, default=1.0, help="virtual time of each figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = []
    for text in args.text:
        print(
            "tokens a second (requests in flight)".ljust(38),
            *(f"{rows:>5} x {text}" for rows in args.rows),
        )
        for arm in arms(text, max(args.rows)):
            found = [goodput(arm, rows, text, args.seconds) for rows in args.rows]
            results += [
                {"arm": arm.name, "rows": rows, "text": text, **one}
                for rows, one in zip(args.rows, found, strict=True)
            ]
            print(
                arm.name.ljust(38),
                *(f"{one['tokens_per_s']:>5} ({one['active']:>2})" for one in found),
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
