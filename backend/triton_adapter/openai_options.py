"""Sampling options of OpenAI's API as values of Triton's tensors, whose meaning is another one
([0007](../../docs/adr/0007-what-options-mean.md)).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backend.request import LEAST_TEMPERATURE

PENALTIES = ("presence_penalty", "frequency_penalty")
WHOLE_PROMPT = 2**31 - 1
"""The largest ``prompt_ignore_length``."""
LEAST_TOP_P = 1e-6
"""The likeliest token has more than this share in every vocabulary of under a million tokens."""


def as_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options mean by the same names, and by others that they imply.

    OpenAI's penalties count what was written, without the prompt, and lower the logits before they
    are divided by the temperature, not after. Its ``top_p`` 0 keeps the likeliest token.
    """
    tensors = dict(options)
    temperature = float(np.float32(options.get("temperature") or 0.0))  # as the tensor has it
    for name in PENALTIES:
        if options.get(name):
            scale = temperature if temperature >= LEAST_TEMPERATURE else 1.0
            tensors |= {name: options[name] / scale, "prompt_ignore_length": WHOLE_PROMPT}
    if (top_p := options.get("top_p")) is not None and top_p < LEAST_TOP_P:
        tensors["top_k"] = 1
    return tensors
