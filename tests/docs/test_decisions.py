"""Decisions: a title says what was decided, and the index lists each by its title."""

import re
from pathlib import Path

import pytest

ADR = Path(__file__).resolve().parents[2] / "docs" / "adr"
PAGES = sorted(ADR.glob("0*.md"))
NO_VERB = ("a", "an", "the", "on", "in", "for", "when", "where", "what", "how", "why", "one")
"""First words of titles that name a subject instead of a decision."""
MOST_WORDS = 400
"""Words of a page, its tables included."""


def title(page):
    return page.read_text("utf-8").split("\n", 1)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_title_is_the_decision(page):
    number, _, decision = title(page).removeprefix("# ").partition(": ")
    assert page.name.startswith(f"{number}-")
    assert re.match(r"[A-Z][a-z]+ ", decision)
    assert decision.split()[0].lower() not in NO_VERB


def test_the_index_lists_every_decision_by_its_title():
    index = (ADR / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d{4}) \| \[(.*)\]\((.*?)\)", index, re.MULTILINE)
    listed = sorted((file, f"# {number}: {decision}") for number, decision, file in rows)
    assert listed == [(page.name, title(page)) for page in PAGES]


def test_the_index_marks_what_was_superseded():
    index = (ADR / "README.md").read_text("utf-8")
    for page in PAGES:
        gone = "Status: superseded" in page.read_text("utf-8")
        assert gone == (f"({page.name}) (superseded)" in index), page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_decision_is_half_a_page(page):
    assert len(page.read_text("utf-8").split()) <= MOST_WORDS


def test_every_decision_has_a_number_of_its_own():
    numbers = [page.name[:4] for page in PAGES]
    assert len(set(numbers)) == len(numbers)
