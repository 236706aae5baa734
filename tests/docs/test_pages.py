"""Pages open alike: one sentence of purpose, then a command, a picture or an example."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if not re.match(r"\d", page.name))
RUN = [page for page in PAGES if page.parent.name in ("how-to", "tutorial")]
MOST_WORDS = 32
"""Words of the sentence of purpose."""
FIRST_LINES = 24
"""Lines within which a page to follow shows what to run."""


def name(page):
    return str(page.relative_to(DOCS))


def opening(page):
    """Return the first paragraph after the title."""
    return page.read_text("utf-8").split("\n\n")[1]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_opens_with_one_sentence_of_purpose(page):
    text = re.sub(r"\]\([^)]*\)", "]", opening(page))
    assert re.match(r"[A-Z`]", text)  # no list, table or picture
    assert len(re.findall(r"\.(?:\s|$)", text)) == 1, text
    assert text.endswith(".")
    assert len(text.split()) <= MOST_WORDS, text


@pytest.mark.parametrize("page", RUN, ids=name)
def test_a_page_to_follow_soon_shows_what_to_run(page):
    lines = page.read_text("utf-8").splitlines()
    assert any(line.startswith("```") for line in lines[:FIRST_LINES])


def test_benchmarks_has_a_short_page_before_its_appendix():
    page, appendix = (DOCS / "benchmarks.md").read_text("utf-8").split("\n## Appendix\n")
    assert len(page.split()) <= 1500
    assert "\n## Where it loses\n" in page
    questions = [part for part in page.split("\n## ")[1:] if part.split("\n")[0].endswith("?")]
    assert [part.count("<picture>") for part in questions] == [1] * len(questions)
    assert "<picture>" not in appendix
