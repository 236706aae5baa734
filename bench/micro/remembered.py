"""The worth of the draft ``suffix`` where requests to a server repeat. Prints JSON.

    python -m bench.micro.remembered --config model_repository/spindle/1/serving.json

Three workloads, each served by one request at a time: ``sql`` asks one schema different questions,
``agent`` runs loops of tool calls after one long prompt, ``other`` asks questions that have little
in common. Each arm serves all of them in order with an app of its own, which begins with nothing
remembered, by the adaptive policy. Reported are tokens a step, the proposed and accepted tokens,
and microseconds of the loop's thread in the draft: of a proposal at a full memory, and of adding an
answer, per token.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from backend.app import App, build
from backend.config import ServingConfig, load_config
from backend.engine_config import EngineConfig
from backend.engines.port import Turn
from backend.engines.suffix import SuffixEngine
from backend.kinds import KINDS
from backend.request import GenerationRequest, SamplingParams
from backend.sequence import Sequence
from bench import records
from bench.in_process import generate
from bench.prompts import PROMPTS

SCHEMA = """\
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, signed_up DATE);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER, placed_on DATE, total NUMERIC,
  status TEXT);
CREATE TABLE order_items (order_id INTEGER, product_id INTEGER, quantity INTEGER, price NUMERIC);
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT, category TEXT, stock INTEGER);"""
ASKED = (
    "How many orders have the status '{status}'?",
    "List the names of the customers in {city}.",
    "What is the total of all orders placed by customers from {city}?",
    "Which products of the category '{category}' have fewer than {number} in stock?",
    "Show the {number} customers with the most orders.",
    "What was the average total of orders with the status '{status}'?",
    "How many products of the category '{category}' were sold?",
)
VALUES = {
    "status": ("open", "paid", "shipped", "returned", "cancelled"),
    "city": ("Berlin", "Lyon", "Porto", "Bergen", "Graz"),
    "category": ("books", "toys", "garden", "music", "tools"),
    "number": ("3", "5", "10", "20", "50"),
}
TOOLS = """\
You are an agent of an online shop. Answer every message with one JSON object and nothing else.
Tools:
- find_customer: arguments name (string), city (string)
- list_orders: arguments customer_id (integer), status (string), limit (integer)
- refund_order: arguments order_id (integer), reason (string), notify (boolean)
- send_mail: arguments customer_id (integer), subject (string), body (string)
Example:
{"tool": "list_orders", "arguments": {"customer_id": 7, "status": "open", "limit": 10}}"""
RESULTS = (
    '{{"customer_id": {id}, "name": "{name}", "city": "{city}"}}',
    '{{"orders": [{{"order_id": {order}, "status": "paid", "total": {total}}}]}}',
    '{{"refunded": true, "order_id": {order}}}',
)
NAMES = ("Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "Jo", "Kim", "Lea")


def chat(*messages: tuple[str, str]) -> str:
    """Return messages (role, content) as ChatML, up to where the answer begins."""
    turns = (f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return "".join(turns) + "<|im_start|>assistant\n"


def questions(count: int, seed: int) -> list[str]:
    """Return prompts with different questions about one schema."""
    rng, prompts_made = random.Random(f"sql/{seed}"), list[str]()
    while len(prompts_made) < count:
        question = rng.choice(ASKED).format(**{k: rng.choice(v) for k, v in VALUES.items()})
        text = f"{SCHEMA}\n\nWrite one SQL query that answers: {question}"
        if chat(("user", text)) not in prompts_made:
            prompts_made.append(chat(("user", text)))
    return prompts_made


def loops(count: int, seed: int) -> list[str]:
    """Return prompts of an agent's steps, loop after loop. The steps before are as they should have
    been, so that every arm is asked the same.
    """
    rng, prompts_made = random.Random(f"agent/{seed}"), list[str]()
    while len(prompts_made) < count:
        buyer = {
            "id": rng.randrange(100, 999),
            "order": rng.randrange(10_000, 99_999),
            "total": rng.randrange(10, 300),
            "name": rng.choice(NAMES),
            "city": rng.choice(VALUES["city"]),
        }
        calls = (
            f'"find_customer", "arguments": {{"name": "{buyer["name"]}", "city": "{buyer["city"]}"',
            f'"list_orders", "arguments": {{"customer_id": {buyer["id"]}, "status": "paid", '
            '"limit": 10',
            f'"refund_order", "arguments": {{"order_id": {buyer["order"]}, "reason": "broken", '
            '"notify": true',
        )
        request = f"{buyer['name']} from {buyer['city']} wants the money back for a broken kettle."
        messages = [("system", TOOLS), ("user", request)]
        for call, result in zip(calls, RESULTS, strict=True):
            prompts_made.append(chat(*messages))
            answer = result.format(**buyer)
            messages += [("assistant", f'{{"tool": {call}}}}}'), ("user", answer)]
        prompts_made.append(chat(*messages))
    return prompts_made[:count]


def unlike(count: int, seed: int) -> list[str]:
    """Return prompts that have little in common."""
    messages = [message for kind in PROMPTS.values() for message in kind]
    random.Random(f"other/{seed}").shuffle(messages)
    return [chat(("user", message)) for message in itertools.islice(messages, count)]


WORKLOADS = {"sql": questions, "agent": loops, "other": unlike}
ARMS = {
    "lookup": ("lookup",),
    "suffix": ("suffix",),
    "both": ("lookup", "suffix"),
    "head": ("head",),
    "head, suffix": ("head", "suffix"),
}


def app_of(config: ServingConfig, names: tuple[str, ...]) -> App:
    """Return an app with these drafts: those of a configuration, or of a kind without a model."""
    by_name = {draft.name: draft for draft in config.drafts}
    drafts = tuple(
        by_name.get(name) or EngineConfig(engine=name, name=name)
        for name in names
        if name in by_name or name in KINDS
    )
    policy = replace(config.policy, keep_learned=False)
    return build(replace(config, drafts=drafts, policy=policy))


def serve(app: App, prompts: list[str], max_tokens: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Return what serving the prompts took, and the texts."""
    started = time.perf_counter()
    requests = [GenerationRequest(prompt, max_tokens, temperature=0.0) for prompt in prompts]
    sessions = generate(app, requests)
    seconds = time.perf_counter() - started
    tokens = sum(session.output_tokens for session in sessions)
    accepted = sum(session.accepted for session in sessions)
    by_draft = {
        name: [sum(s.drafts.get(name, (0, 0))[place] for s in sessions) for place in (0, 1)]
        for name in sorted({name for session in sessions for name in session.drafts})
    }
    figures = {
        "tokens_per_step": round(tokens / (tokens - accepted), 3),
        "seconds": round(seconds, 1),
        "tokens": tokens,
        "proposed_and_accepted": by_draft,
    }
    return figures, [s.sequence.tokens[s.sequence.prompt_tokens :] for s in sessions]


def compare(config: ServingConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Return for each workload what each arm took, and how many texts differ between arms."""
    results: dict[str, Any] = {}
    for name, prompts in WORKLOADS.items():
        results[name], texts = {}, list[list[list[int]]]()
        requests = prompts(options.count, options.seed)
        for arm in options.arms:
            app = app_of(config, ARMS[arm])
            figures, answers = serve(app, requests, options.max_tokens)
            app.close()
            del app
            gc.collect()  # a model's weights, before the next one's
            results[name][arm] = figures
            print(name, arm, figures, file=sys.stderr, flush=True)
            texts.append(answers)
        same = sum(
            one == other
            for answers in texts[1:]
            for one, other in zip(texts[0], answers, strict=True)
        )
        compared = len(requests) * (len(texts) - 1)
        results[name] |= {"prompts": len(requests), "texts_compared": compared, "same": same}
    return results


def costs(tokens: int, seed: int) -> dict[str, Any]:
    """Return what a proposal and keeping answers take with ``tokens`` remembered: microseconds of
    the thread's CPU time, texts of Zipf-distributed words, half of them another tenant's.
    """
    rng = random.Random(f"costs/{seed}")
    words = [[rng.randrange(49152) for _ in range(rng.randrange(2, 9))] for _ in range(3000)]
    weights = list(itertools.accumulate(1 / (1 + place) for place in range(len(words))))

    def sequence(number: int, length: int) -> Sequence:
        picks = rng.choices(words, cum_weights=weights, k=length // 2)
        text = list(itertools.chain.from_iterable(picks))[:length]
        return Sequence(number, text, 64, SamplingParams(), salt=rng.choice("ab"))

    engine = SuffixEngine("suffix", remembered_tokens=tokens, max_draft_tokens=8)
    numbers, adding = itertools.count(), []
    while engine.remembered_tokens < tokens - 1000:
        text = sequence(next(numbers), rng.choice((128, 256, 512)))
        started = time.thread_time()
        engine.remember(text)
        adding.append((time.thread_time() - started) / (len(text.tokens) - 64))
        engine.cancel([text.id])
    proposing = []
    for _ in range(2000):
        text = sequence(next(numbers), rng.randrange(128, 400))
        new, text.tokens = text.tokens[-3:], text.tokens[:-3]
        engine.available(text, 8)  # the text before was read step by step
        text.tokens = text.tokens + new
        started = time.thread_time()
        engine.available(text, 8)
        engine.submit([Turn(text, len(text.tokens), run=8, nodes=256)])
        engine.poll(0.0)
        proposing.append(time.thread_time() - started)
        engine.cancel([text.id])
    return {
        "remembered_tokens": engine.remembered_tokens,
        "proposal_us": {
            "median": round(1e6 * statistics.median(proposing), 1),
            "p90": round(1e6 * statistics.quantiles(proposing, n=10)[-1], 1),
        },
        "adding_us_per_token": round(1e6 * statistics.median(adding), 2),
    }


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["lookup", "suffix"])
    parser.add_argument("--count", type=int, default=50, help="prompts of a workload")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--remembered-tokens", type=int, default=2**20, help="of the costs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = {
        "seed": options.seed,
        "costs": costs(options.remembered_tokens, options.seed),
        "workloads": compare(load_config(options.config), options),
    }
    print(json.dumps(records.stamp() | report, indent=1))


if __name__ == "__main__":
    main()
