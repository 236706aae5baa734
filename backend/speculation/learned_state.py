"""Keeps what the policy learns in the cache folder over restarts: read at start, written every
minute and at the end, off the loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic, time
from typing import Any, Protocol

from backend.config import ServingConfig
from backend.ops.stats import StepStats
from backend.storage import cache
from backend.storage.manifest import weights_sha256
from policy import AnyPolicy
from policy.learned import without_times

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 60.0


class HoldsState(Protocol):
    """The owner of the policy's state."""

    state: Any


class LearnedState:
    """Moves the policy's state between its owner and a file. The state is an immutable value, so
    reading it needs no lock.

    A file that does not fit, or that cannot be written, is a metric and never costs a request.
    """

    def __init__(
        self, policy: AnyPolicy, owner: HoldsState, stats: StepStats, key: str, *, keep: bool
    ) -> None:
        self._policy, self._key = policy, key
        self._owner = owner
        self._stats = stats
        self._keep = keep
        self._saved: Any = None
        self._changing = threading.Lock()
        self._restored_age_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learned-state", daemon=True)

    def show(self) -> dict[str, Any]:
        """Return the learned state, and the age at which it was restored (seconds; None: it was
        not).
        """
        return {
            "restored_age_s": self._restored_age_s,
            **self._policy.save(self._owner.state, monotonic()),
        }

    def restore(self) -> None:
        """Restore the file's state if it fits; call it before the loop runs."""
        if not self._keep:
            return
        try:
            content = json.loads(cache.learned_file(self._key).read_text("utf-8"))
            if content["key"] != self._key:
                raise ValueError(f"key must be {self._key!r}, got {content['key']!r}")
            idle_s = max(0.0, time() - float(content["saved_unix_s"]))
            self._owner.state = self._policy.load(content["state"], monotonic(), idle_s)
        except FileNotFoundError:
            logger.info("no learned state to restore")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "the learned state cannot be restored: %s: %r",
                cache.learned_file(self._key),
                error,
            )
            self._stats.fallback("learned_state_unusable")
        else:
            self._restored_age_s = round(idle_s, 1)
            logger.info("restored learned state, saved %.0f s ago", idle_s)

    @contextmanager
    def changing(self, policy: AnyPolicy, key: str) -> Iterator[dict[str, Any]]:
        """Yield the learned state, from which the block makes the loop's new one. After it the
        state is saved as this policy's, under this key.
        """
        with self._changing:
            yield self._policy.save(self._owner.state, monotonic())
            self._policy, self._key = policy, key

    def start(self) -> None:
        """Start to save every minute."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and save once more."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()

    def save(self) -> None:
        """Write the file if there is anything new; a failure is counted."""
        with self._changing:
            policy, state, key = self._policy, self._owner.state, self._key
        if not self._keep or state is self._saved:
            return
        file = cache.learned_file(key)
        try:
            if not (data := policy.save(state, monotonic())):
                return
            text = json.dumps({"key": key, "saved_unix_s": time(), "state": data}, allow_nan=False)
            cache.publish_file(file, text)
        except (OSError, ValueError, TypeError) as error:
            logger.error("the learned state cannot be saved: %s: %s", file, error)
            self._stats.fallback("learned_state_unsaved")
        else:
            self._saved = state

    def _run(self) -> None:
        while not self._closed.wait(SAVE_PERIOD_S):
            self.save()


def pace(key: str) -> float:
    """Return measured over tabulated time of the target's passes, as the last server with this key
    learnt it; 1 if nothing is known.
    """
    try:
        content = json.loads(cache.learned_file(key).read_text("utf-8"))
        return float(content["state"]["target"]["factor"])
    except (OSError, ValueError, TypeError, KeyError):
        return 1.0


def forget_times(key: str) -> None:
    """Drop what the file says of times, which are those of other tables now; the rest stays."""
    file = cache.learned_file(key)
    try:
        content = json.loads(file.read_text("utf-8"))
        content["state"] = without_times(content["state"])
        cache.publish_file(file, json.dumps(content))
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the learned state cannot be changed: %s: %r", file, error)


def learned_key(config: ServingConfig, folders: Mapping[str, Path]) -> str:
    """Return a hash of all that the estimates depend on: the engines' settings and weights
    (``folders`` by engine name), k_max, and a user's policy.
    """
    engines = [
        {
            **asdict(engine),
            "model": weights_sha256(folders[engine.name]) if engine.name in folders else "",
        }
        for engine in config.engines
    ]
    depends: dict[str, Any] = {"engines": engines, "k_max": config.policy.k_max}
    if config.policy.is_custom:
        depends |= {"policy": config.policy.kind, "options": config.policy.options}
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()
