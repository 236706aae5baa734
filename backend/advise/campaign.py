"""Which cells are measured: some lengths at some loads, the plain server, and what the first fit
leaves open.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mode
from typing import Any

from backend.advise import AdviceError
from backend.advise.goodput import PLAIN, LoadRange
from backend.advise.load import Body, Cell, Client, QueuedError, measure, quiet_page
from backend.advise.scrape import require
from backend.advise.servers import Spec, running, speculation
from policy.simulation.statistics import abba

Say = Callable[[str], None]
_ABOVE, _BELOW = 0.2, 0.25
"""How far the drafted tokens of a proposal may be from a length: above in tokens, below as a share,
since the last proposal of a text is cut.
"""
MOST_IN_FLIGHT = 1 << 16
_LEAST_REQUESTS = 8
"""The least of a cell in a block; with n in flight it is at least 1.5 n."""
_WARM_TOKENS = 12
"""The length of the requests that a load begins with, unmeasured."""


@dataclass
class CampaignSettings:
    """The requests to send, and limits."""

    bodies: Sequence[Body]
    loads: list[int]
    blocks: int = 2
    most_tokens: int = 256
    """The most that a request may ask for."""
    start_limit_s: float = 1800.0
    allowance: list[int] = field(default_factory=lambda: [1 << 30])
    """How many more requests may be sent."""

    def requests(self, loads: Sequence[int]) -> int:
        """Return how many requests one length takes at these loads, in all blocks."""
        return sum(n + self.blocks * self._each(n) for n in loads)

    def _each(self, in_flight: int) -> int:
        return max(_LEAST_REQUESTS, in_flight + (in_flight + 1) // 2)

    def slice(self, in_flight: int, block: int, model: str) -> list[Body]:
        """Return the bodies of a block: the same for every length."""
        count, most = self._each(in_flight), len(self.bodies)
        start = (block * count + 7 * in_flight) % most
        return [self._body(self.bodies[(start + i) % most], model) for i in range(count)]

    def _body(self, body: Body, model: str) -> Body:
        fields = {
            k: v for k, v in body.items() if k not in ("stream_options", "best_of", "metadata")
        }
        fields |= {"stream": False, "n": 1}
        if model:
            fields["model"] = model
        names = [
            n for n in ("max_tokens", "max_completion_tokens") if isinstance(fields.get(n), int)
        ]
        for name in names or ["max_tokens"]:
            fields[name] = min(fields.get(name) or self.most_tokens, self.most_tokens)
        return fields


@dataclass
class Campaign:
    """Measures cells of servers that it starts, or of servers that run."""

    settings: CampaignSettings
    say: Say
    cells: list[Cell] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    most: int = MOST_IN_FLIGHT
    """The most requests in flight that the server was seen to run."""
    heeds_tables: bool = True
    engine: str = ""
    version: str = ""

    @property
    def loads(self) -> list[int]:
        """The loads that the server can take."""
        return [n for n in self.settings.loads if n <= self.most]

    def lengths(self) -> list[int]:
        """Return the lengths that were measured."""
        return sorted({cell.length for cell in self.cells if cell.loaded})

    def note(self, text: str) -> None:
        """Keep and say what the reader of the advice must know."""
        if text not in self.notes:
            self.notes.append(text)
            self.say(f"note: {text}")

    def look(self, client: Client) -> str:
        """Read engine and version of a server, and return the name of its model."""
        self.engine = client.page().engine or self.engine
        self.version = client.version() or self.version
        models = client.models()
        names = {body.get("model") for body in self.settings.bodies}
        return "" if names <= {*models} or not models else models[0]

    def cell(
        self, client: Client, arm: int, in_flight: int, block: int, body: Body, model: str
    ) -> bool:
        """Measure one cell in one block; returns whether the server can take that load. The
        ``body`` is added to each request.
        """
        bodies = [one | body for one in self.settings.slice(in_flight, block, model)]
        about: dict[str, Any] = {"loaded": arm != PLAIN, "block": block}
        try:
            if not block:  # new shapes compile, and caches fill
                short = [one | {"max_tokens": _WARM_TOKENS} for one in bodies[:in_flight]]
                measure(client, short, max(arm, 0), in_flight)
            cell = measure(client, bodies, max(arm, 0), in_flight, **about)
        except QueuedError as problem:
            self._lower(in_flight, str(problem))
            return False
        if arm > 0:
            require(client.page(), "accepted")
        if self._is_as_length_field(cell):
            self.cells.append(cell)
        name = "plain" if arm == PLAIN else f"length {arm}"
        ms = 1e3 * cell.seconds()
        brings = f"a step takes {ms:.3g} ms and brings {cell.emitted:.2f} tokens"
        self.say(f"  {name}, {in_flight} in flight, block {block + 1}: {brings} a request")
        return True

    def _lower(self, in_flight: int, why: str) -> None:
        self.most = min(self.most, in_flight - 1)
        self.cells = [cell for cell in self.cells if cell.in_flight <= self.most]
        if len(self.loads) < 2:
            raise AdviceError(f"{why}. Give at least two loads that it can take with --in-flight.")
        self.note(f"{why}: loads above {self.loads[-1]} are left out")

    def _is_as_length_field(self, cell: Cell) -> bool:
        """Return whether the server drafted the length that it was asked for."""
        drafted = drafted_length(cell)
        if not cell.loaded or drafted is None or is_length(drafted, cell.length):
            return True
        if cell.length:
            raise AdviceError(
                f"asked for length {cell.length}, the server drafts {drafted:.1f} tokens: it runs "
                "only one length. Start it with the probe scheduler from spindle_vllm, or use "
                "--serve."
            )
        self.heeds_tables = False
        self.note(
            f"asked for length 0 by a table, the engine drafts {drafted:.1f} tokens: it "
            "ignores tables, so the advice is one length for all loads"
        )
        return False


@dataclass
class StartedServers(Campaign):
    """Starts a server for each length."""

    command: str = ""
    spec: Spec = field(default_factory=dict)
    client: Callable[..., Client] = Client

    def measure(self, arms: Sequence[int], longest: int) -> None:
        """Measure these lengths, and the plain server as ``PLAIN``."""
        for arm in arms:
            self.say(f"starting {'a plain server' if arm == PLAIN else f'length {arm}'}")
            with self.serve([LoadRange(1, MOST_IN_FLIGHT, arm)], longest) as client:
                model = self.look(client)
                self.warm(client)
                for block in range(self.settings.blocks):
                    for in_flight in self.loads[:: -1 if block % 2 else 1]:
                        if not self.cell(client, arm, in_flight, block, {}, model):
                            break
                    if arm == 0 and not self.heeds_tables:
                        break

    @contextmanager
    def serve(self, table: list[LoadRange], longest: int) -> Iterator[Client]:
        """Start a server with a table of lengths."""
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            words = speculation(self.engine, self.spec, table, longest, Path(folder))
            limit_s = self.settings.start_limit_s
            yield stack.enter_context(running(self.command, words, self.client, limit_s))

    def warm(self, client: Client) -> None:
        """Serve the first requests, which compile and fill caches, unmeasured."""
        quiet_page(client)
        for body in self.settings.slice(1, 0, self.look(client))[:2]:
            client.ask(body)


@dataclass
class ProbedServer(Campaign):
    """Asks a running server for the length with each request, by the probe scheduler, and a second
    one without speculation.
    """

    server: Client = field(default_factory=lambda: Client("http://127.0.0.1:8000"))
    plain: Client | None = None

    def measure(self, arms: Sequence[int], longest: int) -> None:
        """Measure these lengths interleaved, and the plain server as ``PLAIN``."""
        del longest
        names = {client.url: self.look(client) for client in (self.plain, self.server) if client}
        by_name = {str(arm): arm for arm in arms if arm != PLAIN or self.plain}
        for arm in by_name.values():  # first requests compile and fill caches
            client = self._client(arm)
            quiet_page(client)
            client.ask(self.settings.slice(1, 0, names[client.url])[0] | _length_field(arm))
        for block in range(self.settings.blocks):
            for in_flight in self.loads[:: -1 if block % 2 else 1]:
                for name in abba([*by_name], block):
                    arm, client = by_name[name], self._client(by_name[name])
                    model = names[client.url]
                    if not self.cell(client, arm, in_flight, block, _length_field(arm), model):
                        break

    def _client(self, arm: int) -> Client:
        return self.plain if arm == PLAIN and self.plain else self.server


def drafted_length(cell: Cell) -> float | None:
    """Return how many tokens a server drafts at a time: the usual number of its answers, or the
    mean of its counters; None if it proposes nothing.
    """
    proposed = [tokens for reply in cell.replies for tokens in reply.proposed]
    if proposed:
        return float(mode(proposed))
    drafts = cell.window["drafts"]
    return cell.window["drafted"] / drafts if drafts else None


def is_length(drafted: float, length: int, above: float = _ABOVE) -> bool:
    """Return whether a mean of drafted tokens is a length's."""
    return (1 - _BELOW) * length <= drafted <= length + above


def _length_field(arm: int) -> Body:
    return {} if arm == PLAIN else {"vllm_xargs": {"probe_k": arm}}
