"""The reservations of a fake server: what the real allocator promises about leases and fences, in memory."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
)
from gpuscale.common.wire import fingerprint, optional_seconds, seconds, to_duration, to_timestamp
from gpuscale.testing.inventory import WHOLE, Inventory

DEFAULT_TTL = 4.0
"""Seconds; short, so that holders soon learn what a test does to their leases. The real allocator's is 300."""
State = api.Reservation.State


class Ledger:
    """Who holds what. Every method may be called from any thread."""

    def __init__(self, inventory: Inventory) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Notified at every change; its lock guards everything."""
        self.version = 0
        self._inventory = inventory
        self._reservations: dict[str, api.Reservation] = {}
        self._ends: dict[str, float] = {}
        self._requests: dict[str, tuple[str, str]] = {}
        self._fence = 0

    def reserve(self, request: api.ReserveRequest, give_up: Callable[[], bool]) -> api.Reservation:
        """Grant what is asked for, or wait as long as that says.

        Raises:
            AlreadyExistsError: the request id was used with other arguments (REQUEST_ID_REUSED).
            FailedPreconditionError: more than there is (UNSATISFIABLE).
            ResourceExhaustedError: no room now (NO_CAPACITY), or none came in time (WAIT_TIMEOUT).
        """
        wait = optional_seconds(request, "wait") or 0.0
        deadline = time.monotonic() + wait
        with self.changed:
            while True:
                self._expire_due()
                try:
                    return self._known(request) or self._grant(request)
                except ResourceExhaustedError as error:
                    left = deadline - time.monotonic()
                    if not wait:
                        raise
                    if left <= 0 or give_up():
                        raise ResourceExhaustedError(
                            f"no room within {wait:g} s",
                            reason="WAIT_TIMEOUT",
                            metadata={"last_reason": error.reason},
                        ) from error
                    self.changed.wait(min(left, 0.05))

    def renew(self, request: api.RenewReservationRequest) -> api.Reservation:
        """Start a lease anew.

        Raises:
            FailedPreconditionError: it has ended (RESERVATION_ENDED), or the fence is another (FENCE_MISMATCH).
            NotFoundError: there is none of that name (RESERVATION_NOT_FOUND).
        """
        with self.changed:
            found = self._checked(request.name, request.fence)
            if found.state != State.STATE_ACTIVE:
                raise FailedPreconditionError(f"{found.name}: {found.end_reason}", reason="RESERVATION_ENDED")
            if request.HasField("ttl"):
                found.ttl.CopyFrom(request.ttl)
            self._start(found)
            return self.shown(found.name)

    def check(self, request: api.CheckLeaseRequest) -> None:
        """See to it that a lease holds GPUs.

        Raises:
            FailedPreconditionError: it has ended (RESERVATION_ENDED), the fence is another (FENCE_MISMATCH), or the GPU is
                (GPU_NOT_HELD).
            NotFoundError: there is none of that name (RESERVATION_NOT_FOUND).
            PermissionDeniedError: the token is another's (LEASE_TOKEN_INVALID).
        """
        with self.changed:
            found = self._checked(request.name, request.fence)
            if found.state != State.STATE_ACTIVE:
                raise FailedPreconditionError(f"{found.name}: {found.end_reason}", reason="RESERVATION_ENDED")
            if request.lease_token not in {"", lease_token(found)}:
                raise PermissionDeniedError(
                    f"that is not the token of {found.name}", reason="LEASE_TOKEN_INVALID"
                )
            if not {gpu.uuid for gpu in found.gpus}.issuperset(request.gpu_uuids):
                raise FailedPreconditionError(f"{found.name} does not hold them", reason="GPU_NOT_HELD")

    def release(self, request: api.ReleaseReservationRequest) -> api.Reservation:
        """Give GPUs back; harmless where that was done.

        Raises:
            FailedPreconditionError: the fence is another (FENCE_MISMATCH).
            NotFoundError: there is none of that name (RESERVATION_NOT_FOUND).
        """
        with self.changed:
            found = self._checked(request.name, request.fence)
            self.end(found.name, State.STATE_RELEASED, "released by its holder")
            return self.shown(found.name)

    def end(self, name: str, state: "api.Reservation.State.ValueType", reason: str) -> None:
        """End a reservation, unless it has ended.

        Raises:
            NotFoundError: there is none of that name (RESERVATION_NOT_FOUND).
        """
        with self.changed:
            found = self._found(name)
            if found.state != State.STATE_ACTIVE:
                return
            found.state = state
            found.end_reason = reason
            found.end_time.CopyFrom(to_timestamp(datetime.now(UTC)))
            del self._ends[name]
            self._inventory.give_back((gpu.uuid for gpu in found.gpus), found.gpus[0].milli)
            self._tell()

    def shown(self, name: str) -> api.Reservation:
        """A copy of a reservation, with what is left of its lease.

        Raises:
            NotFoundError: there is none of that name (RESERVATION_NOT_FOUND).
        """
        with self.changed:
            self._expire_due()
            shown = api.Reservation()
            shown.CopyFrom(self._found(name))
            if name in self._ends:
                left = max(0.0, self._ends[name] - time.monotonic())
                shown.remaining.CopyFrom(to_duration(left))
                shown.expire_time.CopyFrom(to_timestamp(datetime.now(UTC) + timedelta(seconds=left)))
            return shown

    def all(self, *, holder: str = "", ended: bool = False) -> list[api.Reservation]:
        """Copies of the reservations, oldest first."""
        with self.changed:
            self._expire_due()
            return [
                self.shown(name)
                for name, one in self._reservations.items()
                if (not holder or one.holder == holder) and (ended or one.state == State.STATE_ACTIVE)
            ]

    def changes(self, open_: Callable[[], bool]) -> Iterator[int]:
        """The version, now and after each change, while somebody listens."""
        seen = -1
        while open_():
            with self.changed:
                self._expire_due()
                if self.version == seen:
                    self.changed.wait(0.05)
                    continue
                seen = self.version
            yield seen

    def _known(self, request: api.ReserveRequest) -> api.Reservation | None:
        if request.request_id not in self._requests:
            return None
        print_, name = self._requests[request.request_id]
        if print_ != fingerprint(request):
            raise AlreadyExistsError(
                "the request id was used with other arguments", reason="REQUEST_ID_REUSED"
            )
        return self.shown(name)

    def _grant(self, request: api.ReserveRequest) -> api.Reservation:
        milli = request.ask.gpu_milli if request.ask.HasField("gpu_milli") else WHOLE
        picked = self._inventory.pick(request.ask)
        self._fence += 1
        granted = api.Reservation(
            name=f"reservations/{uuid.uuid4().hex[:12]}",
            holder=request.holder,
            state=State.STATE_ACTIVE,
            fence=self._fence,
            ttl=to_duration(optional_seconds(request, "ttl") or DEFAULT_TTL),
            create_time=to_timestamp(datetime.now(UTC)),
            policy=request.ask.policy,
            request_id=request.request_id,
            owner="local",
            labels=request.labels,
            tenant=request.tenant,
            priority=request.priority,
            member_count=1 + picked[-1][0],
        )
        for member, gpu in picked:
            gpu.held_milli += milli
            granted.gpus.add(
                name=gpu.name,
                node=gpu.node,
                uuid=gpu.uuid,
                index=gpu.index,
                model=gpu.model,
                simulated=True,
                milli=milli,
                member=member,
            )
        self._reservations[granted.name] = granted
        self._requests[request.request_id] = fingerprint(request), granted.name
        self._start(granted)
        self._tell()
        return self.shown(granted.name)

    def _start(self, one: api.Reservation) -> None:
        self._ends[one.name] = time.monotonic() + seconds(one.ttl)

    def _expire_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, end in self._ends.items() if end <= now]:
            self.end(name, State.STATE_EXPIRED, "not renewed in time")

    def _found(self, name: str) -> api.Reservation:
        if name not in self._reservations:
            raise NotFoundError(
                f"there is no {name}", reason="RESERVATION_NOT_FOUND", metadata={"name": name}
            )
        return self._reservations[name]

    def _checked(self, name: str, fence: int) -> api.Reservation:
        self._expire_due()
        found = self._found(name)
        if found.fence != fence:
            raise FailedPreconditionError(f"the fence of {name} is another", reason="FENCE_MISMATCH")
        return found

    def _tell(self) -> None:
        self.version += 1
        self.changed.notify_all()


def lease_token(reservation: api.Reservation) -> str:
    """What comes with a grant."""
    return f"token of {reservation.name}"


def lease_status(ledger: Ledger, lease: api.LeaseRenewal) -> api.LeaseStatus:
    """Renew one lease of a KeepAlive stream, and say how it stands."""
    try:
        renewed = ledger.renew(api.RenewReservationRequest(name=lease.name, fence=lease.fence))
    except GpuscaleError as error:
        return api.LeaseStatus(
            name=lease.name, fence=lease.fence, error_reason=error.reason, message=error.message
        )
    return api.LeaseStatus(
        name=lease.name, fence=lease.fence, state=renewed.state, remaining=renewed.remaining
    )
