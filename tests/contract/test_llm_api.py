"""TensorRT-LLM's LLM API as a hosted engine, on a fake that enforces the recorded sources of three
versions: never on the real one.
"""

import asyncio
import json
import os
import re
import sys
import threading
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines.hosted import HostedRequest, HostedService
from backend.engines.port import EngineLostError
from backend.engines.tensorrt_llm import kind
from backend.ops.stats import Stats
from backend.request import ErrorCode, RequestError, SamplingParams
from policy import Switches
from tests.contract import fake_llm_api
from tests.contract.engine_folders import engine_folder
from tests.fakes.apps import ask as ask_app
from tests.fakes.apps import fake_app, finish
from tests.fakes.markov import VOCAB_SIZE, MarkovChain

END = 97
"""A letter that the chain writes now and then."""
PROMPT = tuple(b"the quick brown fox")
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "tensorrt-llm.md"


def checkpoint(path):
    """A Hugging Face folder as far as it is read before the library loads it."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": END}))
    (path / "tokenizer.json").write_text("{}")
    return path


def settings(model, engine_args=None, policy=None):
    return {
        "target": {"engine": "tensorrt_llm", "model": str(model), "engine_args": engine_args or {}},
        "policy": policy or {"kind": "none"},
        "limits": {"max_active_requests": 4, "max_context_tokens": 100},
    }


class Server:
    """An engine of a version, started as the application starts it."""

    def __init__(self, monkeypatch, tmp_path):
        self._monkeypatch, self._path = monkeypatch, tmp_path
        self.switches, self.stats = Switches(), Stats()
        monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")  # and is put back

    def folder(self, flow):
        if flow == "checkpoint":
            return checkpoint(self._path / "model")
        made = engine_folder(self._path, "engine", vocab_size=VOCAB_SIZE, max_draft_len=4)
        (made / "tokenizer.json").write_text("{}")
        return made

    def start(self, version="1.2.1", flow="checkpoint", engine_args=None, policy=None):
        """Return a coroutine that starts it."""
        for name in fake_llm_api.ADAPTERS:
            self._monkeypatch.delitem(sys.modules, name, raising=False)
        fake_llm_api.install(version, self._monkeypatch.setitem)
        config = parse_config(settings(self.folder(flow), engine_args, policy))
        kind.check_folder("target", config.target, config, lambda e: Path(e.model))
        service = HostedService(config, lambda e: Path(e.model), self.stats, lambda: self.switches)
        return kind.start(config.target, service)

    def counted(self, name):
        return sum(n for one, _, n in self.stats.drain().counters if one == name)


@pytest.fixture
def server(monkeypatch, tmp_path):
    return Server(monkeypatch, tmp_path)


def ask(max_tokens=40, tokens=PROMPT, *, own=None, **sampling):
    sampling.setdefault("end_ids", (END,))
    params = SamplingParams(**sampling)
    return HostedRequest(7, tuple(tokens), len(PROMPT), max_tokens, params, **(own or {}))


async def parts(engine, asked):
    async with aclosing(engine.generate(asked)) as stream:
        return [part async for part in stream]


def text(chunks):
    return [token for part in chunks for token in part.tokens]


def chain_text(asked):
    chain, tokens = MarkovChain(), list(asked.tokens)
    while len(tokens) < len(asked.tokens) + asked.max_tokens:
        tokens.append(chain.next(tokens, asked.prompt_tokens, asked.sampling)[0])
        if tokens[-1] in asked.sampling.end_ids:
            break
    return tokens[len(asked.tokens) :]


def run(server, asked, **how):
    async def main():
        engine = await server.start(**how)
        try:
            return await parts(engine, asked)
        finally:
            await engine.close()

    return asyncio.run(main())


FLOWS = [
    (version, flow)
    for version in fake_llm_api.VERSIONS
    for flow in ("checkpoint", "engine")
    if (version, flow) != ("main", "engine")
]


@pytest.mark.parametrize(("version", "flow"), FLOWS)
@pytest.mark.parametrize("end_ids", [(), (END,), (101, END)])
def test_texts_are_the_model_s_and_end_with_its_end_token(server, version, flow, end_ids):
    asked = ask(end_ids=end_ids)
    found = run(server, asked, version=version, flow=flow)
    assert text(found) == chain_text(asked)
    assert server.counted("spindle_emitted_tokens_total") == len(text(found))


def test_an_engine_folder_needs_a_version_with_the_engine_backend(server):
    with pytest.raises(ConfigError, match=r"TensorRT-LLM main has no engine backend: 1\.2\.1"):
        run(server, ask(), version="main", flow="engine")


@pytest.mark.parametrize("version", fake_llm_api.VERSIONS)
def test_a_generation_that_is_closed_is_aborted(server, version):
    async def main():
        engine = await server.start(version)
        stream = engine.generate(ask(end_ids=()))
        await anext(stream)
        assert fake_llm_api.LLM.made[-1].running == {1}
        await stream.aclose()
        return fake_llm_api.LLM.made[-1].running

    assert asyncio.run(main()) == set()


def test_a_request_that_fails_ends_alone_and_a_lost_worker_ends_the_engine(server):
    async def main():
        engine = await server.start()
        llm = fake_llm_api.LLM.made[-1]
        llm.fail(fake_llm_api.RequestError("it is too long"), 1)
        with pytest.raises(RequestError, match="TensorRT-LLM ended the request: it is too long"):
            await parts(engine, ask())
        assert text(await parts(engine, ask())) == chain_text(ask())
        llm.fail(OSError("a worker died"))
        with pytest.raises(EngineLostError, match="OSError: a worker died"):
            await parts(engine, ask())
        with pytest.raises(EngineLostError, match="shutting down"):
            await parts(engine, ask())

    asyncio.run(main())


@pytest.mark.parametrize("bias", [(), ((5, 3.0),)])
def test_log_probabilities_are_the_contract_s_or_refused(server, bias):
    asked = ask(temperature=1.0, bias=bias, top_log_probs=2, log_probs=True, seed=1)
    if bias:
        with pytest.raises(RequestError, match="return_log_probs is not supported"):
            run(server, asked)
        return
    found = run(server, asked)
    tokens, place = list(PROMPT), 0
    for part in found:
        for token, log_prob, top in zip(part.tokens, part.log_probs, part.top, strict=True):
            _, scores = MarkovChain().chances(tokens, len(PROMPT), asked.sampling)
            best = sorted(scores, reverse=True)[:2]
            assert log_prob == pytest.approx(scores[token])
            assert [score for _, score in top] == pytest.approx(best)
            tokens.append(token)
            place += 1
    assert place


def test_requests_of_one_salt_share_kv_or_are_refused_where_none_is_known(server):
    asked = ask(own={"salt": "tenant"})
    assert text(run(server, asked, version="1.3.0rc3")) == chain_text(asked)
    with pytest.raises(RequestError, match="cache_salt is not supported"):
        run(Server(server._monkeypatch, server._path / ".."), asked, version="main")


# -- each option of the contract, by the table of the page

OPTIONS = {
    "end_id, eos of the model": {"end_ids": (101, END)},
    "max_tokens": {},
    "temperature": {"temperature": 0.7, "seed": 3},
    "runtime_top_k": {"temperature": 1.0, "top_k": 2, "seed": 3},
    "runtime_top_k over 1024": {"temperature": 1.0, "top_k": 2000, "seed": 3},
    "runtime_top_p": {"temperature": 1.0, "top_p": 0.7, "seed": 3},
    "runtime_top_p_decay": {"temperature": 1.0, "top_p": 0.9, "top_p_decay": 0.9, "seed": 3},
    "min_p": {"temperature": 1.0, "min_p": 0.2, "seed": 3},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.8},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "prompt_ignore_length": {"presence_penalty": 0.8, "prompt_ignore_length": 4},
    "min_length": {"min_tokens": 20},
    "min_length, several end tokens": {"min_tokens": 20, "end_ids": (101, END)},
    "bad_words_list of one token": {"bad_words": ((98,), (99,))},
    "bad_words_list of several tokens": {"bad_words": ((98, 99),)},
    "embedding_bias": {"bias": ((104, 4.0),)},
    "random_seed": {"temperature": 1.0, "seed": 3},
    "return_log_probs": {"log_probs": True},
    "return_log_probs with temperature or bias": {"log_probs": True, "temperature": 0.5},
}
EQUAL_IF_GREEDY = {name for name, words in OPTIONS.items() if not words.get("temperature")}


def rows():
    table = PAGE.read_text("utf-8").split("## Options")[1].split("\n## ")[0]
    found = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)[2:]
    return [(name.replace("`", ""), *cells) for name, *cells in found]


def test_the_table_has_every_option():
    assert {name for name, *_ in rows()} == OPTIONS.keys()
    read = {name for words in OPTIONS.values() for name in words}
    options = {one.name for one in fields(SamplingParams) if one.init}
    with_others = {"guide", "top_log_probs", "top_p_min", "top_p_reset_id"}
    assert options - read == with_others


@pytest.mark.parametrize("flow", ["checkpoint", "engine"])
def test_every_option_is_the_same_or_other_or_refused_by_name_as_the_page_says(server, flow):
    async def main():
        engine = await server.start(flow=flow)
        for name, *cells in rows():
            asked, cell = ask(**OPTIONS[name]), cells[flow == "engine"]
            meaning = re.match("same|other|refused", cell)[0]
            if meaning == "refused":
                with pytest.raises(RequestError) as caught:
                    await parts(engine, asked)
                assert caught.value.code is ErrorCode.UNIMPLEMENTED, name
                assert "is not supported" in caught.value.message, name
                continue
            found = text(await parts(engine, asked))
            if meaning == "same" and name in EQUAL_IF_GREEDY:
                assert found == chain_text(asked), name

    asyncio.run(main())


# -- drafters

PLUG_IN = {
    "decoding_type": "Spindle",
    "max_draft_len": 4,
    "drafts": [{"engine": "lookup", "name": "lookup"}],
}
REPEATING = ask(60, PROMPT + tuple(b" abcabcabcabcabcabcabc" * 2), end_ids=(), bias=((120, 40.0),))
"""Its text is a row of one letter, which ``lookup`` proposes."""


@pytest.mark.parametrize("version", fake_llm_api.VERSIONS)
def test_the_drafter_chooses_by_request_and_texts_stay(server, version):
    async def main():
        engine = await server.start(
            version, engine_args={"speculative_config": PLUG_IN}, policy={"kind": "adaptive"}
        )
        assert (engine.limits.draft, engine.limits.k_max) == ("spindle", 4)
        assert engine.explain()["step"] == "no step has been planned yet"
        free = await parts(engine, REPEATING)
        assert engine.explain()["requests"]
        none = await parts(engine, replace(REPEATING, most_drafted=0))
        server.switches = Switches(speculation="off")
        off = await parts(engine, REPEATING)
        return free, none, off

    free, none, off = asyncio.run(main())
    assert text(free) == text(none) == text(off) == chain_text(REPEATING)
    assert sum(accepted for _, accepted in free[-1].verified_steps) > 10
    assert max(proposed for proposed, _ in free[-1].verified_steps) <= 4
    assert none[-1].verified_steps == off[-1].verified_steps == []
    assert server.counted("spindle_emitted_tokens_total") == 3 * 59


def test_a_drafter_of_tensorrt_llm_keeps_its_lengths_to_itself(server):
    spec = {"decoding_type": "NGram", "max_draft_len": 3}

    async def main():
        engine = await server.start(
            engine_args={"speculative_config": spec}, policy={"kind": "fixed"}
        )
        assert (engine.limits.draft, engine.limits.k_max) == ("ngram", 3)
        assert text(await parts(engine, ask())) == chain_text(ask())
        with pytest.raises(RequestError, match="num_draft_tokens is not supported"):
            await parts(engine, ask(own={"most_drafted": 0}))

    asyncio.run(main())


def test_a_schedule_of_lengths_has_another_meaning_after_1_3():
    old, new = ({1: 4, 4: 2, 8: 0}, {3: 4, 7: 2})
    made = [
        fake_llm_api.DecodingConfig(version, "NGram", 4, schedule)
        for version, schedule in (("1.2.1", old), ("main", new))
    ]
    assert all([m.length(n) for n in range(1, 11)] == [4] * 3 + [2] * 4 + [0] * 3 for m in made)
    with pytest.raises(ValueError, match="must include batch_size=1"):
        fake_llm_api.DecodingConfig("1.2.1", "NGram", 4, new)


# -- in the loop, as every hosted engine is (tests/unit/test_hosted_loop.py)


@pytest.fixture(params=["checkpoint", "engine"])
def app(request, server, monkeypatch):
    """A deployment of one flow; texts are bytes."""
    fake_llm_api.install("1.2.1", monkeypatch.setitem)  # and is taken away again
    raw = settings(server.folder(request.param))
    raw["target"]["engine"] = "tests.contract.fake_llm_kind"
    app = build(parse_config(raw))
    yield app
    app.close()


def test_many_requests_share_the_places_and_get_the_reference_s_text(app):
    finish(reference := fake_app(), alone := ask_app(reference, "same ", 20))
    reference.close()
    sinks = [ask_app(app, "same ", 20) for _ in range(10)]
    finish(app, *sinks)
    assert {sink.text for sink in sinks} == {alone.text}
    assert not fake_llm_api.LLM.made[-1].running


def test_a_stop_word_and_a_cancellation_abort_in_tensorrt_llm(app):
    finish(app, reference := ask_app(app, "stop ", 60))
    word = reference.text[20:24]
    finish(app, one := ask_app(app, "stop ", 60, stop_words=(word,)))
    assert one.text == reference.text[: reference.text.index(word)]
    gone, other = ask_app(app, "go on ", 80), ask_app(app, "stop ", 60)
    while not (llm := fake_llm_api.LLM.made[-1]).running:
        app.loop.step()
    gone.cancelled = True
    app.loop.wake()
    finish(app, gone, other)
    assert (gone.reason, other.text) == (ErrorCode.CANCELLED, reference.text)
    app.loop.step()
    assert not llm.running


def test_a_lost_worker_ends_the_loop_and_each_request_by_one_error(app):
    sinks = [ask_app(app, "tokens ", 60) for _ in range(6)]  # four places
    fake_llm_api.LLM.made[-1].fail(OSError("a worker died"))
    app.loop.run(threading.Event())
    assert all(len(sink.ends) == 1 for sink in sinks)
    assert any("a worker died" in sink.ends[0][1] for sink in sinks)


# -- settings


@pytest.mark.parametrize(
    ("engine_args", "policy", "message"),
    [
        ({"max_batch_size": 8}, None, "engine_args.max_batch_size follows from other settings"),
        ({"speculative_config": {"max_draft_len": 3}}, None, "must have a decoding_type"),
        ({"speculative_config": {"decoding_type": "NGram"}}, None, "must be at least 1"),
        (
            {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}},
            {"kind": "adaptive"},
            "policy.kind must be 'none' or 'fixed'",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(server, engine_args, policy, message):
    with pytest.raises(ConfigError, match=message):
        run(server, ask(), engine_args=engine_args, policy=policy)


def test_an_engine_folder_bounds_the_limits(server, tmp_path):
    folder = server.folder("engine")
    raw = settings(folder)
    for name, value in (("max_active_requests", 9), ("max_context_tokens", 125)):
        limits = {**raw["limits"], name: value}
        config = parse_config({**raw, "limits": limits})
        with pytest.raises(ConfigError, match=f"limits.{name} must be at most"):
            kind.check_folder("target", config.target, config, lambda e: Path(e.model))
    config = parse_config({**raw, "limits": {**raw["limits"], "enable_kv_cache_reuse": False}})
    with pytest.raises(ConfigError, match="draft_tokens_external, which needs it"):
        kind.check_folder("target", config.target, config, lambda e: Path(e.model))


@pytest.mark.parametrize(("ranks", "single"), [(1, "1"), (2, None)])
def test_a_model_on_one_gpu_runs_without_mpi(server, monkeypatch, ranks, single):
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    run(server, ask(), engine_args={"tensor_parallel_size": ranks})
    assert os.environ.pop("TLLM_WORKER_USE_SINGLE_PROCESS", None) == single
