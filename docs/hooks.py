"""Changes that the site's build makes to the pages of this repository (``mkdocs.yml`` names it).

The pages are written to be read in the repository. On the site, links that leave
``docs`` become text that names the file, pictures follow the page's light or dark, and the
decisions are listed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="([^"]+)"[^>]*>\s*<img alt="([^"]*)"\s+src="([^"]+)"[^>]*>'
    r"\s*</picture>"
)
CODE = re.compile(r"(```.*?```)", re.DOTALL)


def on_config(config: Any, **_: Any) -> Any:
    """List the decisions by their files: a new one needs no line in ``mkdocs.yml``."""
    decisions = [f"adr/{path.name}" for path in sorted((DOCS / "adr").glob("0*.md"))]
    pages = [{"All decisions": "adr/README.md"}, *decisions]
    for entry in config["nav"]:
        if entry.get("Decisions") == "adr/":
            entry["Decisions"] = pages
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page as the site has it."""
    folder = os.path.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, address = match.groups()
        path = address.partition("#")[0]
        if re.match(r"[a-z]+:", address) or not path:
            return match[0]
        target = os.path.normpath(os.path.join(folder, path))
        if not target.startswith(".."):
            return match[0]
        return f'<span title="{target.removeprefix("../")}">{text}</span>'

    def picture(match: re.Match[str]) -> str:
        dark, words, light = match.groups()
        return f"![{words}]({light}#only-light)\n![{words}]({dark}#only-dark)"

    parts = CODE.split(markdown)  # the odd ones are code
    for at in range(0, len(parts), 2):
        parts[at] = LINK.sub(link, PICTURE.sub(picture, parts[at]))
    return "".join(parts)
