"""Building engines: the deployment file, the command lines against the recorded arguments of
TensorRT-LLM's programs, resuming.
"""

import argparse
import json
import shlex
from pathlib import Path

import pytest

from backend.checked_settings import ConfigError
from backend.config import parse_config
from backend.engines.tensorrt_llm.kind import check_folder
from engines_build.build import BuildError, build, run_program
from engines_build.trtllm.deployment import TrtllmDeployment, load_deployment
from tests.contract.engine_folders import engine_folder
from tests.fakes.checkpoints import folder

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "docker" / "deployments").glob("*.yaml"))
RECORD = json.loads((Path(__file__).parent / "tensorrt_llm_arguments.json").read_text())
VOCAB = 10


class Raising(argparse.ArgumentParser):
    def error(self, message):
        raise AssertionError(message)


def parse(command):
    """Read a command line as the recorded program would."""
    program, arguments = (
        (command[0], command[1:]) if command[0] != "python3" else (command[1], command[2:])
    )
    name = next(n for n in ("trtllm-build", "quantize", "llama", "qwen") if n in program)
    parser = Raising(allow_abbrev=False)
    for option, entry in RECORD["programs"][name].items():
        if entry.get("flag"):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, choices=entry.get("choices"))
    return name, parser.parse_args(arguments)


def dry_run(path, capsys):
    def run(command):
        raise AssertionError(f"a dry run ran {command}")

    build(load_deployment(path), run, dry_run=True)
    return [
        shlex.split(line)
        for line in capsys.readouterr().out.splitlines()
        if not line.startswith("#")
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_name_only_arguments_that_the_programs_have(path, capsys):
    deployment = load_deployment(path)
    lines = [parse(command) for command in dry_run(path, capsys)]
    assert len(lines) == 2 * len(deployment.engines)
    target, *drafts = (arguments for name, arguments in lines if name == "trtllm-build")
    assert (target.speculative_decoding_mode, target.max_draft_len) == (
        "draft_tokens_external",
        str(deployment.max_draft_len),
    )
    assert all(draft.speculative_decoding_mode is None for draft in drafts)
    for engine in (target, *drafts):
        assert (engine.use_paged_context_fmha, engine.kv_cache_type, engine.max_beam_width) == (
            "enable",
            "paged",
            "1",
        )
        assert (
            int(engine.max_num_tokens) >= deployment.max_context_tokens + deployment.max_draft_len
        )
        assert int(engine.max_num_tokens) == deployment.token_budget == 65_536
        assert int(engine.max_input_len) >= deployment.max_context_tokens


@pytest.mark.parametrize(
    ("batch", "context", "draft", "asked", "budget"),
    [
        (64, 8192, 8, 0, 65_536),
        (8, 1024, 8, 0, 8 * 1056),
        (1, 131_072, 8, 0, 131_104),
        (64, 8192, 8, 262_144, 262_144),
        (64, 8192, 8, 100, 8224),
    ],
)
def test_the_token_budget_is_for_all_prompts_of_a_batch_and_at_least_one(
    batch, context, draft, asked, budget
):
    made = TrtllmDeployment(
        max_batch_size=batch,
        max_context_tokens=context,
        max_draft_len=draft,
        max_text_tokens=asked,
    )
    assert made.token_budget == budget


def test_a_quantised_engine_is_made_by_the_quantiser_and_keeps_its_paged_context(capsys):
    lines = [
        parse(command)
        for command in dry_run(ROOT / "docker/deployments/llama-3.3-70b-tp4.yaml", capsys)
    ]
    name, quantise = lines[0]
    assert (name, quantise.qformat, quantise.kv_cache_dtype, quantise.tp_size) == (
        "quantize",
        "fp8",
        "fp8",
        "4",
    )
    assert quantise.calib_dataset == "/models/calibration"
    assert (lines[1][1].use_fp8_context_fmha, lines[1][1].workers) == ("enable", "4")


def test_an_argument_that_the_programs_have_not_would_be_noticed():
    with pytest.raises(AssertionError, match="unrecognized arguments: --max_draft_length"):
        parse(["trtllm-build", "--max_draft_length", "8"])


def written(path, **changes):
    for name in ("target", "small"):
        if not (path / name).exists():
            made = folder(path, name, tokenizer=json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
            (made / "generation_config.json").write_text('{"eos_token_id": 1}')
    raw = {
        "output": str(path / "engines"),
        "max_context_tokens": 32,
        "max_draft_len": 4,
        "max_batch_size": 8,
        "target": {"name": "big", "checkpoint": str(path / "target")},
        "drafts": [{"name": "small", "checkpoint": str(path / "small")}],
    }
    file = path / "deployment.json"
    file.write_text(json.dumps(raw | changes))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maximum": 1}, "unknown key 'maximum'"),
        ({"output": ""}, "output must name a folder"),
        ({"max_draft_len": -1}, "max_draft_len must be at least 0, got -1"),
        ({"drafts": [{"name": "big", "checkpoint": "x"}]}, "target.name must be unique"),
        (
            {"drafts": [{"name": "d", "checkpoint": "x", "tp_size": 2}]},
            r"drafts\[0\].gpus must name tp_size \* pp_size = 2 GPUs, got \[0\]",
        ),
        (
            {"drafts": [{"name": "d", "checkpoint": "x", "fp8_kv_cache": True}]},
            r"fp8_kv_cache needs a quantisation",
        ),
        (
            {"target": {"name": "t", "checkpoint": "x", "quantisation": "fp8"}},
            "target.calibration must name a folder of texts for the quantisation 'fp8'",
        ),
        (
            {"target": {"name": "t", "checkpoint": "x", "calibration": "/texts"}},
            "target.calibration needs a quantisation, got '/texts'",
        ),
        (
            {
                "drafts": [
                    {
                        "name": "q",
                        "checkpoint": "x",
                        "quantisation": "int4_awq",
                        "calibration": "/no/texts",
                    }
                ]
            },
            "calibration of q must be a folder, got '/no/texts'",
        ),
        ({"max_context_tokens": 65}, "max_context_tokens 65 is over the 64 of"),
    ],
)
def test_a_deployment_that_cannot_be_built_is_refused_by_key_and_value(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(
            load_deployment(written(tmp_path, **changes)),
            lambda command: pytest.fail("nothing may run"),
        )


def test_a_draft_of_another_vocabulary_is_refused_with_its_first_difference(tmp_path):
    folder(tmp_path, "small", tokenizer=json.dumps({"model": {"vocab": {"a": 0, "c": 1}}}))
    with pytest.raises(
        ConfigError, match='first difference: id 1 is "c" in the draft, "b" in the target'
    ):
        build(load_deployment(written(tmp_path)), lambda command: pytest.fail("nothing may run"))


class Programs:
    """The programs, as far as their folders go; ``breaks`` fails the build of that engine once."""

    def __init__(self, breaks=""):
        self.ran, self._breaks = [], breaks

    def __call__(self, command):
        name, arguments = parse(command)
        output = Path(arguments.output_dir)
        self.ran.append((name, output.name))
        if name != "trtllm-build":
            (output / "config.json").write_text("{}")
            return
        if output.name == self._breaks:
            self._breaks = ""
            (output / "rank0.engine").write_bytes(b"half")
            raise BuildError("broke off")
        draft_len = int(arguments.max_draft_len or 0)
        engine_folder(
            output.parent,
            output.name,
            vocab_size=VOCAB,
            max_draft_len=draft_len,
            max_seq_len=int(arguments.max_seq_len) + draft_len,
        )


ALL = [("llama", "big"), ("trtllm-build", "big"), ("llama", "small"), ("trtllm-build", "small")]


def test_a_second_run_does_nothing_and_the_result_can_be_served(tmp_path):
    file, programs = written(tmp_path), Programs()
    build(load_deployment(file), programs)
    assert programs.ran == ALL
    build(load_deployment(file), programs)
    assert programs.ran == ALL
    config = parse_config(json.loads((tmp_path / "engines/serving.json").read_text()))
    assert (config.target.engine, config.target.model, config.drafts) == (
        "tensorrt_llm",
        str(tmp_path / "engines/big"),
        (),
    )
    check_folder("target", config.target, config, lambda engine: Path(engine.model))
    manifest = json.loads((tmp_path / "engines/big/manifest.json").read_text())
    assert set(manifest["sha256"]) == {"config.json", "rank0.engine"}
    assert (tmp_path / "engines/big/tokenizer.json").exists()


def test_a_stage_that_broke_off_is_made_again_and_the_others_are_kept(tmp_path):
    file, programs = written(tmp_path), Programs(breaks="small")
    with pytest.raises(BuildError):
        build(load_deployment(file), programs)
    assert not (tmp_path / "engines/serving.json").exists()
    build(load_deployment(file), programs)
    assert programs.ran == [*ALL, ("trtllm-build", "small")]


def test_other_limits_build_the_engines_again_and_convert_nothing(tmp_path):
    programs = Programs()
    build(load_deployment(written(tmp_path)), programs)
    build(load_deployment(written(tmp_path, max_batch_size=16)), programs)
    assert programs.ran == [*ALL, ("trtllm-build", "big"), ("trtllm-build", "small")]


def test_what_was_built_otherwise_than_asked_is_refused(tmp_path):
    def careless(command):
        name, arguments = parse(command)
        output = Path(arguments.output_dir)
        if name == "trtllm-build":
            engine_folder(output.parent, output.name, vocab_size=VOCAB, paged_context_fmha=False)
        else:
            (output / "config.json").write_text("{}")

    with pytest.raises(
        ConfigError, match=r"big was built without --use_paged_context_fmha.*instead of 4"
    ):
        build(load_deployment(written(tmp_path)), careless)


def test_a_plain_target_is_built_without_drafts(tmp_path, capsys):
    lines = [parse(one)[1] for one in dry_run(written(tmp_path, max_draft_len=0), capsys)]
    assert lines[1].speculative_decoding_mode is lines[1].max_draft_len is None
    programs = Programs()
    build(load_deployment(written(tmp_path, max_draft_len=0)), programs)
    assert programs.ran == ALL


def test_without_the_container_the_missing_program_is_named():
    with pytest.raises(BuildError, match="trtllm-build-missing cannot be run"):
        run_program(["trtllm-build-missing"])
