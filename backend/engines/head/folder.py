"""A head's folder: ``config.json`` (``HeadConfig``, the vocabulary and the target that it was made
for) and ``model.safetensors``: the network's weights in bf16 and ``token_ids`` int32[rows].
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backend.config import ConfigError
from backend.engines.port import Footprint

ARCHITECTURE = "SpindleHead"
WEIGHTS_FILE = "model.safetensors"
CONTEXT_ROWS = 512
"""Tokens of a request's own text, at most, that it can propose beside the static ones."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What a head is made of. ``layers``: the target's whose output it reads, counted from 1.
    ``rows``: how many tokens it can propose beside those of the request's own text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[int, ...]
    rows: int
    rms_norm_eps: float = 1e-5

    @property
    def parameters(self) -> int:
        """How many numbers its network has."""
        hidden, inner, taps = self.hidden_size, self.intermediate_size, len(self.layers)
        return hidden * ((taps + 2) * hidden + 3 * inner + taps + 4)


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
        raise ConfigError(f"{path} is no head's: {error}") from error
    layers = values.pop("layers")
    if not (isinstance(layers, list) and layers and sorted(set(layers)) == layers):
        raise ConfigError(f"{path}: layers must be different and ascending, got {layers!r}")
    return HeadConfig(layers=tuple(layers), **values)


def made_for(folder: Path) -> str:
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


def footprint(folder: Path, dtype: str, device: str, sequences: int) -> Footprint:
    """Return what a head takes: its network, its rows and the target's embedding in bf16, and the
    rows of so many sequences' own tokens.
    """
    config, item = read_config(folder), 2 if dtype == "bf16" else 4
    weights = item * (config.parameters + config.rows * config.hidden_size)
    weights += 2 * config.vocab_size * config.hidden_size
    own = sequences * min(CONTEXT_ROWS, config.vocab_size - config.rows) * config.hidden_size * item
    logits = 4 * sequences * (config.rows + CONTEXT_ROWS)
    return Footprint(device, weights, 0, own + 2 * logits)
