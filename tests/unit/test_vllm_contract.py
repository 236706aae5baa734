"""The table of what options mean with vLLM as the target, against the code that refuses them."""

from dataclasses import fields
from types import SimpleNamespace

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.core.preparation import check_served
from backend.engines.hosted import HostedRequest
from backend.engines.vllm import arguments, kind
from backend.engines.vllm.contract import REFUSES, ROWS, Meaning, check, penalty
from backend.engines.vllm.metrics import Passing
from backend.kinds import KINDS
from backend.ops.stats import Stats
from backend.request import GenerationRequest, RequestError, SamplingParams

EOS = 2
PROMPT = (5, 6, 7)
DEFAULTS = {"temperature": 0.7, "end_ids": (EOS,), "prompt_ignore_length": 3}


def asking(tokens=PROMPT, guide=None, **options):
    sampling = SamplingParams(**{**DEFAULTS, **options})
    return HostedRequest(1, tokens, len(PROMPT), 20, sampling, guide=guide)


def refused(ask, speculates=True):
    """Return the option that is refused, None where all is served."""
    try:
        check(ask, speculates=speculates, eos=EOS)
    except RequestError as error:
        return error.message.split(" is not supported: ")[0]
    return None


def test_every_option_of_a_request_has_one_row():
    named = [name for row in ROWS for name in row.options]
    asked = {field.name for field in fields(GenerationRequest)}
    assert sorted(named) == sorted(asked)


def test_an_option_that_is_refused_says_so_and_no_other_is_refused_as_such():
    assert KINDS["vllm"].answer("REFUSES", {}) == REFUSES
    for row in ROWS:
        values = {"top_p_decay": 0.5, "top_p_min": 0.5, "top_p_reset_id": 1}
        for name in row.options:
            value = values.get(name, True)
            request = GenerationRequest(**{"text_input": "a", "max_tokens": 1, name: value})
            alone = name not in ("top_p_min", "top_p_reset_id")
            if row.meaning is Meaning.REFUSED and alone:
                with pytest.raises(RequestError, match=f"is not supported: {row.note}"):
                    check_served(request, REFUSES)
            else:
                check_served(request, REFUSES)


CONDITIONAL = {
    "temperature": asking(temperature=2.5),
    "min_p": asking(min_p=0.1),
    "min_tokens": asking(min_tokens=2, end_ids=(9,)),
    "presence_penalty": asking(presence_penalty=0.5, prompt_ignore_length=2),
    "frequency_penalty": asking(frequency_penalty=3.0),
    "embedding_bias": asking(bias=((4, 1.0),)),
    "return_log_probs": asking(log_probs=True, top_p=0.5),
    "return_top_log_probs": asking(top_log_probs=2, top_k=4),
    "guided_decoding_guide": asking(guide=("regex", "a"), end_ids=(9,)),
    "resumed_tokens": asking(tokens=(*PROMPT, 8), presence_penalty=0.5),
}


@pytest.mark.parametrize("name", CONDITIONAL)
def test_what_the_table_refuses_in_some_cases_is_refused_in_them(name):
    assert refused(CONDITIONAL[name]) == name


def test_every_row_that_speaks_of_a_refusal_has_a_case_of_it():
    other = {
        "embedding_bias": "bias",
        "guided_decoding_guide": "guide",
        "return_top_log_probs": "top_log_probs",
    }
    cases = {other.get(name, name) for name in CONDITIONAL} | {"prompt_ignore_length"}
    speaking = [row.options for row in ROWS if row.meaning is not Meaning.REFUSED]
    notes = {row.options: row.note for row in ROWS}
    for options in speaking:
        assert bool(cases & {*options}) == ("refused" in notes[options]), options


@pytest.mark.parametrize(
    "ask",
    [
        asking(),
        asking(temperature=0.0, top_log_probs=3, log_probs=True, top_k=5, bad_words=((4, 5),)),
        asking(presence_penalty=0.5, frequency_penalty=-2.0, repetition_penalty=1.3, seed=3),
        asking(min_tokens=3, top_k=5, top_p=0.5),
        asking(guide=("json", "")),
        asking(tokens=(*PROMPT, 8), repetition_penalty=1.3),
    ],
)
def test_everything_else_is_served(ask):
    assert refused(ask) is None


def test_without_a_drafter_more_is_served():
    assert refused(asking(min_p=0.1, bias=((4, 1.0),)), speculates=False) is None


def test_penalties_are_made_equal_by_the_temperature():
    assert penalty(asking(presence_penalty=1.0), "presence_penalty") == 0.7
    greedy = asking(presence_penalty=1.0, temperature=0.0)
    assert penalty(greedy, "presence_penalty") == 1.0
    assert refused(asking(presence_penalty=3.0, temperature=0.5)) is None


def deployment(**engine_args):
    target = {"engine": "vllm", "model": "m", "engine_args": engine_args}
    return parse_config({"target": target, "policy": {"kind": "fixed", "length": 2}})


NGRAMS = {"method": "ngram", "num_speculative_tokens": 5}


def test_arguments_are_the_users_and_those_that_follow():
    config = deployment(speculative_config=NGRAMS, tensor_parallel_size=2)
    assert (config.policy.k_max, config.policy.draft) == (5, "ngram")
    made = arguments.arguments(config, "folder")
    assert made["tensor_parallel_size"] == 2
    assert made["max_num_seqs"] == config.limits.max_active_requests
    assert {*kind.FOLLOWS} - {*made} == {"tokenizer", "scheduler_cls", "disable_log_stats"}
    settings = arguments.planner_settings(config, {"home": "socket"})
    assert settings["policy"] == {"kind": "fixed", "length": 2, "draft": "ngram"}
    assert settings["home"] == "socket"


def test_steps_of_a_request_are_asked_for_only_with_a_drafter():
    """vLLM refuses to start otherwise."""
    alone = parse_config({"target": {"engine": "vllm", "model": "m"}})
    for config, steps in ((alone, None), (deployment(speculative_config=NGRAMS), "detailed")):
        made = arguments.arguments(config, "folder")
        assert made.get("per_request_spec_decode_metrics") == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_num_seqs": 3}, r"engine_args\.max_num_seqs must be left out: it follows from"),
        ({"speculative_config": 3}, r"speculative_config must be an object, got 3"),
        ({"speculative_config": {"method": "custom_class"}}, "method must name a drafter of"),
        (
            {"speculative_config": {"method": "ngram"}},
            "num_speculative_tokens must be at least 1, got None",
        ),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        deployment(**arguments)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    config = deployment(speculative_config=NGRAMS)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"target\.model: .* has no tokenizer\.json"):
        kind.check_folder("target.model", config.target, config, lambda _: tmp_path)


def family(name, kind, *samples):
    named = [SimpleNamespace(name=n, labels=labels, value=value) for n, labels, value in samples]
    return SimpleNamespace(name=name, type=kind, samples=named)


def test_metrics_of_vllm_are_passed_on_by_what_is_new():
    stats = Stats()
    passing = Passing(stats)
    bucket = {"le": "1.0"}

    def collect(total):
        return [
            family("python_info", "gauge", ("python_info", {}, 1.0)),
            family("vllm:running", "gauge", ("vllm:running", {"engine": "0"}, total)),
            family(
                "vllm:tokens",
                "counter",
                ("vllm:tokens_total", {"engine": "0"}, total),
                ("vllm:tokens_created", {"engine": "0"}, 9.0),
            ),
            family("vllm:s", "histogram", ("vllm:s_bucket", bucket, total)),
        ]

    passing.update(collect(3.0))
    counters, _, gauges = stats.drain()
    assert sorted(counters) == [
        ("vllm:s_bucket", bucket, 3.0),
        ("vllm:tokens_total", {"engine": "0"}, 3.0),
    ]
    assert gauges == [("vllm:running", {"engine": "0"}, 3.0)]
    passing.update(collect(5.0))
    passing.update(collect(5.0))
    assert [amount for _, _, amount in stats.drain().counters] == [2.0, 2.0]
