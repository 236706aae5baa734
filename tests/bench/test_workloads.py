from bench import workloads
from bench.prompts import PROMPTS


def test_generated_workloads_are_a_function_of_the_seed_without_repeats():
    first, again, other = (workloads.load("sql", 20, seed) for seed in (1, 1, 2))
    assert first == again
    assert first.messages != other.messages
    assert len(set(first.messages)) == 20
    assert all("CREATE TABLE" in message for message in first.messages)


def test_our_own_prompts_cover_every_workload_but_questions_over_articles():
    assert set(PROMPTS) == set(workloads.NAMES) - {"qa"}
    assert all(len(set(prompts)) >= 4 for prompts in PROMPTS.values())
