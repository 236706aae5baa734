"""docs/reference/tensors.md, from the table of tensors (``python -m docs.tools.reference``)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from backend.triton_adapter.fields import MODELS, Field
from backend.triton_adapter.rendering import ORIGIN, dims

GUARANTEES = """\
| | greedy | sampled |
| --- | --- | --- |
| CPUs, bf16 or fp32 | one text, bit for bit [1] | one text for a seed, bit for bit [1] |
| CPUs, int8 or 4 bits | the same on AMX, untested elsewhere [1] | the same on AMX [1] |
| `torch` in fp32 | plain decoding's text [2] | one text for a seed, any load [2] |
| `invariant: false`, `torch` in bf16 | may diverge at near-ties [2] | may diverge [2] |
| `cuda` with `invariant` [4] | one text; with trees, except at near-ties | the same for a seed |
| TensorRT-LLM [3] | its own text | by its own draws |
| vLLM in fp32 | plain vLLM's text [2] | by vLLM's own draws |
"""
"""Guarantees under speculation, by number format and kind of request: README and
``docs/explanation/exactness.md`` have this table.
"""

EXAMPLE = """\
Every tensor of the models that clients call, and for each refused one the reason.

```
curl -s localhost:8000/v2/models/ensemble/generate \\
    -d '{"text_input": "The capital of France is", "max_tokens": 8}'
```

```
{"finish_reason":"length","model_name":"ensemble","model_version":"1",
 "text_output":"The capital of France is Paris.\\n\\nThe answer is:"}
```
"""
"""The purpose of the page, a request and its reply."""

BEHAVIOUR = """\
- A bad tensor returns INVALID_ARGUMENT and names the tensor and its value. A full queue or a dead
  engine returns UNAVAILABLE, a cancelled request CANCELLED. Every request gets exactly one final
  reply.
- Options apply inside an accepted run: each token is one that plain decoding would allow there.
  Words are tokenised alone, without special tokens; a word without tokens has no effect. Weights
  and penalties are at most 1e6 in size. If other options ban all that a grammar allows, the grammar
  wins.
- A prompt that has more bytes than 64 KiB and than 16 for each token of the context is refused
  before it is tokenised, and so is any prompt over 32 MiB.
- Whatever the model, limits are 256 stop words, 1,024 characters in a word, 65,536 in a list of
  words, 1,024 in a `cache_salt`, 262,144 in a grammar, 2,097,152 elements in a tensor, and 64 MiB
  for a request. A grammar must be parsed within 5 s of processor time.
- `output_log_probs` has `num_output_tokens` entries, including one for an end token. In a stream,
  text may arrive later than its tokens. `/generate` writes a list with one entry as a number.
- `context_logits` and `generation_logits` are the model's own, before every option. They stay in
  memory until they are sent; `limits.max_logits_bytes` limits their size.
- A Triton batch over 1, or `num_return_sequences` over 1, needs decoupled mode and a streaming
  interface. Responses have `batch_index` and `sequence_index`, and the first error ends them all.
- `stop` sent to `tensorrt_llm` cancels the requests in flight there that have its request id.
  Spindle obeys Triton's `timeout` (microseconds) but not its `priority`, which Python models cannot
  read.
"""
"""How requests are answered, whatever tensors they use."""


def render_contract() -> str:
    """Return ``docs/reference/tensors.md``: every tensor of every model and what becomes of it.
    Models of the same tensors share a table. Refused tensors, and rows that an earlier table has,
    are only named.
    """
    lines = [
        "# Tensors",
        "",
        *EXAMPLE.splitlines(),
        "",
        *textwrap.wrap(f"{ORIGIN} Dims are without the batch dimension.", 100),
        "",
        "Unsupported inputs accept neutral values: an empty tensor, or the values given as "
        "neutral.",
        "Anything else returns UNIMPLEMENTED, naming the tensor and the reason.",
        "[Exactness](../explanation/exactness.md) says which texts are guaranteed to be equal.",
        "",
        "## Behaviour",
        "",
        *BEHAVIOUR.splitlines(),
    ]
    same: dict[tuple[object, object], list[str]] = {}
    for model in MODELS:
        same.setdefault((model.inputs, model.outputs), []).append(model.name)
    models = {model.name: model for model in MODELS}
    first_table: dict[str, str] = {}
    for names in same.values():
        lines += ["", f"## `{'`, `'.join(names)}`"]
        model = models[names[0]]
        for kind, tensors, column in (
            ("input", model.inputs, "what it does"),
            ("output", model.outputs, "meaning"),
        ):
            rows = {
                f.name: f"| `{f.name}` | {f.dtype} [{dims(f)}] | {_note(f)} |"
                for f in tensors
                if f.refused is None
            }
            lines += ["", f"| {kind} | type | {column} |", "| --- | --- | --- |"]
            lines += [row for row in rows.values() if row not in first_table]
            for first in dict.fromkeys(
                first_table[row] for row in rows.values() if row in first_table
            ):
                same_rows = (
                    f"`{name}`" for name, row in rows.items() if first_table.get(row) == first
                )
                lines += ["", *textwrap.wrap(f"As in `{first}`: {', '.join(same_rows)}.", 100)]
            lines += _list_refused(
                tensors, f"{kind}s are {'refused' if kind == 'input' else 'never sent'}"
            )
            first_table = dict.fromkeys(rows.values(), names[0]) | first_table
    return "\n".join(lines) + "\n"


def _list_refused(tensors: Iterable[Field], outcome: str) -> list[str]:
    """Return a paragraph for each reason why tensors are refused."""
    names_by_reason: dict[str, list[str]] = {}
    for field in tensors:
        if field.refused is not None:
            neutral = f" (neutral: {', '.join(map(repr, field.neutral))})" if field.neutral else ""
            name = f"`{field.name}`{neutral}"
            names_by_reason.setdefault(field.refused.value, []).append(name)
    lines = []
    for reason, names in names_by_reason.items():
        text = f"{reason[0].upper()}{reason[1:]}, so these {outcome}: {', '.join(names)}."
        lines += ["", *textwrap.wrap(text, 100)]
    return lines


def _note(field: Field) -> str:
    return (
        ("**required**; " if field.required else "")
        + field.does
        + (" (Spindle extension)" if field.extra else "")
    )
