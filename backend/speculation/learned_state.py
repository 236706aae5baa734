"""What the policy has learnt, kept in the cache folder over restarts: read at start, written every
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
from policy import Policy

logger = logging.getLogger(__name__)

SAVE_PERIOD_S = 60.0


class HoldsState(Protocol):
    """The loop's planning, as far as this module knows it."""

    state: Any


class LearnedState:
    """Moves the policy's state between the loop and a file. The state is an immutable value, so
    reading it needs no lock.

    A file that does not fit is ignored and one that cannot be written is missed, with a metric;
    neither ever costs a request.
    """

    def __init__(
        self, policy: Policy, planning: HoldsState, stats: StepStats, key: str, *, keep: bool
    ) -> None:
        self._policy, self._key = policy, key
        self._planning = planning
        self._stats = stats
        self._keep = keep
        self._saved: Any = None
        self._changing = threading.Lock()
        self._restored_age_s: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="learned-state", daemon=True)

    def show(self) -> dict[str, Any]:
        """Return what is known now, and how old was what this process began with (seconds; None: it
        began with nothing).
        """
        return {
            "restored_age_s": self._restored_age_s,
            **self._policy.save(self._planning.state, monotonic()),
        }

    def restore(self) -> None:
        """Let the policy begin with what the file has, if it fits; call it before the loop runs."""
        if not self._keep:
            return
        try:
            content = json.loads(cache.learned_file(self._key).read_text("utf-8"))
            if content["key"] != self._key:
                raise ValueError(f"key must be {self._key!r}, got {content['key']!r}")
            idle_s = max(0.0, time() - float(content["saved_unix_s"]))
            self._planning.state = self._policy.load(content["state"], monotonic(), idle_s)
        except FileNotFoundError:
            logger.info("nothing was learnt here before")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning(
                "what was learnt before cannot be used: %s: %r",
                cache.learned_file(self._key),
                error,
            )
            self._stats.fallback("learned_state_unusable")
        else:
            self._restored_age_s = round(idle_s, 1)
            logger.info("what was learnt until %.0f s ago is taken up", idle_s)

    @contextmanager
    def changing(self, policy: Policy, key: str) -> Iterator[dict[str, Any]]:
        """Give the block what is known, for the state that it hands the loop; that is kept as this
        policy's, under this key.
        """
        with self._changing:
            yield self._policy.save(self._planning.state, monotonic())
            self._policy, self._key = policy, key

    def start(self) -> None:
        """Begin to save every minute."""
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
            policy, state, key = self._policy, self._planning.state, self._key
        if not self._keep or state is self._saved:
            return
        file = cache.learned_file(key)
        try:
            if not (data := policy.save(state, monotonic())):
                return
            text = json.dumps({"key": key, "saved_unix_s": time(), "state": data}, allow_nan=False)
            cache.publish_file(file, text)
        except (OSError, ValueError, TypeError) as error:
            logger.error("what was learnt cannot be saved: %s: %s", file, error)
            self._stats.fallback("learned_state_unsaved")
        else:
            self._saved = state

    def _run(self) -> None:
        while not self._closed.wait(SAVE_PERIOD_S):
            self.save()


def learned_key(config: ServingConfig, folders: Mapping[str, Path]) -> str:
    """Return a hash of all that the estimates depend on.

    The engines' settings and weights (``folders`` by engine name), k_max, and a user's policy.
    """
    engines = [
        {
            **asdict(engine),
            "model": weights_sha256(folders[engine.name]) if engine.name in folders else "",
        }
        for engine in (config.target, *config.drafts)
    ]
    depends: dict[str, Any] = {"engines": engines, "k_max": config.policy.k_max}
    if config.policy.own:  # what it learns is of its own kind
        depends |= {"policy": config.policy.kind, "options": config.policy.options}
    return hashlib.sha256(json.dumps(depends).encode()).hexdigest()
