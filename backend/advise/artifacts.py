"""Cells from AIPerf's artifacts: one folder a run, of one length and concurrency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from backend.advise import AdviceError
from backend.advise.campaign import Campaign, CampaignSettings
from backend.advise.load import AnswerCounts, Cell, reply_of
from backend.advise.scrape import Window

RECORDS, RAW, SUMMARY = (
    "profile_export.jsonl",
    "profile_export_raw.jsonl",
    "profile_export_aiperf.json",
)


def read(folders: Sequence[Path], say: Callable[[str], None]) -> Campaign:
    """Return the cells of runs. Raises AdviceError if a folder is none of AIPerf's."""
    cells = [_cell(folder) for folder in folders]
    campaign = Campaign(CampaignSettings([], sorted({c.in_flight for c in cells})), say, cells)
    campaign.note("AIPerf does not count steps: they are derived from tokens and acceptance")
    return campaign


def _cell(folder: Path) -> Cell:
    records = [r for r in _lines(folder / RECORDS) if r.get("metrics") and not r.get("error")]
    if not records:
        raise AdviceError(f"{folder / RECORDS} has no answered request")
    summary = _summary(folder)
    replies = _replies(folder) or [_counts(record["metrics"]) for record in records]
    pooled = _find(summary, "pooled_spec_decode_acceptance_histogram") or {}
    histogram = [0] * (1 + max(map(int, pooled), default=-1))
    for accepted, count in pooled.items():
        histogram[int(accepted)] = int(count)
    if histogram and not any(reply.accepted or reply.histogram for reply in replies):
        replies[0] = AnswerCounts(
            replies[0].prompt_tokens, replies[0].output_tokens, histogram=tuple(histogram)
        )
    starts = [record["metadata"]["request_start_ns"] for record in records]
    ends = [record["metadata"]["request_end_ns"] for record in records]
    concurrency = _find(summary, "concurrency")
    if not isinstance(concurrency, int):
        raise AdviceError(
            f"{folder / SUMMARY} has no concurrency: run aiperf with --concurrency, since a table "
            "is by requests in flight"
        )
    generated = float(sum(reply.output_tokens for reply in replies))
    histograms = [reply.histogram or _histogram(reply) for reply in replies]
    accepted_tokens = float(sum(j * count for h in histograms for j, count in enumerate(h)))
    drafts = float(sum(map(sum, histograms)))
    length = max((len(h) - 1 for h in histograms if h), default=0)
    proposed = [tokens for reply in replies for tokens in reply.proposed]
    length = max(proposed, default=length)
    delta = {
        "generated": generated,
        "accepted": accepted_tokens,
        "drafts": drafts,
        "drafted": float(sum(proposed)) or drafts * length,
    }
    window = Window((max(ends) - min(starts)) / 1e9, delta)
    return Cell(length, concurrency, window, tuple(replies), length > 0, sent_requests=len(records))


def _histogram(reply: AnswerCounts) -> tuple[int, ...]:
    most = max(reply.accepted, default=-1)
    return tuple(reply.accepted.count(j) for j in range(most + 1))


def _counts(metrics: dict[str, Any]) -> AnswerCounts:
    output = _value(metrics, "output_sequence_length") or _value(metrics, "output_token_count")
    return AnswerCounts(_value(metrics, "input_sequence_length"), output)


def _value(metrics: dict[str, Any], name: str) -> int:
    return int((metrics.get(name) or {}).get("value") or 0)


def _replies(folder: Path) -> list[AnswerCounts]:
    """Return what the answers themselves say, if the run kept them (--export-level raw)."""
    if not (folder / RAW).is_file():
        return []
    replies = []
    for record in _lines(folder / RAW):
        for answer in _answers(record):
            reply = reply_of(answer)
            if reply.output_tokens:
                replies.append(reply)
    return replies if any(reply.accepted or reply.histogram for reply in replies) else []


def _answers(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the OpenAI answers with counts in a raw record, in whatever field they are."""
    if isinstance(value, str) and '"usage"' in value:
        try:
            yield from _answers(json.loads(value.removeprefix("data:")))
        except ValueError:
            return
    elif isinstance(value, dict):
        if isinstance(value.get("usage"), dict):
            yield value
        else:
            for each in value.values():
                yield from _answers(each)
    elif isinstance(value, list):
        for each in value:
            yield from _answers(each)


def _summary(folder: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads((folder / SUMMARY).read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise AdviceError(f"{folder} has no readable {SUMMARY} of AIPerf: {problem}") from None
    return data


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as problem:
        raise AdviceError(f"{path} cannot be read: {problem}") from None


def _find(value: Any, name: str) -> Any:
    """Return the first value of a name at any depth, else None."""
    if isinstance(value, dict):
        if value.get(name) is not None:
            return value[name]
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            if (match := _find(each, name)) is not None:
                return match
    return None
