import random
import re

import pytest

from engines_build.distill.corpora import Corpus, Document, ask_about, sql_question

pytestmark = pytest.mark.slow

SOURCES = ["sql", "stdlib"]


@pytest.fixture(scope="module")
def sides():
    return Corpus(SOURCES, None, False, seed=0), Corpus(SOURCES, None, True, seed=0)


def test_the_sides_share_no_document(sides):
    train, held_out = sides
    assert train.names
    assert held_out.names
    assert not train.names & held_out.names


def test_held_out_is_about_a_tenth_whatever_the_seed(sides):
    train, held_out = sides
    assert 0.03 < len(held_out.names) / len(train.names | held_out.names) < 0.2
    assert Corpus(SOURCES, None, True, seed=5).names == held_out.names


def test_a_prompt_depends_on_seed_and_index_alone(sides):
    again, other = Corpus(SOURCES, None, False, seed=0), Corpus(SOURCES, None, False, seed=1)
    prompts = [sides[0].prompt(i) for i in range(20)]
    assert [again.prompt(i) for i in reversed(range(20))] == prompts[::-1]
    assert [other.prompt(i) for i in range(20)] != prompts
    assert len({p.text for p in prompts}) > 15


def test_the_digest_tells_the_sides_apart_and_is_stable(sides):
    train, held_out = sides
    assert train.digest == Corpus(SOURCES, None, False, seed=3).digest
    assert train.digest != held_out.digest


def test_sources_decide_the_workloads(sides):
    assert Corpus(["sql"], None, False, seed=0).workloads == ["sql"]
    assert {sides[0].prompt(i).workload for i in range(200)} == set(sides[0].workloads)


def test_a_named_workload_is_kept(sides):
    assert {sides[0].prompt(i, "code").workload for i in range(10)} == {"code"}


def test_an_sql_question_asks_about_a_table_of_its_schema():
    schema = Document(
        "sql",
        "x",
        "CREATE TABLE a (id INTEGER PRIMARY KEY, b TEXT, c TEXT);\nCREATE TABLE d (id INTEGER "
        "PRIMARY KEY, e TEXT, f REAL);",
    )
    for seed in range(30):
        assert re.search(r"\b(a|d)\b", sql_question(schema, random.Random(seed)))


def test_a_question_carries_its_passage():
    for seed in range(10):
        assert "the passage" in ask_about("the passage", "summarise", random.Random(seed))


@pytest.mark.parametrize("source", ["nowhere", "wordnet"])
def test_a_source_that_cannot_be_read_is_named(source):
    with pytest.raises(ValueError, match=source):
        Corpus([source], None, False, seed=0)
