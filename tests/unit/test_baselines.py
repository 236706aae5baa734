"""A baseline is one entry of the registry."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.speculation.policy_factory import make_policy
from bench import baselines
from bench.simulator.protocol import tuned_arms
from policy import LatencyModel
from policy.baselines import BASELINES, Baseline, BaselineSettings, FixedLength, registry
from policy.custom import PolicyError, load_policy
from policy.simulation import arms
from policy.simulation.presets import MIXED, llama_8b_h100
from tests.fakes.apps import FAKE

TWICE = Baseline(
    lambda s: FixedLength(s.draft, s.options.get("times", 2) * s.length),
    "twice as long",
    needs=("draft", "length"),
    options={"times": (2, 3)},
    colour="#123456",
    marker="*",
)

FRESH = """
import bench.baselines
from tests.unit.test_baselines import TWICE
bench.baselines.BASELINES["twice"] = TWICE
from bench.sweep.arms import ADAPTING, Tuning, arm_config
from bench.sweep.plots import COLOURS, MARKERS
from bench.tables import OTHERS
fake = {"engine": "tests.fakes.fake"}
config = {"target": fake, "drafts": [{"name": "d", **fake}]}
policy = arm_config(config, "twice", Tuning("d", 3), 8)["policy"]
assert "twice" in ADAPTING and (COLOURS["twice"], MARKERS["twice"]) == ("#123456", "*")
assert OTHERS["twice"] == "twice as long"
assert (policy["kind"], policy["draft"], policy["length"]) == ("twice", "d", 3), policy
"""


def engines(config, free=()):
    """Return what of engines is read: whether a draft is free."""
    limits = [SimpleNamespace(free=draft.name in free) for draft in config.drafts]
    return [SimpleNamespace(limits=limit) for limit in limits]


@pytest.fixture(autouse=True)
def twice(monkeypatch):
    for known in (BASELINES, baselines.BASELINES):
        monkeypatch.setitem(known, "twice", TWICE)


def test_a_new_baseline_is_a_setting():
    asked = {"kind": "twice", "draft": "d0", "length": 3}
    config = parse_config({**FAKE, "policy": asked})
    made = make_policy(config, engines(config), {}, None)
    assert (made.draft, made.length) == ("d0", 6)
    with pytest.raises(ConfigError, match=r"policy\.draft must be one of .*, got .d9."):
        parse_config({**FAKE, "policy": {**asked, "draft": "d9"}})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("twice", {"time": 3}, "of 'twice' must be one of ['times'], got 'time'"),
        ("twice", {"times": "3"}, "policy.options.times must be a whole number, got '3'"),
        ("twice", {"times": True}, "policy.options.times must be a whole number, got True"),
        ("twice", {"times": -1}, "policy.options.times must be a whole number, got -1"),
        ("ema", {"times": 3}, "policy.options of 'ema' must be left out, got 'times'"),
        ("adaptive", {"times": 3}, "policy.options must be empty for 'adaptive'"),
    ],
)
def test_the_numbers_of_a_baseline_are_options_checked_by_name_and_value(kind, options, words):
    asked = {"draft": "d0", "length": 3, "options": {"times": 3}}
    config = parse_config({**FAKE, "policy": {**asked, "kind": "twice"}})
    assert make_policy(config, engines(config), {}, None).length == 9
    with pytest.raises(ConfigError) as error:
        parse_config({**FAKE, "policy": {**asked, "kind": kind, "options": options}})
    assert words in str(error.value)


def test_the_numbers_of_a_baseline_are_written_after_its_arm():
    deployment = llama_8b_h100()

    def made(arm):
        return arms.make_policy(arm, deployment, MIXED, None, deployment.latency, 0)

    draft = deployment.drafts[0]
    assert made(f"twice:{draft}:3:times=3").length == 9
    for wrong in ("time=3", "times=x", "times=-1"):
        with pytest.raises(PolicyError, match=wrong.replace("=", ".*")):
            made(f"twice:{draft}:3:{wrong}")


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
    file.write_text('{"target": {"engine": "tests.fakes.fake"}, "policy": {"kind": "none"}}')
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


def test_a_module_of_the_benches_is_a_baseline_that_is_reached_by_its_path(tmp_path, monkeypatch):
    lines = (
        "from policy.baselines import Baseline, FixedLength",
        "class Once(FixedLength):",
        "    def __init__(self, drafts, latency, k_max, *, draft): super().__init__(draft, 1)",
        'ENTRIES = {"once": Baseline.by_path(Once, "one token", needs=("draft",))}',
    )
    (tmp_path / "once.py").write_text("\n".join(lines))
    monkeypatch.setattr(baselines, "__path__", [*baselines.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bench.baselines.once", raising=False)
    found = registry.collect("bench.baselines")
    assert {*found} == {*baselines.BASELINES} - {*BASELINES} | {"once"}
    once, model = found["once"], LatencyModel.unit(1)
    assert (once.label, once.path) == ("one token", "bench.baselines.once.Once")
    assert once.make(BaselineSettings(("d",), model, draft="d")).length == 1
    assert load_policy(once.path, ("d",), model, 8, {"draft": "d"}).policy.policy.length == 1


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("smartspek:eagle", "did you mean 'smartspec'"),
        ("smartspec", "did you mean 'smartspec:eagle'"),
        ("fixed:eagle", "did you mean 'fixed:eagle:3'"),
        ("bench.baselines.spin.SpinSelecton:length=3", "did you mean 'SpinSelection'"),
        ("bench.baselines.spin.SpinSelection:length", "an option must be NAME=VALUE"),
    ],
)
def test_a_misspelt_arm_is_refused_with_what_is_most_like_it(arm, words):
    deployment = llama_8b_h100()
    with pytest.raises(PolicyError, match=words):
        arms.make_policy(arm, deployment, MIXED, None, deployment.latency, 0)
