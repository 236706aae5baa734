"""A head's folder: ``config.json`` (``HeadConfig``, the vocabulary and the target that it was made
for) and ``model.safetensors``: the network's weights in bf16 and ``token_ids`` int32[rows].
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.checked_settings import ConfigError
from backend.engines.port import Footprint

if TYPE_CHECKING:
    from backend.sampling.distributions import Floats
    from backend.sampling.draw import IntArray

ARCHITECTURE = "SpindleHead"
WEIGHTS_FILE = "model.safetensors"
CONTEXT_ROWS = 512
"""Tokens of a request's own text, at most, that a head can propose besides the static ones."""
TARGET_ROWS = 128
"""The same if the target runs the head."""

_RACE_BYTES = 64
"""Bytes of each logit while the target's device draws for a head: its noise, mass and time in 64
bits, and what they are made of.
"""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head. ``layers``: the target's whose output it reads, counted from 1.
    ``rows``: how many tokens it can propose besides those of the request's own text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]
    rows: int
    rms_norm_eps: float = 1e-5

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of its network, by name."""
        hidden, inner, taps = self.hidden_size, self.intermediate_size, len(self.layers)
        norms = ("state_norm", "token_norm", "mlp_norm", "norm")
        return {
            "features_norm": (taps, hidden),
            "join.weight": (hidden, taps * hidden),
            "mix.weight": (hidden, 2 * hidden),
            "gate_up.weight": (2 * inner, hidden),
            "down.weight": (hidden, inner),
        } | dict.fromkeys(norms, (hidden,))

    @property
    def parameters(self) -> int:
        """How many numbers its network has."""
        return sum(map(prod, self.shapes().values()))


def read_config(folder: Path) -> HeadConfig:
    """Return what a head is made of. Raises ConfigError naming the file and what is wrong."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text("utf-8"))
        values = {name: raw[name] for name in HeadConfig.__dataclass_fields__}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]} is missing") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not the config of a head: {error}") from error
    layers = values.pop("layers")
    if not (isinstance(layers, list) and layers and sorted(set(layers)) == layers):
        raise ConfigError(f"{path}: layers must be different and ascending, got {layers!r}")
    return HeadConfig(layers=tuple(layers), **values)


def read_head(folder: Path) -> tuple[HeadConfig, dict[str, Floats], IntArray]:
    """Return what a head is made of, its weights by name in fp32, and the tokens int64[rows] that
    have rows in any case. Raises ConfigError for files that are missing or do not fit.
    """
    import numpy as np  # `doctor` runs without packages

    from backend.engines.checkpoint import read_arrays

    config, path = read_config(folder), folder / WEIGHTS_FILE
    arrays = read_arrays(path)
    token_ids = arrays.pop("token_ids", np.zeros(0)).astype(np.int64)
    ids = set(token_ids.tolist())
    if not len(ids) == len(token_ids) == config.rows or not ids <= set(range(config.vocab_size)):
        text = f"token_ids must be {config.rows} different ids below {config.vocab_size}"
        raise ConfigError(f"{path}: {text}")
    shapes = config.shapes()
    if unknown := sorted(set(arrays) - set(shapes)):
        raise ConfigError(f"{path}: unknown tensors: {', '.join(unknown)}")
    for name, shape in shapes.items():
        stored = arrays[name].shape if name in arrays else "missing"
        if stored != shape:
            raise ConfigError(f"{path}: {name} should be {list(shape)}, is {stored}")
    return config, arrays, token_ids


def read_target_sha256(folder: Path) -> str:
    """Return the hash of the target's weights that a head was trained on (``weights_sha256``);
    empty where its folder does not say.
    """
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return str(raw.get("target_sha256", ""))


def config_json(config: HeadConfig, **others: Any) -> str:
    """Return the text of a ``config.json``."""
    raw = {**asdict(config), "layers": list(config.layers), **others}
    raw |= {"architectures": [ARCHITECTURE], "dtype": "bfloat16"}
    return json.dumps(raw, indent=2, sort_keys=True) + "\n"


def footprint(
    folder: Path, dtype: str, device: str, sequences: int, *, in_target: bool = False
) -> Footprint:
    """Return what a head takes: its network, its rows and those of ``sequences``' own tokens, and
    copies of the target's embedding in bf16 (on GPUs of its head, too). With ``in_target`` it reads
    the target's own, and the target keeps a state of every sequence for it.
    """
    config, item = read_config(folder), 2 if dtype == "bf16" else 4
    hidden, own_rows = config.hidden_size, TARGET_ROWS if in_target else CONTEXT_ROWS
    weights = item * (config.parameters + config.rows * hidden)
    if not in_target:
        weights += (2 if device == "cpu" else 4) * config.vocab_size * hidden
    text_rows = sequences * min(own_rows, config.vocab_size - config.rows) * hidden * item
    logits = sequences * (config.rows + own_rows)
    if not in_target:
        return Footprint(device, weights, 0, text_rows + 8 * logits)
    states = (sequences + 1) * len(config.layers) * hidden * item
    return Footprint(device, weights, 0, text_rows + states + _RACE_BYTES * logits)
