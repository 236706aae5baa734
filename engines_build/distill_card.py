"""The model card of a distilled draft."""

from __future__ import annotations

import argparse
from typing import Any

from engines_build.corpora import LICENCES
from engines_build.distill_generate import MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, SAMPLED_TEMPERATURE, TOP_K
from engines_build.distill_train import Shape

_CARD = """# {name}

A draft for speculative decoding, distilled from `{target}` by this project's `engines_build.distill`. It proposes tokens;
it is no model to talk to. Same tokenizer as its target (`vocabulary_sha256` in config.json).

- Llama, {layers} layers, hidden {hidden}, head dimension {head_dim}, {millions:.1f} M parameters (most in the embedding), bf16.
- The output head covers {shortlist} tokens (`lm_head.token_ids`); it never proposes another one.
- Weights: Apache-2.0. They are trained on the target's own output and on these texts:
{licences}

## Training

1. Plain language modelling on {warm_up} tokens of the texts above, one pass. The embedding
   starts as the target's, projected to {hidden} dimensions.
2. Cross entropy with the target's law (its top {top_k} log probabilities, the rest as one class) on {generated} tokens of its own
   in {sequences} sequences: half greedy, half at temperature {temperature} among its top {top_k}; prompts up to {prompt} tokens, answers
   up to {new}; raw text and chat template. At most {epochs} passes; loss at the end {loss:.3f} nats.

Seed {seed}. The last run of this command took {minutes:.0f} minutes; shards that earlier runs had generated are not counted:

    {command}

Documents were split by name before anything was generated. sha256 over the documents:

- training `{train_digest}`
- held-out `{held_out_digest}`

The evaluation sets of this project's benchmarks (MT-Bench questions, Wikipedia and news articles, perlfaq) are in neither.

## Scores on held-out prompts

Along the target's greedy answers: share of tokens predicted (agreement); acceptance if both sampled at temperature 1 (overlap); mean
tokens emitted per greedy step with 2 and 4 proposed tokens (1 = no gain). Prompts come from the same templates as in training, over other
documents: expect less on requests of another kind.

| workload | tokens | agreement | overlap | tokens/step k=2 | tokens/step k=4 |
| --- | --- | --- | --- | --- | --- |
{scores}

## Bad at

Rare words, names, numbers and anything outside its {shortlist} tokens; long contexts (it saw at most {seen} tokens);
languages other than English. Lowest agreement here: {worst}.
"""


def model_card(args: argparse.Namespace, shape: Shape, report: dict[str, Any]) -> str:
    """Write the README.md of a draft from the run's arguments and its report."""
    scores = report["scores"]
    columns = ("agreement", "overlap", "tokens_per_step_2", "tokens_per_step_4")
    lines = [f"| {w} | {s['tokens']:.0f} | " + " | ".join(f"{s[c]:.2f}" for c in columns) + " |" for w, s in scores.items()]
    return _CARD.format(
        name=args.out.name,
        target=args.target.name,
        layers=shape.layers,
        hidden=shape.hidden,
        head_dim=shape.head_dim,
        shortlist=shape.shortlist,
        millions=report["parameters"] / 1e6,
        licences="\n".join(f"  - {LICENCES[s]}" for s in args.sources),
        generated=f"{report['generated_tokens']:,}",
        sequences=f"{report['sequences']:,}",
        temperature=SAMPLED_TEMPERATURE,
        top_k=TOP_K,
        prompt=MAX_PROMPT_TOKENS,
        new=MAX_NEW_TOKENS,
        warm_up=f"{args.warm_up_tokens:,}",
        loss=report["loss"],
        epochs=args.epochs,
        seed=args.seed,
        minutes=report["wall_s"] / 60,
        command=report["command"],
        train_digest=args.train.digest,
        held_out_digest=args.held_out.digest,
        scores="\n".join(lines),
        seen=MAX_PROMPT_TOKENS + MAX_NEW_TOKENS,
        worst=min(scores, key=lambda w: scores[w]["agreement"]),
    )
