"""What the draft ``suffix`` is worth where a server is asked alike again and again. Prints JSON.

    python -m bench.micro.remembered --config model_repository/spindle/1/serving.json

Three workloads, each served by one request at a time: ``sql`` asks one schema different questions,
``agent`` runs loops of tool calls behind one long prompt, ``other`` asks questions that have little
in common. Each arm serves all of them in order with an app of its own, which begins with nothing
remembered, by the adaptive policy. Told are tokens a step, the proposed and accepted tokens, and
microseconds of the loop's thread in the draft: of a proposal at a full memory, and of adding an
answer, per token.
"""

from __future__ import annotations

import itertools
import random

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
    said = (f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return "".join(said) + "<|im_start|>assistant\n"


def questions(count: int, seed: int) -> list[str]:
    """Return prompts with different questions about one schema."""
    rng, found = random.Random(f"sql/{seed}"), list[str]()
    while len(found) < count:
        question = rng.choice(ASKED).format(**{k: rng.choice(v) for k, v in VALUES.items()})
        text = f"{SCHEMA}\n\nWrite one SQL query that answers: {question}"
        if chat(("user", text)) not in found:
            found.append(chat(("user", text)))
    return found


def loops(count: int, seed: int) -> list[str]:
    """Return prompts of an agent's steps, loop after loop. The steps before are as they should have
    been, so that every arm is asked the same.
    """
    rng, found = random.Random(f"agent/{seed}"), list[str]()
    while len(found) < count:
        known = {
            "id": rng.randrange(100, 999),
            "order": rng.randrange(10_000, 99_999),
            "total": rng.randrange(10, 300),
            "name": rng.choice(NAMES),
            "city": rng.choice(VALUES["city"]),
        }
        calls = (
            f'"find_customer", "arguments": {{"name": "{known["name"]}", "city": "{known["city"]}"',
            f'"list_orders", "arguments": {{"customer_id": {known["id"]}, "status": "paid", '
            '"limit": 10',
            f'"refund_order", "arguments": {{"order_id": {known["order"]}, "reason": "broken", '
            '"notify": true',
        )
        asked = f"{known['name']} from {known['city']} wants the money back for a broken kettle."
        messages = [("system", TOOLS), ("user", asked)]
        for call, result in zip(calls, RESULTS, strict=True):
            found.append(chat(*messages))
            told = result.format(**known)
            messages += [("assistant", f'{{"tool": {call}}}}}'), ("user", told)]
        found.append(chat(*messages))
    return found[:count]


def unlike(count: int, seed: int) -> list[str]:
    """Return prompts that have little in common."""
    messages = [message for kind in PROMPTS.values() for message in kind]
    random.Random(f"other/{seed}").shuffle(messages)
    return [chat(("user", message)) for message in itertools.islice(messages, count)]
