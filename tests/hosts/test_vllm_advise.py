"""``spindle advise`` with vLLM itself: its check of tables, and a server with the probe scheduler:
``make test-vllm``.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest

from backend.advise.cli import main
from backend.advise.formats import vllm as options_of
from backend.advise.goodput import LoadRange, length_at
from backend.advise.load import Client
from backend.advise.servers import running
from engines_build import vllm_wheel

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

DRAFTS = Path(__file__).resolve().parents[2] / "engines_build" / "drafts"
TABLES = [
    [LoadRange(1, 1, 6), LoadRange(2, 16, 3), LoadRange(17, 64, 0)],
    [LoadRange(1, 3, 1), LoadRange(4, 40, 2)],
    [LoadRange(1, 4, 0), LoadRange(5, 64, 2)],
]


@pytest.mark.parametrize("table", TABLES)
def test_vllm_reads_a_table_as_it_was_meant(table):
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    text = options_of(table, {"method": "ngram"}, (0, 32), 2)
    config = json.loads(shlex.split(text.splitlines()[-1])[1])
    rows, longest = (
        config["num_speculative_tokens_per_batch_size"],
        config["num_speculative_tokens"],
    )
    lookup = build_dynamic_sd_schedule_lookup(rows, 100, longest)
    assert [lookup[n] for n in range(1, 101)] == [length_at(table, n) for n in range(1, 101)]


def test_a_server_with_the_probe_is_advised(tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "wheel"
    wheel.mkdir()
    vllm_wheel.write_tree(wheel)
    monkeypatch.setenv("PYTHONPATH", str(wheel))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    words += ["--model", str(DRAFTS / "tiny-target"), "--dtype", "float32", "--enforce-eager"]
    words += ["--max-model-len", "512", "--max-num-seqs", "8", "--no-async-scheduling"]
    command = shlex.join(words) + " --port {port} {spec}"
    spec = {"method": "draft_model", "model": str(DRAFTS / "tiny-0.9m")}
    spec |= {"num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 64, 4]]}
    probe = ["--scheduler-cls", "spindle_vllm.ProbeScheduler"]
    probe += ["--per-request-spec-decode-metrics", "detailed"]
    probe += ["--speculative-config", json.dumps(spec)]
    log, out = tmp_path / "log.jsonl", tmp_path / "out"
    body = {"model": "?", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    names = ("orders", "clients", "books", "rooms")
    lines = [json.dumps(body | {"prompt": f"SELECT id FROM {name} WHERE "}) for name in names]
    log.write_text("\n".join(lines))
    with running(command, probe, Client, 240) as server, running(command, [], Client, 240) as plain:
        urls = ["--url", server.url, "--plain-url", plain.url]
        loads = ["--in-flight", "1,2,4", "--lengths", "0,2,4"]
        assert main([*urls, "--requests", str(log), *loads, "--out", str(out)]) == 0
    data = json.loads((out / "advice.json").read_text())
    assert data["engine"] == "vllm"
    assert data["fit"]["ordered"]
    drafted = {
        (cell["length"], cell["in_flight"]): cell["drafted"] / cell["rows"]
        for cell in data["cells"]
        if not cell["plain"]
    }
    assert all(abs(value - length) < 0.3 * length + 0.01 for (length, _), value in drafted.items())
    assert {one["in_flight"] for one in data["intervals"]} == {1, 2, 4}
    capsys.readouterr()
