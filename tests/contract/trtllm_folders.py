"""Settings and folders of a served deployment of TensorRT-LLM engines, for the fake executor: a
model that counts through eight letters.
"""

import json

import numpy as np

from policy import LatencyTable
from tests.contract.engine_folders import engine_folder
from tests.contract.fake_executor import Executor, Model

TOKENS = ["<end>", *"abcdefgh"]
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(TOKENS)}, "merges": []},
    "pre_tokenizer": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    },
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    },
}


def folder(path, name, **options):
    made = engine_folder(path, name, vocab_size=len(TOKENS), **options)
    (made / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    table = LatencyTable.synthetic(
        name, dict.fromkeys((1, 64), 0.02 if name == "target" else 0.0002)
    )
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (made / "latency.json").write_text(json.dumps(table.to_dict()))
    Executor.models[str(made)] = Model(
        lambda tokens: 5.0 * (np.arange(len(TOKENS)) == tokens[-1] % 8 + 1)
    )
    return made


def settings(path, **changes):
    target = {"engine": "trtllm", "model": str(folder(path, "target", max_draft_len=4))}
    draft = {"engine": "trtllm", "name": "small", "model": str(folder(path, "small"))}
    limits = {"max_active_requests": 8, "max_context_tokens": 64, "prefill_chunk_tokens": 64}
    policy = {"k_max": 4, "keep_learned": False}
    return {"target": target, "drafts": [draft], "policy": policy, "limits": limits} | changes
