"""Distil a draft for a target: ``python -m engines_build.distill --target DIR --out DIR``.

Stages: generate (the target answers prompts, its logits kept), train, evaluate (held-out prompts), export. Shards and checkpoints stay in
``--work``, where a second run continues. The exported folder is a Hugging Face Llama folder with two additions: ``draft_vocab_size`` in
config.json says that ``lm_head.weight`` [S, hidden] covers only the tokens in the tensor ``lm_head.token_ids`` (int32 [S]), and
``vocabulary_sha256`` names the vocabulary that the draft shares with its target.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from backend.manifest import vocabulary_sha256
from engines_build.corpora import LICENCES, Corpus
from engines_build.distill_card import model_card
from engines_build.distill_generate import Generator, Shards, Teacher, eos_token_ids
from engines_build.distill_train import Shape, Trainer, build, choose_shortlist, evaluate, load_samples, plain_samples, run_name

MAX_SHARD_BYTES = 16 * 2**20
HELD_OUT_SLOTS = 24
_CONFIG_KEYS = {
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "bos_token_id", "eos_token_id"),
}
_GENERATE_SHARE = 0.6
"""Share of ``--minutes`` after which generation gives way to training."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; a bad value ends the program with a line that names its flag."""
    parser = argparse.ArgumentParser(prog="python -m engines_build.distill", description="Distil a draft for a target.")
    folder = {"type": Path, "metavar": "DIR"}
    parser.add_argument("--target", required=True, **folder, help="Hugging Face folder of the target (Llama family, with its tokenizer)")
    parser.add_argument("--out", required=True, **folder, help="folder to write the draft to")
    parser.add_argument("--work", **folder, help="folder for shards and checkpoints (default: OUT with .work behind its name)")
    parser.add_argument("--corpora", **folder, help="folder filled by engines_build.corpora --fetch")
    parser.add_argument("--sources", default=",".join(LICENCES), help="sources of the prompts, comma-separated (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=160)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--shortlist", type=int, default=8192, help="tokens the draft can propose (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens the target generates (default: %(default)s)")
    parser.add_argument("--held-out-tokens", type=int, default=12_000, help="tokens it generates for the evaluation (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=120.0, help="bound on the whole run (default: %(default)s)")
    parser.add_argument("--warm-up-tokens", type=int, default=1_000_000, help="plain text trained on first (default: %(default)s; 0: none)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=12, help="sequences per training step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--slots", type=int, default=64, help="sequences the target generates at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    for name in (
        "hidden",
        "layers",
        "head_dim",
        "shortlist",
        "tokens",
        "held_out_tokens",
        "minutes",
        "epochs",
        "batch",
        "learning_rate",
        "slots",
        "threads",
    ):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be positive, got {getattr(args, name)}")
    if args.warm_up_tokens < 0:
        parser.error(f"--warm-up-tokens: must not be negative, got {args.warm_up_tokens}")
    if args.hidden % args.head_dim or args.head_dim % 2:
        parser.error(f"--hidden, --head-dim: hidden must be a multiple of an even head_dim, got {args.hidden} and {args.head_dim}")
    if not (args.target / "tokenizer.json").is_file():
        parser.error(f"--target: no tokenizer.json in {args.target}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: cuda is not available here")
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    args.sources = args.sources.split(",")
    try:
        args.train, args.held_out = (Corpus(args.sources, args.corpora, side, args.seed) for side in (False, True))
    except ValueError as error:
        parser.error(f"--{error}")
    return args


def distil(args: argparse.Namespace) -> dict[str, Any]:
    """Run all stages as ``parse`` says. Returns the report that the model card shows."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start = time.monotonic()
    end = start + 60 * args.minutes
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    dtype = torch.bfloat16
    target = LlamaForCausalLM.from_pretrained(args.target, dtype=dtype)
    shards, held_out = Shards(args.work / "train"), Shards(args.work / "held_out")
    for corpus, store, tokens, slots in (
        (args.held_out, held_out, args.held_out_tokens, HELD_OUT_SLOTS),
        (args.train, shards, args.tokens, args.slots),
    ):
        if store.generated < tokens:
            greedy_share = 1.0 if corpus.held_out else 0.5
            teacher = Teacher(target, min(slots, args.slots), args.device, dtype)
            Generator(teacher, tokenizer, corpus, store, greedy_share).run(tokens, start + 60 * _GENERATE_SHARE * args.minutes)
    samples = load_samples(shards)
    shape = Shape(args.hidden, args.layers, args.head_dim, min(args.shortlist, target.config.vocab_size))
    shortlist = choose_shortlist(samples, shape.shortlist, target.config.vocab_size, eos_token_ids(tokenizer))
    draft = build(shape, target, shortlist)
    name = run_name(shape, len(samples), args.seed)
    if args.warm_up_tokens:
        plain = plain_samples(args.train.texts, tokenizer, args.warm_up_tokens, args.seed)
        Trainer(draft, shortlist, plain, args.device, args.seed).run(
            1, args.batch, args.learning_rate, end, args.work / f"{name}-warm-up.pt"
        )
    trainer = Trainer(draft, shortlist, samples, args.device, args.seed)
    loss = trainer.run(args.epochs, args.batch, args.learning_rate, end, args.work / f"{name}.pt")
    draft.bfloat16().float()  # scored as it will be stored
    scores = evaluate(draft, shortlist, load_samples(held_out), args.device)
    for workload, score in scores.items():
        print(f"evaluate: {workload} " + " ".join(f"{k} {v:.3f}" for k, v in score.items()), flush=True)
    report = {
        "loss": loss,
        "scores": scores,
        "generated_tokens": shards.generated,
        "sequences": len(samples),
        "wall_s": time.monotonic() - start,
    }
    report |= {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "command": shlex.join(["python", "-m", "engines_build.distill", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
    }
    export(draft, shortlist, args.target, args.out)
    (args.out / "README.md").write_text(model_card(args, shape, report), encoding="utf-8")
    return report


def export(draft: LlamaForCausalLM, shortlist: Tensor, target: Path, out: Path) -> None:
    """Write config.json and the bf16 weights (sharded so that no file passes ``MAX_SHARD_BYTES``, unless one tensor alone does)."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    tensors = {name: t.detach().bfloat16().cpu().contiguous() for name, t in draft.state_dict().items()}
    tensors["lm_head.token_ids"] = shortlist.int()
    files: list[dict[str, Tensor]] = [{}]
    for name, t in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        if files[-1] and sum(o.nbytes for o in files[-1].values()) + t.nbytes > MAX_SHARD_BYTES - 2**16:
            files.append({})
        files[-1][name] = t
    if len(files) == 1:
        save_file(files[0], out / "model.safetensors", metadata={"format": "pt"})
    else:
        names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        for file, name in zip(files, names, strict=True):
            save_file(file, out / name, metadata={"format": "pt"})
        where = {tensor: name for file, name in zip(files, names, strict=True) for tensor in file}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = {k: v for k, v in draft.config.to_dict().items() if k in _CONFIG_KEYS}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "draft_vocab_size": len(shortlist)}
    config["vocabulary_sha256"] = vocabulary_sha256(target / "tokenizer.json")
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    distil(parse())
