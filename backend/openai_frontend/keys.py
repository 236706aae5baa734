"""API keys. With several, each is one tenant's, and tenants share nothing that tells of another."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import blake2b

from starlette.datastructures import Headers

from backend.openai_frontend.errors import ApiError

OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page has no secrets (what it shows asks for the key), and probes have
none.
"""
OPERATOR_PATHS = ("/explain", "/metrics")
"""Paths that show figures of all requests: with several keys, only the first one opens them."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that callers may have; none: anyone may call."""

    keys: tuple[str, ...] = ()

    def tenant(self, path: str, headers: Headers) -> str:
        """Return the tenant that calls a path; '' if all callers are one. Raises ApiError if the
        caller lacks a key for it.
        """
        if not self.keys or path in OPEN_PATHS:
            return ""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = ""
        matches = [_is_same(given.strip(), key) for key in self.keys]
        if not any(matches):
            raise ApiError(401, "the API key is missing or wrong")
        if path in OPERATOR_PATHS and not matches[0]:
            raise ApiError(403, f"{path} shows figures of all tenants: it needs the first key")
        return tenant_of(given.strip()) if len(self.keys) > 1 else ""


def tenant_of(key: str) -> str:
    """Return the tenant that a key stands for: the same for each process, and no way to the key."""
    return _digest(key, b"tenant")


def tenant_salt(tenant: str, salt: str | None) -> str | None:
    """Return the ``cache_salt`` of a tenant's request, from its own ``salt`` if it has one.

    Clients cannot name another tenant's, for they do not know its key.
    """
    return _digest(salt or "", tenant.encode()) if tenant else salt


def _digest(text: str, key: bytes) -> str:
    data = text.encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=_DIGEST_BYTES, key=key).hexdigest()


def _is_same(given: str, key: str) -> bool:
    # Starlette decodes headers as latin-1; keys are UTF-8.
    return hmac.compare_digest(given.encode("latin-1"), key.encode())
