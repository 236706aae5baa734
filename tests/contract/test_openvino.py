"""The default engine on CPUs: the exactness suite, the traps of its library, and the same texts
under any load or plan, bit for bit.
"""

import gc
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from itertools import cycle

import numpy as np
import pytest
import torch

from backend import kinds
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engine_config import with_auto_resolved
from backend.engines.openvino import decoder
from backend.engines.openvino.conversion import misfit_of_attention
from backend.engines.openvino.decoder import PassError
from backend.engines.openvino.engine import keeps_sums
from backend.engines.openvino.layout import Layout, in_calls, paths
from backend.engines.openvino.paged_attention import OpenvinoVersionError
from backend.engines.openvino.width import PassWidth
from backend.engines.port import KeepsWidth, Turn
from backend.engines.stepping.chunks import KVTable, PassChunk
from backend.machine import machine
from backend.request import SamplingParams
from backend.sampling.distributions import likeliest
from backend.sequence import BLOCK_TOKENS, ROOT, Proposal, Sequence
from policy import NO_DRAFT
from tests.contract import checks, deployment
from tests.contract.deployment import (
    K_MAX,
    VOCAB,
    Deployment,
    ForetoldDraft,
    Scripted,
    tiny_engine,
)
from tests.contract.openvino_engines import (
    heads_of_sixteen,
    on_openvino,
    openvino_engine,
    with_larger_heads,
)
from tests.contract.scenarios import ALIKE, BUSY, CRAMPED, CROWDED, MIXED, TAILED, serve
from tests.fakes.checkpoints import LLAMA3
from tests.fakes.llamas import layers_of, torch_engine
from tests.fakes.llamas import llama as tiny_llama

SCENARIOS = {
    "busy": BUSY,
    "options": MIXED,
    "little KV": CRAMPED,
    "crowded": CROWDED,
    "tail": TAILED,
    "prefixes": ALIKE,
}


@pytest.fixture(autouse=True, scope="module")
def larger_heads():
    with with_larger_heads():
        yield


@pytest.fixture(scope="module", params=[1, 2], ids="{} threads".format)
def engine(request):
    with on_openvino(threads=request.param):
        return tiny_engine()


@pytest.mark.parametrize("invariant", [True, False], ids=["invariant", "in runs"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_texts_are_those_of_plain_decoding_and_nothing_unwritten_is_read(name, invariant):
    with on_openvino(SCENARIOS[name], invariant=invariant):
        checks.texts(serve(SCENARIOS[name]))


def test_a_draft_s_graph_ranks_as_the_rule_does():
    config = heads_of_sixteen()
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: torch.randn(size, generator=generator) for name, size in config.shapes().items()
    }
    weights["lm_head.weight"] *= 2  # sharper
    sizes = {"kv_blocks": 4, "max_context_tokens": 96, "verifies": False, "invariant": False}
    draft = openvino_engine("draft", config, weights, **sizes)
    logits = draft.model.forward([PassChunk(list(range(9)), 0, table(0), 9)])
    found, wanted = draft.model.best(logits, 3), [likeliest(row, 3) for row in logits]
    assert draft.model.best(logits[:5], 3) is None
    assert [[column for column, _ in row] for row in found] == [
        [column for column, _ in row] for row in wanted
    ]
    for row, other in zip(found, wanted, strict=True):
        assert np.allclose([p for _, p in row], [p for _, p in other], atol=1e-5)
    assert {len(row) for row in found} != {3}  # some are too unlikely to be reported


# -- the same bits


def logits_of(engine, *chunks):
    """The logits of one pass [rows, vocab]."""
    return engine.model.forward(list(chunks)).copy()


def table(number, blocks=2):
    return KVTable(range(number * blocks, (number + 1) * blocks))


def plain(engine, tokens, prompt, where):
    """The logits after each of ``tokens`` from the prompt's last on: prefill, then one by one."""
    rows = [logits_of(engine, PassChunk(tokens[:prompt], 0, where, 1, prompt_rows=prompt))]
    rows += [
        logits_of(engine, PassChunk([token], position, where, 1))
        for position, token in enumerate(tokens[prompt:], prompt)
    ]
    return np.concatenate(rows)


PROMPT, TEXT = 29, 37
"""The text goes over the end of a block."""


@pytest.fixture
def text(engine):
    tokens = np.random.default_rng(0).integers(0, VOCAB, TEXT).tolist()
    return tokens, plain(engine, tokens, PROMPT, table(0))


@pytest.mark.parametrize("cuts", [[2, 27], [14, 15], [3, 3, 3, 20], [27, 2], [1, 28]])
def test_a_prompt_cut_anywhere_has_the_bits_of_the_whole(engine, text, cuts):
    tokens, whole = text
    start, where = 0, table(1)
    for cut in cuts:
        part = PassChunk(tokens[start : start + cut], start, where, 1, prompt_rows=cut)
        other = PassChunk(tokens[: 5 + cut], 0, table(2), 0, prompt_rows=5 + cut)
        rows = logits_of(engine, part, other)
        start += cut
    assert np.array_equal(rows[0], whole[0])


@pytest.mark.parametrize("others", [0, 1, 6])
@pytest.mark.parametrize("proposed", [1, 3, 8])
def test_a_verification_has_the_bits_of_plain_decoding(engine, text, proposed, others):
    tokens, whole = text
    where = table(1)
    plain(engine, tokens[: PROMPT + 1], PROMPT, where)
    chain = PassChunk(tokens[PROMPT - 1 + 1 : PROMPT + proposed], PROMPT, where, proposed)
    alongside = [
        PassChunk(tokens[: 4 + n], 0, table(2 + n), 1 + n, prompt_rows=4 + n) for n in range(3)
    ]
    alongside += [PassChunk(tokens[:2], 0, table(5 + n), 1) for n in range(3)]
    found = logits_of(engine, *alongside[:others], chain)[-proposed:]
    assert np.array_equal(found, whole[1 : 1 + proposed])


def test_a_tree_has_the_bits_of_its_paths_and_leaves_the_kv_of_the_one_that_is_kept(engine, text):
    tokens, whole = text
    where = table(1)
    plain(engine, tokens[:PROMPT], PROMPT, where)
    # The longest path is wrong; the text is on nodes 1 and 3 to 6.
    wrong = [(token + 1) % VOCAB for token in tokens[PROMPT + 1 : PROMPT + 8]]
    truth = tokens[PROMPT + 1 : PROMPT + 6]
    nodes = [wrong[0], truth[0], *wrong[1:2], *truth[1:], *wrong[2:5]]
    parents = [ROOT, ROOT, 0, 1, 3, 4, 5, 2, 7, 8]
    tree = PassChunk([tokens[PROMPT], *nodes], PROMPT, where, len(nodes) + 1, parents)
    found = logits_of(engine, tree)
    path = [1, 3, 4, 5, 6]
    assert np.array_equal(found[[0, *(1 + node for node in path)]], whole[1:7])
    with torch.inference_mode():
        engine.model.keep([(tree, path)])
    assert np.array_equal(
        logits_of(engine, PassChunk([tokens[PROMPT + 6]], PROMPT + 6, where, 1)), whole[7:8]
    )


def served(engine, asks, *, load):
    """Serve (prompt, tokens, sampling) under a load; return text and log-probabilities of each."""
    rng = np.random.default_rng([1, load])
    drafts = [
        ForetoldDraft("liar", lies=True),
        ForetoldDraft("oracle"),
        ForetoldDraft("bushy", bushy=True),
    ]
    script = [
        (int(d), int(k))
        for d, k in zip(rng.integers(0, 3, 17), rng.integers(0, K_MAX + 1, 17), strict=True)
    ]
    alone = load == 0
    made = Deployment(
        engine,
        [] if alone else drafts,
        Scripted([(NO_DRAFT, 0)] if alone else script, rng.integers(1, 8, 13).tolist()),
        chunk_tokens=64 if alone else int(rng.integers(2, 24)),
        max_active=1 if alone else int(rng.integers(2, 13)),
        kv_blocks=8 if alone else int(rng.integers(6, 20)),
        nodes=int(rng.choice([0, 7])),
        reuse=bool(rng.integers(2)),
        poisons=False,
    )
    sessions = []
    for prompt, tokens, sampling, truth in asks:
        sessions.append(made.submit(prompt, tokens, sampling))
        for draft in made.drafts:
            draft.truth[sessions[-1].id] = truth
        for _ in range(int(rng.integers(0, 3))):
            made.step()
    made.run()
    texts = [(s.sequence.tokens[s.sequence.prompt_tokens :], s.sink.log_probs) for s in sessions]
    return texts, made.counters()


def asked(count):
    """Greedy and seeded requests, many of which begin alike."""
    rng = np.random.default_rng(7)
    stems = [rng.integers(0, VOCAB, 2 * BLOCK_TOKENS).tolist() for _ in range(4)]
    for number, stem in zip(range(count), cycle(stems), strict=False):
        kept = int(rng.choice([1, 20, BLOCK_TOKENS, 2 * BLOCK_TOKENS]))
        prompt = [*stem[:kept], *rng.integers(0, VOCAB, int(rng.integers(0, 9))).tolist()]
        temperature = 0.0 if number % 2 else 0.9
        yield (
            prompt,
            int(rng.integers(3, 16)),
            SamplingParams(temperature, seed=number, log_probs=True),
        )


def same_texts_under(loads, count, dtype, threads):
    with on_openvino(dtype=dtype, threads=threads):
        engine = tiny_engine(kv_blocks=20)
    return same_texts_of(engine, loads, count)


def same_texts_of(engine, loads, count):
    """Assert that requests have the same texts under loads as alone; return how many of them were
    pre-empted.
    """
    unknown = [(*ask, []) for ask in asked(count)]
    alone, _ = served(engine, unknown, load=0)
    known = [(*ask, tokens) for ask, (tokens, _) in zip(asked(count), alone, strict=True)]
    pre_empted = 0.0
    for load in loads:
        found, counters = served(engine, known, load=load)
        assert found == alone, f"load {load}"
        pre_empted += sum(value for key, value in counters.items() if "preempt" in key[0])
    return pre_empted


in_bf16 = pytest.mark.skipif(
    not machine.multiplies_bf16(), reason="the processor does not multiply bf16"
)
DTYPES = ["fp32", pytest.param("bf16", marks=in_bf16)]
"""Those that promise the same bits."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_request_has_the_same_text_to_the_last_bit_under_any_load_and_plan(dtype, threads):
    same_texts_under(range(1, 4), 24, dtype, threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_int8_has_the_same_bits_under_any_load_and_plan(threads, monkeypatch):
    monkeypatch.setattr("backend.engines.openvino.parts.SMALL_WEIGHT", 1)
    same_texts_under(range(1, 3), 12, "int8", threads)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_hundred_requests_have_the_same_bits_under_twenty_loads_pre_emption_included(
    dtype, threads
):
    assert same_texts_under(range(1, 21), 200, dtype, threads) > 100


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_text_has_the_same_bits_with_one_thread_and_with_two(dtype):
    tokens, found = np.random.default_rng(0).integers(0, VOCAB, TEXT).tolist(), []
    for threads in (1, 2):
        with on_openvino(dtype=dtype, threads=threads):
            found.append(plain(tiny_engine(), tokens, PROMPT, table(0)))
    assert np.array_equal(*found)


def test_a_pass_is_as_wide_as_the_one_before_and_its_bits_are_the_same(monkeypatch, engine, text):
    tokens, whole = text
    plain(engine, tokens[: PROMPT + 1], PROMPT, where := table(1))
    inputs, widths = Layout.inputs, []

    def noted(layout, **options):
        found = inputs(layout, **options)
        widths.append((len(found["ids"]), len(found["expand"])))
        return found

    monkeypatch.setattr(Layout, "inputs", noted)
    monkeypatch.setattr(engine.model, "_widths", (PassWidth(4), PassWidth(20)))
    tree = PassChunk(tokens[PROMPT : PROMPT + 4], PROMPT, where, 4, [ROOT, 0, ROOT])
    for chunk in (tree, PassChunk(tokens[PROMPT : PROMPT + 3], PROMPT, where, 3)):
        found = logits_of(engine, chunk)
    assert widths[0] == widths[1] == (4, 5)
    assert isinstance(engine, KeepsWidth)
    assert engine.width() == (4, 4)
    assert np.array_equal(found, whole[1:4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_target_that_a_head_reads_has_the_bits_of_one_without(monkeypatch, dtype):
    tokens, found = np.random.default_rng(0).integers(0, VOCAB, TEXT).tolist(), []
    for taps in (deployment.TAPS, ()):
        monkeypatch.setattr(deployment, "TAPS", taps)
        with on_openvino(dtype=dtype):
            found.append(plain(tiny_engine(), tokens, PROMPT, table(0)))
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("terms", "dtype", "kept"),
    [
        ({64, 96}, "fp32", True),
        ({64, 96}, "bf16", True),
        ({32, 96}, "bf16", False),
        ({64, 80}, "bf16", False),
        ({48, 96}, "bf16", False),
        ({48, 96}, "fp32", True),
        ({48, 96}, "int8", True),
        ({48, 96}, "int4", True),
    ],
)
def test_the_same_bits_are_promised_where_products_keep_them(terms, dtype, kept):
    assert keeps_sums(terms, dtype) == kept


@in_bf16
def test_a_model_whose_products_do_not_keep_them_is_no_promise():
    config = replace(heads_of_sixteen(), intermediate_size=80)
    with on_openvino(dtype="bf16"):
        assert tiny_engine().limits.invariant
        assert not tiny_engine(config=config).limits.invariant


FAMILY = tiny_llama(VOCAB, 32, 48, 2, 4, 2, 16)


@pytest.mark.parametrize(
    "changed",
    [
        {"ties_embeddings": True, "qkv_bias": True},
        {"rope": LLAMA3, "rope_theta": 500000.0, "num_kv_heads": 4, "rms_norm_eps": 1e-3},
    ],
    ids="-".join,
)
def test_a_graph_has_the_logits_of_the_reference(changed):
    config = replace(FAMILY, **changed)
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(s, generator=generator) / 3 for n, s in config.shapes().items()}
    sizes = {"kv_blocks": 4, "max_context_tokens": 96}
    made = openvino_engine("target", config, weights, **sizes)
    wide = {name: weight.double() for name, weight in weights.items()}
    reference = torch_engine("target", config, wide, **sizes)
    tokens = [*range(VOCAB), *range(VOCAB)]
    chunk = PassChunk(tokens, 0, table(0), len(tokens), prompt_rows=len(tokens))
    found, wanted = logits_of(made, chunk), logits_of(reference, chunk)
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, atol=2e-4, rtol=2e-4)


def test_int8_rounds_matrices_and_little_else(monkeypatch):
    monkeypatch.setattr("backend.engines.openvino.parts.SMALL_WEIGHT", 1)
    generator = torch.Generator().manual_seed(3)
    weights = {n: torch.randn(s, generator=generator) / 3 for n, s in FAMILY.shapes().items()}
    rounded = {
        name: rounded_to_rows(w) if w.dim() == 2 and "embed" not in name else w
        for name, w in weights.items()
    }
    sizes = {"kv_blocks": 4, "max_context_tokens": 96}
    made = openvino_engine("target", FAMILY, weights, dtype="int8", **sizes)
    reference = openvino_engine("target", FAMILY, rounded, **sizes)
    assert made.limits.invariant
    chunk = PassChunk(list(range(VOCAB)), 0, table(0), VOCAB, prompt_rows=VOCAB)
    found, wanted = logits_of(made, chunk), logits_of(reference, chunk)
    assert 0 < (found - wanted).std() < 0.02 * wanted.std()  # activations are rounded, too


def rounded_to_rows(weight):
    """A matrix in 127 steps a row, the step in fp16."""
    step = (weight.abs().amax(1, keepdim=True) / 127).half().float()
    return (weight / step).round().clamp(-127, 127) * step


# -- what its library does


def test_it_is_refused_in_another_version_than_is_known(monkeypatch, engine):
    monkeypatch.setattr(metadata, "version", lambda name: "2026.5.0")
    missing = "openvino==2026.4.1 (found: 2026.5.0)"
    assert kinds.KINDS["openvino"].missing == missing
    with pytest.raises(OpenvinoVersionError, match=r"2026\.5\.0"), on_openvino():
        tiny_engine()
    raw = {"target": {"engine": "openvino", "model": "folder"}}
    with pytest.raises(ConfigError, match=r"target.engine 'openvino' needs openvino==2026\.4\.1"):
        parse_config(raw)
    auto = parse_config({"target": {"model": "folder"}}).target
    assert (auto.engine, with_auto_resolved(auto).engine) == ("torch", "torch")


def test_the_installed_version_is_the_one_that_is_known():
    assert metadata.version("openvino") == kinds.KINDS["openvino"].package[1]


BROKEN = """
import numpy as np
from backend.engines.openvino.engine import OpenvinoEngine
from backend.engines.openvino.layout import Layout, in_calls, paths
from tests.contract import deployment
from tests.contract import test_openvino as tests

deployment.tiny_config = tests.heads_of_sixteen
with tests.on_openvino():
    engine = tests.tiny_engine()
chunk = tests.PassChunk([1, 2, 3], 0, tests.table(0), 1, prompt_rows=3)
tests.logits_of(engine, chunk)
inputs = Layout.inputs
Layout.inputs = lambda self, **options: {
    **inputs(self, **options), "past_lens": np.zeros(9, np.int32)
}
try:
    tests.logits_of(engine, chunk)
except tests.PassError as error:
    print(error)
else:
    print("logits")
"""


def test_a_pass_that_raises_within_its_library_never_ends_in_the_logits_before():
    """It is swallowed, or ends the process."""
    command = [sys.executable, "-c", BROKEN]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode < 0 or "OpenVINO's pass of 1 sequences left no logits" in done.stdout
    assert "logits\n" not in done.stdout.replace("left no logits\n", "")


def test_a_silent_pass_is_an_error_and_the_next_is_not(engine):
    class Silent:
        def __getattr__(self, name):
            return getattr(request, name)

        def infer(self, **_):
            pass

    request = engine.model._request
    chunk = PassChunk([1, 2], 0, table(0), 1, prompt_rows=2)
    before = logits_of(engine, chunk)
    pool_of(engine)[:, :, engine.limits.kv_blocks :] = 1.0
    contents = pool_of(engine)[:, :, : engine.limits.kv_blocks].copy()
    engine.model._request = Silent()
    with pytest.raises(PassError, match="1 sequences left no logits"):
        logits_of(engine, PassChunk([5, 6], 0, table(0), 1, prompt_rows=2))
    assert np.array_equal(pool_of(engine)[:, :, : engine.limits.kv_blocks], contents)
    assert np.array_equal(logits_of(engine, chunk), before)  # with a request of its own


def pool_of(engine):
    """Keys and values by layer [layers, 2, blocks, kv_heads, tokens, head_dim]."""
    pool = engine.model.pools[0]
    return pool.reshape(-1, 2, *pool.shape[1:])


def test_weights_and_caches_outlive_the_arrays_that_they_came_from(engine, text):
    tokens, whole = text
    gc.collect()
    arrays = [np.full((64, 1024), np.nan, np.float32) for _ in range(64)]
    assert np.array_equal(plain(engine, tokens, PROMPT, table(3)), whole)
    assert len(arrays) == 64


def test_caches_laid_out_otherwise_are_refused(monkeypatch):
    monkeypatch.setattr(decoder, "BLOCK_TOKENS", 16)
    with pytest.raises(OpenvinoVersionError, match="blocks of"), on_openvino():
        tiny_engine()


def test_heads_that_its_attention_gets_wrong_are_refused():
    layers = layers_of(tiny_llama(VOCAB, 16, 24, 2, 4, 2, 8))
    assert "head_dim must be a multiple of 16, got 8" in misfit_of_attention(layers)
    assert not misfit_of_attention(layers_of(heads_of_sixteen()))


def test_caches_are_ours_and_of_the_size_that_was_planned(engine):
    pool = pool_of(engine)
    blocks = engine.limits.kv_blocks + decoder.SCRATCH_BLOCKS
    assert list(pool.shape) == [2, 2, blocks, 2, BLOCK_TOKENS, 16]
    pool[...] = 0
    before = pool.copy()
    logits_of(engine, PassChunk([1, 2, 3], 0, table(0), 1, prompt_rows=3))
    changed = (pool != before)[:, :, : engine.limits.kv_blocks]
    written = changed.any(-1).any(1).any(2)  # by layer, block and position
    assert written[:, 0, :3].all()
    assert int(written.sum()) == 2 * 3


# -- where rows lie


@pytest.mark.parametrize("longest", [1, 8, 32, 33, 64])
def test_the_branches_that_are_let_in_and_the_prompts_copies_fit_the_blocks_for_them(longest):
    branches = decoder.most_branches(longest)
    chains = [ROOT, *range(longest - 1)]
    found = []
    for start in range(BLOCK_TOKENS):
        where = KVTable(range(9))
        tree = PassChunk(
            [1] * (1 + 2 * longest),
            start,
            where,
            1,
            [*chains, ROOT, *range(longest, 2 * longest - 1)],
        )
        found.append(
            next(iter(Layout([tree], (), iter(range(100, 200)), invariant=True).branches.values()))
        )
    most = max(int((table >= 100).sum()) for table in found)
    assert branches >= 8
    assert branches * most + decoder.RUN_COPIES <= decoder.SCRATCH_BLOCKS


def test_a_tree_s_paths_are_listed_the_longest_first():
    assert paths([ROOT, ROOT, 1, 0, 2]) == [[1, 2, 4], [0, 3]]
    assert paths([]) == []


def test_branches_have_blocks_of_their_own_with_what_the_pass_writes_before_them():
    where = KVTable([5, 6])
    chunk = PassChunk([9, 1, 2, 3], BLOCK_TOKENS - 2, where, 4, (ROOT, ROOT, 0))
    layout = Layout([chunk], (), iter(range(100, 110)), invariant=True)
    found = layout.inputs(repeats=True)
    assert layout.copies == [(5, 100, BLOCK_TOKENS - 2)]
    assert list(found["expand"]) == [0, 1, 3, 0, 2]
    assert list(found["compress"]) == [0, 1, 4, 2]
    assert list(found["past_lens"]) == [30, 31, 32, 30, 31]
    assert list(found["block_indices"]) == [5, 5, 5, 6, 100, 100]
    assert {node: list(blocks) for (_, node), blocks in layout.branches.items()} == {1: [100]}


def test_what_follows_a_prompt_within_a_block_waits_for_a_second_call():
    chunk = PassChunk(list(range(7)), 0, KVTable([0]), 4, prompt_rows=4)
    (_, first), (number, second) = (call[0] for call in in_calls([chunk], 9, invariant=True))
    assert (first.tokens, first.logits) == ([0, 1, 2, 3], 1)
    assert (number, second.tokens, second.start, second.logits) == (0, [4, 5, 6], 4, 3)
    whole = replace(chunk, tokens=list(range(BLOCK_TOKENS + 1)), prompt_rows=BLOCK_TOKENS)
    assert in_calls([whole], 9, invariant=True) == [[(0, whole)]]


def test_branches_of_a_first_call_outlast_the_second(engine, text):
    tokens, whole = text
    where, other = table(1), table(2)
    plain(engine, tokens[:PROMPT], PROMPT, where)
    wrong = [(token + 1) % VOCAB for token in tokens]
    # The text is on the second branch of the first tree; the second chunk takes two calls.
    nodes = [wrong[0], wrong[1], tokens[PROMPT + 1]]
    tree = PassChunk([tokens[PROMPT], *nodes], PROMPT, where, 4, (ROOT, 0, ROOT))
    more = PassChunk([*tokens[:9], *wrong[:3]], 0, other, 4, (ROOT, 0, ROOT), prompt_rows=8)
    found = logits_of(engine, tree, more)
    assert np.array_equal(found[[0, 3]], whole[1:3])
    engine.model.keep([(tree, [2])])
    after = PassChunk([tokens[PROMPT + 2]], PROMPT + 2, where, 1)
    assert np.array_equal(logits_of(engine, after), whole[3:4])


def test_prompts_beyond_the_copies_that_there_are_wait_for_another_call():
    chunks = [PassChunk([1, 2], 0, KVTable([number]), 1, prompt_rows=2) for number in range(5)]
    calls = in_calls(chunks, 2, invariant=True)
    assert [[number for number, _ in call] for call in calls] == [[0, 1], [2, 3], [4]]


def test_a_prompt_that_ends_in_a_shared_block_leaves_what_others_have_there(engine, text):
    tokens, whole = text
    where = table(0)
    plain(engine, tokens[:PROMPT], PROMPT, where)
    own = PassChunk([tokens[PROMPT]], PROMPT, where, 1)
    other = PassChunk(tokens[:5], 0, where, 0, prompt_rows=5)
    assert np.array_equal(logits_of(engine, other, own)[-1], whole[1])
    assert np.array_equal(logits_of(engine, own, other)[0], whole[1])


def test_more_branches_than_a_pass_has_room_for_cost_a_tree_its_branches_only(engine, monkeypatch):
    monkeypatch.setattr(engine, "_most_branches", 1)
    texts = []
    for tree in (True, False):
        turns = []
        for number in range(3):
            sequence = Sequence(100 * tree + number, [1, 2, 3], 3, SamplingParams())
            sequence.blocks["target"] = [number]
            nodes = Proposal("d", [4, 5], [ROOT, ROOT], [0.6, 0.3]) if tree else None
            turns.append(Turn(sequence, 3, proposal=nodes))
        engine.submit(turns)
        texts.append([done.tokens[:1] for done in engine.poll(0.0)])
        engine.cancel([turn.sequence.id for turn in turns])
    assert texts[0] == texts[1]
