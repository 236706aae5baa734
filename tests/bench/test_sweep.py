import argparse
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import servers as arms
from bench.servers import OfferedLoad
from bench.sweep import fresh, options
from bench.sweep import run as sweep
from bench.sweep.arms import (
    ADAPTING,
    AGAIN,
    InProcess,
    Servers,
    Tuning,
    ablation_names,
    arm_config,
    fixed_choice,
    fixed_names,
)
from bench.sweep.report import write_report
from bench.sweep.run import Sweep, best_choice, main
from bench.sweep.simulation import missing

pytestmark = pytest.mark.slow

FAKE = {
    "target": {"engine": "tests.fakes.fake", "options": {"step_s": 0.001}},
    "drafts": [
        {"name": "d-1", "engine": "tests.fakes.fake", "options": {"agreement": 0.8}},
        {"name": "lookup", "engine": "lookup"},
    ],
    "policy": {"k_max": 4},
}
POLICIES = [
    "none",
    "fixed-d-1-2",
    "fixed-lookup-2",
    *ADAPTING,
    "spindle",
]
RATIO = {"median": 1.25, "interval_95": [1.2, 1.3], "blocks": 4}
TEXTS = {"same": 3, "texts": 4}
PEERS_FAMILY = {
    "family": "tiny",
    "skipped": {"third-stack": "no environment"},
    "rows": [
        {
            "workload": "chat",
            "in_flight": 1,
            "arm": "another-stack",
            "tokens_per_s": 9.0,
            "mean_latency_s": 0.5,
        }
        | {"over_plain": RATIO, "spindle_over": RATIO, "as_plain": TEXTS, "as_none": TEXTS}
    ],
}
TUNING = Tuning("d-1", 3, ((1, 3), (8, 0)))


def test_a_policy_is_a_patched_configuration():
    base = {
        **FAKE,
        "policy": {"k_max": 4, "trace_lines": 5},
        "limits": {"max_active_requests": 64, "kv_cache_tokens": 1024},
    }
    made = {name: arm_config(base, name, TUNING, 8) for name in POLICIES}
    assert made["none"]["drafts"] == []
    assert made["fixed-d-1-2"]["policy"] == {
        "kind": "fixed",
        "k_max": 4,
        "draft": "d-1",
        "length": 2,
        "keep_learned": False,
    }
    assert made["schedule"]["policy"]["schedule"] == [
        {"batch": 1, "length": 3},
        {"batch": 8, "length": 0},
    ]
    assert made["ema"]["policy"]["kind"] == "ema"
    assert made["spin"]["policy"]["kind"] == "bench.baselines.spin.SpinSelection"
    assert made["spin"]["policy"]["options"] == {"length": 3}
    assert made["spindle"]["policy"]["kind"] == "adaptive"
    assert made["spindle"]["policy"]["trace_lines"] == 5
    assert {config["limits"]["max_active_requests"] for config in made.values()} == {8}
    assert all(config["limits"]["kv_cache_tokens"] == 1024 for config in made.values())


def test_smartspec_takes_the_best_draft_or_without_tuning_the_first():
    tuning = replace(TUNING, draft="lookup")
    names = ("smartspec", "smartspec-untold")
    tuned, untuned = (arm_config(FAKE, name, tuning, 8)["policy"] for name in names)
    assert (tuned["kind"], tuned["draft"]) == ("smartspec", "lookup")
    assert (untuned["kind"], untuned["draft"]) == ("smartspec", "d-1")


def test_an_ablation_is_spindle_without_a_part_or_with_one_that_is_off():
    base = {
        "target": {"engine": "torch"},
        "drafts": FAKE["drafts"],
        "policy": {"k_max": 4},
    }
    names = ablation_names(base)
    assert names == ["without-prefix-reuse", "without-d-1", "without-lookup"]
    made = {name: arm_config(base, name, TUNING, 8) for name in names}
    spindle = arm_config(base, "spindle", TUNING, 8)
    changes = {
        name: {key: config[key] for key in config if config[key] != spindle.get(key)}
        for name, config in made.items()
    }
    assert changes["without-prefix-reuse"] == {
        "limits": {**spindle["limits"], "enable_kv_cache_reuse": False}
    }
    assert changes["without-d-1"] == {"drafts": FAKE["drafts"][1:]}
    with pytest.raises(KeyError, match="nothing"):
        arm_config(base, "without-nothing", TUNING, 8)


def test_a_policy_of_one_s_own_is_an_arm_with_the_options_of_the_configuration():
    own = "examples.my_policy.BestPaid"
    base = {**FAKE, "policy": {"kind": own, "k_max": 4, "options": {"hope": 0.9}}}
    made = {name: arm_config(base, name, TUNING, 8)["policy"] for name in ("spindle", "ema", own)}
    assert made[own] == {**base["policy"], "keep_learned": False}
    assert (made["spindle"]["kind"], made["spindle"]["options"]) == ("adaptive", {})
    assert "options" not in made["ema"]
    assert arm_config(FAKE, own, TUNING, 8)["policy"]["kind"] == own
    roster = InProcess(base, 4, most=2)
    try:
        served = roster.arm(own)[0].run(
            OfferedLoad([{"text_input": "one two", "max_tokens": 12}] * 3, 2)
        )
        assert [reply.output_tokens for reply in served.replies] == [12] * 3
        assert sum(reply.drafted for reply in served.replies) > 0
    finally:
        roster.close()


def test_in_process_the_engines_not_used_for_longest_make_room():
    roster = InProcess({**FAKE, "policy": {}}, 4, most=2)
    try:
        assert [
            roster.arm(name)[1] for name in ("none", "spindle", "fixed-d-1-2", "none-again")
        ] == [True, True, True, False]
        assert roster.arm("without-d-1")[
            1
        ]  # in the place of those that Spindle and the fixed choices share
        assert [roster.arm(name)[1] for name in ("none", "without-d-1", "spindle", "none")] == [
            False,
            False,
            True,
            True,
        ]
    finally:
        roster.close()


def test_a_fixed_choice_is_named_by_its_draft_and_length():
    assert fixed_names(FAKE, [2, 10]) == [
        "fixed-d-1-2",
        "fixed-d-1-10",
        "fixed-lookup-2",
        "fixed-lookup-10",
    ]
    assert fixed_choice("fixed-d-1-10") == ("d-1", 10)


def test_baselines_get_the_best_draft_and_its_best_length_at_each_batch_size():
    rates = {
        "none": {"1": 10, "8": 50},
        "fixed-a-2": {"1": 20, "8": 40},
        "fixed-a-4": {"1": 18, "8": 45},
        "fixed-b-2": {"1": 30, "8": 1},
    }
    assert best_choice(rates, ["fixed-a-2", "fixed-a-4", "fixed-b-2"]) == {
        "draft": "a",
        "length": 4,
        "schedule": [[1, 2], [8, 0]],
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    config, out = folder / "serving.json", folder / "sweep.json"
    config.write_text(json.dumps(FAKE))
    small = [
        "--workloads",
        "sql",
        "--closed",
        "1",
        "3",
        "--shares",
        "0.8",
        "--lengths",
        "2",
        "--blocks",
        "1",
        "--active",
        "3",
    ]
    size = [
        "--requests",
        "4",
        "--requests-closed",
        "2",
        "--max-tokens",
        "8",
        "--config",
        str(config),
        "--out",
        str(out),
    ]
    command = ["--quick", "--in-process", *small, *size]
    main(command)
    return command, out


def test_a_policy_that_is_not_in_the_sweep_is_refused_by_name(tmp_path):
    config, out = tmp_path / "serving.json", tmp_path / "sweep.json"
    config.write_text(json.dumps(FAKE))
    with pytest.raises(
        SystemExit,
        match=r"--policies: fixed-d-1-3 is none of fixed-d-1-2, fixed-lookup-2, .*schedule.* or a "
        r"dotted path like my_package\.MyPolicy",
    ):
        main(
            [
                "--in-process",
                "--config",
                str(config),
                "--out",
                str(out),
                "--lengths",
                "2",
                "--policies",
                "ema",
                "fixed-d-1-3",
            ]
        )


def test_a_quick_sweep_has_a_row_for_every_policy_and_load(finished):
    record = json.loads(finished[1].read_text())
    rows = record["summary"]
    assert [row["policy"] for row in rows if row["load"] == "closed-3"] == POLICIES
    assert {row["load"] for row in rows} == {"closed-1", "closed-3", "poisson-0.80"}
    assert all(
        row["mean_latency_s"] > 0 and row["requests"] >= 2 and row["warm_blocks"] == 1
        for row in rows
    )
    drafted = {row["policy"]: row["draft_tokens_per_emitted_token"] for row in rows}
    assert drafted["none"] == 0 < drafted["fixed-d-1-2"]
    assert [row["load"] for row in record["noise"]] == ["closed-1", "closed-3", "poisson-0.80"]
    assert record["tuning"]["draft"] in ("d-1", "lookup")


def test_a_sweep_is_simulated_point_by_point(finished):
    record = json.loads(finished[1].read_text())
    rows = {(row["load"], row["policy"]): row for row in record["simulation"]}
    measured = {(row["load"], row["policy"]): row["mean_latency_s"] for row in record["summary"]}
    assert rows.keys() == measured.keys()
    assert all(
        row["measured_s"] == measured[key] for key, row in rows.items() if key[1] != "none"
    )  # none has a second run there
    assert all(row["predicted_s"] > 0 for row in rows.values())
    errors = [round(row["predicted_s"] / row["measured_s"] - 1, 4) for row in rows.values()]
    assert [row["error"] for row in rows.values()] == errors
    assert [row["below_saturation"] for row in rows.values() if row["policy"] == "none"] == [
        True,
        False,
        True,
    ]
    assert (
        missing({**record, "runs": [run for run in record["runs"] if not run["block"]]})
        == "there is no warm block"
    )


def test_policies_get_the_same_requests_and_reuse_no_kv_of_each_other():
    sweep = object.__new__(Sweep)
    sweep._messages = {"sql": [f"message {number}" for number in range(20)]}
    sweep._options = argparse.Namespace(
        seed=0, max_tokens=8, temperature=0.0, requests_closed=4, rounds=2
    )
    one, other, later = (
        sweep._offer("sql", "closed-2", block, policy).requests
        for block, policy in ((1, "a"), (1, "b"), (2, "a"))
    )
    assert [request["text_input"] for request in one] == [
        request["text_input"] for request in other
    ]
    assert len({requests[0]["cache_salt"] for requests in (one, other, later)}) == 3


def test_all_policies_of_a_block_write_the_same_texts_to_the_same_requests(finished):
    runs = json.loads(finished[1].read_text())["runs"]
    for load in ("closed-3", "poisson-0.80"):
        texts = [
            [reply["text"] for reply in run["replies"]]
            for run in runs
            if (run["load"], run["block"]) == (load, 1)
        ]
        assert len(texts) == len(POLICIES) + 1
        assert all(each == texts[0] for each in texts)


def test_a_sweep_that_was_stopped_goes_on_where_it_was_and_runs_nothing_again(finished, tmp_path):
    command, out = finished
    record = json.loads(out.read_text())
    kept = record["runs"][:-5]
    again = tmp_path / "sweep.json"
    again.write_text(json.dumps({**record, "runs": kept}))
    main([*command[:-1], str(again)])
    runs = json.loads(again.read_text())["runs"]
    assert runs[: len(kept)] == kept
    key = ("workload", "load", "block", "policy")
    assert [[run[k] for k in key] for run in runs] == [
        [run[k] for k in key] for run in record["runs"]
    ]


@pytest.mark.parametrize("asked", [["--ablations"], ["--policies", ablation_names(FAKE)[-1]]])
def test_ablations_have_the_threads_that_spindle_s_tables_were_measured_with(
    tmp_path, monkeypatch, asked
):
    config, prepared = tmp_path / "serving.json", []
    config.write_text(json.dumps(FAKE))
    monkeypatch.setattr(sweep, "prepare", prepared.append)
    monkeypatch.setattr(
        sweep,
        "tables",
        lambda _: {"target": SimpleNamespace(to_dict=dict, provenance=SimpleNamespace(threads=3))},
    )
    monkeypatch.setattr(
        sweep, "InProcess", lambda config, *_: sys.exit(f"served with {config['threads']}")
    )
    with pytest.raises(SystemExit, match="served with 3"):
        main(
            [
                "--in-process",
                "--quick",
                "--config",
                str(config),
                *asked,
                "--shares",
                "--out",
                str(tmp_path / "sweep.json"),
            ]
        )
    assert [made.threads for made in prepared] == ["auto", *[3] * (1 + len(ablation_names(FAKE)))]


def test_a_record_of_other_settings_is_not_gone_on_with(finished):
    with pytest.raises(SystemExit, match=r"other settings \(max_tokens\)"):
        main([*finished[0], "--max-tokens", "9"])


def test_a_record_of_another_processor_is_not_gone_on_with(finished, monkeypatch):
    monkeypatch.setattr(sweep.machine, "processor", lambda: "Some CPU (AVX9)")
    with pytest.raises(SystemExit, match=r"another processor \(.*; here: Some CPU \(AVX9\)\)"):
        main(finished[0])


def test_a_sweep_out_of_time_leaves_a_record_and_says_so(finished, tmp_path, capsys):
    out = tmp_path / "sweep.json"
    main([*finished[0][:-1], str(out), "--limit-s", "0"])
    record = json.loads(out.read_text())
    assert {run["block"] for run in record["runs"]} == {0}
    assert all(
        row["warm_blocks"] == 0 and row["mean_latency_s"] == row["cold_mean_latency_s"]
        for row in record["summary"]
    )
    assert {claim["verdict"] for claim in record["claims"]} == {"open"}
    assert "the same command goes on" in capsys.readouterr().out


def test_the_report_is_one_page_without_links_that_tells_missed_claims(finished, tmp_path):
    record = json.loads(finished[1].read_text())
    record["claims"][0] |= {"verdict": "missed", "ratio": 0.5, "interval_95": [0.4, 0.6]}
    write_report(record, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert '<td class="missed">missed</td>' in page
    assert "0.400 to 0.600" in page
    assert page.count('src="data:image/svg+xml;base64,') == 4
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert all(policy in page for policy in POLICIES)


def test_the_page_has_the_ablations_and_peers_that_were_measured_apart(finished, tmp_path):
    record = json.loads(finished[1].read_text())
    ratio = {
        "workload": "mix",
        "load": "closed-1",
        "ratio": 1.07,
        "interval_95": [1.02, 1.12],
        "blocks": 4,
    }
    parts = [
        {**ratio, "part": "prefix-reuse", "by_default": False},
        {**ratio, "part": "lookup", "by_default": True},
    ]
    here = {"machine": record["machine"]}
    (tmp_path / "ablations.json").write_text(json.dumps({**here, "ablations": parts}))
    (tmp_path / "peers-other.json").write_text(json.dumps({**here, "families": [PEERS_FAMILY]}))
    elsewhere = {
        "machine": {"processor": "Some CPU (AVX9)"},
        "families": [{**PEERS_FAMILY, "family": "elsewhere"}],
    }
    (tmp_path / "peers.json").write_text(json.dumps(elsewhere))
    write_report(record, tmp_path / "page.html", tmp_path)
    page = (tmp_path / "page.html").read_text()
    assert all(
        words in page
        for words in (
            '<td class="text">prefix-reuse</td>',
            "1.020 to 1.120",
            "another-stack",
            "1.25 (1.20 to 1.30)",
            "third-stack: no environment",
        )
    )
    assert "elsewhere" not in page
    write_report(record, tmp_path / "page.html", tmp_path / "nothing")
    assert "another-stack" not in (tmp_path / "page.html").read_text()


def test_a_server_that_is_given_up_while_it_starts_is_ended(tmp_path, monkeypatch):
    made = []

    def give_up(service, limit_s):
        made.append(service)
        raise KeyboardInterrupt

    monkeypatch.setattr(arms.Service, "wait_ready", give_up)
    with pytest.raises(KeyboardInterrupt):
        arms.ServerArm(FAKE, tmp_path / "server")
    assert made[0].process.poll() is not None


@pytest.mark.parametrize(("free_gib", "servers"), [(22, 6), (100, 8), (3, 2)])
def test_as_many_servers_run_as_fit_into_memory(monkeypatch, free_gib, servers):
    monkeypatch.setattr(options, "host_bytes", lambda: free_gib << 30)
    assert options.parse([], "").servers == servers


def test_servers_serve_both_loops_count_by_run_and_share_one_for_fixed_choices(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")  # a short path: sockets lie in it
    servers = Servers(FAKE, 4, folder, most=2)
    request = {"text_input": "one two one two", "max_tokens": 12, "cache_salt": "a"}
    try:
        plain, fresh = servers.arm("none")
        assert fresh
        served = plain.run(OfferedLoad([request] * 3, at_s=[0.0, 0.1, 0.2]))
        assert [reply.output_tokens for reply in served.replies] == [12] * 3
        assert served.wall_s > 0.2
        assert served.counts["spindle_steps_total"] >= 12
        assert servers.arm(AGAIN) == (plain, False)
        two, fresh = servers.arm("fixed-d-1-2")
        assert fresh
        drafted = two.run(OfferedLoad([request] * 2, 2))
        assert {reply.text for reply in drafted.replies} == {reply.text for reply in served.replies}
        assert (
            drafted.counts['spindle_draft_tokens_by_position_total{draft="d-1",position="2"}'] > 0
        )
        assert all(
            reply.input_tokens and sum(reply.drafts["d-1"]) == reply.drafted + reply.accepted
            for reply in drafted.replies
        )
        four, fresh = servers.arm("fixed-d-1-4")
        assert (four, fresh) == (two, False)
        assert (
            four.run(OfferedLoad([request])).counts[
                'spindle_draft_tokens_by_position_total{draft="d-1",position="4"}'
            ]
            > 0
        )
        assert servers.arm("spindle")[1]
        assert servers.arm("none")[1]  # it was not used for longest, and only two may run
    finally:
        servers.close()


def test_a_peer_that_cannot_run_is_skipped_with_the_reason_and_needs_a_closed_loop(
    finished, tmp_path, capsys
):
    small = [
        "--quick",
        "--in-process",
        "--config",
        finished[0][-3],
        "--closed",
        "1",
        "--blocks",
        "0",
        "--requests-closed",
        "1",
        "--max-tokens",
        "4",
    ]
    out = tmp_path / "sweep.json"
    main([*small, "--policies", "--shares", "--peers", "transformers-plain", "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["skipped"] == {
        "transformers-plain": "peers run checkpoints only, not the engine 'tests.fakes.fake'"
    }
    assert [row["policy"] for row in record["summary"]] == ["none", "spindle"]
    assert "tuning" not in record
    with pytest.raises(SystemExit):
        main([*small, "--peers", "all", "--out", str(out)])
    assert "closed loops only" in capsys.readouterr().err


def test_a_fresh_server_is_compared_with_plain_decoding_block_by_block(
    tmp_path, monkeypatch, capsys
):
    config, out = tmp_path / "serving.json", tmp_path / "fresh.json"
    config.write_text(json.dumps(FAKE))
    command = f"fresh --config {config} --out {out} --closed 2 --temperatures 0 --blocks 2"
    command += " --rounds 1 --requests 2 --max-tokens 8"
    monkeypatch.setattr(sys, "argv", command.split())
    fresh.main()
    record = json.loads(out.read_text())
    runs = [(run["block"], run["policy"]) for run in record["runs"]]
    assert runs == [(0, "none"), (0, "spindle"), (1, "spindle"), (1, "none")]
    assert record["commit"]
    assert "2 in flight, spindle over none" in capsys.readouterr().out
