"""Endpoints on disk: tables (SQLModel) and statements (Core) for one connection of the store.

`replica_store`, `decision_store` and `watcher_store` keep their tables in the same file. Nested values (specs, templates)
are stored as messages of the contract, whose rules of compatibility are known.
"""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import sqlalchemy
from sqlalchemy import RowMapping
from sqlmodel import Field, SQLModel, col, delete, insert, select, update

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.model import Endpoint, EndpointSpec
from gpuscale.autoscaler.wire.translate import spec_from_wire, spec_to_wire
from gpuscale.common.store.schema import Whole, revisions

Connection: TypeAlias = sqlalchemy.Connection
"""What a work on the store is given. Modules that are no store pass it on, and speak no SQL."""
METADATA: Final = SQLModel.metadata
"""The tables of every store module that has been imported."""
VERSION: Final = 6
"""Version of the schema of all tables of the autoscaler."""
MIGRATIONS: Final = revisions("gpuscale.autoscaler.state.migrations", 2, 3, 4, 5, 6)
"""By the version that they start from."""
REQUEST_KEPT_SECONDS: Final = 24 * 3600.0
"""For so long the same request id returns the same answer."""


class EndpointRow(SQLModel, table=True):
    """An endpoint; times in seconds since 1970, `sets` is JSON: groups aimed at by capability set."""

    id: str = Field(primary_key=True)
    spec: bytes
    etag: str
    desired: int = Field(sa_type=Whole)
    create_time: float
    update_time: float
    deleting: bool
    sets: str = ""


class RuleChangeRow(SQLModel, table=True):
    """When a rule last changed the count, in seconds since boot."""

    endpoint: str = Field(primary_key=True)
    rule: str = Field(primary_key=True)
    changed_at: float


class EndpointRequestRow(SQLModel, table=True):
    """A CreateEndpoint that was carried out, and the endpoint it made."""

    request_id: str = Field(primary_key=True)
    fingerprint: str
    endpoint: str
    spec: bytes
    etag: str
    create_time: float = Field(index=True)


class ProcessRow(SQLModel, table=True):
    """One row: how often this program was started on this state, and in which boot it ran last."""

    id: int = Field(primary_key=True, sa_type=Whole)
    starts: int = Field(sa_type=Whole)
    boot_id: str


def moment(seconds: float) -> datetime:
    """The date of so many seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def begin(connection: Connection, boot_id: str) -> tuple[int, bool]:
    """Note a start of the program: (how often it was started, whether the host was rebooted since the last time)."""
    row = connection.execute(select(ProcessRow)).mappings().one_or_none()
    starts = 1 if row is None else row["starts"] + 1
    connection.execute(delete(ProcessRow))
    connection.execute(insert(ProcessRow).values(id=1, starts=starts, boot_id=boot_id))
    return starts, row is not None and row["boot_id"] != boot_id


def endpoints(connection: Connection) -> list[Endpoint]:
    """All endpoints, by id."""
    rows = connection.execute(select(EndpointRow)).mappings()
    return sorted((_endpoint(row) for row in rows), key=lambda one: one.id)


def endpoint(connection: Connection, endpoint_id: str, known: Endpoint | None = None) -> Endpoint | None:
    """One endpoint, if there is one of that id; its spec is not read again where `known` has the same etag."""
    row = (
        connection.execute(select(EndpointRow).where(col(EndpointRow.id) == endpoint_id))
        .mappings()
        .one_or_none()
    )
    return None if row is None else _endpoint(row, known)


def save_endpoint(connection: Connection, one: Endpoint) -> None:
    """Insert or replace an endpoint."""
    connection.execute(delete(EndpointRow).where(col(EndpointRow.id) == one.id))
    values: Mapping[str, Any] = {
        "id": one.id,
        "spec": _spec_bytes(one.spec),
        "etag": one.etag,
        "desired": one.desired,
        "create_time": one.create_time.timestamp(),
        "update_time": one.update_time.timestamp(),
        "deleting": one.deleting,
        "sets": json.dumps(dict(one.sets)) if one.sets else "",
    }
    connection.execute(insert(EndpointRow).values(values))


def remove_endpoint(connection: Connection, endpoint_id: str) -> None:
    """Remove an endpoint with what is known of its rules."""
    connection.execute(delete(EndpointRow).where(col(EndpointRow.id) == endpoint_id))
    connection.execute(delete(RuleChangeRow).where(col(RuleChangeRow.endpoint) == endpoint_id))


def rule_changes(connection: Connection, endpoint_id: str) -> dict[str, float]:
    """When each rule of an endpoint last changed the count, in seconds since boot."""
    found = select(RuleChangeRow).where(col(RuleChangeRow.endpoint) == endpoint_id)
    return {row["rule"]: row["changed_at"] for row in connection.execute(found).mappings()}


def save_rule_changes(connection: Connection, endpoint_id: str, rules: Iterable[str], now: float) -> None:
    """These rules changed the count just now."""
    for rule in sorted(rules):
        own = (col(RuleChangeRow.endpoint) == endpoint_id, col(RuleChangeRow.rule) == rule)
        connection.execute(delete(RuleChangeRow).where(*own))
        connection.execute(insert(RuleChangeRow).values(endpoint=endpoint_id, rule=rule, changed_at=now))


def restart_rests(connection: Connection, now: float) -> None:
    """After a reboot, whose clock knows nothing of the one before, every cooldown that was ever begun begins anew."""
    connection.execute(update(RuleChangeRow).values(changed_at=now))


def answered(connection: Connection, request_id: str) -> tuple[str, Endpoint] | None:
    """The fingerprint of the request with this id, and the endpoint it made, as it was then; None if there was none."""
    query = select(EndpointRequestRow).where(col(EndpointRequestRow.request_id) == request_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        return None
    spec, time = _spec(row["spec"]), moment(row["create_time"])
    return row["fingerprint"], Endpoint(row["endpoint"], spec, row["etag"], spec.min_replicas, time, time)


def save_answer(connection: Connection, request_id: str, fingerprint: str, made: Endpoint) -> None:
    """Remember what a request made; forget requests that are too old."""
    time = made.create_time.timestamp()
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


def _spec(stored: bytes) -> EndpointSpec:
    return spec_from_wire(autoscaler_api.EndpointSpec.FromString(stored))


def _spec_bytes(spec: EndpointSpec) -> bytes:
    return spec_to_wire(spec).SerializeToString(deterministic=True)


def _endpoint(row: RowMapping, known: Endpoint | None = None) -> Endpoint:
    return Endpoint(
        id=row["id"],
        spec=known.spec if known is not None and known.etag == row["etag"] else _spec(row["spec"]),
        etag=row["etag"],
        desired=row["desired"],
        create_time=moment(row["create_time"]),
        update_time=moment(row["update_time"]),
        deleting=row["deleting"],
        sets=json.loads(row["sets"]) if row["sets"] else {},
    )
