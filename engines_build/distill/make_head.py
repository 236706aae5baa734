"""Train a head for a target: ``python -m engines_build.distill --target DIR --out DIR``.

The target answers prompts, its states and logits kept; the head is trained on them, scored on
prompts of held-out documents and written. Shards and checkpoints stay in ``--work``, where a second
run continues and other heads of the same target find the shards.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from transformers import AutoTokenizer

from backend.engines.models.llama import read_llama
from backend.engines.weights import load_embeddings
from backend.tokenizer import load_tokenizer
from engines_build.distill.arguments import parse
from engines_build.distill.card import command_line, head_card
from engines_build.distill.data import claim, drop_judged, first_tokens, generate
from engines_build.distill.evaluation_sets import EvaluationError
from engines_build.distill.forms import FORMS, run_name
from engines_build.distill.generate import served_dtype
from engines_build.distill.head import evaluate_head, load_head_samples
from engines_build.distill.overlap import OverlapError
from engines_build.distill.train import Budget, HeadTrainer


def distil_head(args: argparse.Namespace) -> dict[str, Any]:
    """Run all stages as ``parse`` says. Returns the report that the model card shows."""
    start = time.monotonic()
    claim(args.work, args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=False)
    form = FORMS[args.form](args, read_llama(args.target))
    layers = form.kept_layers
    shards, held_out = generate(args, served_dtype("cpu"), tokenizer, start, layers)
    embedding, rows = (table.float() for table in load_embeddings(args.target))
    samples = load_head_samples(shards, len(layers))
    samples = [s for s in samples if s.workload in set(args.workloads)]
    samples = drop_judged(args, first_tokens(samples, args.tokens), tokenizer)
    torch.manual_seed(args.seed)
    unroller = form.begin(samples, embedding, rows, {*load_tokenizer(args.target).end_ids})
    run = args.work / run_name(form, args, len(samples))
    budget = Budget(args.train_tokens, args.batch, args.learning_rate, start + 60 * args.minutes)
    line = HeadTrainer(unroller, samples, args.seed, run).run(budget)
    form.end()
    scores = evaluate_head(unroller, load_head_samples(held_out, len(layers)))
    for workload, score in scores.items():
        figures = " ".join(f"{k} {v:.3f}" for k, v in score.items())
        print(f"evaluate: {workload} {figures}", flush=True)
    report = {
        "training": line,
        "scores": scores,
        "generated_tokens": sum(len(s.tokens) - s.prompt_tokens for s in samples),
        "sequences": len(samples),
        "set_tokens": sum(len(s.tokens) for s in samples),
        "parameters": sum(p.numel() for p in unroller.network.parameters()),
        "wall_s": time.monotonic() - start,
    }
    card = head_card(args, form.export(), report, command_line(args))
    (args.out / "README.md").write_text(card, encoding="utf-8")
    return report


def main() -> None:
    """Run what the command line says."""
    args = parse(sys.argv[1:])
    torch.set_num_threads(args.threads)
    try:
        distil_head(args)
    except (OverlapError, EvaluationError, ValueError) as error:
        sys.exit(f"error: {error}")
