"""What one rule of acceptance makes of proposals: tokens a step of chains, trees and trimmed trees.

    python -m bench.micro.one_rule measure --out RAW
    python -m bench.micro.one_rule compare --before OLD_RAW --after RAW --out FILE

``measure`` has the shipped target follow each shipped draft over prompts of the five workloads,
engine to engine, no server between. ``ARMS`` names what is proposed. ``adaptive`` arms are the loop
with its planner, which trims. A step is one pass of the target behind the prompt; tokens behind an
end token are not counted. ``compare`` gives means with intervals (95 %, resampling prompts) and
ratios by prompt; a record made by an adapter of an older port stands beside under its arms' names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from backend import machine
from backend.app import App, build
from backend.config import ServingConfig, load_config
from backend.engines.port import Completion, Engine, Turn
from backend.engines.registry import Service, make_engine
from backend.model_folders import model_path
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from backend.storage.tables import read_table
from backend.tokenizer import load_tokenizer
from backend.triton_adapter.paths import PROJECT_ROOT
from bench import workloads
from bench.in_process import Sink, serve
from policy import IntArray, Outcome, Policy
from policy.plan import FloatArray

CONFIG = PROJECT_ROOT / "model_repository" / "spindle" / "1" / "serving.json"
TABLES = PROJECT_ROOT / "policy" / "simulation" / "tables"
TEMPERATURES = (0.0, 0.7, 1.0)
LONGEST_PROMPT = 600
RESAMPLES = 2000
MANY = 64
"""Nodes enough for all that a draft's forwards give."""
ADAPTIVE = "adaptive"
PARTS = ("engines", "loop")


@dataclass(frozen=True, slots=True)
class Arm:
    """A draft runs ``run`` forwards for its ``nodes`` best nodes.

    Only the spine is verified where ``chain``; else the nodes of confidence ``least`` or more.
    """

    run: int
    nodes: int
    chain: bool = False
    least: float = 0.0


ARMS = {
    "chain 4": Arm(4, MANY, chain=True),
    "chain 8": Arm(8, MANY, chain=True),
    "tree 4 of 4": Arm(4, 4),
    "tree 8 of 4": Arm(4, 8),
    "tree 8 of 8": Arm(8, 8),
    "trimmed 8 of 4": Arm(4, 8, least=0.1),
}
OVER = (
    ("chain 4", "before chain 4"),
    ("chain 8", "before chain 8"),
    ("tree 4 of 4", "before chain 4"),
    ("tree 4 of 4", "before tree 4"),
    ("tree 8 of 4", "before tree 8"),
    ("tree 8 of 8", "before chain 8"),
    ("tree 8 of 8", "before tree 8"),
    ("trimmed 8 of 4", "before chain 4"),
    ("trimmed 8 of 4", "before tree 8"),
    (ADAPTIVE, f"before {ADAPTIVE}"),
)
"""Arms with as many verified nodes, or as many of the draft's forwards."""


@dataclass(slots=True)
class Count:
    """What became of one text: ``proposing`` steps had a proposal, of ``nodes`` verified in all."""

    tokens: int = 0
    steps: int = 0
    proposing: int = 0
    nodes: int = 0
    accepted: int = 0

    def add(self, tokens: int, nodes: int, accepted: int) -> None:
        """Count a step."""
        self.tokens += tokens
        self.steps += 1
        self.proposing += nodes > 0
        self.nodes += nodes
        self.accepted += accepted


FIELDS = len(fields(Count))


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt of a workload as token ids, to be answered with the noise of ``seed``."""

    workload: str
    prompt: list[int]
    seed: int


class Port:
    """How the engines are asked; an older port is another class of this kind."""

    prefix = ""

    def arms_of(self, draft: Engine) -> dict[str, Arm]:
        """Return the arms that a draft is measured with."""
        del draft
        return ARMS

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """Return the options of a text."""
        return SamplingParams(temperature=temperature, seed=seed)

    def proposals(self, draft: Engine, sequences: list[Sequence], arm: Arm) -> dict[int, Proposal]:
        """Return what is proposed by sequence id; nothing where the draft has nothing."""
        asked = [s for s in sequences if draft.available(s, arm.run) >= arm.run]
        turns = [Turn(s, len(s.tokens), arm.run, nodes=arm.nodes) for s in asked]
        found = {}
        for completion in completed(draft, turns):
            if proposal := completion.proposal:
                kept = sum(confidence >= arm.least for confidence in proposal.confidence)
                verified = proposal.spine() if arm.chain else proposal.first(kept)
                found[completion.sequence_id] = verified
        return found

    def nodes(self, proposal: Proposal) -> int:
        """Return how many nodes are verified."""
        return len(proposal)

    def emitted(self, sequence: Sequence) -> None:
        """Note that a sequence has had a step."""

    def verified(self, outcome: Outcome) -> list[int]:
        """Return how many nodes of each row were verified."""
        verified: list[int] = outcome.verified.tolist()
        return verified


def completed(engine: Engine, turns: list[Turn]) -> list[Completion]:
    """Return what turns came to. Raises RuntimeError where one failed."""
    engine.submit(turns)
    found: list[Completion] = []
    while len(found) < len(turns):
        found += engine.poll(1.0)
    if errors := [completion.error for completion in found if completion.error]:
        raise RuntimeError(errors[0])
    return found


def answered(
    port: Port,
    target: Engine,
    draft: Engine,
    texts: list[Text],
    arm: Arm,
    temperature: float,
    length: int,
    ends: frozenset[int],
) -> list[Count]:
    """Answer all texts side by side, up to ``length`` tokens and an end token, and count."""
    blocks = -(-(LONGEST_PROMPT + length + MANY) // BLOCK_TOKENS) + 1
    rows = {}
    for number, text in enumerate(texts):
        table = list(range(number * blocks, (number + 1) * blocks))
        own = {engine.name: list(table) for engine in (target, draft) if engine.limits.kv_blocks}
        sampling = port.sampling(temperature, text.seed)
        rows[number] = Sequence(number, list(text.prompt), len(text.prompt), sampling, own)
    counts = {number: Count() for number in rows}
    for completion in completed(target, [Turn(s, len(s.tokens)) for s in rows.values()]):
        rows[completion.sequence_id].tokens += completion.tokens
        port.emitted(rows[completion.sequence_id])
    running = [s for s in rows.values() if s.tokens[-1] not in ends]
    while running:
        proposed = port.proposals(draft, running, arm)
        turns = [Turn(s, len(s.tokens), proposal=proposed.get(s.id)) for s in running]
        for completion in completed(target, turns):
            sequence, proposal = rows[completion.sequence_id], proposed.get(completion.sequence_id)
            taken = up_to(completion.tokens, ends)
            sequence.tokens += taken
            port.emitted(sequence)
            accepted = min(completion.accepted, len(taken))
            counts[sequence.id].add(len(taken), port.nodes(proposal) if proposal else 0, accepted)
        running = [s for s in running if s.tokens[-1] not in ends]
        running = [s for s in running if len(s.tokens) - s.prompt_tokens < length]
    for engine in (target, draft):
        engine.cancel(rows)
    return list(counts.values())


def up_to(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Return tokens up to the first end."""
    end = next((at for at, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    return tokens[:end]


# -- the loop


class Watched:
    """A policy whose outcomes are counted by request."""

    def __init__(self, policy: Policy, port: Port) -> None:
        self._policy, self._port = policy, port
        self.counts: dict[int, Count] = defaultdict(Count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, outcome: Outcome, state: Any, now: float) -> Any:
        """Count, and let it learn."""
        rows = (c.tolist() for c in (outcome.request, outcome.emitted, outcome.accepted))
        columns = zip(*rows, self._port.verified(outcome), strict=True)
        for request, emitted, accepted, nodes in columns:
            self.counts[request].add(emitted, nodes, min(accepted, emitted))
        return self._policy.observe(outcome, state, now)


def loop_answers(
    port: Port,
    app: App,
    texts: list[Text],
    temperature: float,
    length: int,
) -> list[Count]:
    """Serve texts one at a time with the configured policy, which begins cold."""
    watched = Watched(app.orchestrator.planning.policy, port)
    asked = GenerationRequest("", length, temperature=temperature or None)
    sessions = []
    for text in texts:
        request = replace(asked, prompt_token_ids=tuple(text.prompt), seed=text.seed)
        sessions.append(app.session(request, Sink()))
    serve(app, sessions, 1, cast(Policy, watched))
    return [without_first(watched.counts[session.id]) for session in sessions]


def without_first(count: Count) -> Count:
    """Leave out the pass of the prompt, which emits a token and has no proposal."""
    return replace(count, tokens=count.tokens - 1, steps=count.steps - 1)


# -- measure


def prompts(config: ServingConfig, each: int, seeds: int, seed: int) -> list[Text]:
    """Return texts to answer: ``seeds`` of each prompt, side by side."""
    folder = model_path(config.target)
    tokenizer = load_tokenizer(folder)
    texts = []
    for kind in workloads.NAMES:
        messages = workloads.load(kind, 4 * each, seed).messages
        encoded = [tokenizer.encode(workloads.render(message, folder)) for message in messages]
        chosen = [prompt for prompt in encoded if len(prompt) <= LONGEST_PROMPT][:each]
        texts += [Text(kind, prompt, seed + number) for prompt in chosen for number in range(seeds)]
    return texts


def measure(args: argparse.Namespace, port: Port) -> dict[str, Any]:
    """Count for every arm, draft and temperature.

    A row is [workload, prompt, tokens, steps, ...] of a text.
    """
    torch.set_num_threads(1)
    config = load_config(CONFIG)
    texts = prompts(config, args.prompts, args.seeds, args.seed)
    room = len(texts) * (LONGEST_PROMPT + args.tokens + 2 * MANY)
    config = replace(config, limits=replace(config.limits, kv_cache_tokens=room))
    ends = load_tokenizer(model_path(config.target)).end_ids
    record: dict[str, Any] = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    settings = {key: getattr(args, key) for key in ("prompts", "seeds", "tokens", "seed")}
    if record.setdefault("settings", settings) != settings:
        raise SystemExit(f"{args.out} is of other settings: give another --out")
    dtypes = [engine.dtype for engine in (config.target, *config.drafts)]
    record |= {"machine": machine.describe(), "dtypes": dtypes}
    rows = record.setdefault("rows", {})
    for name, run in works(config, port, args, texts, ends):
        if name in rows:
            continue
        started_s = time.perf_counter()
        found = enumerate(zip(texts, run(), strict=True))
        rows[name] = [[t.workload, n // args.seeds, *astuple(count)] for n, (t, count) in found]
        args.out.write_text(json.dumps(record) + "\n", "utf-8")
        tokens, steps = by_prompt(rows[name])[1].sum(axis=0)[:2]
        line = f"{name}: {tokens / steps:.3f} ({time.perf_counter() - started_s:.0f} s)"
        print(line, file=sys.stderr, flush=True)
    return record


Work = Callable[[], list[Count]]


def works(
    config: ServingConfig,
    port: Port,
    args: argparse.Namespace,
    texts: list[Text],
    ends: frozenset[int],
) -> Iterator[tuple[str, Work]]:
    """Yield (name, what counts) of every arm: those of the engines, then those of the loop."""
    if "engines" in args.parts:
        target = make_engine(config.target, Service(config, 1, model_path))
        for settings in config.drafts:
            draft = make_engine(settings, Service(config, 1, model_path))
            for temperature in TEMPERATURES:
                for arm_name, arm in port.arms_of(draft).items():
                    name = f"{port.prefix}{arm_name}/{settings.name}/{temperature}"
                    asked = (texts, arm, temperature, args.tokens, ends)
                    yield name, partial(answered, port, target, draft, *asked)
            draft.close()
        target.close()
    if "loop" in args.parts:
        table, small = (read_table(TABLES / f"smollm2-cpu-{of}.json") for of in ("target", "small"))
        for drafts in (config.drafts, *((draft,) for draft in config.drafts)):
            tables = {"target": table, **{draft.name: small for draft in drafts}}
            app = build(replace(config, drafts=drafts), tables)
            label = drafts[0].name if len(drafts) == 1 else "all"
            for temperature in TEMPERATURES:
                name = f"{port.prefix}{ADAPTIVE}/{label}/{temperature}"
                yield name, partial(loop_answers, port, app, texts, temperature, args.tokens)
            app.close()


# -- compare


Rows = list[list[Any]]


def by_prompt(rows: Rows) -> tuple[list[str], IntArray]:
    """Return workloads and int64[prompts, counts]: the texts of a prompt are one case."""
    sums: dict[tuple[str, int], IntArray] = defaultdict(lambda: np.zeros(FIELDS, np.int64))
    for workload, prompt, *counts in rows:
        sums[workload, prompt] += np.array(counts)
    return [workload for workload, _ in sums], np.stack(list(sums.values()))


def rate(counts: IntArray) -> Any:
    """Return tokens a step of summed counts [..., counts]."""
    return counts[..., 0] / counts[..., 1]


def drawn(counts: IntArray, seed: int) -> IntArray:
    """Return sums [resamples, counts] over prompts drawn with replacement, alike for all arms."""
    rng = np.random.default_rng(seed)
    sums: IntArray = counts[rng.integers(len(counts), size=(RESAMPLES, len(counts)))].sum(axis=1)
    return sums


def interval(values: FloatArray) -> list[float]:
    """Return the 95 % interval of resampled values."""
    return [round(float(end), 4) for end in np.quantile(values, [0.025, 0.975])]


def figures(rows: Rows, seed: int) -> dict[str, Any]:
    """Return what an arm comes to."""
    kinds, counts = by_prompt(rows)
    own = {kind: counts[[k == kind for k in kinds]] for kind in dict.fromkeys(kinds)}
    return {
        **means(counts),
        "interval_95": interval(rate(drawn(counts, seed))),
        "by_workload": {kind: means(chosen) for kind, chosen in own.items()},
    }


def means(counts: IntArray) -> dict[str, float]:
    """Return what int64[prompts, counts] come to: ``accepted`` of a node verified."""
    tokens, steps, proposing, nodes, accepted = counts.sum(axis=0).tolist()
    return {
        "tokens_per_step": round(tokens / steps, 4),
        "nodes_per_step": round(nodes / steps, 3),
        "proposing": round(proposing / steps, 4),
        "accepted": round(accepted / max(nodes, 1), 4),
    }


def ratio(ours: Rows, theirs: Rows, seed: int) -> dict[str, Any]:
    """Return the ratio of tokens a step with its interval, over all prompts and by workload."""
    (kinds, one), (_, other) = by_prompt(ours), by_prompt(theirs)
    value = float(rate(one.sum(axis=0)) / rate(other.sum(axis=0)))
    own = {}
    for kind in dict.fromkeys(kinds):
        chosen = [k == kind for k in kinds]
        pair = (rate(counts[chosen].sum(axis=0)) for counts in (one, other))
        own[kind] = round(float(next(pair) / next(pair)), 4)
    return {
        "ratio": round(value, 4),
        "interval_95": interval(rate(drawn(one, seed)) / rate(drawn(other, seed))),
        "by_workload": own,
    }


def against(name: str, rows: dict[str, Rows], seed: int) -> Iterator[dict[str, Any]]:
    """Yield an arm's ratios of ``OVER`` to those that there are."""
    arm, draft, temperature = name.split("/")
    for over in (f"{other}/{draft}/{temperature}" for one, other in OVER if one == arm):
        if over in rows:
            yield {"arm": name, "over": over, **ratio(rows[name], rows[over], seed)}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of both sides' arms and of the ratios of ``OVER``."""
    *before, after = (json.loads(path.read_text("utf-8")) for path in (*args.before, args.after))
    rows: dict[str, Rows] = {}
    for path, record in zip((*args.before, args.after), (*before, after), strict=True):
        if record["settings"] != after["settings"]:
            raise SystemExit(f"{path} and {args.after} are of different settings")
        rows |= record["rows"]
    seed = after["settings"]["seed"]
    ratios = [pair for name in after["rows"] for pair in against(name, rows, seed)]
    known = {key: after[key] for key in ("machine", "dtypes", "settings")}
    return {
        **known,
        "arms": {name: figures(of, seed) for name, of in rows.items()},
        "ratios": ratios,
    }


def main(port: Port | None = None) -> None:
    """Read the arguments, measure or compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--prompts", type=int, default=12, help="of each workload")
    measuring.add_argument("--seeds", type=int, default=1, help="texts behind each prompt")
    measuring.add_argument("--tokens", type=int, default=48, help="of a text, at the least")
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    comparing = commands.add_parser("compare")
    comparing.add_argument("--before", type=Path, nargs="*", default=(), help="by an older port")
    comparing.add_argument("--after", type=Path, required=True)
    for command in (measuring, comparing):
        command.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args, port or Port())
    else:
        args.out.write_text(json.dumps(compare(args), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
