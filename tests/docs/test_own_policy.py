"""Pages with the simulator's output: what they show is the example, and what a run prints."""

import json
import re
import shlex
from pathlib import Path

import pytest

from backend.config import parse_config
from policy import LatencyModel, simulate
from policy.custom import PolicyError, load_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial" / "own-policy.md"
FROM_MODEL = ("adaptive", "oracle")
"""Arms whose plans change with the planner: their speeds are compared within 5 %."""


def block(language, word="", page=PAGE):
    """Return the first block of a language that has the word."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return next(text for name, text in blocks if name == language and word in text)


@pytest.fixture(autouse=True)
def in_the_examples(monkeypatch):
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.syspath_prepend(ROOT / "examples")


def test_the_code_is_the_example_s_and_has_forty_lines():
    code = block("python")
    assert code == (ROOT / "examples" / "my_policy.py").read_text("utf-8")
    assert len(code.splitlines()) <= 40


def test_the_simulator_prints_what_the_page_shows(capsys):
    folder, command = block("sh").replace("\\\n", " ").splitlines()
    assert folder == "cd examples"
    check_output(command, block("", "adaptive over"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simulator", "baselines"])
def test_the_simulator_prints_what_its_pages_show(name, capsys):
    page = ROOT / "docs" / "research" / f"{name}.md"
    command = block("", "spindle simulate compare", page).replace("\\\n", " ").strip()
    check_output(command, block("", "adaptive over", page), capsys)


def check_output(command, output, capsys):
    """Run a page's command and compare the table that it prints with the page's."""
    assert simulate.main(shlex.split(command.removeprefix("spindle simulate"))) == 0
    printed, shown = capsys.readouterr().out.splitlines()[2:-1], output.splitlines()
    assert printed[0].split() == shown[0].split()
    for now, then in zip(printed[1:], shown[1:], strict=True):
        (load, arm, *figures), expected = now.split()[:7], then.split()[:7]
        assert [load, arm] == expected[:2]
        if arm not in FROM_MODEL:
            assert figures == expected[2:], arm
        for figure, other in zip(figures[:3], expected[2:5], strict=True):
            assert float(figure) == pytest.approx(float(other), rel=0.05), arm


def test_the_setting_is_one():
    setting = json.loads(f"{{{block('json')}}}")
    policy = parse_config({"target": {"engine": "tests.fakes.fake"}, **setting}).policy
    assert (policy.is_custom, policy.options) == (True, {"hope": 0.6})


def test_a_wrong_name_is_said_as_the_page_shows():
    shown = block("", "policy.kind ").strip()
    path = re.search("'(.*?)'", shown)[1]
    with pytest.raises(PolicyError) as caught:
        load_policy(path, ("a",), LatencyModel.unit(1), 8, {})
    said = str(caught.value).replace(str(ROOT / "examples"), "/srv")
    assert shown == f"policy.kind {said}"
