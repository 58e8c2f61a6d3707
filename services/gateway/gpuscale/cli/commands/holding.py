"""`LeaseHolder`: what a supervisor tells and asks the service, by the lease token of one reservation."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console.terminal import note_of_run
from gpuscale.client.orders import Orders
from gpuscale.common import wire
from gpuscale.common.errors import REFUSALS, UNANSWERED, GpuscaleError, UnavailableError
from gpuscale.common.names import LEASE_KEY, node_name
from gpuscale.common.rpc import channel, status

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import AllocatorServiceStub, JobMember, Reservation

RETRY = 0.5
"""Seconds before an unanswered renewal is retried."""
RARELY, PART = 5.0, 8
"""Most seconds between retries of the end, and which part of the time that it has taken: many jobs may wait for one allocator."""
PATIENCE, OF_ENDED, OF_DETACHED = 10.0, 300.0, 60.0
"""Seconds to retry without an answer: the first renewal and the release, the report of the end while the lease lasts, and that of a
detached job past the end of its lease."""
_Answer = TypeVar("_Answer")


class LeaseHolder:
    """Renews and releases the reservation of some orders by the lease token, in the first of several ways that answers.

    Attributes:
        ends: when the lease ends by the last renewal, by the monotonic clock; a single value, which its guard may share.
        next_node: id of the node that keeps GPUs for its job, by the last renewal; empty if none does.
        moved: the reservation of a job that waits for other GPUs, to start again; None if it does not.
    """

    def __init__(
        self, orders: Orders, ways: "Sequence[AllocatorServiceStub]", ends: "memoryview[float] | None" = None
    ) -> None:
        self.orders = orders
        self.member: JobMember | None = None
        self.all_ended = orders.member is None
        self.last_lines: Callable[[], Sequence[str]] = tuple
        self.moved: Reservation | None = None
        self.next_node: str = ""
        self.asked_at = 0.0
        self.ends = [0.0] if ends is None else ends
        self._ways = list(ways)
        self._shown = ((LEASE_KEY, orders.lease_token),)

    def renew(self, timeout: float, ended_attempt: int = 0) -> "Reservation":
        """Renew the lease; `timeout` limits all ways together. Another attempt is to follow an `ended_attempt`.

        Raises GpuscaleError: it cannot be renewed; one of `UNANSWERED` if there was no answer.
        """
        self.asked_at = time.monotonic()
        if self.member is not None:
            self.member.last_lines[:] = self.last_lines()
        request = api.RenewReservationRequest(
            name=self.orders.reservation,
            fence=self.orders.fence,
            member=self.member,
            ended_attempt=ended_attempt,
        )
        each = timeout / max(1, len(self._ways))
        answer = self._ask(lambda way: way.RenewReservation(request, timeout=each, metadata=self._shown))
        self.ends[0] = self.asked_at + wire.seconds(answer.reservation.remaining)
        self.next_node = answer.next_node.removeprefix("nodes/")
        return answer.reservation

    def started(self, pid: int) -> None:
        """Report the command with each renewal from now on, if the service stores that; pid 0 if it cannot start."""
        if self.orders.reports:
            self.member = api.JobMember(
                member=self.orders.member or 0,
                node=node_name(self.orders.node),
                pid=pid,
                start_time=wire.to_timestamp(datetime.now(UTC)) if pid else None,
            )

    def ended(self, code: int, why: str, *, leaves: bool = False) -> None:
        """Report how the command ended, and why it was stopped; whether it `leaves` to be started again."""
        if self.member is not None:
            self.member.exit_code, self.member.end_reason = code, why
            self.member.end_time.GetCurrentTime()
            ended_attempt = self.orders.attempt if leaves else 0
            try:
                known = self.renew_patiently(channel.RPC_TIMEOUT, ended_attempt)
            except GpuscaleError as error:
                note_of_run(f"nobody knows how the command ended: {error.message}")
                return
            if known.job.attempt > self.orders.attempt:
                self.moved, self.all_ended = known, False
                return
            ended = [one for one in known.job.members if one.HasField("exit_code")]
            self.all_ended = len(ended) == known.member_count

    def renew_patiently(self, timeout: float, ended_attempt: int = 0) -> "Reservation":
        """Like `renew`, but retries unless it is refused, such as while the allocator restarts or has too many calls."""
        now, said = time.monotonic(), self.orders.detached
        until = max(now, self.ends[0]) + OF_DETACHED
        if not self.orders.detached:
            until = max(now + PATIENCE, min(self.ends[0], now + OF_ENDED) if self.member is not None else now)
        while True:
            try:
                return self.renew(timeout, ended_attempt)
            except GpuscaleError as error:
                if isinstance(error, REFUSALS) or time.monotonic() >= until:
                    raise
                if not said and time.monotonic() - now > PATIENCE:
                    said = True
                    note_of_run(f"nobody knows yet how the command ended, trying again: {error.message}")
            time.sleep(max(RETRY, min((time.monotonic() - now) / PART, RARELY)))

    def failed(self, error: GpuscaleError) -> None:
        """Report that the command did not start."""
        from gpuscale.cli.console.errors import exit_code as code_of

        self.started(0)
        self.ended(code_of(error), f"it did not start: {error.message}")

    def look(self) -> None:
        """Find out whether another attempt is to follow this one."""
        with suppress(GpuscaleError):  # it has ended
            known = self.renew_patiently(channel.RPC_TIMEOUT)
            self.moved = known if known.job.attempt > self.orders.attempt else None

    def killed(self, code: int) -> None:
        """Report that the previous supervisor was killed, unless it reported an end itself. All it started has ended."""
        with suppress(GpuscaleError):  # then the lease expires
            known = self.renew_patiently(channel.RPC_TIMEOUT)
            number = self.orders.member or 0
            if known.job.attempt > self.orders.attempt:  # it was about to start it again
                self.moved = known
                return
            of = [one for one in known.job.members if one.member == number]
            if not of or not of[0].HasField("exit_code"):
                self.started(0)
                if of:
                    self.member = of[0]
                leaves = bool(self.orders.on_move and known.end_reason)
                self.ended(code, "its supervisor was killed", leaves=leaves)
            if self.all_ended:
                self.release()

    def of(self, orders: Orders) -> "LeaseHolder":
        """The holder for a member."""
        return LeaseHolder(orders, self._ways)

    def release(self) -> None:
        """Release the GPUs, patiently where the end of the command was heard; if that fails, the lease expires."""
        name, timeout = self.orders.reservation, channel.RPC_TIMEOUT
        request = api.ReleaseReservationRequest(name=name, fence=self.orders.fence)
        until = time.monotonic() + (PATIENCE if self.member is not None else 0.0)
        while True:
            try:
                self._ask(lambda way: way.ReleaseReservation(request, timeout=timeout, metadata=self._shown))
            except GpuscaleError as error:
                if isinstance(error, REFUSALS) or time.monotonic() >= until:
                    note_of_run(f"{name} was not released, and expires by itself: {error.message}")
                    return
            else:
                return
            time.sleep(RETRY)

    def _ask(self, call: "Callable[[AllocatorServiceStub], _Answer]") -> _Answer:
        failure: GpuscaleError = UnavailableError(
            "this host has no agent's socket, and no other way is known"
        )
        for way in self._ways.copy():
            try:
                with status.rpc_errors():
                    return call(way)
            except UNANSWERED as error:
                failure = error
                self._ways.append(self._ways.pop(0))  # the next call tries another way first
        raise failure
