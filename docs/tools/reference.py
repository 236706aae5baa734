"""The reference that is generated from the code: ``python -m docs.tools.reference`` brings all of
it up to date; ``test_reference.py`` fails where a page is out of date.

A page says between ``<!-- generated: NAME -->`` and ``<!-- end -->`` what the code says. Settings
and errors keep the sentences that stand in their tables; the tensors and the fields of OpenAI's
bodies are rendered by the packages that own them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from backend import PROJECT_ROOT
from backend.cli import DELEGATED_COMMANDS
from backend.engines.vllm.contract import ROWS
from backend.openai_frontend.triton import _STATUS
from backend.ops.metric_names import NVIDIA_FAMILIES, SPINDLE_FAMILIES, Metric
from backend.request import ErrorCode
from backend.triton_adapter.fields import MODELS
from backend.triton_adapter.rendering import render_config
from docs.tools import openai_page, settings_page, tensors_page

FOLDER = PROJECT_ROOT / "docs" / "reference"
PLACE = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SENTENCE = re.compile(r"^\| `(\w+)` \|(?:.*\|)? ([^|]*) \|$", re.MULTILINE)
COMMANDS = ("serve", "doctor", *DELEGATED_COMMANDS)
OPENAI_CODE = re.compile(
    r'"((?:un|in|missing|context|model|method)[a-z]*_[a-z_]*'
    r'(?:parameter|type|value|exceeded|key|found|supported))"'
)


def metrics(families: tuple[Metric, ...]) -> str:
    """Return a row a family."""
    rows = ["| metric | kind | labels | what it counts |", "| --- | --- | --- | --- |"]
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        rows.append(f"| `{family.name}` | {family.kind.value} | {labels} | {family.help} |")
    return "\n".join(rows)


def errors(before: str) -> str:
    """Return a row a code, its sentence as it was."""
    sentences = dict(SENTENCE.findall(before))
    rows = ["| code | status of the OpenAI front end | when |", "| --- | --- | --- |"]
    for code in ErrorCode:
        status = _STATUS.get(code.value, 500)
        rows.append(f"| `{code.value}` | {status} | {sentences.get(code.value, '')} |")
    return "\n".join(rows)


def openai_codes(before: str) -> str:
    """Return a row a code that the front end's sources name, its sentence as it was."""
    sentences = dict(SENTENCE.findall(before))
    sources = (PROJECT_ROOT / "backend" / "openai_frontend").glob("*.py")
    codes = {code for path in sources for code in OPENAI_CODE.findall(path.read_text("utf-8"))}
    rows = ["| code | what is wrong |", "| --- | --- |"]
    rows += [f"| `{code}` | {sentences.get(code, '')} |" for code in sorted(codes)]
    return "\n".join(rows)


def vllm_options() -> str:
    """Return a row for some options, with their meaning where vLLM is the target."""
    rows = ["| options | meaning | |", "| --- | --- | --- |"]
    for row in ROWS:
        names = ", ".join(f"`{name}`" for name in row.options)
        rows.append(f"| {names} | {row.meaning.value} | {row.note} |")
    return "\n".join(rows)


def help_of(command: str) -> str:
    """Return what ``spindle COMMAND --help`` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "backend.cli", command, "--help"],
        cwd=PROJECT_ROOT,
        env={**os.environ, "COLUMNS": "98"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.rstrip()


def commands() -> str:
    """Return the help of every command."""
    parts = [f"## `spindle {name}`\n\n```text\n{help_of(name)}\n```" for name in COMMANDS]
    return "\n\n".join(parts)


PAGES: dict[str, Callable[[str], str]] = {
    "metrics": lambda _: metrics(SPINDLE_FAMILIES),
    "nvidia metrics": lambda _: metrics(NVIDIA_FAMILIES),
    "errors": errors,
    "openai codes": openai_codes,
    "commands": lambda _: commands(),
    "vllm options": lambda _: vllm_options(),
}
"""The new text of a place, given the old one."""


def rewrite(page: str) -> str:
    """Return a page as it should be."""
    return PLACE.sub(lambda place: f"{place[1]}{PAGES[place[2]](place[0])}\n{place[3]}", page)


def due(path: Path) -> str:
    """Return a reference page's text as it should be."""
    page = path.read_text("utf-8")
    makers: dict[str, Callable[[str], str]] = {
        "settings.md": settings_page.rewrite,
        "openai.md": openai_page.with_fields,
        "tensors.md": lambda _: tensors_page.render_contract(),
    }
    return makers.get(path.name, rewrite)(page)


def main() -> None:
    """Write every page of the reference, and the models' configurations."""
    for model in MODELS:
        path = PROJECT_ROOT / "model_repository" / model.name / "config.pbtxt"
        path.write_text(render_config(model), "utf-8")
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(due(path), "utf-8")


if __name__ == "__main__":
    main()
