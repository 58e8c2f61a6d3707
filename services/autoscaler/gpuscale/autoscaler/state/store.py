"""Endpoints and their replicas on disk: tables (SQLModel) and statements (Core) for one connection of the store.

The row of a replica is the intent written before every external action. `decision_log`, `watcher_store` and `backtest_store`
keep their tables in the same file. Nested values (specs, templates) are stored as messages of the contract, with its
compatibility rules.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, TypeAlias

import sqlalchemy
from sqlalchemy import ClauseElement, ColumnElement, bindparam, collate, or_
from sqlmodel import Field, SQLModel, col, delete, func, insert, select, update

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, WorkerGroup
from gpuscale.autoscaler.domain.replicas import (
    EndReason,
    Goal,
    Replica,
    ReplicaLease,
    ReplicaState,
    Revocation,
)
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec, ReplicaTemplate
from gpuscale.autoscaler.wire import specs
from gpuscale.common.store.store import Prepared, Whole, revisions
from gpuscale.common.wire import ANY_TIME, TimeRange
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

Connection: TypeAlias = sqlalchemy.Connection
"""What a work of the store receives. Other modules pass it on, and use no SQL."""
METADATA: Final = SQLModel.metadata
"""The tables of every imported store module."""
VERSION: Final = 12
"""Version of the schema of all tables of the autoscaler."""
MIGRATIONS: Final = revisions("gpuscale.autoscaler.state.migrations", VERSION)
"""By the version that they start from."""
REQUEST_KEPT_SECONDS: Final = 24 * 3600.0
"""For so long a repeated request id gets the same answer."""


class EndpointRow(SQLModel, table=True):
    """An endpoint; times in seconds since 1970, `sets` is JSON: wanted groups by capability set."""

    id: str = Field(primary_key=True)
    spec: bytes
    etag: str
    desired: int = Field(sa_type=Whole)
    create_time: float
    update_time: float
    deleting: bool
    sets: str = ""
    tenant: str = ""
    creator: str = ""
    delete_time: float | None = None


def _page_of_endpoints(dialect: str) -> ClauseElement:
    id_ = col(EndpointRow.id)
    place = id_ if dialect == "sqlite" else collate(id_, "C")  # whatever the language of the database
    after = select(EndpointRow).where(place > bindparam("key")).order_by(place)
    return after.limit(bindparam("most", type_=Whole))


_ENDPOINTS: Final = Prepared(_page_of_endpoints)
_ENDPOINT: Final = Prepared(select(EndpointRow).where(col(EndpointRow.id) == bindparam("key")))
_PUT_ENDPOINT: Final = Prepared.replacing(METADATA.tables["endpointrow"])
_ENDPOINT_COLUMNS: Final = tuple(EndpointRow.model_fields)


class RuleChangeRow(SQLModel, table=True):
    """When a rule last changed the count, in seconds since boot."""

    endpoint: str = Field(primary_key=True)
    rule: str = Field(primary_key=True)
    changed_at: float


_PUT_RULE_CHANGE: Final = Prepared.replacing(METADATA.tables["rulechangerow"])
_RULE_CHANGES: Final = Prepared(
    select(col(RuleChangeRow.rule), col(RuleChangeRow.changed_at)).where(
        col(RuleChangeRow.endpoint) == bindparam("key")
    )
)


class EndpointRequestRow(SQLModel, table=True):
    """A completed CreateEndpoint, and the endpoint it created."""

    request_id: str = Field(primary_key=True)
    fingerprint: str
    endpoint: str
    spec: bytes
    etag: str
    create_time: float = Field(index=True)


class ProcessRow(SQLModel, table=True):
    """One row: how often this program was started on this state, and its last boot."""

    id: int = Field(primary_key=True, sa_type=Whole)
    starts: int = Field(sa_type=Whole)
    boot_id: str


def moment(seconds: float) -> datetime:
    """The date of so many seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def begin(connection: Connection, boot_id: str) -> tuple[int, bool]:
    """Record a start of the program: (how often it was started, whether the host was rebooted since the last time)."""
    row = connection.execute(select(ProcessRow)).mappings().one_or_none()
    starts = 1 if row is None else row["starts"] + 1
    connection.execute(delete(ProcessRow))
    connection.execute(insert(ProcessRow).values(id=1, starts=starts, boot_id=boot_id))
    return starts, row is not None and row["boot_id"] != boot_id


def endpoints(connection: Connection, after: str = "", most: int = sys.maxsize) -> list[Endpoint]:
    """At most `most` endpoints by id, after an id."""
    rows = _ENDPOINTS.all(connection, {"key": after, "most": most})
    return [_endpoint(dict(zip(_ENDPOINT_COLUMNS, row, strict=True))) for row in rows]


def endpoint(connection: Connection, endpoint_id: str, known: Endpoint | None = None) -> Endpoint | None:
    """One endpoint, if it exists; its spec is reused from `known` if that has the same etag."""
    rows = _ENDPOINT.all(connection, {"key": endpoint_id})
    return _endpoint(dict(zip(_ENDPOINT_COLUMNS, rows[0], strict=True)), known) if rows else None


def save_endpoint(connection: Connection, one: Endpoint) -> None:
    """Insert or replace an endpoint."""
    values: Mapping[str, Any] = {
        **{name: getattr(one, name) for name in ("id", "etag", "desired", "deleting", "tenant", "creator")},
        "spec": _spec_bytes(one.spec),
        "create_time": one.create_time.timestamp(),
        "update_time": one.update_time.timestamp(),
        "sets": json.dumps(dict(one.sets)) if one.sets else "",
        "delete_time": None if one.delete_time is None else one.delete_time.timestamp(),
    }
    _PUT_ENDPOINT.run(connection, [values])


def remove_endpoint(connection: Connection, endpoint_id: str) -> None:
    """Remove an endpoint with its rules' state."""
    connection.execute(delete(EndpointRow).where(col(EndpointRow.id) == endpoint_id))
    connection.execute(delete(RuleChangeRow).where(col(RuleChangeRow.endpoint) == endpoint_id))


def rule_changes(connection: Connection, endpoint_id: str) -> dict[str, float]:
    """When each rule of an endpoint last changed the count, in seconds since boot."""
    return {rule: at for rule, at, *_ in _RULE_CHANGES.all(connection, {"key": endpoint_id})}


def save_rule_changes(connection: Connection, endpoint_id: str, rules: Iterable[str], now: float) -> None:
    """These rules changed the count just now."""
    rows = [{"endpoint": endpoint_id, "rule": rule, "changed_at": now} for rule in sorted(rules)]
    _PUT_RULE_CHANGE.run(connection, rows)


def restart_rests(connection: Connection, now: float) -> None:
    """After a reboot, which starts a new clock, every running cooldown restarts."""
    connection.execute(update(RuleChangeRow).values(changed_at=now))


def answered(connection: Connection, request_id: str) -> tuple[str, Endpoint] | None:
    """The fingerprint of the request with this id, and the endpoint it created, as it was then; None if there is none."""
    query = select(EndpointRequestRow).where(col(EndpointRequestRow.request_id) == request_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    spec, time = _spec(row["spec"]), moment(row["create_time"])
    return row["fingerprint"], Endpoint(row["endpoint"], spec, row["etag"], spec.min_replicas, time, time)


def save_answer(
    connection: Connection, request_id: str, fingerprint: str, made: Endpoint, wall: datetime
) -> None:
    """Store the result of a request at a time; drop requests that are too old."""
    time = wall.timestamp()
    old = col(EndpointRequestRow.create_time) < time - REQUEST_KEPT_SECONDS
    connection.execute(delete(EndpointRequestRow).where(old))
    row: Mapping[str, Any] = {
        "request_id": request_id,
        "fingerprint": fingerprint,
        "endpoint": made.id,
        "spec": _spec_bytes(made.spec),
        "etag": made.etag,
        "create_time": time,
    }
    connection.execute(insert(EndpointRequestRow).values(row))


@lru_cache(maxsize=8_192)
def _spec(stored: bytes) -> EndpointSpec:
    return specs.spec_from_wire(autoscaler_api.EndpointSpec.FromString(stored))


def _spec_bytes(spec: EndpointSpec) -> bytes:
    return specs.spec_to_wire(spec).SerializeToString(deterministic=True)


def _endpoint(row: Mapping[Any, Any], known: Endpoint | None = None) -> Endpoint:
    return Endpoint(
        id=row["id"],
        spec=known.spec if known is not None and known.etag == row["etag"] else _spec(row["spec"]),
        etag=row["etag"],
        desired=row["desired"],
        create_time=moment(row["create_time"]),
        update_time=moment(row["update_time"]),
        deleting=bool(row["deleting"]),
        sets=json.loads(row["sets"]) if row["sets"] else {},
        tenant=row["tenant"],
        creator=row["creator"],
        delete_time=None if row["delete_time"] is None else moment(row["delete_time"]),
    )


KEPT: Final = 100
"""Ended replicas kept per endpoint."""
_SEPARATOR: Final = " "  # no id and no UUID contains one
_NOT_SOON: Final = 1e12  # in seconds since boot; finite, so that earlier times can be computed


class ReplicaRow(SQLModel, table=True):
    """A replica; `seq` is the order of decisions, `*_time` are seconds since 1970, `*_at` since boot.

    `revocation` is JSON of the fields of a Revocation.
    """

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
    revocation: str = ""
    end_reason: str = ""


def _read(connection: Connection, *where: ColumnElement[bool]) -> list[Replica]:
    query = select(ReplicaRow).where(*where).order_by(col(ReplicaRow.seq))
    return [_replica(row) for row in connection.execute(query).mappings()]


def replicas(connection: Connection, *endpoints: str, show_ended: bool = False) -> list[Replica]:
    """Replicas of some endpoints, or of all, in the order they were decided."""
    where = [] if show_ended else [col(ReplicaRow.ended).is_(False)]
    return _read(connection, *where, *([col(ReplicaRow.endpoint).in_(endpoints)] if endpoints else []))


def replicas_after(
    connection: Connection,
    seq: int,
    most: int,
    *,
    endpoint: str = "",
    show_ended: bool = False,
    gpu_uuid: str = "",
    period: TimeRange = ANY_TIME,
) -> Iterator[tuple[int, Replica]]:
    """Replicas of one endpoint or all, of a GPU and of a period, in the order they were decided, after a number.

    Each with its number; `most` are read at a time.
    """
    where: list[ColumnElement[bool]] = [] if show_ended else [col(ReplicaRow.ended).is_(False)]
    if endpoint:
        where.append(col(ReplicaRow.endpoint) == endpoint)
    if gpu_uuid:
        where.append(col(ReplicaRow.gpu_uuids).contains(gpu_uuid, autoescape=True))
    if period.since is not None:
        end = col(ReplicaRow.end_time)
        where.append(or_(end.is_(None), end >= period.since.timestamp()))
    if period.until is not None:
        where.append(col(ReplicaRow.create_time) <= period.until.timestamp())
    query = select(ReplicaRow).where(*where).order_by(col(ReplicaRow.seq)).limit(most)
    while rows := connection.execute(query.where(col(ReplicaRow.seq) > seq)).mappings().all():
        for row in rows:
            one, seq = _replica(row), row["seq"]
            # LIKE finds parts of a UUID too, and on SQLite those in another case.
            if not gpu_uuid or (one.lease and gpu_uuid in one.lease.gpu_uuids):
                yield seq, one


_REPLICAS: Final = Prepared(
    select(ReplicaRow).where(col(ReplicaRow.endpoint) == bindparam("key")).order_by(col(ReplicaRow.seq))
)
_REPLICA_COLUMNS: Final = tuple(ReplicaRow.model_fields)
_OF_REPLICA: Final = [name for name in _REPLICA_COLUMNS if name != "seq"]
_ADD_REPLICA: Final = Prepared(insert(ReplicaRow).values({name: bindparam(name) for name in _OF_REPLICA}))
_CHANGE_REPLICA: Final = Prepared(
    update(ReplicaRow)
    .where(col(ReplicaRow.id) == bindparam("key"))
    .values({name: bindparam(name) for name in _OF_REPLICA})
)


_SAME: Final = (
    *("endpoint", "id", "request_id", "adapter", "node"),
    *("pid", "exit_code", "reason", "ready_at", "ended_at"),
)
"""Fields of a replica that are columns as they are."""
_GOALS: Final = {one.value: one for one in (Goal.RUN, Goal.STOP)}


def replicas_of(connection: Connection, endpoint: str) -> list[Replica]:
    """All stored replicas of an endpoint, in the order they were decided."""
    rows = _REPLICAS.all(connection, {"key": endpoint})
    return [_replica(dict(zip(_REPLICA_COLUMNS, row, strict=True))) for row in rows]


def replicas_kept_since(connection: Connection, endpoint: str = "") -> datetime | None:
    """The time from which no ended replica was forgotten; None if none was."""
    own, end = col(ReplicaRow.endpoint), func.min(col(ReplicaRow.end_time))
    full = select(end.label("end"))
    full = full.where(col(ReplicaRow.ended).is_(True), col(ReplicaRow.owes_release).is_(False))
    full = full.group_by(own).having(func.count() >= KEPT)
    if endpoint:
        full = full.where(own == endpoint)
    time = connection.execute(select(func.max(full.subquery().c.end))).scalar()
    return None if time is None else moment(time)


def of_adapter(connection: Connection, adapter: str) -> list[Replica]:
    """Replicas of an adapter that have not ended."""
    return _read(connection, col(ReplicaRow.adapter) == adapter, col(ReplicaRow.ended).is_(False))


def leased(connection: Connection) -> list[Replica]:
    """Replicas that have not ended and hold a reservation."""
    return _read(connection, col(ReplicaRow.ended).is_(False), col(ReplicaRow.reservation) != "")


def owing(connection: Connection) -> list[Replica]:
    """Ended replicas whose reservation is still to be released."""
    return _read(connection, col(ReplicaRow.owes_release).is_(True))


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
    """Write the intent of a replica."""
    _ADD_REPLICA.run(connection, [_values(one)])


def save_replica(connection: Connection, one: Replica) -> None:
    """Update a replica."""
    save_replicas(connection, [one])


def save_replicas(connection: Connection, changed: Iterable[Replica]) -> None:
    """Update several replicas."""
    _CHANGE_REPLICA.run(connection, [{"key": one.id, **_values(one)} for one in changed])


def prune(connection: Connection, endpoint: str) -> None:
    """Remove ended replicas of an endpoint, except those that ended last and those that owe a release."""
    seq, end = col(ReplicaRow.seq), col(ReplicaRow.end_time)
    over = select(seq).where(
        col(ReplicaRow.endpoint) == endpoint,
        col(ReplicaRow.ended).is_(True),
        col(ReplicaRow.owes_release).is_(False),
    )
    last_first = over.order_by(end.desc().nulls_last(), seq.desc())
    connection.execute(delete(ReplicaRow).where(seq.in_(last_first.offset(KEPT))))


def remove_replicas(connection: Connection, endpoint: str) -> None:
    """Remove all replicas of an endpoint."""
    connection.execute(delete(ReplicaRow).where(col(ReplicaRow.endpoint) == endpoint))


def forget_boot(connection: Connection) -> None:
    """After a reboot: times of the earlier clock are void.

    A planned revocation stays, at an unknown time: otherwise a plan made before the allocator repeats it would stop the
    replacement.
    """
    connection.execute(update(ReplicaRow).values(ready_at=None, ended_at=None))
    for one in _read(connection, col(ReplicaRow.ended).is_(False)):
        if (told := one.revocation) is not None:
            unknown = replace(told, at=_NOT_SOON, leave_at=_NOT_SOON - (told.at - told.leave_at))
            save_replica(connection, replace(one, revocation=unknown))


def _values(one: Replica) -> Mapping[str, Any]:
    lease = one.lease or ReplicaLease("", 0, ())
    group = b""
    if one.group.set:  # as the parts of a message that say it
        wire = autoscaler_internal.DecisionInputs.CapabilitySet(
            id=one.group.set, groups=[specs.to_wire(autoscaler_api.WorkerGroup(), one.group.asked)]
        )
        if one.group.reported is not None:
            specs.to_wire(wire.reported, one.group.reported).SetInParent()
        group = wire.SerializeToString(deterministic=True)
    revocation = ""
    if one.revocation is not None:
        revocation = json.dumps({**asdict(one.revocation), "time": one.revocation.time.timestamp()})
    return {
        **{name: getattr(one, name) for name in _SAME},
        "template": specs.template_to_wire(one.template).SerializeToString(deterministic=True),
        "create_time": one.create_time.timestamp(),
        "state": one.state.value,
        "goal": one.goal.value,
        "nodes": _SEPARATOR.join(one.nodes),
        "reservation": lease.reservation,
        "fence": lease.fence,
        "gpu_uuids": _SEPARATOR.join(lease.gpu_uuids),
        "lease_token": lease.token,
        "ended": one.ended,
        "owes_release": one.owes_release,
        "hurry": one.hurry,
        "end_time": None if one.end_time is None else one.end_time.timestamp(),
        "worker_group": group,
        "revocation": revocation,
        "end_reason": one.end_reason.value if one.end_reason else "",
    }


@lru_cache(maxsize=1_024)
def _template(stored: bytes) -> ReplicaTemplate:
    """Replicas of an endpoint mostly have the same one."""
    return specs.template_from_wire(autoscaler_api.ReplicaTemplate.FromString(stored))


def _replica(row: Mapping[Any, Any]) -> Replica:
    lease = ReplicaLease(
        row["reservation"], row["fence"], tuple(row["gpu_uuids"].split()), row["lease_token"]
    )
    group, revocation = NO_GROUP, None
    if row["worker_group"]:
        wire = autoscaler_internal.DecisionInputs.CapabilitySet.FromString(row["worker_group"])
        [asked] = wire.groups
        reported = (
            specs.from_wire(WorkerGroup, wire.reported, "reported") if wire.HasField("reported") else None
        )
        group = GroupOfReplica(wire.id, specs.from_wire(WorkerGroup, asked, "groups"), reported)
    if row["revocation"]:
        told = json.loads(row["revocation"])
        revocation = Revocation(told["at"], told["leave_at"], moment(told["time"]), told["reason"])
    return Replica(
        **{name: row[name] for name in _SAME},
        template=_template(row["template"]),
        create_time=moment(row["create_time"]),
        state=ReplicaState(row["state"]),
        goal=_GOALS[row["goal"]],
        nodes=tuple(row["nodes"].split()),
        lease=lease if lease.reservation else None,
        owes_release=bool(row["owes_release"]),
        hurry=bool(row["hurry"]),
        end_time=None if row["end_time"] is None else moment(row["end_time"]),
        group=group,
        revocation=revocation,
        end_reason=EndReason(row["end_reason"]) if row["end_reason"] else None,
    )
