"""An EAGLE-3 head proposes the same tokens here and in vLLM's CPU build: ``make test-vllm``.

For a prompt that comes in chunks, vLLM 0.32 gives the row after a chunk the prompt's last token in
place of the next one. With that fault imitated, the tokens are the same, too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from transformers import LlamaConfig, LlamaForCausalLM

from backend.engines.eagle.dialects import TargetShape, read_published
from backend.engines.eagle.engine import EagleEngine
from backend.engines.eagle.model import TorchModel
from backend.engines.port import HiddenStates, Turn
from backend.request import SamplingParams
from backend.sequence import Sequence
from tests.fakes.eagle import published, random_head, write

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S, LENGTH, CHUNK = 600, 4, 64
SIZES = {"vocab_size": 512, "draft_vocab_size": 256, "hidden_size": 128, "intermediate_size": 192}
SIZES |= {"target_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
DIALECTS = {
    "SafeAILab": {},
    "speculators": {
        "layers": (2, 3, 6),
        "own_embedding": True,
        "norm_before_residual": True,
        "norm_output": True,
        "fuse": "joint",
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def head_of(folder, dialect, target):
    """Write a head in a dialect's files."""
    config, tensors = published(dialect, *random_head(1, **SIZES | DIALECTS[dialect]))
    if dialect == "speculators":
        del tensors["verifier_norm.weight"]  # the target's, which vLLM's loader refuses
        greedy = {"proposal_type": "greedy", "speculative_tokens": LENGTH}
        config["transformer_layer_config"] |= {"model_type": "llama", "torch_dtype": "float32"}
        config["speculators_config"] |= {
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        }
    else:
        config |= {"model_type": "llama", "torch_dtype": "float32"}
    return write(folder, dialect, config, tensors)


def of_vllm(target, head, prompts):
    """vLLM's answers and proposals."""
    words = [target, head, str(LENGTH), str(CHUNK)]
    done = subprocess.run(
        [sys.executable, ROOT / "tests/hosts/eagle_worker.py", *words],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    line = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert line, (done.stdout + done.stderr)[-4000:]
    return json.loads(line[0].removeprefix("RESULT "))


class Here:
    """The head of a folder in our engine, with the states of transformers' forward."""

    def __init__(self, target, folder):
        self.lm = LlamaForCausalLM.from_pretrained(target).float().eval()
        head = read_published(folder, TargetShape(128, 512, 8))
        self.layers = head.shape.layers
        rows = self.lm.lm_head.weight.detach(), self.lm.get_input_embeddings().weight.detach()
        tables, room = {"embedding": rows[1], "lm_head": rows[0]}, {"positions": 512, "slots": 512}
        model = TorchModel(head.shape, head.tensors, **tables, **room)
        sizes = {"kv_blocks": 16, "max_context_tokens": 480, "max_draft_tokens": LENGTH}
        self.engine = EagleEngine("eagle", model, **sizes)

    @torch.inference_mode()
    def states(self, tokens):
        found = self.lm(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.stack([found[layer][0] for layer in self.layers], 1)

    def proposals(self, prompt, answer, after, wrong):
        """The chains after the answer's first tokens, as many as ``after`` says each time;
        ``wrong``: tokens that the head is given in place of the text's, by place.
        """
        text = [*prompt, *answer]
        states = self.states(text)
        seen = [wrong.get(place, token) for place, token in enumerate(text)]
        sequence = Sequence(1, [], len(prompt), SamplingParams(), {"eagle": [*range(16)]})
        chains, absorbed = [], 0
        for count in after:
            end = len(prompt) + count
            sequence.tokens += seen[len(sequence.tokens) : end]
            rows = HiddenStates(absorbed, self.layers, states[absorbed : end - 1])
            self.engine.absorb([(sequence, rows)])
            absorbed = end - 1
            self.engine.submit([Turn(sequence, end, run=LENGTH, nodes=256)])
            chains.append(self.engine.poll(0.0)[0].proposal.spine().tokens)
        self.engine.cancel([1])
        return chains


def steps(answer, proposals):
    """(tokens of the answer before it, proposal) of every step after the prompt."""
    while proposals and proposals[0][0] != answer[0]:
        proposals = proposals[1:]  # of the prompt's chunks but the last
    count, found = 1, []
    for last, chain in proposals:
        if count > len(answer):
            break
        assert last == answer[count - 1]
        found.append((count, chain))
        pairs = zip(chain, answer[count:], strict=False)
        accepted = next((n for n, (mine, theirs) in enumerate(pairs) if mine != theirs), len(chain))
        count += accepted + 1
    return found


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_proposed_token_is_vllm_s(target, dialect, tmp_path):
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 512) for _ in range(tokens)] for tokens in (40, 100)]
    folder = head_of(tmp_path / "head", dialect, target)
    whole, chunked = of_vllm(target, folder, prompts)
    here = Here(target, folder)
    for prompt, found, wrong in (
        (prompts[0], whole, {}),
        (prompts[1], chunked, {CHUNK: prompts[1][-1]}),
    ):
        theirs = steps(found["answer"], found["proposals"])
        mine = here.proposals(prompt, found["answer"], [count for count, _ in theirs], wrong)
        assert len(theirs) > 10
        assert mine == [chain for _, chain in theirs]
    theirs = steps(chunked["answer"], chunked["proposals"])
    right = here.proposals(prompts[1], chunked["answer"], [count for count, _ in theirs], {})
    assert right != [chain for _, chain in theirs]
