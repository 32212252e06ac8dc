"""Principal: who calls, from the API key and from nothing else."""

import hashlib
import hmac
from dataclasses import dataclass, replace
from typing import NewType, Protocol

from fastapi import Request

from loraplex.platform.errors import Forbidden, Unauthenticated

TenantId = NewType("TenantId", str)

CHANGE_ADAPTERS = "adapters:write"


@dataclass(frozen=True)
class Principal:
    tenant: TenantId
    namespace: str  # whose cached KV blocks its requests may share
    key_id: str
    scopes: frozenset[str]


class Authenticator(Protocol):
    """Turns a caller's credentials into a principal."""

    def authenticate(self, authorization: str | None) -> Principal:
        """Returns the principal of an Authorization header's value.

        Raises:
            Unauthenticated: with the same text for a missing, malformed and wrong key.
        """


class ApiKeyAuthenticator:
    """Authenticates one tenant with one key.

    Args:
        operator_key: lets the operator act for the tenant and change its adapters.
    """

    def __init__(self, key: str, namespace: str, operator_key: str | None = None) -> None:
        scopes = frozenset({"inference:write", "adapters:read"})
        self.principal = Principal(TenantId("default"), namespace, "default", scopes)
        self._known = [(_digest(key), self.principal)]
        if operator_key is not None:
            operator = replace(self.principal, key_id="operator", scopes=scopes | {CHANGE_ADAPTERS})
            self._known.append((_digest(operator_key), operator))

    def authenticate(self, authorization: str | None) -> Principal:
        """As `Authenticator.authenticate`."""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = [who for digest, who in self._known if hmac.compare_digest(given, digest)]
        if scheme.lower() != "bearer" or not found:
            raise Unauthenticated
        return found[-1]


def current_principal(request: Request) -> Principal:
    """Returns the principal that the edge has authenticated; a dependency."""
    principal: Principal = request.state.principal
    return principal


def check_token(authorization: str | None, token: str) -> None:
    """Raises Unauthenticated if the Authorization header does not hold the token."""
    scheme, _, given = (authorization or "").partition(" ")
    is_right = hmac.compare_digest(_digest(given.strip()), _digest(token))
    if scheme.lower() != "bearer" or not is_right:
        raise Unauthenticated("Give the metrics token as 'Authorization: Bearer TOKEN'.")


def operator(request: Request) -> Principal:
    """Returns the principal if it may change adapters; a dependency.

    Raises:
        Forbidden: if the principal may not change adapters.
    """
    principal = current_principal(request)
    if CHANGE_ADAPTERS not in principal.scopes:
        raise Forbidden("This route needs the operator's key (--operator-key).")
    return principal


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
