"""The settings of the policy in another engine: some of serving.json, and a few of its own.

The host's engine is the target, and ``k_max``, the most tokens of a proposal, is a setting of the
host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from backend.checked_settings import ConfigError, build_settings, setting
from backend.config import HOSTED, ServingConfig, parse_config

TARGET = "target"
"""The name that the host's engine has in plans, tables and metrics."""

_SHARED = ("drafts", "policy", "limits", "threads")
_DEFAULT_DRAFTS = [{"engine": "suffix", "name": "suffix"}]


@dataclass(frozen=True, slots=True)
class HostConfig:
    """A plug-in's settings."""

    serving: ServingConfig = field(default_factory=ServingConfig)
    """Drafts, policy, limits and threads of drafts, as in serving.json."""
    latency_file: str = ""
    """The host's latency table: read if it exists, else written once measured. Empty: measured at
    every start.
    """
    calibration_s: float = setting(20.0, low=0.1, high=600.0)
    """The most seconds of measuring."""
    home: str = ""
    """The socket of Spindle's engine process, where the host is its target: switches come from
    there, and metrics go there.
    """
    learned_key: str = ""
    """The name under which what is learned is kept in the cache folder; empty: nothing is kept."""
    metrics_port: int = setting(0, low=0, high=65535)
    """A port on the loopback with the plug-in's own metrics; 0: none."""


def host_config(
    raw: Mapping[str, Any], k_max: int, max_context_tokens: int, drafter: str = ""
) -> HostConfig:
    """Check a plug-in's settings; ``drafter`` names the host's own, which then is the only draft.
    Raises ConfigError naming key and value.
    """
    host_keys = {key: value for key, value in raw.items() if key not in _SHARED}
    if "serving" in host_keys:
        raise ConfigError(f"unknown key 'serving'; known here: {', '.join(_SHARED)}")
    shared = {key: raw[key] for key in _SHARED if key in raw}
    if drafter:
        if "drafts" in shared:
            raise ConfigError(f"drafts must be absent: {drafter} of the host proposes")
        shared["drafts"] = [{"engine": HOSTED, "name": drafter}]
    policy, limits = dict(shared.pop("policy", {})), dict(shared.pop("limits", {}))
    if "k_max" in policy:
        raise ConfigError(f"policy.k_max is the host's own setting, got {policy['k_max']!r}")
    limits.setdefault("max_context_tokens", max_context_tokens)
    defaults = {"threads": 1, "drafts": _DEFAULT_DRAFTS, **shared}
    target = {"engine": HOSTED, "name": TARGET}
    serving = parse_config(
        {**defaults, "target": target, "policy": {**policy, "k_max": k_max}, "limits": limits}
    )
    config: HostConfig = build_settings(HostConfig, {**host_keys}, "")
    return replace(config, serving=serving)
