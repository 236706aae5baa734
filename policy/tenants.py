"""Estimates learned from texts, apart by tenant: the text of one moves no plan of another.

A tenant is all requests of one ``cache_salt``; those without one are a tenant, too. Levels of
acceptance, what confidences are worth and how much of a plan's gain is kept have a column for each
tenant and draft, ``row * drafts + draft``, which only that tenant's requests teach. So the bound is
zero: whatever other tenants send, a tenant's columns are the same. A new tenant begins as a server
does, with the priors.

Tenants share the machine: the seconds that steps take, the price of time in a common batch,
and the budget for trials. When another tenant comes than the ``most`` that have rows, the least
recently used row is given away: one that sends under many salts can make idle tenants begin again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from .plan import FloatArray, IntArray

NO_TENANT = -1


@dataclass(frozen=True, slots=True, eq=False)
class Tenants:
    """The tenants that are known, by row; from the start there is 0, requests without a salt."""

    ids: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    """int64[T] the tenant of each row."""
    last_turn: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    """int64[T] the turn at which a request of the tenant last came or went."""
    row: dict[int, int] = field(default_factory=dict)
    """The row by request, of requests that are not over."""
    turn: int = 0

    @property
    def rows(self) -> int:
        """Return T."""
        return len(self.ids)

    def admit(self, request: list[int], tenant: list[int], most: int) -> tuple[Tenants, list[int]]:
        """Return the tenants with these requests, ``tenant`` of each, and the rows that new
        tenants took over: with ``most`` rows that of the least recently used tenant without a
        request. If all have requests, there is one row more.
        """
        new = [(r, t) for r, t in zip(request, tenant, strict=True) if r not in self.row]
        if not new:
            return self, []
        ids, last_turn, row = self.ids.tolist(), self.last_turn.tolist(), self.row.copy()
        turn, emptied = self.turn + 1, []
        for request_id, tenant_id in new:
            if tenant_id in ids:
                place = ids.index(tenant_id)
            else:
                idle = set(range(len(ids))).difference(row.values()) if len(ids) >= most else set()
                place = min(idle, key=last_turn.__getitem__, default=len(ids))
                if idle:
                    emptied.append(place)
                ids[place : place + 1], last_turn[place : place + 1] = [tenant_id], [turn]
            row[request_id], last_turn[place] = place, turn
        return Tenants(np.array(ids, np.int64), np.array(last_turn, np.int64), row, turn), emptied

    def without(self, requests: Iterable[int]) -> Tenants:
        """Return the tenants without these requests; unknown ones do not matter."""
        gone = [request for request in requests if request in self.row]
        if not gone:
            return self
        row, last_turn = self.row.copy(), self.last_turn.copy()
        for request in gone:
            last_turn[row.pop(request)] = self.turn + 1
        return replace(self, row=row, last_turn=last_turn, turn=self.turn + 1)

    def of(self, request: list[int]) -> IntArray:
        """Return the rows of requests, int64[n]; NO_TENANT for an unknown one of several tenants.

        If there is one tenant, it can be no other.
        """
        if self.rows == 1:
            return np.zeros(len(request), np.int64)
        return np.array([self.row.get(r, NO_TENANT) for r in request], np.int64)


def with_rows(
    column: FloatArray, before: int, tenants: int, emptied: Iterable[int], value: float = 0.0
) -> FloatArray:
    """Return a copy of ``column`` [T * D, ...], of ``before`` tenants, for ``tenants``; new rows
    and emptied ones have ``value``.
    """
    drafts = len(column) // before
    by_tenant = column.reshape(before, drafts, *column.shape[1:])
    more = np.zeros((tenants - before, *by_tenant.shape[1:]))
    after = np.concatenate([by_tenant, more])
    after[[*emptied, *range(before, tenants)]] = value
    rows: FloatArray = after.reshape(tenants * drafts, *column.shape[1:])
    return rows
