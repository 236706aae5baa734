"""The demonstrations must be able to fail."""

import argparse
import types

import pytest

import bench
from bench.load import FINAL, UNANSWERED
from bench.micro.overload import check
from bench.micro.soak import Soak
from bench.resources import Sample, SharedMemory, Watch


def watched(rss_mib, regions):
    watch = Watch(service=None)
    watch.samples = [Sample(at, "engine", 7, rss_mib(at), 4, 10) for at in range(90)]
    watch.shared = [SharedMemory(at, regions(at), 3.0) for at in range(90)]
    return watch


@pytest.mark.parametrize(
    ("rss_mib", "regions", "grown"),
    [
        (lambda at: 40.0, lambda at: 3, []),
        (lambda at: 40.0 + at, lambda at: 3, ["engine: rss_mib grew from 57.0 to 114.5"]),
        (lambda at: 40.0, lambda at: 3 + at, ["shared memory: regions grew from 20 to 77.5"]),
    ],
)
def test_growth_between_the_first_and_the_last_third_is_named(rss_mib, regions, grown):
    assert watched(rss_mib, regions).summary()[1] == grown


@pytest.mark.parametrize(
    ("outcomes", "violations"),
    [
        ({FINAL: 8, "UNAVAILABLE": 2}, []),
        ({FINAL: 9}, ["10 requests were sent, 9 ended"]),
        ({FINAL: 9, UNANSWERED: 1}, ["10 requests were sent, 9 ended"]),
        ({FINAL: 9, "2 final responses": 1}, ["1 requests got 2 final responses"]),
    ],
)
def test_a_request_that_did_not_end_exactly_once_is_a_violation(outcomes, violations):
    soak = Soak(types.SimpleNamespace(), argparse.Namespace(minutes=1))
    soak.watch = watched(lambda at: 40.0, lambda at: 3)
    soak.sent_requests = 10
    soak.outcomes.update(outcomes)
    soak.check()
    assert soak.violations == violations


def figures(p50, p95, **outcomes):
    return {"inter_token_ms": {"p50": p50, "p95": p95}, "outcomes": outcomes}


@pytest.mark.parametrize(
    ("overload", "violations"),
    [
        (figures(120, 240, final=5, UNAVAILABLE=5), []),
        (
            figures(131, 240, final=5, UNAVAILABLE=5),
            ["inter-token time p50 is 1.31 of that at capacity"],
        ),
        (figures(100, 200, final=5), ["no request was refused"]),
        (
            figures(100, 200, final=5, UNAVAILABLE=5, INTERNAL=1),
            ["requests ended otherwise: {'INTERNAL': 1}"],
        ),
    ],
)
def test_an_overload_that_hurts_the_admitted_is_a_violation(overload, violations):
    assert check(figures(100, 200, final=5), overload)[1] == violations


def test_a_missing_package_is_named_with_the_command_that_installs_it(capsys):
    for name, words in (("matplotlib.pyplot", "make dev"), ("bench.absent", "ModuleNotFoundError")):
        bench.report_error(ModuleNotFoundError, ModuleNotFoundError(name, name=name), None)
        assert words in capsys.readouterr().err
