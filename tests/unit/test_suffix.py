import io
import random
import stat
from types import SimpleNamespace

import numpy as np
import pytest

from backend.app import build
from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines import answers, memory
from backend.engines.answers import CONTEXT, LONGEST, SHORTEST, Answers, PastText, tenant_of
from backend.engines.lookup import LookupEngine
from backend.engines.port import Turn
from backend.engines.registry import Service, make_engine
from backend.engines.suffix import SuffixEngine
from backend.kinds import KINDS
from backend.request import GenerationRequest, SamplingParams, tenant_id
from backend.sequence import Proposal, Sequence
from bench.in_process import generate
from policy.evidence import bin_of_match
from tests.unit.test_lookup import paths

HERE = tenant_of("here")


def engine(remembered_tokens=4096, **options):
    settings = {"max_draft_tokens": 8, **options}
    return SuffixEngine("suffix", remembered_tokens=remembered_tokens, **settings)


def sequence(number, prompt, answer=(), salt="", **options):
    return Sequence(number, [*prompt, *answer], len(prompt), SamplingParams(), salt=salt, **options)


def answered(suffix, prompt, answer, salt="", number=10**6, **options):
    """Serve one; what stands before the prompt is never asked for."""
    suffix.remember(
        sequence(number, [*range(900, 900 + CONTEXT), *prompt], answer, salt, **options)
    )
    suffix.cancel([number])


def propose(draft, seq, run=8):
    draft.submit([Turn(seq, len(seq.tokens), run=run, nodes=99)])
    (completion,) = draft.poll(0.0)
    assert completion.error is None
    return completion.proposal


# -- what is proposed


def test_what_followed_in_an_earlier_answer_is_proposed():
    suffix = engine()
    answered(suffix, [1, 2], [3, 4, 5, 6, 7])
    asked = sequence(1, [9, 3, 4])
    assert (suffix.available(asked, 2), propose(suffix, asked, 2).tokens) == (2, [5, 6])
    assert propose(suffix, asked).tokens == [5, 6, 7]  # no further than the answer


def test_an_answer_is_found_from_its_prompt_s_end_on_but_no_prompt_is_proposed():
    suffix = engine()
    answered(suffix, [*range(20, 40), 1, 2], [3, 4, 5, 6])
    assert propose(suffix, sequence(1, [9, 1, 2])).tokens == [3, 4, 5, 6]
    for end in range(20, 40):
        assert suffix.available(sequence(end, [9, 9, end - 1, end]), 8) == 0


def test_where_answers_differ_the_most_frequent_comes_first():
    suffix = engine()
    for token in (5, 6, 6, 7, 6, 5):
        answered(suffix, [1, 2], [3, 4, token, 8])
    tree = propose(suffix, sequence(1, [0, 3, 4]))
    assert tree.tokens[0] == 6
    first = {path[0]: chance for path, chance in paths(tree).items() if len(path) == 1}
    assert sorted(first, key=lambda token: -first[token]) == [6, 5, 7]
    assert sorted(tree.confidence, reverse=True) == tree.confidence
    assert not tree.is_chain


def test_agreement_and_longer_matches_count_as_likelier():
    suffix = engine()
    answered(suffix, [0], [1, 2, 3, 4, 5, 6])
    short, long = propose(suffix, sequence(1, [9, 3, 4])), propose(suffix, sequence(2, [1, 2, 3]))
    answered(suffix, [0], [8, 3, 4, 5, 6])
    agreed = propose(suffix, sequence(3, [9, 3, 4]))
    assert short.confidence[0] < min(long.confidence[0], agreed.confidence[0])


def test_the_longest_match_wins_wherever_it_is():
    suffix = engine()
    answered(suffix, [0], [1, 2, 3, 4, 5, 6])
    own_is_longer = sequence(1, [0, 1, 2, 3, 4, 7, 8, 0, 1, 2, 3, 4])
    assert propose(suffix, own_is_longer, 2).tokens == [7, 8]
    kept_is_longer = sequence(2, [9, 3, 4, 7, 8, 1, 2, 3, 4])
    assert propose(suffix, kept_is_longer, 2).tokens == [5, 6]


def test_where_nothing_was_served_it_is_lookup():
    rng, suffix, lookup = random.Random(3), engine(), LookupEngine("suffix", max_draft_tokens=8)
    seq, trees = sequence(1, []), 0
    while len(seq.tokens) < 300:
        seq.tokens += rng.choices(range(6), k=rng.choice([0, 1, 2, 5]))
        assert suffix.available(seq, 6) == lookup.available(seq, 6)
        tree = propose(suffix, seq, 6)
        assert tree == propose(lookup, seq, 6)
        trees += not tree.is_chain
    assert trees > 20


@pytest.mark.parametrize("size", [2, 3, 7, 15, 16, 17, 31, 32, 40])
def test_the_evidence_is_the_longest_match_in_the_text_or_an_answer(size):
    piece, suffix = [*range(100, 140)], engine()
    asked = sequence(1, [1, 2, *piece[len(piece) - size :]])
    repeated = sequence(2, [1, *piece, 2, 3, *piece[len(piece) - size :]])
    alike, differs = bin_of_match(size, agree=True), bin_of_match(size)
    assert (suffix.evidence(asked), suffix.evidence(repeated)) == (0, alike)
    answered(suffix, [5, 6], [*piece, 2, 8])
    assert suffix.evidence(asked) == suffix.evidence(repeated) == alike
    answered(suffix, [5, 6], [*piece[30:], 2, 8])  # the newest, and shorter
    assert suffix.evidence(asked) == suffix.evidence(repeated) == alike
    answered(suffix, [5, 6], [*piece[30:], 7, 8])
    assert suffix.evidence(asked) == suffix.evidence(repeated) == differs
    assert suffix.evidence(sequence(3, [7, 9, 9])) == 0


def test_a_grammar_cuts_what_comes_from_answers_too():
    class Guide:
        def count_allowed(self, output, proposed):
            return next((i for i, token in enumerate(proposed) if token == 6), len(proposed))

    suffix = engine()
    answered(suffix, [1, 2], [3, 4, 5, 6, 7])
    seq = Sequence(1, [9, 3, 4], 3, SamplingParams(guide=Guide()))
    assert propose(suffix, seq).tokens == [5]


def test_nothing_is_available_without_room_and_nothing_is_verified():
    suffix = engine(max_draft_tokens=3)
    answered(suffix, [1, 2], [3, 4, 5, 6, 7, 8])
    seq = sequence(1, [9, 3, 4])
    assert [suffix.available(seq, length) for length in (0, 2, 3, 9)] == [0, 2, 3, 3]
    suffix.submit([Turn(seq, 3, run=1, proposal=Proposal.chain("other", [3]))])
    assert "cannot verify" in suffix.poll(0.0)[0].error


# -- between tenants


def occurred(texts, end, path):
    """Whether ``path`` came after at least the last two tokens of ``end`` in any of the texts."""
    sought = [*end[-2:], *path]
    return any(
        text[at : at + len(sought)] == sought
        for text in texts
        for at in range(len(text) - len(sought) + 1)
    )


@pytest.mark.parametrize("seed", range(4))
def test_no_tenant_is_ever_proposed_what_only_others_were_answered(seed):
    """Few tokens, so that all answers' n-grams are the same; a ring that is written over again and
    again; and in each answer a piece that no other has.
    """
    rng, suffix = random.Random(seed), engine(remembered_tokens=150)
    salts, texts, secret, seen = ("", "a", "b", "a/1"), {}, 10, 0
    for number in range(1, 600):
        salt = rng.choice(salts)
        answer = rng.choices(range(3), k=rng.randrange(0, 30))
        for _ in range(3):
            secret += 1
            answer.insert(rng.randrange(len(answer) + 1), 10 * secret + salts.index(salt))
        prompt = rng.choices(range(3), k=rng.randrange(1, 12))
        remember = rng.random() < 0.8
        answered(suffix, prompt, answer, salt, remember=remember)
        if remember:
            texts.setdefault(salt, []).append(prompt + answer)
        asked = sequence(
            number, rng.choices(range(3), k=rng.randrange(2, 12)), salt=rng.choice(salts)
        )
        suffix.available(asked, 6)
        if rng.random() < 0.3:  # another answer comes between the question and the proposal
            answered(suffix, prompt, answer[::-1], salt)
            texts.setdefault(salt, []).append(prompt + answer[::-1])
        theirs = propose(suffix, asked, 6)
        lookup = LookupEngine("suffix", max_draft_tokens=8)
        own = paths(propose(lookup, asked, 6))
        for path in paths(theirs):
            assert path in own or occurred(texts.get(asked.salt, ()), asked.tokens, path)
            for token in path:
                assert token < 10 or salts[token % 10] == asked.salt
                seen += token >= 10
        suffix.cancel([number])
    assert seen > 50


def test_a_salt_is_kept_nowhere():
    suffix = engine()
    answered(suffix, [1], [2, 3, 4, 5], salt="a secret salt")
    assert b"a secret salt" not in suffix.answers.pack()
    assert tenant_of("a") != tenant_of("b")


# -- what is kept


def test_who_asks_not_to_be_remembered_is_not_but_gets_what_others_left():
    suffix = engine()
    answered(suffix, [1, 2], [3, 4, 5, 6, 7], remember=False)
    assert suffix.remembered_tokens == 0
    answered(suffix, [1, 2], [3, 4, 5, 6, 7])
    assert propose(suffix, sequence(1, [3, 4], remember=False)).tokens == [5, 6, 7]


def test_short_answers_are_left_and_long_ones_lose_their_beginning():
    kept = Answers(20)
    assert kept.add(PastText(HERE, list(range(SHORTEST - 1)), 3)) == (0, 0)
    assert kept.add(PastText(HERE, list(range(SHORTEST)), SHORTEST)) == (0, 0)
    assert kept.add(PastText(HERE, list(range(30)), 2)) == (20, 0)
    (text,) = kept.texts()
    assert (text.tokens, text.context) == (list(range(11, 30)), 0)


def test_the_oldest_go_first_whole_and_nothing_of_them_stays():
    kept, sizes = Answers(100), []
    for number in range(30):
        kept.add(PastText(HERE, [1000 + number] * (SHORTEST + number % 9), 0))
        numbers = [text.tokens[0] - 1000 for text in kept.texts()]
        assert numbers == list(range(numbers[0], number + 1))
        assert kept.tokens == sum(len(text.tokens) + 1 for text in kept.texts()) <= 100
        kept.check()
        sizes.append(kept.tokens)
    assert min(sizes[10:]) > 100 - SHORTEST - 9  # no more goes than has to


def test_memory_is_taken_at_the_start_and_bounded_by_what_is_planned():
    kept, rng = Answers(4096), random.Random(0)
    taken = kept.array_bytes
    for _ in range(2000):  # the shortest: notes are their largest share
        kept.add(PastText(tenant_of(str(rng.random())), rng.choices(range(9), k=SHORTEST), CONTEXT))
    notes = len(list(kept.texts())) * (8 + 72 + 3 * 32 + 104 + 49)
    kept.check()
    assert kept.array_bytes == taken
    assert taken + notes < KINDS["suffix"].token_bytes * 4096


def brute_force(texts, tokens, most):
    """The places after the longest match: (match, what follows), the newest first."""
    found = []
    for text in reversed(texts):
        for at in range(len(text.tokens) - 1, max(text.context, 1) - 1, -1):
            size = 0
            while size < min(at, LONGEST, len(tokens)) and (
                text.tokens[at - 1 - size] == tokens[-1 - size]
            ):
                size += 1
            found.append((size, text.tokens[at : at + 5]))
    least = next((n for n in answers.SIZES if any(size >= n for size, _ in found)), 99)
    found = [place for place in found if place[0] >= least]
    return sorted(found, key=lambda place: -place[0])[:most]


@pytest.mark.parametrize("capacity", [60, 200, 1500])
def test_places_are_those_of_brute_force(capacity):
    rng, kept, many = random.Random(capacity), Answers(capacity, visits=10**6), 0
    for _ in range(400):
        size = rng.randrange(SHORTEST, 35)
        text = PastText(
            HERE, rng.choices(range(4), k=size), rng.randrange(0, min(size, CONTEXT) + 1)
        )
        kept.add(text)
        end = rng.choices(range(4), k=rng.randrange(1, 20))
        if rng.random() < 0.5:
            end = end[:2] + text.tokens[: rng.randrange(1, size + 1)]
        found = [(f.size, kept.read(f.slot, 5)) for f in kept.find(HERE, end, 6)]
        assert found == brute_force(list(kept.texts()), end, 6)
        many += len(found) > 1
        assert kept.find(tenant_of("there"), end, 6) == []
    assert many > 100


def test_a_look_up_visits_a_bounded_number_of_places():
    kept = Answers(2**14)
    for _ in range(200):
        kept.add(PastText(HERE, [7] * 60, 0))
    assert len(kept.find(HERE, [7] * 20, 10**6)) == answers.VISITS


# -- over restarts


def test_answers_outlast_the_engine_only_where_it_has_a_file(tmp_path):
    for file, expected in ((None, []), (tmp_path / "remembered" / "k.npz", [5, 6, 7])):
        first = engine(file=file)
        answered(first, [1, 2], [3, 4, 5, 6, 7], salt="a")
        first.close()
        second = engine(file=file)
        assert propose(second, sequence(1, [3, 4], salt="a")).tokens == expected
        assert propose(second, sequence(2, [3, 4], salt="b")).tokens == []
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first.remembered_tokens == 0


def test_an_engine_that_heard_nothing_new_writes_nothing(tmp_path):
    file = tmp_path / "k.npz"
    engine(file=file).close()
    assert not file.exists()


def test_a_smaller_memory_takes_up_the_newest(tmp_path):
    file = tmp_path / "k.npz"
    first = engine(file=file)
    for number in range(50):
        answered(first, [1], [100 + number] * 20)
    first.close()
    second = engine(remembered_tokens=100, file=file)
    assert [text.tokens[-1] - 100 for text in second.answers.texts()] == [47, 48, 49]


def damaged(**changed):
    columns = {
        "tokens": np.arange(25, dtype=np.int32),
        "sizes": np.array([12, 13]),
        "contexts": np.array([0, 1]),
        "tenants": np.zeros(32, np.uint8),
    } | changed
    file = io.BytesIO()
    np.savez(file, **columns)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        damaged()[:-40],
        damaged(sizes=np.array([12, 14])),
        damaged(sizes=np.array([-1, 26])),
        damaged(contexts=np.array([0, 14])),
        damaged(contexts=np.array([0])),
        damaged(tenants=np.zeros(31, np.uint8)),
        damaged(tokens=np.full(25, -1, np.int32)),
        damaged(tokens=np.zeros(25)),
        damaged(sizes=np.array([12.0, 13.0])),
        damaged(tokens=np.array([object()] * 25)),
    ],
)
def test_a_file_that_cannot_be_used_is_a_metric_and_no_more(tmp_path, content):
    file, counted = tmp_path / "k.npz", []
    file.write_bytes(content)
    suffix = engine(file=file, count=lambda *names, **labels: counted.append((names, labels)))
    assert counted == [(("spindle_fallback_total",), {"reason": "remembered_unusable"})]
    answered(suffix, [1, 2], [3, 4, 5, 6, 7])
    suffix.close()
    assert len(Answers.unpack(file.read_bytes())) == 1
    assert len(Answers.unpack(damaged())) == 2


def test_a_file_that_cannot_be_written_is_a_metric(tmp_path):
    (tmp_path / "in the way").write_text("")
    counted = []
    suffix = engine(
        file=tmp_path / "in the way" / "k.npz",
        count=lambda name, *amount, **labels: counted.append(labels.get("reason", "")),
    )
    answered(suffix, [1, 2], [3, 4, 5, 6, 7])
    suffix.close()
    assert counted[-1] == "remembered_unsaved"


# -- in a service

SERVED = {
    "target": {"engine": "tests.fakes.fake"},
    "drafts": [{"name": "suffix", "engine": "suffix"}],
    "policy": {"kind": "fixed", "draft": "suffix", "length": 4, "k_max": 4},
}


def ask(app, **options):
    """Return the answer's token ids, and how many of them were accepted."""
    request = GenerationRequest("what was it?", 40, end_id=-1, **options)
    (session,) = generate(app, [request])
    return session.sequence.tokens[session.sequence.prompt_tokens :], session.accepted


def test_the_same_question_is_answered_faster_and_alike_unless_remembering_is_off():
    app = build(parse_config(SERVED))
    (first, before), (second, after), (third, again) = (ask(app) for _ in range(3))
    assert first == second == third
    assert after == again > before + 20
    counters = {
        name: value
        for name, labels, value in app.stats.drain().counters
        if labels.get("event") == "kept"
    }
    assert list(counters) == ["spindle_remembered_tokens_total"]
    forgetful = build(parse_config(SERVED))
    assert [ask(forgetful, remember=False) for _ in range(3)] == [(first, before)] * 3
    assert forgetful.drafts[0].remembered_tokens == 0
    assert ask(app, cache_salt="b") == (first, before)


def test_a_request_without_speculation_is_remembered_too():
    app = build(parse_config(SERVED))
    ask(app, num_draft_tokens=0)
    assert ask(app)[1] > 20


def test_requests_for_prompt_logits_are_never_remembered():
    app = build(parse_config(SERVED))
    ask(app, return_context_logits=True)
    assert app.drafts[0].remembered_tokens == 0


def test_a_draft_that_cannot_take_an_answer_costs_no_request(monkeypatch):
    app = build(parse_config(SERVED))

    def fail(sequence):
        raise MemoryError

    monkeypatch.setattr(app.drafts[0], "remember", fail)
    assert ask(app) == ask(app)
    assert app.stats.drain().counters


def test_the_key_of_the_file_is_the_target_s(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))
    files = set()
    for raw in (SERVED, {**SERVED, "target": {"engine": "tests.fakes.fake", "model": "other"}}):
        for keep in (False, True):
            drafts = [{**SERVED["drafts"][0], "keep_remembered": keep}]
            config = parse_config({**raw, "drafts": drafts})
            made = make_engine(config.drafts[0], Service(config, 1, lambda engine: tmp_path))
            answered(made, [1, 2], [3, 4, 5, 6, 7])
            made.close()
            files.add(keep and len([*tmp_path.rglob("*.npz")]))
    assert files == {False, 1, 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"remembered_tokens": 100}, r"drafts\[0\].remembered_tokens must be at least 4096, got"),
        ({"remembered_tokens": 2**28}, r"drafts\[0\].remembered_tokens must be at most"),
        ({"keep_remembered": 1}, r"drafts\[0\].keep_remembered must be bool, got 1"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({**SERVED, "drafts": [{**SERVED["drafts"][0], **settings}]})


def test_the_memory_plan_counts_what_is_remembered():
    sizes = [
        memory.process_bytes(
            parse_config({**SERVED, "drafts": [{**SERVED["drafts"][0], "remembered_tokens": n}]})
        )
        for n in (2**12, 2**20)
    ]
    assert sizes[1] - sizes[0] == KINDS["suffix"].token_bytes * (2**20 - 2**12)
    plain = parse_config({**SERVED, "drafts": [{"name": "suffix", "engine": "lookup"}]})
    assert memory.process_bytes(plain) < sizes[0]


@pytest.mark.parametrize("kind", [kind for kind, about in KINDS.items() if not about.model])
def test_what_a_kind_says_of_being_free_its_engine_says_too(kind):
    config = parse_config({"target": {"engine": "tests.fakes.fake"}})
    entry = SimpleNamespace(**{**vars_of(config.target), "engine": kind, "kind": KINDS[kind]})
    made = make_engine(entry, Service(config, 1, lambda engine: None))
    assert made.limits.free is KINDS[kind].free


def vars_of(engine_config):
    return {name: getattr(engine_config, name) for name in engine_config.__slots__}


def test_what_the_policy_learns_of_answers_is_kept_apart_by_salt():
    app = build(parse_config({**SERVED, "policy": {"kind": "adaptive", "k_max": 4}}))
    for salt in (None, "a", "a", "b"):
        ask(app, **({} if salt is None else {"cache_salt": salt}))
    state = app.orchestrator.cycle.runner.state.inner.inner
    assert state.tenants.ids.tolist() == [0, tenant_id("a"), tenant_id("b")]
    reached = state.acceptance.estimates.draft_reached[:, :, 0].sum(1)
    assert reached[1] > reached[2] > 0
