import json
from time import monotonic
from types import SimpleNamespace

import numpy as np
import pytest

from backend.config import parse_config
from backend.ops.stats import Stats, StepStats
from backend.speculation import learned_state as learned
from backend.speculation.learned_state import LearnedState, learned_key
from backend.storage import cache
from policy import Policy
from policy.custom import CheckedPolicy
from policy.learned import SCHEMA
from tests.fakes.apps import FAKE
from tests.fakes.policies import planner, taught
from tests.fakes.waiting import wait_until


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    return tmp_path


class World:
    def __init__(self, state=None, key="a" * 64, keep=True, policy=None):
        self.policy, self.stats = policy or planner(), Stats()
        self.planning = SimpleNamespace(state=state or self.policy.start())
        self.learned = LearnedState(
            self.policy, self.planning, StepStats(self.stats), key, keep=keep
        )

    def fallbacks(self):
        return {
            labels["reason"]: n
            for name, labels, n in self.stats.drain().counters
            if name == "spindle_fallback_total"
        }


def test_what_one_process_saves_at_its_end_the_next_one_takes_up():
    one, other = World(taught(planner(), start_s=monotonic() - 59)), World()
    one.learned.start()
    one.learned.close()
    other.learned.restore()
    tenants = (world.learned.show()["tenants"][0] for world in (other, one))
    shown, before = (tenant["drafts"]["small"]["reached"] for tenant in tenants)
    assert np.allclose(shown, before, rtol=0.05)
    assert other.learned.show()["restored_age_s"] < 60
    assert one.fallbacks() == other.fallbacks() == {}


def test_new_tables_begin_without_the_times_of_the_old():
    key = "a" * 64
    assert learned.pace(key) == 1.0
    learned.forget_times(key)  # of nothing
    one, other = World(taught(planner())), World()
    one.learned.close()
    assert learned.pace(key) == one.planning.state.correction.factor[0] != 1.0
    learned.forget_times(key)
    assert learned.pace(key) == 1.0
    other.learned.restore()
    assert other.fallbacks() == {}
    assert other.learned.show()["tenants"]
    cache.learned_file(key).write_text("{}")
    learned.forget_times(key)
    assert learned.pace(key) == 1.0


def test_it_is_saved_while_it_runs(monkeypatch):
    monkeypatch.setattr(learned, "SAVE_PERIOD_S", 0.01)
    world = World(taught(planner()))
    world.learned.start()
    wait_until(cache.learned_file("a" * 64).exists)
    assert json.loads(cache.learned_file("a" * 64).read_text())["state"]["schema"] == SCHEMA
    world.learned.close()


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_is_written_where_nothing_was_learnt_or_is_to_be_kept(folder, keep):
    world = World(None if keep else taught(planner()), keep=keep)
    world.learned.restore()
    world.learned.close()
    assert not (folder / "learned").exists()
    assert world.fallbacks() == {}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[: len(content) // 2],
        lambda content: "[]",
        lambda content: content.replace(f'"schema": {SCHEMA}', '"schema": 99'),
        lambda content: content.replace('"aaaa', '"bbbb'),
        lambda content: content.replace('"saved_unix_s"', '"saved"'),
    ],
)
def test_a_file_that_does_not_fit_is_counted_and_ignored(spoil):
    World(taught(planner())).learned.close()
    file = cache.learned_file("a" * 64)
    file.write_text(spoil(file.read_text()))
    world = World()
    before = world.planning.state
    world.learned.restore()
    assert world.planning.state is before
    assert world.learned.show() == {"restored_age_s": None}
    assert world.fallbacks() == {"learned_state_unusable": 1}


def test_a_folder_that_cannot_be_written_costs_a_metric_and_the_old_file_stays(folder):
    (folder / "learned").write_text("in the way")
    world = World(taught(planner()))
    world.learned.close()
    assert world.fallbacks() == {"learned_state_unsaved": 1}
    assert (folder / "learned").read_text() == "in the way"


@pytest.mark.parametrize("kept", [lambda *_: 1 / 0, lambda *_: {"a": {1}}, lambda *_: 3])
def test_a_user_s_policy_whose_state_cannot_be_kept_costs_a_metric(kept):
    class Mine(Policy):
        def plan(self, view, state, now, rng):
            raise NotImplementedError

        save = kept

    world = World(policy=CheckedPolicy("my_package.Mine", Mine()))
    world.learned.close()
    assert world.fallbacks() == {"learned_state_unsaved": 1}


def test_the_key_changes_with_whatever_the_estimates_depend_on(folder):
    def write(name, data):
        path = folder / name
        path.mkdir(exist_ok=True)
        header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        return path

    torch = {
        "target": {"engine": "torch", "model": "m"},
        "drafts": [{"name": "d", "engine": "torch", "model": "n"}],
    }
    folders = {"target": write("m", bytes(8)), "d": write("n", bytes(8))}
    key = learned_key(parse_config(torch), folders)
    moved = {"target": {"engine": "torch", "model": "elsewhere"}, "drafts": torch["drafts"]}
    assert learned_key(parse_config(moved), folders) == key
    others = [
        {**torch, "policy": {"k_max": 4}},
        {**torch, "policy": {"kind": "my_package.Mine"}},
        {**torch, "policy": {"kind": "my_package.Mine", "options": {"length": 2}}},
        {**torch, "drafts": [{**torch["drafts"][0], "dtype": "fp64"}]},
        {**torch, "drafts": [*torch["drafts"], {"name": "lookup", "engine": "lookup"}]},
    ]
    keys = {key, *(learned_key(parse_config(other), folders) for other in others)}
    write("n", b"\x00\x00\x80\x3f" * 2)
    assert len(keys | {learned_key(parse_config(torch), folders)}) == 7
    fakes = [
        {
            **FAKE,
            "drafts": [{"name": "d0", "engine": "tests.fakes.fake", "options": {"agreement": a}}],
        }
        for a in (0.5, 0.6)
    ]
    assert len({learned_key(parse_config(fake), {}) for fake in fakes}) == 2
