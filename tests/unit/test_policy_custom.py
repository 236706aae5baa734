import itertools
import sys

import numpy as np
import pytest

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.ipc.process import policy_folders
from backend.launcher.environment import policy_path, read_settings
from policy import NO_DRAFT, DraftNodes, LatencyModel, Plan, View, simulate
from policy.custom import PolicyError, load_policy, plan_error

GOOD = """
from policy import Plan, Policy

NUMBER = 3

class Mine(Policy):
    def __init__(self, drafts, latency, k_max, length=2):
        self.drafts, self.k_max, self.length = drafts, k_max, length

    def plan(self, view, state, now, rng):
        return Plan.within(view, 0, self.length), state

class Planless(Policy):
    def __init__(self, drafts, latency, k_max):
        pass

class Constructorless(Policy):
    plan = Mine.plan

class Narrow(Mine):
    def __init__(self, drafts):
        pass

class Breaks(Mine):
    def __init__(self, drafts, latency, k_max):
        self.length = 1 / 0

class Startless(Mine):
    def start(self):
        return [][0]

class Bare:
    def __init__(self, drafts, latency, k_max):
        pass

class Over(Mine):
    def plan(self, view, state, now, rng):
        plan = Plan.within(view, 0, 1)
        plan.length = plan.length + 99
        return plan, state

class Fails(Mine):
    def plan(self, view, state, now, rng):
        return view.nothing

class Alone(Mine):
    def plan(self, view, state, now, rng):
        return Plan.within(view, 0, 1)

class Trims(Mine):
    def __init__(self, drafts, latency, k_max, nodes):
        super().__init__(drafts, latency, k_max)
        self.nodes = nodes

    def trim(self, view, plan, drafted, state):
        return self.nodes

class Undriven(Mine):
    def drift(self, state):
        return 1.0

def mine(drafts, latency, k_max):
    return Mine(drafts, latency, k_max, length=5)
"""
NAMES = map("own_policy_{}".format, itertools.count())
LATENCY = LatencyModel.unit(2)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of a name of its own where it is found; give the name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text=GOOD):
        name = next(NAMES)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("own_policy_")]:
        del sys.modules[name]


def view(rows):
    full = np.full(rows, 50)
    ceiling = np.repeat([[4, 2]], rows, axis=0)
    return View(("a", "b"), full, full, full, ceiling, 0 * ceiling)


def make(path, **options):
    return load_policy(path, ("a", "b"), LATENCY, 4, options)


def test_a_class_or_a_function_is_made_into_a_policy_with_its_options(module):
    name, rng = module(), np.random.default_rng(0)
    for path, options, length in (("Mine", {}, 2), ("Mine", {"length": 3}, 3), ("mine", {}, 4)):
        policy = make(f"{name}.{path}", **options)
        plan, state = policy.plan(view(2), policy.start(), 0.0, rng)
        assert (plan.length.tolist(), plan.draft.tolist()) == ([length] * 2, [0, 0])
        assert state == policy.start()
    assert (policy.drift(state), policy.save(state, 0.0)) == ({}, {})
    mine = policy.policy.policy
    assert (mine.drafts, mine.k_max) == (("a", "b"), 4)


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("Nobody", {}, "has no 'Nobody', it has Mine, Planless, Constructorless, "),
        ("NUMBER", {}, "must be a class or a function, got 3"),
        ("Planless", {}, "raised TypeError: Can't instantiate abstract class Planless"),
        ("Constructorless", {}, "called with (drafts, latency, k_max) raised TypeError"),
        ("Narrow", {}, "is called with (drafts, latency, k_max), but takes (drafts): too many"),
        ("Mine", {"size": 1}, "but takes (drafts, latency, k_max, length=2): got an unexpected"),
        ("Breaks", {}, "raised ZeroDivisionError: division by zero (own_policy_"),
        ("Startless", {}, "Startless.start raised IndexError: list index out of range (own_p"),
        ("Bare", {}, "made a Bare without start, plan, needs_ceilings, trim, obs"),
        ("Inner.Policy", {}, "there is no module 'own_policy_"),
    ],
)
def test_what_is_wrong_with_a_path_is_said_in_one_line(module, path, options, words):
    name = module()
    with pytest.raises(PolicyError) as caught:
        make(f"{name}.{path}", **options)
    assert words in str(caught.value)
    assert f"{name}.{path}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_like_that", "raised ModuleNotFoundError: No module named 'nothing_like"),
        ("\ndef f(:", "raised SyntaxError: invalid syntax (own_policy_"),
        ("1 / 0", "raised ZeroDivisionError: division by zero (own_policy_"),
    ],
)
def test_what_a_module_raises_is_said_with_its_line(module, text, words):
    name = module(text)
    with pytest.raises(PolicyError) as caught:
        make(f"{name}.Mine")
    assert f"importing {name} {words}" in str(caught.value)
    assert str(caught.value).endswith(".py:2)" if text.startswith("\n") else ".py:1)")


def test_a_module_that_is_not_there_says_where_it_was_looked_for():
    with pytest.raises(PolicyError, match="there is no module 'nowhere' installed, on PYTHONPATH"):
        make("nowhere.to.be.Found")


@pytest.mark.parametrize(
    ("draft", "length", "words"),
    [
        ([0, 0], np.array([1, 1]), "draft must be an array of integers, got list"),
        (np.array([0, 0]), np.array([1.0, 1.0]), "length must be an array of integers, got float"),
        (np.array([0]), np.array([1, 1]), "draft must have the shape (2,), one for each row, got"),
        (np.array([0, 2]), np.array([1, 1]), "draft[1] must be -1 to 1, got 2"),
        (np.array([0, -2]), np.array([1, 0]), "draft[1] must be -1 to 1, got -2"),
        (np.array([0, 1]), np.array([4, 3]), "length[1] must be 0 to 2, its ceiling, got 3"),
        (np.array([0, -1]), np.array([-1, 0]), "length[0] must be 0 to 4, its ceiling, got -1"),
        (np.array([0, -1]), np.array([4, 1]), "length[1] must be 0 to 0, its ceiling, got 1"),
        (np.array([0, 1]), np.array([4, 2]), ""),
    ],
)
def test_a_plan_that_cannot_be_followed_is_reported_by_row(draft, length, words):
    said = plan_error(Plan(draft, length), view(2))
    assert said.startswith(words) if words else said == ""


def trimmed(path, **options):
    plan, drafted = Plan(np.array([0, 1]), np.array([3, 2])), DraftNodes(*np.zeros((4, 0)))
    policy = make(path, **options)
    return policy.trim(view(2), plan, drafted, policy.start())


def test_how_much_is_verified_is_the_policy_s_word_or_as_planned(module):
    name = module()
    assert trimmed(f"{name}.Trims", nodes=np.array([0, 9])).tolist() == [0, 9]
    assert trimmed(f"{name}.Mine").tolist() == [3, 2]


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([1, 1], "nodes must be an array of integers, got list"),
        (np.array([1.0, 1.0]), "nodes must be an array of integers, got float64"),
        (np.array([1]), "nodes must have the shape (2,), one for each row, got (1,)"),
        (np.array([1, -2]), "nodes[1] must be >= 0, got -2"),
    ],
)
def test_an_answer_that_is_no_number_of_nodes_is_reported_by_row(module, nodes, words):
    with pytest.raises(PolicyError) as caught:
        trimmed(f"{module()}.Trims", nodes=nodes)
    assert str(caught.value).endswith(f".Trims.trim: {words}")


def test_a_plan_within_a_view_can_always_be_followed():
    for rows in (3, 0):
        for draft in (NO_DRAFT, 0, np.arange(rows) % 3 - 1):
            for length in (-1, 0, 9, np.arange(rows), 0.7 * np.arange(rows)):
                assert plan_error(Plan.within(view(rows), draft, length), view(rows)) == ""
    plan = Plan.within(view(3), np.array([0, 1, -1]), 3)
    assert (plan.draft.tolist(), plan.length.tolist()) == ([0, 1, -1], [3, 2, 0])


# -- serving


def settings(kind, **policy):
    drafts = [{"name": "a", "engine": "tests.fakes.fake"}]
    policy = {"kind": kind, **policy}
    return parse_config(
        {"target": {"engine": "tests.fakes.fake"}, "drafts": drafts, "policy": policy}
    )


def test_serving_json_names_a_policy_and_its_options(module):
    name = module()
    app = build(settings(f"{name}.Mine", options={"length": 4}, k_max=6))
    policy = app.orchestrator.cycle.runner.policy.policy.policy.policy
    assert (type(policy).__name__, policy.drafts, policy.k_max) == ("Mine", ("a",), 6)
    assert policy.length == 4


def test_a_wrong_path_is_an_error_of_the_setting(module):
    name = module()
    with pytest.raises(ConfigError, match=f"policy.kind '{name}.Nobody': "):
        build(settings(f"{name}.Nobody"))
    with pytest.raises(ConfigError, match=f"policy.kind '{name}.Narrow' is called with"):
        build(settings(f"{name}.Narrow"))


def test_it_lies_next_to_serving_json_or_where_the_launcher_was_started(tmp_path, monkeypatch):
    own = settings("my_package.Mine")
    monkeypatch.delenv("SPINDLE_POLICY_PATH", raising=False)
    assert policy_folders(own, tmp_path / "serving.json") == [str(tmp_path)]
    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    read = read_settings({"SPINDLE_CONFIG": str(tmp_path / "serving.json")})
    monkeypatch.setenv("SPINDLE_POLICY_PATH", policy_path(read))
    folders = policy_folders(own, tmp_path / "run" / "serving.json")
    assert folders == [str(tmp_path / "run"), str(tmp_path), str(tmp_path / "start")]
    assert policy_folders(settings("adaptive"), tmp_path / "run" / "serving.json") == []
    monkeypatch.syspath_prepend(tmp_path)
    assert policy_folders(own, tmp_path / "serving.json") == [str(tmp_path / "start")]


# -- the simulator

COMPARE = ["--jobs", "1", "compare", "--requests", "3", "--rates", "8", "--seeds", "0", "--arms"]


def test_the_simulator_runs_it_along_with_the_others(module, capsys):
    name = module()
    assert simulate.main([*COMPARE, f"none,{name}.Mine,{name}.Mine:length=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    means = {line.split()[1]: float(line.split()[6]) for line in lines[3:-1]}
    assert means[f"{name}.Mine"] == 2.0
    assert means[f"{name}.Mine:length=3"] > 2.5


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ("none,mine", "there is no arm 'mine': there are none, fixed:DRAFT:K, "),
        ("average:eagle", "there is no arm 'average:eagle'"),
        ("{}.Nobody", "has no 'Nobody'"),
        ("{}.Mine:length", "an option must be NAME=VALUE, got 'length'"),
        ("{}.Over", "Over.plan: length[0] must be 0 to 8, its ceiling, got 1"),
        ("{}.Fails", "Fails.plan raised AttributeError: 'View' object has no attribute"),
        ("{}.Alone", "Alone.plan must return (Plan, state), got Plan"),
        ("{}.Undriven", "Undriven.drift must return a dict, got 1.0"),
    ],
)
def test_the_simulator_says_in_one_line_what_is_wrong(module, capsys, arms, words):
    assert simulate.main([*COMPARE, arms.format(module())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert words in line
