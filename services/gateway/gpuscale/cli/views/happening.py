"""What happened, out of what each service keeps: decisions, reservations, replicas and health, as one list by time.

Times are those of the servers' wall clocks.
"""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.console.cells import ABSENT, short, word
from gpuscale.common.wire import to_datetime

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp


class Event(NamedTuple):
    """Something that happened to a resource."""

    time: datetime
    kind: str
    name: str
    what: str

    def record(self) -> Mapping[str, object]:
        """As data."""
        return {
            "time": self.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "kind": self.kind,
            "name": self.name,
            "what": self.what,
        }


def _event(time: "Timestamp", kind: str, name: str, *what: str) -> Event:
    return Event(to_datetime(time), kind, name, ": ".join(one for one in what if one and one != ABSENT))


def of_decisions(found: Iterable[autoscaler_api.Decision]) -> Iterator[Event]:
    """What was decided, when it was decided first."""
    for one in found:
        counts = f"{one.before} -> {one.wanted} wanted, {one.granted} granted"
        yield _event(one.create_time, "decision", one.name, counts, one.limited_by, one.summary)


def of_reservations(found: Iterable[allocator_api.Reservation]) -> Iterator[Event]:
    """Grants, and how they ended."""
    for one in found:
        nodes = ", ".join(dict.fromkeys(gpu.node for gpu in one.gpus))
        gpus = f"{len(one.gpus)} GPU{'' if len(one.gpus) == 1 else 's'} of {nodes or ABSENT}"
        yield _event(one.create_time, "reservation", one.name, f"granted to {one.holder}", gpus)
        if one.HasField("end_time"):
            yield _event(one.end_time, "reservation", one.name, word(one, "state").lower(), one.end_reason)


def of_replicas(found: Iterable[autoscaler_api.Replica]) -> Iterator[Event]:
    """When replicas were decided on, and how they ended."""
    for one in found:
        yield _event(one.create_time, "replica", one.name, "decided on")
        if one.HasField("end_time"):
            code = f"exit code {one.exit_code}" if one.HasField("exit_code") else ""
            yield _event(one.end_time, "replica", one.name, word(one, "state").lower(), code, one.reason)


def of_health(found: Iterable[monitor_api.HealthEvent]) -> Iterator[Event]:
    """What went wrong with nodes and GPUs, and when it was over."""
    for one in found:
        name = one.gpu or f"nodes/{one.node}"
        what = (word(one, "severity").lower(), one.message)
        yield _event(one.start_time, "health", name, *what)
        if one.HasField("resolved_time"):
            yield _event(one.resolved_time, "health", name, "over", one.message)


def merged(found: Iterable[Event], since: datetime, about: str) -> list[Event]:
    """Those since a time, oldest first; `about` leaves only those of a resource and of what belongs to it."""
    kept = {
        one
        for one in found
        if one.time >= since
        and (not about or about in {one.name, short(one.name)} or one.name.startswith(f"{about}/"))
    }
    return sorted(kept)
