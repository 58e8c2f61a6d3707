"""Who calls: the authenticated caller of the RPC at hand."""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from gpuscale.api.types.v1 import options_pb2


class Role(IntEnum):
    """What a caller may do; each role includes the ones before it. The numbers are the contract's."""

    VIEWER = options_pb2.ROLE_VIEWER
    AGENT = options_pb2.ROLE_AGENT
    OPERATOR = options_pb2.ROLE_OPERATOR
    ADMIN = options_pb2.ROLE_ADMIN


@dataclass(frozen=True, slots=True)
class Limits:
    """What a caller that is no admin may ask of the queue.

    Attributes:
        tenants: whose quotas it may use, the one first that a request without a tenant counts against; its own name alone
            where there are none.
        max_priority: the highest priority that it may ask for.
    """

    tenants: tuple[str, ...] = ()
    max_priority: int = 0


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        name: whom the token or certificate names; "local" for callers of this host, "anonymous" for any other caller of
            a server that was told to trust its network.
        role: what it may do.
        kind: how it was recognised.
        limits: what it may ask of the queue, unless it is an admin.
    """

    name: str
    role: Role
    kind: Literal["local", "token", "certificate", "anonymous"]
    limits: Limits = Limits()

    @property
    def tenants(self) -> tuple[str, ...]:
        """Whose quotas it may use; an admin may use those of all others too."""
        return self.limits.tenants or (self.name,)


LOCAL = Principal("local", Role.ADMIN, "local")
ANONYMOUS = Principal("anonymous", Role.ADMIN, "anonymous")
RESERVED_NAMES = frozenset({LOCAL.name, ANONYMOUS.name})
"""Names that no token and no certificate may have: its bearer would own what callers without one made."""

_current: ContextVar[Principal] = ContextVar("gpuscale_principal")


def current_principal() -> Principal:
    """The caller of the RPC that is being handled, for the handler and all tasks that it starts.

    Raises:
        LookupError: no RPC is being handled, or one that needs no caller (health checks).
    """
    return _current.get()


def find_principal() -> Principal | None:
    """The caller of the RPC that is being handled; None where nobody was recognised."""
    return _current.get(None)


def set_principal(principal: Principal) -> None:
    """For the interceptor: name the caller of the RPC at hand."""
    _current.set(principal)
