"""Recommend how many tokens a server should speculate at each load, or none.

``spindle advise`` measures a few short cells on a server that you run, fits the goodput model, and
writes a table of lengths, its gain, and the files to paste. It keeps no requests.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from backend import __version__
from backend.advise import AdviceError, artifacts, passive, report, verify
from backend.advise.advice import Advice, advise
from backend.advise.campaign import Campaign, CampaignSettings, ProbedServer, StartedServers
from backend.advise.goodput import PLAIN
from backend.advise.load import Body, Client, is_local, read_log
from backend.advise.scrape import require
from backend.advise.servers import engine_of

EXAMPLES = """examples:
  spindle advise --serve 'vllm serve MODEL --port {port} {spec}' --requests log.jsonl \\
      --spec '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5}' --out advice
  spindle advise --url http://127.0.0.1:8000 --plain-url http://127.0.0.1:8001 --requests log.jsonl
  spindle advise --metrics-only http://a:8000 http://b:8000 --minutes 10
  spindle advise --from artifacts/plain artifacts/k3-c1 artifacts/k3-c16 --out advice
  spindle advise verify --advice advice/advice.json --requests log.jsonl \\
      --serve 'vllm serve MODEL --port {port} {spec}'

exit status: 0 advice or a proof, 1 none (the reason is printed), 2 wrong options;
verify: 0 proven, 3 refuted, 4 not shown
"""
_NOW = 5
"""The length that is compared with if neither --spec nor --now says another."""
_LEAST_LONGEST = 6
_BUILT_IN = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a binary search works, and write it in Python with comments.",
    "Summarise the causes of the French Revolution in five sentences.",
    "Translate into French: The meeting has been moved to Thursday at ten.",
    "Write an SQL query that lists each customer with the sum of their orders this year.",
    "List ten ideas for a birthday party for a child who likes dinosaurs.",
    "Write a polite reply to a customer whose parcel is late.",
    "Correct this sentence and explain the rule: He don't know where is the station.",
)


def main(arguments: Sequence[str] | None = None, **client: Any) -> int:
    """Run the command; ``client`` is passed to ``load.Client``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        signal.signal(signal.SIGTERM, _end)
    make = partial(Client, **client)
    try:
        if words[:1] == ["verify"]:
            return verify.run(_verify_options(words[1:]), make, _say, consent, read_log)
        parser = _parser()
        options = parser.parse_args(words)
        if options.metrics_only:
            return passive.run(options, make, _say)
        return _advise(options, make)
    except AdviceError as problem:
        _say(f"spindle: error: {problem}")
        return 1
    except KeyboardInterrupt:
        _say("stopped; the servers that were started have ended")
        return 130


def _end(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    values = sorted({int(word) for word in text.split(",")})
    if values[0] < 0:
        raise ValueError
    return values


def _loads(text: str) -> list[int]:
    values = _numbers(text)
    if values[0] < 1:
        raise ValueError
    return values


def _json(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="spindle advise",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sources = parser.add_mutually_exclusive_group(required=True)
    about = "start a server for each length; {port} and {spec} are filled in"
    sources.add_argument("--serve", metavar="COMMAND", help=about)
    about = "measure a running vLLM server that uses the probe scheduler from spindle_vllm"
    sources.add_argument("--url", help=about)
    about = "read the counters of servers in use, and send nothing"
    sources.add_argument("--metrics-only", nargs="+", metavar="URL", help=about)
    about = "read AIPerf's artifacts for several lengths and concurrencies, one folder per run"
    sources.add_argument(
        "--from", dest="folders", nargs="+", type=Path, metavar="FOLDER", help=about
    )
    about = "with --url: a server with the same model and no speculation"
    parser.add_argument("--plain-url", help=about)
    about = "the engine's speculation settings as JSON, with the current length"
    parser.add_argument("--spec", type=_json, default={}, help=about)
    about = f"the current length, if --spec has none (default: {_NOW})"
    parser.add_argument("--now", type=int, help=about)
    about = "lengths to measure (default: 0, 3, and the current one but at least 6)"
    parser.add_argument("--lengths", type=_numbers, help=about)
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        help="minutes to observe with --metrics-only (default: 10)",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=10.0,
        help="seconds between readings with --metrics-only (default: 10)",
    )
    add_sending(parser)
    parser.add_argument("--out", type=Path, help="folder for the advice and its files")
    return parser


def add_sending(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is sent and how much of it."""
    about = "OpenAI request bodies, one JSON object per line"
    parser.add_argument("--requests", type=Path, metavar="FILE", help=about)
    about = "requests in flight to measure (default: 1,4,16,64)"
    parser.add_argument("--in-flight", type=_loads, default=[1, 4, 16, 64], help=about)
    parser.add_argument("--blocks", type=int, help="number of times to measure each cell")
    about = "limit on the tokens that a request may ask for (default: 256)"
    parser.add_argument("--most-tokens", type=int, default=256, help=about)
    parser.add_argument(
        "--most-requests",
        type=int,
        default=3000,
        help="limit on all requests together (default: 3000)",
    )
    about = "seconds that a server may take to start (default: 1800)"
    parser.add_argument("--start-limit", type=float, default=1800.0, help=about)
    about = "measure the server's processor time, not the clock (for a CPU that others also use)"
    parser.add_argument("--by-cpu", action="store_true", help=about)
    about = "allow requests to a server on another machine"
    parser.add_argument("--yes", action="store_true", help=about)


def _verify_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="spindle advise verify",
        description="Prove or refute advice: run plain, before and after in turn (ABC CBA) with "
        "the same requests. Exit status: 0 proven, 3 refuted, 4 not shown.",
    )
    parser.add_argument("--advice", type=Path, required=True, help="advice.json")
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--serve", metavar="COMMAND", help="the command that the advice is for")
    about = "running servers: before=URL after=URL plain=URL"
    sources.add_argument("--urls", nargs="+", metavar="NAME=URL", help=about)
    about = "with --serve: start all servers at once, if the machine has room for them"
    parser.add_argument("--together", action="store_true", help=about)
    add_sending(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the proof as JSON")
    return parser.parse_args(words)


def consent(
    urls: Sequence[str], requests: int, options: argparse.Namespace, bodies: Sequence[Body]
) -> None:
    """Say what will be sent. Raises AdviceError if it may not be."""
    where = ", ".join(urls) or "servers that are started here"
    source = options.requests or "the built-in mix"
    _say(
        f"sends {requests} requests of at most {options.most_tokens} tokens each to {where}, at "
        f"most {max(options.in_flight)} at a time, from {source} ({len(bodies)} requests)"
    )
    if requests > options.most_requests:
        raise AdviceError(
            f"that is above --most-requests {options.most_requests}: give smaller loads "
            "(--in-flight), fewer --lengths or --blocks, or a larger limit"
        )
    check_places(urls, options)


def check_places(urls: Sequence[str], options: argparse.Namespace) -> None:
    """Raise AdviceError for another machine, unless the user agreed."""
    remote = [url for url in urls if not is_local(url)]
    if remote and not options.yes:
        raise AdviceError(f"{', '.join(remote)}: another machine; add --yes to send requests there")


def bodies_of(options: argparse.Namespace) -> list[Body]:
    """Return the requests to send."""
    if options.requests:
        return read_log(options.requests)
    _say("warning: without --requests a built-in mix is sent: acceptance depends on your traffic")
    return [{"messages": [{"role": "user", "content": text}]} for text in _BUILT_IN]


def _advise(options: argparse.Namespace, make: Callable[..., Client]) -> int:
    if options.folders:
        campaign: Campaign = artifacts.read(options.folders, _say)
        now = _now(options)
        advice = advise(campaign.cells, now)
        return _finish(options, campaign, advice, f"AIPerf runs, {len(options.folders)} folders")
    if len(options.in_flight) < 2:
        raise AdviceError("--in-flight needs at least two loads")
    bodies = bodies_of(options)
    settings = CampaignSettings(
        bodies,
        options.in_flight,
        options.blocks or 2,
        most_tokens=options.most_tokens,
        start_limit_s=options.start_limit,
        allowance=[options.most_requests],
    )
    make = partial(make, allowance=settings.allowance)
    campaign, arms, longest = _plan(options, settings, make)
    arms_sent = len(arms) - (isinstance(campaign, ProbedServer) and campaign.plain is None)
    urls = [url for url in (options.url, options.plain_url) if url]
    consent(urls, arms_sent * settings.requests(options.in_flight), options, bodies)
    advice = _measure(campaign, arms, longest, options)
    count = sum(len(cell.replies) for cell in campaign.cells)
    mix = f"{len(bodies)} bodies of {options.requests.name}" if options.requests else "built-in mix"
    return _finish(options, campaign, advice, f"{count} requests, {mix}")


def _now(options: argparse.Namespace) -> int:
    configured = options.spec.get("num_speculative_tokens", options.spec.get("max_draft_len", _NOW))
    return int(options.now if options.now is not None else configured)


def _plan(
    options: argparse.Namespace, settings: CampaignSettings, make: Callable[..., Client]
) -> tuple[StartedServers | ProbedServer, list[int], int]:
    """Return what measures, the first arms, and the longest length."""
    now = _now(options)
    if options.serve:
        if "{port}" not in options.serve or "{spec}" not in options.serve:
            raise AdviceError("--serve must have the words {port} and {spec}")
        if not options.spec:
            raise AdviceError('--serve needs --spec, such as \'{"method": "ngram"}\'')
        longest = max(options.lengths or [now, _LEAST_LONGEST])
        started = StartedServers(
            settings,
            _say,
            engine=engine_of(options.serve),
            command=options.serve,
            spec=options.spec,
            client=make,
        )
        zero = [0] if started.engine == "vllm" else []
        lengths = options.lengths or [*zero, min(3, (longest + 1) // 2), longest]
        return started, [PLAIN, *sorted({*lengths})], longest
    plain = make(options.plain_url) if options.plain_url else None
    probed = ProbedServer(settings, _say, server=make(options.url), plain=plain)
    check_places([url for url in (options.url, options.plain_url) if url], options)
    page = probed.server.page()
    require(page, "drafts", "drafted", "accepted")
    longest = max(options.lengths or [len(page.accepted) or max(now, _LEAST_LONGEST)])
    lengths = options.lengths or [0, min(3, (longest + 1) // 2), longest]
    if plain is None:
        probed.note(
            "no plain server was measured (--plain-url): length 0 still carries the draft, and a "
            "server without it may be faster than any length"
        )
    return probed, [PLAIN, *sorted({*lengths})], longest


def _measure(
    campaign: StartedServers | ProbedServer,
    arms: list[int],
    longest: int,
    options: argparse.Namespace,
) -> Advice:
    """Measure, and measure more where the first fit leaves something open."""
    campaign.measure(arms, longest)
    advice = _fit(campaign, options)
    advised = {one.length for one in advice.table if one.length > 0}
    if advice.speculate and not campaign.heeds_tables:
        advised = {advice.best_fixed}
    open_lengths = sorted(advised - {*campaign.lengths()})[:2]
    if open_lengths and _has_room(campaign, open_lengths):
        _say(f"lengths {open_lengths} are in the advice but not measured yet: measuring them")
        campaign.measure(open_lengths, longest)
        advice = _fit(campaign, options)
    if report.is_far(advice):
        rest = [k for k in range(1, longest + 1) if k not in campaign.lengths()]
        if not _has_room(campaign, rest):
            raise AdviceError(_off(advice, longest))
        if rest:
            campaign.note(_off(advice, longest).partition(":")[0] + ": all lengths were measured")
            campaign.measure(rest, longest)
            advice = _fit(campaign, options)
    return advice


def _off(advice: Advice, longest: int) -> str:
    out = advice.held_out
    assert out is not None
    grid = ",".join(map(str, range(longest + 1)))
    return (
        f"the model is {100 * out.off:.0f} % off at a cell that was left out (length {out.length}, "
        f"{out.in_flight} in flight): measure the grid, --lengths {grid} with a larger "
        "--most-requests"
    )


def _has_room(campaign: Campaign, lengths: Sequence[int]) -> bool:
    settings = campaign.settings
    return settings.allowance[0] >= len(lengths) * settings.requests(campaign.loads)


def _fit(campaign: Campaign, options: argparse.Namespace) -> Advice:
    by_cpu = options.by_cpu
    if by_cpu and not all(cell.window.cpu_s for cell in campaign.cells):
        raise AdviceError("--by-cpu needs --serve: the processor time is known only there")
    return advise(campaign.cells, _now(options), by_cpu=by_cpu, heeds_tables=campaign.heeds_tables)


def _finish(options: argparse.Namespace, campaign: Campaign, advice: Advice, requests: str) -> int:
    for note in report.losing_loads(advice):
        campaign.note(note)
    advice.notes = campaign.notes
    print(report.table_text(advice))
    if options.out:
        about = {
            "spindle": __version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "engine": campaign.engine,
            "versions": {"engine": campaign.version, "spindle": __version__},
            "requests": requests,
            "clock": "processor" if options.by_cpu else "wall",
        }
        paths = report.write(options.out, advice, about, options.spec)
        print(f"written to {options.out}: {', '.join(path.name for path in paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
