"""The adapter by which other engines are planned for, driven by a made-up host."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from backend.checked_settings import ConfigError
from backend.hosts.adapter import Host, HostRow, VerifiedRow
from backend.hosts.calibration import (
    PATIENCE_STEPS,
    SAMPLES,
    StepCalibration,
    StepShape,
    draft_table,
    shapes,
)
from backend.hosts.settings import TARGET, host_config
from backend.ops.stats import Stats
from policy import LatencyTable
from policy.evidence import bin_of_match

FLAT = LatencyTable.synthetic(TARGET, {1: 0.02, 64: 0.021, 1024: 0.3})
K_MAX = 6


def settings(**raw):
    return host_config(raw, K_MAX, 512)


@dataclass
class Text:
    """The text of a request's target, whatever is proposed to it."""

    key: str
    tokens: list
    written: int
    proposed: list = field(default_factory=list)

    def row(self):
        return HostRow(self.key, self.tokens[: self.written], 8, len(self.tokens) - self.written)

    def step(self, proposal):
        """Follow a proposal as far as the text matches it, and draw one more token."""
        self.proposed.append(len(proposal))
        left = self.tokens[self.written :]
        accepted = 0
        while accepted < min(len(proposal), len(left) - 1) and proposal[accepted] == left[accepted]:
            accepted += 1
        self.written += accepted + 1
        return VerifiedRow(self.key, proposal, self.tokens[: self.written])


def repeating(key, start, tokens=200, period=12):
    return Text(key, [start + i % period for i in range(tokens)], 8)


def serve(host, texts, most=500):
    """Serve to the end; return the steps it took."""
    running, steps = list(texts), 0
    while running and steps < most:
        rows = [text.row() for text in running]
        proposals = host.propose(rows)
        assert all(1 <= len(p) <= K_MAX for p in proposals.values())
        done = [
            text.step(proposals[text.key].tokens if text.key in proposals else [])
            for text in running
        ]
        host.ran(done, verify_s=0.02)
        over = [text for text in running if text.written >= len(text.tokens)]
        host.end([text.key for text in over])
        running = [text for text in running if text not in over]
        steps += 1
    return steps


def host(table=FLAT, **raw):
    made = Host(settings(**raw), Stats())
    if table is not None:
        made.plan_by(table)
    return made


def test_text_that_repeats_itself_takes_fewer_steps_and_nothing_stays():
    texts = [repeating(f"r{n}", 100 * n) for n in range(3)]
    planned = host()
    assert serve(planned, texts) < 100
    assert planned.sequences == {}
    assert all(text.written == len(text.tokens) for text in texts)


def test_lengths_differ_by_request():
    rng = np.random.default_rng(0)
    noise = Text("noise", rng.integers(0, 4000, 200).tolist(), 8)
    easy = repeating("easy", 5000)
    serve(host(), [noise, easy])
    assert max(easy.proposed) >= 4
    assert sum(noise.proposed) < sum(easy.proposed)


def test_the_policy_sees_what_drafts_show():
    planned, text = host(), repeating("r", 0, tokens=99)
    text.written = 45
    planned.propose([text.row()])
    view, *_ = planned.cycle.runner.last_plan
    assert view.evidence.tolist() == [[bin_of_match(33, agree=True)]]


def test_without_a_table_nothing_is_proposed():
    text = repeating("r", 0)
    assert serve(host(table=None), [text]) == 192
    assert set(text.proposed) == {0}


def test_the_last_token_is_the_target_s_own():
    text = repeating("r", 0, tokens=80)
    planned = host()
    while text.written < len(text.tokens):
        proposal = planned.propose([text.row()]).get("r")
        assert proposal is None or len(proposal) < len(text.tokens) - text.written
        planned.ran([text.step(proposal.tokens if proposal else [])], verify_s=0.02)


def test_nothing_is_learnt_of_a_step_that_verified_something_else():
    text, stats = repeating("r", 0), Stats()
    planned = Host(settings(), stats)
    planned.plan_by(FLAT)
    for _ in range(40):
        proposal = planned.propose([text.row()]).get("r")
        if proposal is None:
            planned.ran([text.step([])], verify_s=0.02)
            continue
        state = planned.cycle.runner.state
        planned.ran([VerifiedRow("r", [0] * K_MAX, text.step([]).tokens)], verify_s=0.02)
        assert planned.cycle.runner.state is state
        counters = stats.drain().counters
        assert ("spindle_fallback_total", {"reason": "not_as_proposed"}, 1) in counters
        return
    pytest.fail("nothing was proposed")


def test_a_host_may_cut_a_proposal():
    text, planned, cut = repeating("r", 0), host(), 0
    while text.written < len(text.tokens):
        proposal = planned.propose([text.row()]).get("r")
        tokens = proposal.tokens[:1] if proposal else []
        cut += proposal is not None and len(proposal) > 1
        planned.ran([text.step(tokens)], verify_s=0.02)
    assert cut > 5
    assert planned.cycle.runner.state.inner.acceptance.estimates.draft_reached[0].sum() > 0


def test_rows_leave_and_return_and_may_begin_again():
    one, other, planned = repeating("a", 0), repeating("b", 100), host()
    for step in range(60):
        here = [one] if 10 <= step < 30 else [one, other]
        here = [text for text in here if text.written < len(text.tokens)]
        proposals = planned.propose([text.row() for text in here])
        done = [
            text.step(proposals[text.key].tokens if text.key in proposals else []) for text in here
        ]
        planned.ran(done[:1] if step == 5 else done, verify_s=0.02)
    assert planned.sequences["b"].tokens == other.tokens[: other.written]
    other.written = 20
    planned.propose([other.row()])
    assert planned.sequences["b"].tokens == other.tokens[:20]


def test_answers_are_remembered_apart_by_salt():
    planned = host()
    answer = np.random.default_rng(1).integers(0, 4000, 120).tolist()
    serve(planned, [Text("first", answer, 8)])
    alike = planned.drafts[0].available
    planned.propose(
        [HostRow("same", answer[:20], 8, 90), HostRow("apart", answer[:20], 8, 90, salt="x")]
    )
    assert alike(planned.sequences["same"], 4) == 4
    assert alike(planned.sequences["apart"], 4) == 0


def test_a_policy_that_fails_costs_speculation_only():
    planned = host()
    planned.cycle.runner.policy.plan = None
    assert serve(planned, [repeating("r", 0)]) == 192


def test_the_first_tokens_are_counted_by_metric():
    stats = Stats()
    planned = Host(settings(), stats)
    planned.plan_by(FLAT)
    serve(planned, [repeating("r", 0)])
    counted = {(name, labels.get("draft")): n for name, labels, n in stats.drain().counters}
    assert counted["spindle_emitted_tokens_total", "suffix"] > 100
    assert counted["spindle_accepted_tokens_total", "suffix"] > 80


def test_settings_are_checked():
    assert [d.engine for d in settings().serving.drafts] == ["suffix"]
    assert settings().serving.policy.k_max == K_MAX
    for raw, wrong in (
        ({"draft": []}, "unknown key 'draft'"),
        ({"serving": {}}, "unknown key 'serving'"),
        ({"policy": {"k_max": 3}}, "policy.k_max is the host's own"),
        ({"policy": {"nothing": 3}}, "unknown key 'policy.nothing'"),
        ({"calibration_s": 0}, "calibration_s must be at least 0.1"),
        ({"drafts": [{"engine": "head", "name": "h", "model": "x"}]}, "reads the target"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            settings(**raw)


def test_shapes_grow_and_long_prompts_come_last():
    found = list(shapes(5, 6, 4000))
    assert found[0] == StepShape(1, 0)
    assert [s.rows for s in found] == [*sorted([s.rows for s in found][:-4]), 1, 1, 4, 4]
    assert {s.length for s in found} == {0, 1, 2, 4, 6}
    assert max(s.prompt_tokens for s in shapes(5, 6, 100)) < 100


def test_a_calibration_takes_the_median_of_its_shapes():
    calibration = StepCalibration(shapes(2, 2, 0), 1e9)
    while (shape := calibration.shape) is not None:
        for n in range(SAMPLES + 1):
            tokens = shape.rows * (1 + shape.length)
            calibration.ran(shape.rows, tokens, 40, 9.0 if n in (0, 2) else 0.01 * tokens)
    table = calibration.table(TARGET, "cpu", "m", "f", "v")
    assert table.tokens == (1, 2, 3, 2, 4, 6)
    assert table.seconds == pytest.approx([0.01, 0.02, 0.03, 0.02, 0.04, 0.06])


def test_a_calibration_ends_when_its_time_is_spent_but_not_empty():
    now = iter(range(100))
    calibration = StepCalibration(shapes(64, 8, 0), 5.0, lambda: next(now))
    steps = 0
    while calibration.shape is not None:
        calibration.ran(1, 1, 16, 0.01)
        steps += 1
    assert steps == 6
    assert len(calibration.table(TARGET, "cpu", "m", "f", "v").tokens) == 1


def test_the_first_step_which_may_compile_spends_nothing_of_the_budget():
    now = iter([100.0, 100.0, 100.01, 100.02, 100.03])
    calibration = StepCalibration(iter([StepShape(1, 0)]), 5.0, lambda: next(now))
    for seconds in (100.0, 0.01, 0.02, 0.03):
        assert calibration.shape is not None
        calibration.ran(1, 1, 16, seconds)
    assert calibration.shape is None
    assert calibration.table(TARGET, "cpu", "m", "f", "v").seconds == (0.02,)


def test_a_shape_without_room_is_left_out_and_steps_with_prompts_are_better_than_none():
    calibration = StepCalibration(iter([StepShape(4, 0)]), 1e9)
    for _ in range(PATIENCE_STEPS + 1):
        assert calibration.shape is not None
        calibration.ran(2, 2, 40, 0.01)
    assert calibration.shape is None
    assert calibration.table(TARGET, "cpu", "m", "f", "v").rows == (2,)


def test_a_draft_with_a_model_is_measured_and_drafts_within_its_room():
    drafts = [
        {
            "engine": "torch",
            "name": "small",
            "dtype": "fp32",
            "model": "engines_build/drafts/tiny-0.9m",
        }
    ]
    planned = host(drafts=drafts, limits={"kv_cache_tokens": 2048, "max_active_requests": 4})
    table = draft_table(planned.drafts[0], 4)
    assert {(r, t) for r, t in zip(table.rows, table.tokens, strict=True)} >= {(1, 1), (4, 4)}
    assert min(table.seconds) > 0
    texts = [
        Text(f"t{n}", np.random.default_rng(n).integers(1, 99, 60).tolist(), 8) for n in range(3)
    ]
    serve(planned, texts)
    assert planned.ledger.usage()["used"] == 0
