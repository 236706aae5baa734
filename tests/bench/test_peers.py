import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from backend import PROJECT_ROOT
from backend.tokenizer import ByteTokenizer, load_tokenizer
from bench.peers import arms as peer_arms
from bench.peers import models as peer_models
from bench.peers import run as peers
from bench.peers.arms import WORKERS, PeerArm, Peers
from bench.peers.worker import _Clock
from bench.servers import OfferedLoad, ServedReply
from engines_build.convert import checkpoint_name, unpermute
from tests.fakes.machine import AVX2_FLAGS, BF16_FLAGS, FakeMachine

pytestmark = pytest.mark.slow

DRAFTS = PROJECT_ROOT / "engines_build" / "drafts"
TINY, DRAFT = DRAFTS / "tiny-target", DRAFTS / "tiny-0.9m"
REQUESTS = [{"text_input": text, "max_tokens": 2} for text in "abc"]
ANSWER = {"replies": [{"tokens": [65, 256], "first_s": 0.1, "total_s": 0.2}], "wall_s": 0.2}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPINDLE_CACHE", str(tmp_path))


def test_a_workers_reply_ends_with_the_token_that_ends_the_text():
    clock = _Clock()
    clock.begin()
    clock.add([5, 6])
    clock.add([2, 7])
    reply = clock.as_reply([0, 2])
    assert reply["tokens"] == [5, 6, 2]
    assert 0 < reply["first_s"] <= reply["total_s"]


def test_a_peer_answers_over_its_pipe_and_its_end_is_an_error():
    code = (
        f"print('ready'); work = input(); print({json.dumps(ANSWER)!r}); import sys; "
        f"print(work, file=sys.stderr)"
    )
    peer = PeerArm([sys.executable, "-c", code], ByteTokenizer())
    served = peer.run(OfferedLoad(REQUESTS[:1]))
    assert (
        served.wall_s,
        served.replies[0].text,
        served.replies[0].output_tokens,
        served.replies[0].drafted,
    ) == (0.2, "A", 2, 0)
    with pytest.raises((RuntimeError, BrokenPipeError)):
        peer.run(OfferedLoad(REQUESTS[:1]))
    with pytest.raises(ValueError, match="closed"):
        peer.run(OfferedLoad(REQUESTS[:1], at_s=[0.0]))
    peer.close()


def test_a_peer_that_does_not_start_says_why():
    with pytest.raises(
        RuntimeError, match="status 1: ModuleNotFoundError: No module named 'nothing_such'"
    ):
        PeerArm([sys.executable, "-c", "import nothing_such"], ByteTokenizer())


@pytest.mark.parametrize(("free", "again"), [(8 << 30, False), (1 << 30, True)])
def test_where_memory_runs_short_the_peer_not_used_for_longest_makes_room(free, again, monkeypatch):
    code = f"print('ready', flush=True)\nwhile input(): print({json.dumps(ANSWER)!r}, flush=True)"
    monkeypatch.setattr(Peers, "command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(peer_arms.memory, "host_bytes", lambda: free)
    stacks = Peers({"target": {"engine": "torch", "model": str(TINY)}})
    first, fresh = stacks.arm("transformers-plain")
    assert fresh
    second, fresh = stacks.arm("openvino-plain")
    assert fresh
    assert second.run(OfferedLoad(REQUESTS[:1])).wall_s == 0.2
    same, fresh = stacks.arm("transformers-plain")
    assert (fresh, same is first) == (again, not again)
    assert same.run(OfferedLoad(REQUESTS[:1])).wall_s == 0.2
    stacks.close()


def test_a_peer_without_its_environment_says_how_to_make_it():
    known = Peers({"target": {"engine": "torch", "model": "smollm2-135m-instruct"}})
    assert known.missing("vllm-plain") == "no environment: bench/peers/peers.sh vllm"
    assert known.missing("llamacpp-lookup") == "no environment: bench/peers/peers.sh llamacpp"
    assert known.missing("transformers-plain") == ""
    assert known.missing("transformers-draft") == "no draft that runs a model"


def test_the_script_of_environments_knows_every_stack_and_refuses_others():
    script = (WORKERS / "peers.sh").read_text()
    assert all(f"    {stack})" in script for stack in ("openvino", "vllm", "llamacpp"))
    run = subprocess.run(
        ["sh", str(WORKERS / "peers.sh"), "nothing"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (run.returncode, run.stderr) == (
        2,
        "peers.sh: no peer 'nothing': openvino, vllm, llamacpp\n",
    )


def test_a_whole_head_proposes_what_the_narrow_one_does(tmp_path):
    torch.manual_seed(0)
    narrow = tmp_path / "narrow"
    shutil.copytree(DRAFT, narrow)
    config = json.loads((narrow / "config.json").read_text()) | {"draft_vocab_size": 100}
    (narrow / "config.json").write_text(json.dumps(config))
    tensors = load_file(narrow / "model.safetensors")
    ids = torch.randperm(config["vocab_size"])[:100]
    rows = tensors[peer_models.HEAD][:100]
    peer_models.save_file(
        tensors | {peer_models.HEAD: rows.contiguous(), peer_models.HEAD_IDS: ids},
        narrow / "model.safetensors",
    )
    made = peer_models.whole_head(narrow)
    whole = load_file(made / "model.safetensors")
    assert peer_models.HEAD_IDS not in whole
    assert whole[peer_models.HEAD].shape == (config["vocab_size"], config["hidden_size"])
    hidden = torch.randn(500, config["hidden_size"])
    assert torch.equal(
        (hidden @ whole[peer_models.HEAD].float().T).argmax(1),
        ids[(hidden @ rows.float().T).argmax(1)],
    )
    assert "draft_vocab_size" not in json.loads((made / "config.json").read_text())
    assert peer_models.whole_head(TINY) == TINY


def test_a_gguf_file_has_the_checkpoints_weights_and_tokenizer():
    reader = gguf.GGUFReader(peer_models.as_gguf(TINY, TINY, "BF16"))
    weights = load_file(TINY / "model.safetensors")
    heads = json.loads((TINY / "config.json").read_text())["num_attention_heads"]
    names = set()
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        name = checkpoint_name(tensor.name)
        names.add(name)
        values = unpermute(values, heads) if ".q_proj" in name or ".k_proj" in name else values
        assert np.array_equal(values, weights[name].float().numpy()), name
    assert names == {*weights}
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tokenizer = load_tokenizer(TINY)
    assert len(fields["tokenizer.ggml.tokens"]) == tokenizer.vocab_size
    assert fields["tokenizer.ggml.eos_token_id"] in tokenizer.end_ids


def run(texts, wall_s=1.0):
    return {
        "wall_s": wall_s,
        "replies": [ServedReply(text, len(text), 0, 0, "", 0.1, 0.2) for text in texts],
    }


def test_texts_that_part_are_counted_with_the_token_where_they_do():
    found = peers.exactness(
        [run(["same", "abcd", "ab"])], [run(["same", "abXd", "abc"])], ByteTokenizer()
    )
    assert found == {"texts": 3, "same": 1, "first_difference_tokens": [2, 2]}


def test_a_row_holds_an_arm_against_its_own_plain_one_and_against_spindle():
    arms = {"none": 4.0, "spindle": 2.0, "vllm-plain": 8.0, "vllm-draft": 4.0, "none-again": 4.0}
    runs = [
        {
            "workload": "mix",
            "in_flight": 1,
            "block": block,
            "arm": arm,
            **run(["abcd"], wall_s * (1 + block)),
        }
        for block in range(3)
        for arm, wall_s in arms.items()
    ]
    made = peers.rows(SimpleNamespace(runs=runs, names=[*arms], tokenizer=ByteTokenizer()), seed=0)
    draft = next(row for row in made if row["arm"] == "vllm-draft")
    assert (
        draft["over_plain"]["median"],
        draft["over_none"]["median"],
        draft["spindle_over"]["median"],
    ) == (2.0, 1.0, 2.0)
    assert (draft["tokens_per_s"], draft["over_plain"]["blocks"], draft["as_plain"]["same"]) == (
        0.5,
        3,
        3,
    )


def test_a_peer_without_its_plain_arm_is_refused(capsys):
    with pytest.raises(SystemExit):
        peers.parse(["--peers", "vllm-draft"])
    assert "without vllm-plain" in capsys.readouterr().err


def test_transformers_serves_plain_and_with_lookup_the_same_text():
    texts = {}
    for kind in ("plain", "lookup"):
        known = Peers({"target": {"engine": "torch", "model": str(TINY)}, "threads": 1})
        try:
            arm, _ = known.arm(f"transformers-{kind}")
            served = arm.run(
                OfferedLoad(
                    [{"text_input": "CREATE TABLE t (a INTEGER, b", "max_tokens": 8}] * 3, 2
                )
            )
        finally:
            known.close()
        texts[kind] = [reply.text for reply in served.replies]
        assert all(0 < reply.output_tokens <= 8 for reply in served.replies)
    assert texts["plain"] == texts["lookup"]


@pytest.mark.parametrize(
    ("flags", "dtype", "reads"),
    [
        (AVX2_FLAGS, "float32", "bf16 checkpoint, run in fp32"),
        (BF16_FLAGS, "bfloat16", "bf16 checkpoint"),
    ],
)
def test_stacks_that_would_crawl_in_bf16_run_in_fp32_and_say_so(flags, dtype, reads):
    target = {"engine": "torch", "model": str(TINY)}
    stacks = Peers({"target": target}, machine=FakeMachine(flags=flags))
    for name in ("transformers-plain", "vllm-plain"):
        command = stacks.command(name)
        assert command[command.index("--dtype") + 1] == dtype
        assert stacks.weights(name) == reads
