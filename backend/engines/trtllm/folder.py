"""Reads a folder made by ``trtllm-build``: its engine, and whether it can serve here.
TensorRT-LLM is not needed to read it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backend.sequence import BLOCK_TOKENS
from backend.settings import ConfigError

TEXT_TOKENS = 65_536
"""Tokens of text that are in flight at most where an engine is built without saying how many."""

DRAFT_TOKENS_EXTERNAL = 2
"""``build_config.speculative_decoding_mode`` of a target that verifies draft tokens from outside; 1
is none.
"""


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """The limits of one engine, in tokens, requests and ranks. Every turn sends the whole text as a
    prompt: ``max_input_len`` bounds it.

    ``max_num_tokens`` is what an iteration takes, and every text in it counts whole: it bounds all
    texts in flight together. ``activation_bytes`` are an estimate of what activations take on each
    GPU, which ``max_num_tokens`` decides.
    """

    folder: Path
    version: str
    architecture: str
    vocab_size: int
    logits_dtype: str
    tp_size: int
    pp_size: int
    max_batch_size: int
    max_beam_width: int
    max_input_len: int
    max_seq_len: int
    max_draft_len: int
    max_num_tokens: int
    tokens_per_block: int
    verifies_drafts: bool
    paged_context_fmha: bool
    paged_kv_cache: bool
    gathers_context_logits: bool
    gathers_generation_logits: bool
    kv_bytes_per_token: int
    activation_bytes: int

    @property
    def ranks(self) -> int:
        """How many GPUs the engine spans."""
        return self.tp_size * self.pp_size

    @property
    def padded_vocab_size(self) -> int:
        """The width of logits: the vocabulary in equal parts for every tensor-parallel rank."""
        return -(-self.vocab_size // self.tp_size) * self.tp_size

    @property
    def max_context_tokens(self) -> int:
        """The longest text that every turn of it can be enqueued.

        The executor silently shortens what does not fit: the prompt with its draft in
        ``max_input_len``; prompt, ``max_tokens`` (up to draft + 1) and draft in ``max_seq_len``. A
        prompt with its draft has to fit one iteration as well, for it is not run in chunks.
        """
        return min(
            min(self.max_input_len, self.max_num_tokens) - self.max_draft_len,
            self.max_seq_len - 2 * self.max_draft_len,
        )

    @property
    def weight_bytes(self) -> int:
        """The size of the engine files: about what the weights take on the GPUs, all ranks
        together.
        """
        return sum(file.stat().st_size for file in self.folder.glob("rank*.engine"))


def read_engine_folder(folder: Path) -> EngineFolder:
    """Read ``config.json`` and look for the files of all ranks. Raises ConfigError naming the
    folder and what it lacks.
    """
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        pretrained, build = config["pretrained_config"], config["build_config"]
        plugins, mapping = build["plugin_config"], pretrained.get("mapping", {})
        found = EngineFolder(
            folder=folder,
            version=str(config.get("version", "")),
            architecture=str(pretrained["architecture"]),
            vocab_size=int(pretrained["vocab_size"]),
            logits_dtype=str(pretrained.get("logits_dtype", "float32")),
            tp_size=int(mapping.get("tp_size", 1)),
            pp_size=int(mapping.get("pp_size", 1)),
            max_batch_size=int(build["max_batch_size"]),
            max_beam_width=int(build.get("max_beam_width", 1)),
            max_input_len=int(build["max_input_len"]),
            max_seq_len=int(build["max_seq_len"]),
            max_draft_len=int(build.get("max_draft_len", 0)),
            max_num_tokens=int(build["max_num_tokens"]),
            tokens_per_block=int(plugins["tokens_per_block"]),
            verifies_drafts=build.get("speculative_decoding_mode")
            in (DRAFT_TOKENS_EXTERNAL, "DRAFT_TOKENS_EXTERNAL"),
            paged_context_fmha=bool(plugins["use_paged_context_fmha"]),
            paged_kv_cache=str(build.get("kv_cache_type", "")).upper() == "PAGED"
            or bool(plugins.get("paged_kv_cache")),
            gathers_context_logits=bool(build.get("gather_context_logits", False)),
            gathers_generation_logits=bool(build.get("gather_generation_logits", False)),
            kv_bytes_per_token=_kv_bytes(pretrained),
            activation_bytes=int(build["max_num_tokens"]) * _activation_bytes(pretrained),
        )
    except OSError as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'config.json'} is not the config of a TensorRT-LLM engine: {error!r}"
        ) from error
    missing = [
        f"rank{rank}.engine"
        for rank in range(found.ranks)
        if not (folder / f"rank{rank}.engine").is_file()
    ]
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}")
    return found


def _kv_bytes(pretrained: dict[str, Any]) -> int:
    """Return the bytes of KV of one token over all ranks: keys and values of every layer and KV
    head.
    """
    heads = int(pretrained["num_attention_heads"])
    head_size = int(pretrained.get("head_size") or int(pretrained["hidden_size"]) // heads)
    kv_heads = int(pretrained.get("num_key_value_heads") or heads)
    quantised = str(
        (pretrained.get("quantization") or {}).get("kv_cache_quant_algo") or ""
    ).upper() in ("FP8", "INT8")
    width = 1 if quantised else 4 if pretrained.get("dtype") == "float32" else 2
    return 2 * int(pretrained["num_hidden_layers"]) * kv_heads * head_size * width


def _activation_bytes(pretrained: dict[str, Any]) -> int:
    """Return about the bytes of activations of one token on a rank: four rows of the hidden size
    and both halves of a gated MLP.

    Not measured: TensorRT plans this memory when it builds, and says how much it is in its log.
    """
    hidden = int(pretrained["hidden_size"])
    inner = int(pretrained.get("intermediate_size") or 4 * hidden) // int(
        pretrained.get("mapping", {}).get("tp_size", 1)
    )
    return (4 * hidden + 2 * inner) * (4 if pretrained.get("dtype") == "float32" else 2)


def token_budget(
    max_batch_size: int, max_context_tokens: int, max_draft_len: int, text_tokens: int = 0
) -> int:
    """Return ``max_num_tokens`` for an engine: ``text_tokens`` of text (0: a whole batch's, at
    most ``TEXT_TOKENS``), at least the longest text with its draft, in blocks as the ledger
    counts them.
    """
    longest = -(-(max_context_tokens + max_draft_len + 1) // BLOCK_TOKENS) * BLOCK_TOKENS
    return max(
        longest,
        text_tokens or min(max_batch_size * longest, TEXT_TOKENS),
        max_batch_size * (max_draft_len + 1),
    )


def check_target(target: EngineFolder, k_max: int) -> None:
    """Refuse a target that cannot verify drafts of ``k_max`` tokens. Raises ConfigError naming the
    folder and how to build it again.
    """
    wrong = _unfit(target)
    if not target.verifies_drafts or target.max_draft_len < 1:
        wrong.append(
            "it was built without --speculative_decoding_mode draft_tokens_external and "
            "--max_draft_len"
        )
    elif target.max_draft_len < k_max:
        wrong.append(f"policy.k_max {k_max} is over its max_draft_len {target.max_draft_len}")
    if target.logits_dtype != "float32":
        wrong.append(
            f"its logits are {target.logits_dtype}, and those of drafts, which must be of the "
            f"same type, are float32"
        )
    _refuse(target, "target", wrong, max(k_max, 1))


def check_draft(draft: EngineFolder, target: EngineFolder) -> None:
    """Refuse a draft that does not fit its target. Raises ConfigError."""
    wrong = _unfit(draft)
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft {draft.folder} has a vocabulary of {draft.vocab_size} tokens, its target "
            f"{target.folder} {target.vocab_size}"
        )
    if draft.verifies_drafts:
        wrong.append("it was built as a target (--speculative_decoding_mode draft_tokens_external)")
    _refuse(draft, "draft", wrong, 0)


def _unfit(engine: EngineFolder) -> list[str]:
    wrong = []
    if not engine.paged_context_fmha:
        wrong.append(
            "it was built without --use_paged_context_fmha enable, so KV cannot be reused "
            "between turns"
        )
    if not engine.paged_kv_cache:
        wrong.append("it was built without a paged KV cache")
    if engine.gathers_context_logits:
        wrong.append("it was built with --gather_context_logits, which turns KV reuse off")
    if engine.max_beam_width != 1:
        wrong.append(f"its max_beam_width is {engine.max_beam_width}, and draft tokens need 1")
    return wrong


def _refuse(engine: EngineFolder, role: str, wrong: list[str], max_draft_len: int) -> None:
    if wrong:
        command = shlex.join(
            build_command("CHECKPOINT_DIR", str(engine.folder), engine, max_draft_len)
        )
        raise ConfigError(
            f"{role} engine {engine.folder} cannot serve: {'; '.join(wrong)}. Build it again: "
            f"{command}"
        )


def build_command(checkpoint: str, output: str, limits: Any, max_draft_len: int) -> list[str]:
    """Return the ``trtllm-build`` command line of an engine with these ``limits`` (names as in
    ``EngineFolder``).

    ``max_draft_len`` 0 makes a draft. The builder adds ``max_draft_len`` to ``max_seq_len`` by
    itself.
    """
    base_seq_len = limits.max_seq_len - (
        limits.max_draft_len if getattr(limits, "verifies_drafts", False) else 0
    )
    command = ["trtllm-build", "--checkpoint_dir", checkpoint, "--output_dir", output]
    command += ["--max_batch_size", str(limits.max_batch_size), "--max_beam_width", "1"]
    command += [
        "--max_input_len",
        str(base_seq_len + max_draft_len),
        "--max_seq_len",
        str(base_seq_len + max_draft_len),
    ]
    command += [
        "--kv_cache_type",
        "paged",
        "--remove_input_padding",
        "enable",
        "--use_paged_context_fmha",
        "enable",
    ]
    command += ["--tokens_per_block", str(limits.tokens_per_block), "--logits_dtype", "float32"]
    command += ["--max_num_tokens", str(limits.max_num_tokens)]
    if getattr(limits, "gathers_generation_logits", True):
        command += ["--gather_generation_logits"]
    if max_draft_len:
        command += [
            "--speculative_decoding_mode",
            "draft_tokens_external",
            "--max_draft_len",
            str(max_draft_len),
        ]
    return command
