"""Replicas on disk: the intent rows that stand before every action outside. See `store`."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import ColumnElement, RowMapping
from sqlmodel import Field, SQLModel, col, delete, func, insert, select, update

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.model import NO_GROUP, GroupOfReplica, ReplicaTemplate
from gpuscale.autoscaler.domain.replicas import Goal, Lease, Replica, ReplicaState
from gpuscale.autoscaler.state.store import Connection, moment
from gpuscale.autoscaler.wire.translate import template_from_wire, template_to_wire
from gpuscale.autoscaler.wire.translate_capabilities import group_from_wire, group_to_wire, groups_from_wire
from gpuscale.common.store.schema import Whole

KEPT: Final = 100
"""Ended replicas that are kept of each endpoint."""
_SEPARATOR: Final = " "  # no id and no UUID holds one


class ReplicaRow(SQLModel, table=True):
    """A replica; `seq` is the order in which they were decided, `*_time` are seconds since 1970, `*_at` since boot."""

    seq: int | None = Field(default=None, primary_key=True, sa_type=Whole)
    endpoint: str = Field(index=True)
    id: str = Field(unique=True)
    request_id: str = Field(unique=True)
    template: bytes
    create_time: float
    state: str
    goal: str
    nodes: str
    adapter: str = Field(index=True)
    node: str
    reservation: str
    fence: int = Field(sa_type=Whole)
    gpu_uuids: str
    lease_token: str = ""
    ended: bool = Field(index=True)
    owes_release: bool = Field(index=True)
    hurry: bool
    pid: int = Field(sa_type=Whole)
    exit_code: int | None = Field(default=None, sa_type=Whole)
    reason: str
    ready_at: float | None = None
    ended_at: float | None = None
    end_time: float | None = None
    worker_group: bytes = b""


def _read(connection: Connection, *where: ColumnElement[bool]) -> list[Replica]:
    query = select(ReplicaRow).where(*where).order_by(col(ReplicaRow.seq))
    return [_replica(row) for row in connection.execute(query).mappings()]


def replicas(connection: Connection, endpoint: str = "", *, show_ended: bool = False) -> list[Replica]:
    """Replicas of one endpoint, or of all, in the order they were decided."""
    where = [col(ReplicaRow.endpoint) == endpoint] if endpoint else []
    return _read(connection, *where, *([] if show_ended else [col(ReplicaRow.ended).is_(False)]))


def of_adapter(connection: Connection, adapter: str) -> list[Replica]:
    """Replicas of an adapter that have not ended."""
    return _read(connection, col(ReplicaRow.adapter) == adapter, col(ReplicaRow.ended).is_(False))


def leased(connection: Connection) -> list[Replica]:
    """Replicas that have not ended and hold a reservation."""
    return _read(connection, col(ReplicaRow.ended).is_(False), col(ReplicaRow.reservation) != "")


def owing(connection: Connection, endpoint: str = "") -> list[Replica]:
    """Ended replicas, of one endpoint or of all, whose reservation is still to be released."""
    where = [col(ReplicaRow.endpoint) == endpoint] if endpoint else []
    return _read(connection, col(ReplicaRow.owes_release).is_(True), *where)


def loads(connection: Connection) -> dict[str, int]:
    """Replicas of each adapter that have not ended."""
    adapter = col(ReplicaRow.adapter)
    live = (
        select(adapter, func.count()).where(col(ReplicaRow.ended).is_(False), adapter != "").group_by(adapter)
    )
    return {row[0]: row[1] for row in connection.execute(live)}


def replica(connection: Connection, replica_id: str) -> Replica | None:
    """One replica by id."""
    return next(iter(_read(connection, col(ReplicaRow.id) == replica_id)), None)


def add_replica(connection: Connection, one: Replica) -> None:
    """Write the intent to have a replica."""
    connection.execute(insert(ReplicaRow).values(_values(one)))


def save_replica(connection: Connection, one: Replica) -> None:
    """Replace what is known of a replica."""
    connection.execute(update(ReplicaRow).where(col(ReplicaRow.id) == one.id).values(_values(one)))


def save_replicas(connection: Connection, changed: Iterable[Replica]) -> None:
    """Replace what is known of several."""
    for one in changed:
        save_replica(connection, one)


def prune(connection: Connection, endpoint: str) -> None:
    """Forget ended replicas of an endpoint, but for the last ones and those that owe a release."""
    seq = col(ReplicaRow.seq)
    over = select(seq).where(
        col(ReplicaRow.endpoint) == endpoint,
        col(ReplicaRow.ended).is_(True),
        col(ReplicaRow.owes_release).is_(False),
    )
    connection.execute(delete(ReplicaRow).where(seq.in_(over.order_by(seq.desc()).offset(KEPT))))


def remove_replicas(connection: Connection, endpoint: str) -> None:
    """Forget all replicas of an endpoint."""
    connection.execute(delete(ReplicaRow).where(col(ReplicaRow.endpoint) == endpoint))


def forget_boot(connection: Connection) -> None:
    """After a reboot: moments of the clock before it mean nothing any more."""
    connection.execute(update(ReplicaRow).values(ready_at=None, ended_at=None))


def _values(one: Replica) -> Mapping[str, Any]:
    lease = one.lease or Lease("", 0, ())
    return {
        "endpoint": one.endpoint,
        "id": one.id,
        "request_id": one.request_id,
        "template": template_to_wire(one.template).SerializeToString(deterministic=True),
        "create_time": one.create_time.timestamp(),
        "state": one.state.value,
        "goal": one.goal.value,
        "nodes": _SEPARATOR.join(one.nodes),
        "adapter": one.adapter,
        "node": one.node,
        "reservation": lease.reservation,
        "fence": lease.fence,
        "gpu_uuids": _SEPARATOR.join(lease.gpu_uuids),
        "lease_token": lease.token,
        "ended": one.ended,
        "owes_release": one.owes_release,
        "hurry": one.hurry,
        "pid": one.pid,
        "exit_code": one.exit_code,
        "reason": one.reason,
        "ready_at": one.ready_at,
        "ended_at": one.ended_at,
        "end_time": None if one.end_time is None else one.end_time.timestamp(),
        "worker_group": _group_bytes(one.group),
    }


@lru_cache(maxsize=1_024)
def _template(stored: bytes) -> ReplicaTemplate:
    """Replicas of an endpoint mostly have the same one."""
    return template_from_wire(autoscaler_api.ReplicaTemplate.FromString(stored))


def _group_bytes(group: GroupOfReplica) -> bytes:
    """As the parts of a message that say it; empty where its endpoint has no capability sets."""
    if not group.set:
        return b""
    wire = autoscaler_api.DecisionInputs.CapabilitySet(id=group.set, groups=[group_to_wire(group.asked)])
    if group.reported is not None:
        wire.reported.CopyFrom(group_to_wire(group.reported))
    return wire.SerializeToString(deterministic=True)


def _group(stored: bytes) -> GroupOfReplica:
    if not stored:
        return NO_GROUP
    wire = autoscaler_api.DecisionInputs.CapabilitySet.FromString(stored)
    [asked] = groups_from_wire(wire.groups, "groups")
    reported = group_from_wire(wire.reported, "reported") if wire.HasField("reported") else None
    return GroupOfReplica(wire.id, asked, reported)


def _replica(row: RowMapping) -> Replica:
    lease = Lease(row["reservation"], row["fence"], tuple(row["gpu_uuids"].split()), row["lease_token"])
    return Replica(
        endpoint=row["endpoint"],
        id=row["id"],
        request_id=row["request_id"],
        template=_template(row["template"]),
        create_time=moment(row["create_time"]),
        state=ReplicaState(row["state"]),
        goal=Goal(row["goal"]),
        nodes=tuple(row["nodes"].split()),
        adapter=row["adapter"],
        node=row["node"],
        lease=lease if lease.reservation else None,
        owes_release=row["owes_release"],
        hurry=row["hurry"],
        pid=row["pid"],
        exit_code=row["exit_code"],
        reason=row["reason"],
        ready_at=row["ready_at"],
        ended_at=row["ended_at"],
        end_time=None if row["end_time"] is None else moment(row["end_time"]),
        group=_group(row["worker_group"]),
    )
