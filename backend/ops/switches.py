"""The switches as they stand: read by the loop before every step, set by the administrative
interface, kept while the server runs.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backend.checked_settings import ConfigError
from backend.config import ServingConfig, SwitchesConfig, parse_switches
from backend.ops.stats import StepStats
from policy import Switches

logger = logging.getLogger(__name__)


class SwitchBoard:
    """Holds one immutable ``Switches``: a reader sees the old value or the new one, never a
    mixture. One thread sets.
    """

    def __init__(self, config: ServingConfig, stats: StepStats) -> None:
        self._config = config
        self._stats = stats
        self._file: Path | None = None
        self._put(config.switches)

    def current(self) -> Switches:
        """Return the switches (any thread)."""
        return self._current

    def show(self) -> dict[str, Any]:
        """Return the switches by key."""
        return asdict(self._current)

    def set(self, words: list[str]) -> dict[str, Any]:
        """Apply ``key=value`` words, all or none, from the next step on; return the switches.
        Raises ConfigError naming key and value.
        """
        self._put(parse_switches({**self.show(), **_parse(words)}, self._config))
        logger.warning("switches set: %s", " ".join(words))
        if self._file is not None:
            try:
                self._file.write_text(json.dumps(self.show()), "utf-8")
            except OSError as error:
                logger.error(
                    "switches not saved, a restart will lose them: cannot write %s: %s",
                    self._file,
                    error.strerror,
                )
                self._stats.fallback("switches_not_kept")
        return self.show()

    def check(self, config: ServingConfig) -> None:
        """Raise ConfigError when the switches as they stand do not fit these drafts."""
        parse_switches(self.show(), config)

    def change_drafts(self, config: ServingConfig) -> None:
        """Check against these drafts what is set from now on. Raises ConfigError when the switches
        as they stand do not fit them.
        """
        self.check(config)
        self._config = config

    def keep_in(self, file: Path) -> None:
        """Take up what an earlier process left in the file, and leave there what is set from now
        on.
        """
        self._file = file
        try:
            self._put(parse_switches(json.loads(file.read_text("utf-8")), self._config))
            logger.warning("restored switches: %s", self.show())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            logger.error("cannot restore switches from %s: %s", file, error)
            self._stats.fallback("switches_not_kept")

    def _put(self, config: SwitchesConfig) -> None:
        self._current = Switches(**asdict(config))
        self._stats.switches(self._current)


def _parse(words: list[str]) -> dict[str, Any]:
    """Return the values by key, numbers as numbers; ranges and types are checked by whom they are
    for.
    """
    if not words:
        raise ConfigError("set needs key=value")
    values: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator:
            raise ConfigError(f"set takes key=value, got {word!r}")
        values[key] = text if key in _TEXTS else _number(text)
    return values


_TEXTS = frozenset(key for key, value in asdict(SwitchesConfig()).items() if isinstance(value, str))


def _number(text: str) -> Any:
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return text
