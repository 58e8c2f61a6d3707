"""Which of several addresses a call goes to: the one that leads, as far as the answers so far have shown.

Several addresses stand for one service of which one process leads and the others are ready to take over. A standby
answers UNAVAILABLE, reason NOT_LEADER, without having done anything, so such a call may always be made again elsewhere;
so may one that found no connection. Any other failure is the caller's: nobody knows whether the call was done.
"""

import time
from collections.abc import Sequence
from typing import Final

import grpc

from gpuscale.common.errors import (
    DeadlineExceededError,
    GpuscaleError,
    InvalidArgumentError,
    UnavailableError,
)
from gpuscale.common.rpc.status import DETAILS_KEY, from_rpc_error
from gpuscale.common.runtime.backoff import Backoff

NOT_LEADER: Final = "NOT_LEADER"
"""Reason with which a standby turns calls away; its metadata `leader` is the leader's address, where known."""
PATIENCE: Final = 10.0
"""Seconds for which a call without a deadline looks for the leader."""

_OTHER_WAYS: Final = ("unix:", "unix-abstract:", "dns:///", "ipv4:", "ipv6:")
_USUAL_PORT: Final = 7070
_HIGHEST_PORT: Final = 65_535
_FIRST_PAUSE: Final = 0.1
_LONGEST_PAUSE: Final = 1.0
# What gRPC core says of a call that it never gave to a connection. Where it says it in other words one day, the caller
# gets the error and calls again.
_NEVER_SENT: Final = ("failed to connect to all addresses", "DNS resolution failed", "errors resolving ")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses of `HOST:PORT,HOST:PORT`; of a single one, that one.

    Raises:
        InvalidArgumentError: one is no address, or of several one is empty or stands there twice.
    """
    addresses = tuple(one.strip() for one in text.split(","))
    if len(addresses) > 1 and ("" in addresses or len(set(addresses)) < len(addresses)):
        raise InvalidArgumentError(
            f"{text!r} must name different addresses, with commas between", field="address"
        )
    for one in addresses:
        problem = _problem(one)
        if problem:
            raise InvalidArgumentError(f"the address {one!r} {problem}")
    return addresses


def _problem(address: str) -> str:
    """What is wrong with an address to connect to; empty where nothing is."""
    if address.startswith(_OTHER_WAYS):
        return ""
    scheme, found, rest = address.partition("://")
    if found:
        return f"has {scheme}:// before it: write {rest.rstrip('/')}"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"has no port: write HOST:PORT, such as {address or '127.0.0.1'}:{_USUAL_PORT}"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"is ambiguous: write an IPv6 address in brackets, such as [::1]:{_USUAL_PORT}"
    if not (port.isascii() and port.isdecimal() and 0 < int(port) <= _HIGHEST_PORT):
        return f"has the port {port!r}: a port is a number from 1 to {_HIGHEST_PORT}"
    return "" if host else f"has no host: write HOST:PORT, such as 127.0.0.1:{port}"


class Leader:
    """Which of the addresses is taken for the leader's; the first to begin with. Shared by all calls of a channel."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self.index = 0

    @property
    def count(self) -> int:
        """How many addresses there are."""
        return len(self._addresses)

    def failed(self, index: int, hint: str = "") -> None:
        """The address at `index` does not lead: go on to the one that `hint` names, or to the next.

        A failure at an address that was left meanwhile, as of a call that took long, changes nothing.
        """
        if index != self.index:
            return
        known = hint in self._addresses and self._addresses.index(hint) != index
        self.index = self._addresses.index(hint) if known else (index + 1) % len(self._addresses)


class Trail:
    """The way of one call from address to address.

    Args:
        leader: of the channel.
        timeout: seconds that the caller gives the call; None for any time.
        again: whether it can be made again: not where a stream of requests was used up.
    """

    def __init__(self, leader: Leader, timeout: float | None, *, again: bool) -> None:
        self._leader = leader
        self._again = again
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._patience = time.monotonic() + PATIENCE
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._refusals = 0
        self.index = leader.index

    @property
    def timeout(self) -> float | None:
        """Seconds left of the caller's; None for any time."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def began(self) -> None:
        """A response came: from now on the call is not made again."""
        self._again = False

    def after(self, error: grpc.RpcError) -> float | None:
        """Seconds until the call is to be made again, at `index`; None where the error is the caller's.

        Later calls go elsewhere too, where the error shows that this address does not lead or does not answer.
        """
        problem = from_rpc_error(error)
        if not _lost(problem):
            return None
        self._leader.failed(self.index, problem.metadata.get("leader", ""))
        if not (self._again and (problem.reason == NOT_LEADER or _never_sent(error))):
            return None
        self.index = self._leader.index
        self._refusals += 1
        # Each address is asked once without a pause; then there is no leader, until a standby has taken over.
        pause = 0.0 if self._refusals % self._leader.count else self._backoff.next()
        latest = self._patience if self._deadline is None else self._deadline
        return pause if time.monotonic() + pause < latest else None


def _lost(problem: GpuscaleError) -> bool:
    """Whether later calls should go elsewhere."""
    if isinstance(problem, UnavailableError):
        return problem.reason in (NOT_LEADER, "LEAD_LOST", "SHUTTING_DOWN", UnavailableError.default_reason)
    return isinstance(problem, DeadlineExceededError) and problem.reason == problem.default_reason


def _never_sent(error: grpc.RpcError) -> bool:
    """Whether gRPC itself says that the call went nowhere. A server that says so, with details, tells of its own upstream."""
    if not isinstance(error, (grpc.Call, grpc.aio.AioRpcError)):
        return False
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    return (error.details() or "").startswith(_NEVER_SENT)
