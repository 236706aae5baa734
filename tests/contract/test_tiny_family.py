"""The shipped family of small trained models, whole and in fp32: drafts that come and go change no
text, and each is worth its place.
"""

import threading
from dataclasses import replace

import pytest
import torch

from backend import PROJECT_ROOT
from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.reloading import reload_drafts
from backend.request import GenerationRequest
from backend.tokenizer import load_tokenizer
from bench.in_process import SilentSink, generate
from bench.micro.hazards import messages
from policy import LatencyTable, NoSpeculation, RandomChoice
from tests.contract.reference_texts import Model
from tests.contract.tiny_family import as_message
from tests.contract.witness import Witness

pytestmark = pytest.mark.slow

FOLDER = PROJECT_ROOT / "engines_build/drafts"
NAMES = ["tiny-head", "tiny-0.9m"]


def share_repeated(texts, size=4):
    """The share of the runs of ``size`` tokens that occurred before in their own text."""
    runs = [[tuple(text[i : i + size]) for i in range(len(text) - size + 1)] for text in texts]
    return sum(len(seen) - len(set(seen)) for seen in runs) / max(sum(map(len, runs)), 1)


def engine(name):
    kind = "head" if name == "tiny-head" else "torch"
    return {"name": name, "engine": kind, "model": str(FOLDER / name), "dtype": "fp32"}


def config(*names, **settings):
    drafts = [
        engine(name) if name != "lookup" else {"name": name, "engine": "lookup"} for name in names
    ]
    return parse_config(
        {
            "target": {**engine("tiny-target"), "name": "target"},
            "drafts": drafts,
            "threads": 1,
            **settings,
        }
    )


TABLES = {"target": LatencyTable.synthetic("target", {1: 0.004, 8: 0.005, 64: 0.02})}
TABLES |= {name: LatencyTable.synthetic(name, {1: 0.0003, 64: 0.001}) for name in NAMES}


@pytest.fixture(scope="module", autouse=True)
def one_thread(tmp_path_factory):
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPINDLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patched.setattr("backend.reloading.load_tables", lambda config, folders: (TABLES, 1))
        yield


@pytest.fixture(scope="module")
def app():
    made = build(config(*NAMES, "lookup"), TABLES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def requests():
    texts = [
        *messages("sql", 6, 1),
        "What is a window?",
        "Explain what an index of a database is good for.",
    ]
    return [GenerationRequest(as_message(text), 48) for text in texts]


@pytest.fixture(scope="module")
def plain(app, requests):
    return generate(app, requests, policy=NoSpeculation())


@pytest.mark.parametrize("policy", [None, RandomChoice()], ids=["planned", "random"])
def test_texts_are_those_of_plain_decoding_in_batches_with_any_draft(app, requests, plain, policy):
    sessions = generate(app, requests, together=4, policy=policy)
    assert sum(session.accepted for session in sessions) > 20
    Witness(FOLDER / "tiny-target").check_equal(plain, sessions)


def test_trained_drafts_come_and_go_under_requests_in_flight(requests, plain):
    app = build(config(NAMES[0]), TABLES)
    sessions = [app.session(request, SilentSink()) for request in requests]
    for session in sessions:
        app.orchestrator.submit(session)
    for names in (NAMES, [NAMES[1]], ["lookup", *NAMES], [NAMES[0]], ["lookup"]):
        for _ in range(4):
            app.orchestrator.step()
        change = threading.Thread(target=reload_drafts, args=(app, config(*names)))
        change.start()
        while change.is_alive():
            app.orchestrator.step()
        assert [draft.name for draft in app.drafts] == names
    while any(not session.sink.has_ended for session in sessions):
        app.orchestrator.step()
    Witness(FOLDER / "tiny-target").check_equal(plain, sessions)
    assert not [
        name for name, _, _ in app.stats.drain().counters if name == "spindle_fallback_total"
    ]
    app.close()


def test_a_head_that_the_target_was_not_built_for_is_refused_by_its_layers():
    app = build(config("tiny-0.9m"), TABLES)
    with pytest.raises(ConfigError, match=r"layers \[1, 2, 4\] cannot be added"):
        reload_drafts(app, config(*NAMES))
    app.close()


@pytest.mark.parametrize("workload", ["chat", "summarise", "code"])
def test_the_target_does_not_loop_where_it_decodes_greedily(workload):
    target, tokenizer = (
        Model(FOLDER / "tiny-target", "fp32", rows=8),
        load_tokenizer(FOLDER / "tiny-target"),
    )
    prompts = [tokenizer.encode(as_message(message)) for message in messages(workload, 8, 1)]
    answers = target.answers(prompts, 0.0, 96, tokenizer.end_ids, 0)
    assert sum(map(len, answers)) > 200
    assert share_repeated(answers) < 0.4


def test_long_requests_over_little_kv_all_end_with_two_drafts_that_keep_kv(requests):
    """The drafts' KV is in the same ledger: none runs out of blocks (vLLM #9995, TRT-LLM #9279)."""
    target, twin = ({**engine("tiny-target"), "name": name} for name in ("target", "twin"))
    settings = {
        "target": target,
        "drafts": [engine("tiny-0.9m"), twin],
        "limits": {"kv_cache_tokens": 1024, "max_active_requests": 16, "max_context_tokens": 512},
        "policy": {"kind": "random", "k_max": 8},
        "threads": 1,
    }
    app = build(parse_config(settings), {**TABLES, "twin": TABLES["target"]})
    asked = [replace(request, max_tokens=200, end_id=-1) for request in requests]
    sessions = generate(app, asked * 4, 32)
    assert [session.output_tokens for session in sessions] == [200] * 32
    counted = {(name, *labels.values()): n for name, labels, n in app.stats.drain().counters}
    assert counted["spindle_preemptions_total",] > 0
    assert not any(name == "spindle_fallback_total" for name, *_ in counted)
    assert app.orchestrator.counts() == (0, 0)
    alone = generate(app, asked, policy=NoSpeculation())
    app.close()
    assert [s.sequence.tokens for s in sessions] == 4 * [s.sequence.tokens for s in alone]
