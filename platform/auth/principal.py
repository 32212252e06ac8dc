"""Principal: who calls. It comes from the API key and from nothing else."""

import hashlib
import hmac
from dataclasses import dataclass
from typing import NewType

from fastapi import Request

from loraplex.platform.errors import Unauthenticated

TenantId = NewType("TenantId", str)


@dataclass(frozen=True)
class Principal:
    tenant: TenantId
    namespace: str  # whose cached KV blocks its requests may share
    key_id: str
    scopes: frozenset[str]


class ApiKeyAuthenticator:
    """Knows one tenant with one key. Tenants with keys of their own take this place later."""

    def __init__(self, key: str, namespace: str) -> None:
        self._digest = _digest(key)
        self.principal = Principal(
            tenant=TenantId("default"),
            namespace=namespace,
            key_id="default",
            scopes=frozenset({"inference:write", "adapters:read"}),
        )

    def authenticate(self, authorization: str | None) -> Principal:
        """Takes the value of an Authorization header.

        Raises:
            Unauthenticated: with one text for a missing, malformed and wrong key.
        """
        scheme, _, key = (authorization or "").partition(" ")
        is_right = hmac.compare_digest(_digest(key.strip()), self._digest)
        if scheme.lower() != "bearer" or not is_right:
            raise Unauthenticated
        return self.principal


def current_principal(request: Request) -> Principal:
    """A dependency: the principal that the edge has found."""
    principal: Principal = request.state.principal
    return principal


def check_token(authorization: str | None, token: str) -> None:
    """Raises Unauthenticated if the Authorization header does not hold it."""
    scheme, _, given = (authorization or "").partition(" ")
    is_right = hmac.compare_digest(_digest(given.strip()), _digest(token))
    if scheme.lower() != "bearer" or not is_right:
        raise Unauthenticated("Give the metrics token as 'Authorization: Bearer TOKEN'.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
