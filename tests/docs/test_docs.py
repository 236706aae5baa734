"""The pages that people read: short enough, linked to what exists, and saying what the code
says.
"""

import re
import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import pytest
import yaml

from bench import pictures, tables
from bench.sweep.arms import NONE, SPINDLE
from bench.sweep.figures import BEST_FIXED, interval
from docs.tools.tensors_page import GUARANTEES
from tests.docs.english import foreign

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
CARDS = [*(ROOT / "engines_build").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
JARGON = ("arm", "arms", "aloft", "turn", "turns", "warm block", "cold block")
"""Words of this project's own that README does without."""


def text_of(page):
    """A page without its code, which holds no links."""
    return re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page for page in (*PAGES, *CARDS) if page.name != "CHANGELOG.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_pages_are_in_plain_english(page):
    assert foreign(text_of(page)) == []


def links(page):
    found = re.findall(r"\]\(([^)\s]+)\)", text_of(page)) + re.findall(
        r'(?:src|srcset)="([^"]+)"', text_of(page)
    )
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_readme_is_one_page_of_narrow_lines():
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_has_at_most_100_columns(page):
    prose = [line for line in text_of(page).splitlines() if not line.startswith("|")]
    assert [line for line in prose if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_needs_no_words_of_this_project_s_own():
    words = re.sub(r"`[^`]*`", "", text_of(README)).lower()
    assert [word for word in JARGON if re.search(rf"\b{word}\b", words)] == []


def test_readme_and_the_explanation_guarantee_the_same():
    table = GUARANTEES.split("\n\n")[0]
    assert table in README.read_text("utf-8")
    assert table in (ROOT / "docs" / "explanation" / "exactness.md").read_text("utf-8")


def test_every_alert_has_a_runbook():
    rules = [
        rule
        for group in yaml.safe_load((ROOT / "docker/prometheus/alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    for rule in rules:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == rule["alert"].lower()
        assert anchor in anchors(ROOT / page)


def test_every_reason_of_a_fallback_is_explained():
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "backend").rglob("*.py"))
    reasons = set(re.findall(r'fallback\("(\w+)"\)', sources)) | set(
        re.findall(r'fallback_total", reason="(\w+)"', sources)
    )
    monitor = (ROOT / "docs" / "how-to" / "monitor.md").read_text("utf-8")
    assert {reason for reason in reasons if f"`{reason}`" not in monitor} == set()


def ratios_on_the_h200():
    """Return adaptive over none and over the best fixed length, as GPU's page has them."""
    page = (ROOT / "docs" / "how-to" / "gpu.md").read_text("utf-8")
    rows = re.findall(r"^\| (1|32|128) \| [\d,]+ \|(.*)\| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for _, fixed, adaptive in rows:
        best = max(map(float, fixed.split("|")))
        yield f"{float(adaptive):.2f}" if float(adaptive) < 1 else f"{float(adaptive):.1f}"
        yield f"{float(adaptive) / best:.2f}"


def test_readme_has_the_figures_of_the_records_and_no_other_ratios():
    every = tables.read_speeds()
    headline = [
        interval(*every[tables.HEADLINE, 0.0, 48, over][load])
        for over, load in product((NONE, BEST_FIXED), ("closed-1", "closed-16"))
    ]
    figures = [f for row in headline for f in (row["ratio"], *row["interval_95"])]
    ratios = pictures.ratios(pictures.greedy(tables.HEADLINE))
    policies = [ratio for _, ratio, _ in pictures.over_policies()[1:]]
    figures += [min(policies), max(policies)]
    figures.append(min(pictures.mean(r[16]) for name, r in ratios.items() if name != SPINDLE))
    stacks = tables.over_stacks(tables.WITH_PEERS)
    peers = ("vLLM", "transformers", "llama.cpp, 16 bits", "OpenVINO GenAI, 4 bits")
    words = {f"{figure:.2f}" for figure in figures}
    words |= {f"{stacks[name, 1]['median']:.1f}" for name in peers}
    lines = README.read_text("utf-8").splitlines()
    prose = " ".join(line for line in lines if not line.startswith("|"))
    assert words <= set(re.findall(r"\d+\.\d+", prose))
    words |= {f"{1 / stacks['llama.cpp, 4 bits', load]['median']:.1f}" for load in (1, 8)}
    words |= {*ratios_on_the_h200()}
    with_interval = set(re.findall(r"([\d.]+)x \(", prose))  # the next test's
    assert set(re.findall(r"(\d+\.\d+)x", prose)) <= words | with_interval


def test_readme_s_intervals_are_those_of_a_table_and_one_with_1_claims_nothing():
    prose = " ".join(text_of(README).split())
    tables_shown = README.read_text("utf-8") + (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    claims = re.findall(r"([\d.]+)x \(([\d.]+) to ([\d.]+)\)([^;.]*)", prose)
    assert len(claims) >= 4
    for ratio, low, high, rest in claims:
        assert f"{ratio} ({low}–{high}" in tables_shown
        assert not float(low) <= 1 <= float(high) or "no difference" in rest


def test_the_picture_of_speed_is_that_of_the_headline():
    alone = interval(*tables.read_speeds()[tables.HEADLINE, 0.0, 48, NONE]["closed-1"])["ratio"]
    drawn = pictures.ratios(pictures.greedy(tables.HEADLINE))[SPINDLE][1]
    assert round(pictures.mean(drawn), 2) == round(alone, 2)


def test_the_pictures_are_drawn():
    for theme, colours in pictures.THEMES.items():
        drawn = pictures.PICTURES / f"how-it-works-{theme}.svg"
        assert drawn.read_text("utf-8") == pictures.how_it_works(colours), (
            "run python -m bench.pictures"
        )
        for name in ("how-it-works", "speed", "policies", "peers", "simulation", "traces"):
            assert ET.parse(pictures.PICTURES / f"{name}-{theme}.svg").getroot().tag.endswith("svg")
