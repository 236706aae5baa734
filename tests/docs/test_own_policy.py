"""The page on a policy of your own: what it shows is the example, and what it says is so."""

import json
import re
import shlex
from pathlib import Path

import pytest

from backend.config import parse_config
from policy import LatencyModel, simulate
from policy.custom import PolicyError, load_policy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial" / "own-policy.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(language, word=""):
    """Return the one block of a language that has the word."""
    (text,) = [text for name, text in BLOCKS if name == language and word in text]
    return text


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
    assert simulate.main(shlex.split(command.removeprefix("spindle simulate"))) == 0
    printed, shown = capsys.readouterr().out.splitlines(), block("", "adaptive over").splitlines()
    assert shown[0] in printed
    for now, then in zip(printed[3:-1], shown[1:], strict=True):
        assert now.split()[1] == then.split()[1]
        if "adaptive" not in then:  # that one may change, and with it the last column
            assert now.split()[:7] == then.split()[:7]


def test_the_setting_is_one():
    setting = json.loads(f"{{{block('json')}}}")
    policy = parse_config({"target": {"engine": "tests.fakes.fake"}, **setting}).policy
    assert (policy.is_custom, policy.options) == (True, {"most_rows": 8})


def test_a_wrong_name_is_said_as_the_page_shows():
    shown = block("", "policy.kind ").strip()
    path = re.search("'(.*?)'", shown)[1]
    with pytest.raises(PolicyError) as caught:
        load_policy(path, ("a",), LatencyModel.unit(1), 8, {})
    said = str(caught.value).replace(str(ROOT / "examples"), "/srv")
    assert shown == f"policy.kind {said}"
