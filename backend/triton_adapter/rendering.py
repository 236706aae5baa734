"""The ``config.pbtxt`` of every model, from the table of tensors.

``auto_complete_config`` is off in the deployments that these models replace, hence every config is
complete.
"""

from __future__ import annotations

from backend.triton_adapter.fields import Field, TritonModel

ORIGIN = (
    "Rendered by `python -m docs.tools.reference` from the table in "
    "backend/triton_adapter/fields.py."
)


def render_config(model: TritonModel, *, decoupled: bool = True, max_batch_size: int = 64) -> str:
    """Return a complete ``config.pbtxt``. ``spindle`` answers each command once, unbatched,
    whatever the settings.
    """
    parts = [
        f"# {ORIGIN}",
        f'name: "{model.name}"',
        'backend: "python"',
        f"max_batch_size: {max_batch_size if model.settings else 0}",
        f"model_transaction_policy {{ decoupled: "
        f"{str(decoupled and model.settings and model.decoupled).lower()} }}",
        *(["dynamic_batching { }"] if model.settings else []),
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        *(_tensor("input", field) for field in model.inputs),
        *(_tensor("output", field) for field in model.outputs),
    ]
    return "\n".join(parts) + "\n"


def _tensor(kind: str, field: Field) -> str:
    optional = "" if kind == "output" or field.required else ", optional: true"
    return (
        f'{kind} [ {{ name: "{field.name}", data_type: TYPE_{field.dtype}, dims: [ '
        f"{dims(field)} ]{optional} }} ]"
    )


def dims(field: Field) -> str:
    """Return a tensor's dims as they are written."""
    return ", ".join(map(str, field.dims))
