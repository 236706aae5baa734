"""The reference says what the code says."""

import re

import pytest

from docs.tools import reference, settings_page

PAGES = sorted(reference.FOLDER.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_up_to_date(path):
    assert reference.due(path) == path.read_text("utf-8"), "run python -m docs.tools.reference"


@pytest.mark.parametrize("name", ["errors.md", "settings.md"])
def test_every_row_has_a_sentence(name):
    page = (reference.FOLDER / name).read_text("utf-8")
    assert [line for line in page.splitlines() if re.search(r"\|\s*\|$", line)] == []


def test_every_place_of_the_settings_is_documented():
    page = settings_page.PAGE.read_text("utf-8")
    places = [place[1] for place in settings_page.PLACE.findall(page)]
    assert places == ["", "target", "policy", "limits", "switches", "triton", "openai", "log"]


def test_every_generated_place_is_on_a_page():
    places = [place[1] for path in PAGES for place in reference.PLACE.findall(path.read_text())]
    assert sorted(places) == sorted(reference.PAGES)
