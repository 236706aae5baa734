"""Each draft's worth to its target, by workload: how often the j-th proposed token holds,
tokens a step of chains and trees, cost, coverage, and how far its confidence can be believed.

    python -m bench.micro.hazards --config SERVING.JSON [--prompts 16] [--out FILE]

The target answers prompts that no training text resembles (MT-Bench, news to summarise, questions
over Wikipedia, SQL over tables of its own, functions of held-out modules), greedily and at 0.8.
Then every draft of the configuration, as the engine that serves, proposes at every place of these
answers, given the target's states there. So a hazard counts all places, not only those where some
policy would have drafted; tokens a step are of walks along the answers. Intervals: 95 %,
resampling prompts. Costs: CPU time of a proposal of 4 tokens, a row, over a plain pass of the
target, in turn, one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backend.config import ServingConfig, load_config
from backend.engines.port import Completion, Engine, HiddenStates, ReadsTarget, Turn
from backend.engines.registry import Service, make_engine
from backend.model_folders import model_path, with_kv
from backend.request import SamplingParams
from backend.sequence import BLOCK_TOKENS, Proposal, Sequence
from backend.tokenizer import load_tokenizer
from bench import records
from bench.workloads import load, render
from engines_build.distill.evaluation_sets import sql_questions, wikipedia_questions

WORKLOADS = ("chat", "summarise", "qa", "sql", "code")
TEMPERATURES = (0.0, 0.8)
PLACES = 4
NODES = 8
RESAMPLES = 1000
BINS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)
_IDS = count(1)


def messages(workload: str, number: int, seed: int) -> list[str]:
    """Return ``number`` messages of a workload."""
    if workload in ("chat", "summarise", "code"):
        return list(load(workload, number, seed).messages)
    every = (
        wikipedia_questions() if workload == "qa" else [question for question, _ in sql_questions()]
    )
    return random.Random(f"{workload}/{seed}").sample(every, number)


@dataclass(slots=True)
class TargetAnswer:
    """A prompt with the target's answer, and the hidden states of the step that drew each token."""

    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    states: list[HiddenStates | None] = field(default_factory=list)

    def at(self, place: int) -> Sequence:
        """Return the request as it was with the first ``place`` tokens of its answer."""
        end = self.prompt_tokens + place
        return Sequence(0, self.tokens[:end], self.prompt_tokens, self.sampling)

    def show(self, draft: Engine, sequence: Sequence, place: int) -> None:
        """Let a draft that reads the target take what it has computed for ``at(place)``."""
        states = self.states[place - 1]
        if isinstance(draft, ReadsTarget) and states is not None:
            draft.absorb([(sequence, states)])


@dataclass(slots=True)
class AnswerProposals:
    """One draft's proposals along one answer, by place (None: nothing)."""

    proposals: list[Proposal | None]
    tokens: list[int]

    def accepted_at(self, place: int, *, chain: int = 0, nodes: int = NODES) -> int:
        """Return how many tokens a step at a place accepts."""
        proposal = self.proposals[place]
        if proposal is None:
            return 0
        part = proposal.spine().first(chain) if chain else proposal.first(nodes)
        return len(part.follow(self.tokens[place:]))

    def walk(self, **options: int) -> tuple[int, int]:
        """Return (tokens, steps) of speculation along the answer, from its second token on."""
        place, steps = 1, 0
        while place < len(self.tokens):
            place += 1 + self.accepted_at(place, **options)
            steps += 1
        return min(place, len(self.tokens)) - 1, steps


def answers(
    target: Engine,
    prompts: list[list[int]],
    sampling: Callable[[int], SamplingParams],
    most: int,
    ends: frozenset[int],
) -> list[TargetAnswer]:
    """Have the target answer prompts in one batch."""
    room = -(-(max(map(len, prompts)) + most + 8) // BLOCK_TOKENS)
    going, done = {}, []
    for row, prompt in enumerate(prompts):
        blocks = {target.name: list(range(row * room, (row + 1) * room))}
        sequence = Sequence(next(_IDS), list(prompt), len(prompt), sampling(row), blocks)
        done.append(TargetAnswer(sequence.tokens, len(prompt), sequence.sampling))
        going[sequence.id] = (sequence, done[-1])
    while going:
        target.submit([Turn(sequence, len(sequence.tokens)) for sequence, _ in going.values()])
        for completion in poll(target, len(going)):
            sequence, answer = going[completion.sequence_id]
            sequence.tokens += completion.tokens
            answer.states.append(completion.hidden_states)
            if completion.tokens[-1] in ends or len(answer.states) == most:
                target.cancel([sequence.id])
                del going[sequence.id]
    return done


def poll(engine: Engine, number: int) -> list[Completion]:
    """Return ``number`` completions. Raises RuntimeError for one that failed."""
    completions: list[Completion] = []
    while len(completions) < number:
        completions += engine.poll(1.0)
    for completion in completions:
        if completion.error is not None:
            raise RuntimeError(f"engine {engine.name!r}: {completion.error}")
    return completions


def propose_everywhere(draft: Engine, batch: list[TargetAnswer]) -> list[AnswerProposals]:
    """Have a draft propose at every place of the answers, all of them in one batch."""
    room = -(-(max(len(answer.tokens) for answer in batch) + PLACES + 1) // BLOCK_TOKENS)
    proposals = [AnswerProposals([None], answer.tokens[answer.prompt_tokens :]) for answer in batch]
    ids = [next(_IDS) for _ in batch]
    for place in range(1, max(len(one.tokens) for one in proposals)):
        turns = []
        for row, answer in enumerate(batch):
            if place >= len(proposals[row].tokens):
                continue
            sequence = answer.at(place)
            sequence.id = ids[row]
            sequence.blocks = {draft.name: list(range(row * room, (row + 1) * room))}
            proposals[row].proposals.append(None)
            answer.show(draft, sequence, place)
            if draft.available(sequence, PLACES):
                turns.append(Turn(sequence, len(sequence.tokens), run=PLACES, nodes=256))
        draft.submit(turns)
        for completion in poll(draft, len(turns)):
            proposals[ids.index(completion.sequence_id)].proposals[place] = completion.proposal
    draft.cancel(ids)
    return proposals


def figures(proposals: list[AnswerProposals], seed: int) -> dict[str, Any]:
    """Return a draft's figures along the answers."""
    alive, matched = np.zeros(PLACES, int), np.zeros(PLACES, int)
    claims: list[tuple[float, bool]] = []
    places = covered = 0
    for one in proposals:
        for place, proposal in enumerate(one.proposals):
            places += place > 0
            if proposal is None or not len(proposal):
                continue
            covered += 1
            accepted = len(proposal.spine().first(PLACES).follow(one.tokens[place:]))
            length = min(PLACES, len(proposal.spine()), len(one.tokens) - place)
            for depth in range(length):
                alive[depth] += accepted >= depth
                matched[depth] += accepted > depth
            first = proposal.tokens[0] == one.tokens[place]
            claims.append((proposal.confidence[0], first))
    walks = {
        "chain_4": [one.walk(chain=4) for one in proposals],
        f"tree_{NODES}": [one.walk() for one in proposals],
    }
    return {
        "places": places,
        "proposes": round(covered / max(places, 1), 3),
        "hazards": [round(h / a, 3) if a else None for h, a in zip(matched, alive, strict=True)],
        "tokens_per_step": {name: ratio(walk, seed) for name, walk in walks.items()},
        "reliability": reliability(claims),
    }


def ratio(walks: list[tuple[int, int]], seed: int) -> list[float]:
    """Return tokens a step, and the bounds of its interval."""
    counts, rng = np.array(walks, float), np.random.default_rng(seed)
    picks = rng.integers(len(counts), size=(RESAMPLES, len(counts)))
    sums = counts[picks].sum(1)
    low, high = np.percentile(sums[:, 0] / np.maximum(sums[:, 1], 1), [2.5, 97.5])
    return [round(float(x), 3) for x in (counts[:, 0].sum() / counts[:, 1].sum(), low, high)]


def reliability(claims: list[tuple[float, bool]]) -> list[dict[str, float]]:
    """Return how many first nodes there were in each bin of confidence, and how many matched."""
    if not claims:
        return []
    values, matched = (np.array(column) for column in zip(*claims, strict=True))
    bins = np.digitize(values, BINS[1:-1])
    return [
        {
            "claimed": round(float(values[bins == b].mean()), 3),
            "held": round(float(matched[bins == b].mean()), 3),
            "nodes": int((bins == b).sum()),
        }
        for b in range(len(BINS) - 1)
        if (bins == b).any()
    ]


def costs(
    target: Engine, drafts: list[Engine], answer: TargetAnswer, rounds: int
) -> dict[str, Any]:
    """Return the median CPU milliseconds of a plain pass and of a token of each draft, one row."""
    blocks = -(-(len(answer.tokens) + PLACES + 1) // BLOCK_TOKENS)
    arms: dict[str, Callable[[int], None]] = {}
    for engine in (target, *drafts):
        number = next(_IDS)

        def step(place: int, engine: Engine = engine, number: int = number) -> None:
            sequence = answer.at(place)
            sequence.id, sequence.blocks = number, {engine.name: list(range(blocks))}
            end = len(sequence.tokens)
            drafting = engine is not target
            if place == 1:
                engine.cancel([number])
            answer.show(engine, sequence, place)
            if drafting and not engine.available(sequence, PLACES):
                return
            run: dict[str, Any] = {"run": PLACES, "nodes": NODES} if drafting else {}
            engine.submit([Turn(sequence, end, **run)])
            poll(engine, 1)

        arms[engine.name] = step
    spent: dict[str, list[float]] = {name: [] for name in arms}
    places = len(answer.tokens) - answer.prompt_tokens
    for turn in range(rounds):
        for name, arm in arms.items():
            began = time.thread_time()
            arm(1 + turn % (places - 1))
            spent[name].append(time.thread_time() - began)
    ms = {name: 1e3 * float(np.median(times[2:])) for name, times in spent.items()}
    whole = ms.pop(target.name)
    token = {name: value / PLACES for name, value in ms.items()}
    return {
        "target_ms": round(whole, 3),
        "token_ms": {name: round(value, 3) for name, value in token.items()},
        "token_of_target": {name: round(value / whole, 4) for name, value in token.items()},
    }


def measure(config: ServingConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Run every workload and temperature."""
    config = with_kv(config)
    service, folder = Service(config, 1, model_path), model_path(config.target)
    target = make_engine(config.target, service)
    drafts = [make_engine(draft, service) for draft in config.drafts]
    tokenizer = load_tokenizer(folder)
    rows, last = [], None
    for workload in args.workloads:
        texts = messages(workload, args.prompts, args.seed)
        prompts = [tokenizer.encode(render(text, folder)) for text in texts]
        prompts = [p for p in prompts if len(p) + args.tokens < config.limits.max_context_tokens]
        for temperature in TEMPERATURES:

            def sampling(row: int, temperature: float = temperature) -> SamplingParams:
                seed = args.seed * 1000 + row
                return SamplingParams(temperature, seed=seed) if temperature else SamplingParams()

            batch = answers(target, prompts, sampling, args.tokens, frozenset(tokenizer.end_ids))
            row = {"workload": workload, "temperature": temperature, "texts": len(batch)}
            row["drafts"] = {
                d.name: figures(propose_everywhere(d, batch), args.seed) for d in drafts
            }
            rows.append(row)
            last = max(batch, key=lambda answer: len(answer.tokens))
            print(table(row), file=sys.stderr, flush=True)
    record: dict[str, Any] = {"workloads": rows}
    if last is not None:
        record["costs"] = costs(target, drafts, last, args.rounds)
        print(record["costs"], file=sys.stderr)
    return record


def table(row: dict[str, Any]) -> str:
    """Return the lines of a workload's table."""
    lines = [
        f"{row['workload']}, temperature {row['temperature']}, {row['texts']} texts",
        "| draft | proposes | 1st | 2nd | 3rd | 4th | chain of 4 | tree of 8 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, figures in row["drafts"].items():
        hazards = ["-" if h is None else f"{h:.2f}" for h in figures["hazards"]]
        rates = [f"{r[0]:.2f} ({r[1]:.2f}-{r[2]:.2f})" for r in figures["tokens_per_step"].values()]
        lines.append(
            f"| {name} | {figures['proposes']:.2f} | " + " | ".join(hazards + rates) + " |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the arguments, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=16, help="of each workload")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(args.config)
    record = {
        "dtypes": {e.name: [e.engine, e.dtype] for e in (config.target, *config.drafts)},
    }
    with torch.inference_mode():
        record |= measure(config, args)
    if args.out:
        records.write(args.out, record)
    else:
        print(json.dumps(records.stamp() | record, indent=1))


if __name__ == "__main__":
    main()
