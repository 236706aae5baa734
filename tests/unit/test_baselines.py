"""A baseline is one entry of the registry."""

import subprocess
import sys

import pytest

from backend.config import ConfigError, parse_config
from backend.speculation.policy_factory import make_policy
from bench.simulator.protocol import tuned_arms
from policy import baselines
from policy.baselines import BASELINES, Baseline, FixedLength, registry
from policy.simulation import arms
from policy.simulation.presets import MIXED, llama_8b_h100
from tests.fakes.apps import FAKE

TWICE = Baseline(
    lambda s: FixedLength(s.draft, 2 * s.length),
    "twice as long",
    needs=("draft", "length"),
    colour="#123456",
    marker="*",
)

FRESH = """
import policy.baselines
from tests.unit.test_baselines import TWICE
policy.baselines.BASELINES["twice"] = TWICE
from bench.sweep.arms import ADAPTING, Tuning, arm_config
from bench.sweep.plots import COLOURS, MARKERS
from bench.tables import OTHERS
config = {"target": {"engine": "fake"}, "drafts": [{"name": "d", "engine": "fake"}]}
policy = arm_config(config, "twice", Tuning("d", 3), 8)["policy"]
assert "twice" in ADAPTING and (COLOURS["twice"], MARKERS["twice"]) == ("#123456", "*")
assert OTHERS["twice"] == "twice as long"
assert (policy["kind"], policy["draft"], policy["length"]) == ("twice", "d", 3), policy
"""


@pytest.fixture(autouse=True)
def twice(monkeypatch):
    monkeypatch.setitem(BASELINES, "twice", TWICE)


def test_a_new_baseline_is_a_setting():
    asked = {"kind": "twice", "draft": "d0", "length": 3}
    config = parse_config({**FAKE, "policy": asked})
    drafts = [object()] * len(config.drafts)
    made = make_policy(config, drafts, {}, None)
    assert (made.draft, made.length) == ("d0", 6)
    with pytest.raises(ConfigError, match=r"policy\.draft must be one of .*, got .d9."):
        parse_config({**FAKE, "policy": {**asked, "draft": "d9"}})


def test_a_new_baseline_is_an_arm_of_the_simulator():
    deployment = llama_8b_h100()
    draft = deployment.drafts[0]
    made = arms.make_policy(f"twice:{draft}:3", deployment, MIXED, None, deployment.latency, 0)
    assert (made.draft, made.length) == (draft, 6)
    assert "twice:DRAFT:K" in arms.known_arms()
    assert f"twice:{draft}:5" in tuned_arms(deployment)["twice"]


@pytest.mark.medium
def test_a_process_that_does_not_plan_reads_the_settings_without_the_policy(tmp_path):
    file = tmp_path / "serving.json"
    file.write_text('{"target": {"engine": "fake"}, "policy": {"kind": "none"}}')
    code = (
        "import sys; from backend.config import load_config; "
        f"load_config({str(file)!r}, plans=False); assert 'policy' not in sys.modules; "
        f"load_config({str(file)!r}); assert 'policy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.medium
def test_a_new_baseline_is_an_arm_of_the_benches():
    """In a process of its own, as they read the registry when they are imported."""
    subprocess.run([sys.executable, "-c", FRESH], check=True, timeout=60)


def test_a_module_of_the_package_is_in_the_registry(tmp_path, monkeypatch):
    entry = '{"once": Baseline(lambda s: FixedLength(s.draft, 1), "one token", needs=("draft",))}'
    imports = "from policy.baselines import Baseline, FixedLength"
    (tmp_path / "once.py").write_text(f"{imports}\n\nENTRIES = {entry}\n")
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "policy.baselines.once", raising=False)
    found = registry.collected()
    assert {*found} == {*BASELINES} - {"twice"} | {"once"}
    assert found["once"].label == "one token"
