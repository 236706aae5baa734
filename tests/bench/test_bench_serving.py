import json

import pytest

from tests.bench import workloads
from tests.bench.arms import Reply
from tests.bench.bench_serving import Block, main, summarise
from tests.bench.prompts import PROMPTS

FAKE = {
    "target": {"engine": "fake"},
    "drafts": [{"name": "d", "engine": "fake", "agreement": 0.8}],
    "policy": {"kind": "fixed", "draft": "d", "length": 3},
}


def block(arm, number, wall_s, text="all different words in this reply"):
    return Block(arm, "sql", 1, number, wall_s, [Reply(text, 10, 8, 4, "length", 0.1, wall_s)])


def test_the_ratio_is_over_pairs_and_leaves_looping_replies_out():
    looping = "round and round we go " * 8
    blocks = [block("adaptive", 1, 1.0), block("plain", 1, 2.0), block("plain", 2, 3.0), block("adaptive", 2, 2.0)]
    blocks += [block("adaptive", 3, 0.1, looping), block("plain", 3, 1.0, looping)]
    row = summarise(blocks, "sql", 1, seed=0)
    assert (row["blocks"], row["headline_blocks"]) == (3, 2)
    assert row["ratio"] == pytest.approx((2.0 + 1.5) / 2)
    assert row["tokens_per_s"] == {"adaptive": pytest.approx(30 / 3.1), "plain": pytest.approx(30 / 6.0)}
    assert (row["acceptance"], row["drafted_per_token"]) == (0.5, 0.8)
    assert (row["looping_share"], row["texts_that_differ"]) == (pytest.approx(1 / 3), 0)


def test_a_run_in_process_leaves_a_record_without_texts(tmp_path):
    config = tmp_path / "serving.json"
    config.write_text(json.dumps(FAKE))
    size = ["--concurrency", "1", "3", "--blocks", "2", "--max-tokens", "12"]
    main(["--config", str(config), "--in-process", "--raw", "--workloads", "sql", *size, "--out", str(tmp_path / "results")])
    (path,) = (tmp_path / "results").iterdir()
    record = json.loads(path.read_text())
    assert [(row["workload"], row["concurrency"], row["blocks"]) for row in record["tables"]] == [("sql", 1, 2), ("sql", 3, 2)]
    assert all(row["texts_that_differ"] == 0 and row["drafted_per_token"] > 0 for row in record["tables"])
    replies = [reply for block in record["blocks"] for reply in block["replies"]]
    assert len(replies) == 2 * 2 * (1 + 3)
    assert all(reply["output_tokens"] <= 12 and len(reply["text"]) == 16 for reply in replies)
    assert record["config"] == FAKE


def test_generated_workloads_are_a_function_of_the_seed_without_repeats():
    first, again, other = (workloads.load("sql", 20, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.messages != other.messages
    assert len(set(first.messages)) == 20
    assert all("CREATE TABLE" in message for message in first.messages)


def test_our_own_prompts_cover_every_workload_but_questions_over_articles():
    assert set(PROMPTS) == set(workloads.NAMES) - {"qa"}
    assert all(len(set(prompts)) >= 4 for prompts in PROMPTS.values())
