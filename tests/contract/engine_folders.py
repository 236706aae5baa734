"""Engine folders as ``trtllm-build`` leaves them, as far as this project reads them: a
``config.json`` and a file for each rank.
"""

import json
from pathlib import Path

DRAFT_TOKENS_EXTERNAL = 2


def engine_folder(
    parent: Path,
    name: str = "target",
    *,
    vocab_size: int,
    max_draft_len: int = 0,
    paged_context_fmha: bool = True,
    max_seq_len: int = 128,
    max_batch_size: int = 8,
    tp_size: int = 1,
) -> Path:
    """Write and return ``parent/name``; ``max_draft_len`` above 0 makes a target."""
    folder = parent / name
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "version": "1.2.1",
        "pretrained_config": {
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "vocab_size": vocab_size,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_size": 16,
            "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1},
        },
        "build_config": {
            "max_input_len": max_seq_len,
            "max_seq_len": max_seq_len,
            "max_batch_size": max_batch_size,
            "max_beam_width": 1,
            "max_draft_len": max_draft_len,
            "speculative_decoding_mode": DRAFT_TOKENS_EXTERNAL if max_draft_len else 1,
            "kv_cache_type": "PAGED",
            "gather_context_logits": False,
            "plugin_config": {
                "use_paged_context_fmha": paged_context_fmha,
                "paged_kv_cache": True,
                "remove_input_padding": True,
            },
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(tp_size):
        (folder / f"rank{rank}.engine").write_bytes(b"engine" * 100)
    return folder
