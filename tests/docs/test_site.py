"""The site is built with strict links, leads nowhere that is not there, and fetches nothing."""

import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
WITHOUT_NETWORK = {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MKDOCS.exists(), reason="make docs, or make test-all, installs mkdocs"),
]


class Page(HTMLParser):
    """A page's targets (ids), links, and the files it loads by itself (fetched)."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.fetched = set(), [], []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        own = dict(attributes)
        self.ids |= {own[key] for key in ("id", "name") if own.get(key)}
        if tag == "a" and own.get("href"):
            self.links.append(own["href"])
        elif address := own.get("src") or own.get("href"):
            self.fetched.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **WITHOUT_NETWORK},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_repository_is_there(site, pages):
    names = {path.relative_to(site).with_suffix(".md").as_posix() for path in pages}
    docs = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert names == {re.sub(r"\bREADME\.md$", "index.md", name) for name in docs}


def test_every_link_leads_to_a_file_and_a_place_that_are_there(pages):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            ids = pages[target].ids if target in pages else {anchor}
            if not target.is_file() or (anchor and anchor not in ids):
                lost.append(f"{path.name}: {link}")
    assert lost == []


def test_a_page_loads_only_what_lies_next_to_it(site, pages):
    lost = []
    for path, page in pages.items():
        for address in page.fetched:
            file = address.partition("#")[0].partition("?")[0]
            if re.match(r"([a-z]+:)?//", address) or not (path.parent / file).exists():
                lost.append(f"{path.name}: {address}")
    assert lost == []
    sheets = "".join(path.read_text("utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(\s*[\"']?https?:", sheets) == []


def test_no_page_shows_markdown_that_was_not_read(pages):
    for path in pages:
        body = path.read_text("utf-8").partition("<article")[2].partition("</article>")[0]
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", body, flags=re.DOTALL)
        unread = r"\]\([\w./#-]+\)|^\| ?---|^(?:[-*]|\d+\.) \w"
        assert re.findall(unread, text, re.MULTILINE) == [], path.name
