"""Changes of endpoints, each for one transaction, and what must hold for them."""

from dataclasses import replace
from datetime import datetime

from gpuscale.autoscaler import decision_log
from gpuscale.autoscaler.state import replica_store, store
from gpuscale.autoscaler.domain.decisions import Outcome, compose
from gpuscale.autoscaler.domain.engine import order
from gpuscale.autoscaler.model import Endpoint
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    NotFoundError,
    OutOfRangeError,
)
from gpuscale.common.names import endpoint_name


def find(connection: Connection, endpoint_id: str) -> Endpoint:
    """The endpoint.

    Raises:
        NotFoundError: there is none of that id.
    """
    found = store.endpoint(connection, endpoint_id)
    if found is None:
        name = endpoint_name(endpoint_id)
        raise NotFoundError(f"there is no {name}", metadata={"name": name})
    return found


def repeated(connection: Connection, request_id: str, fingerprint: str) -> Endpoint | None:
    """What a request with this id made; None if there was none.

    Raises:
        AlreadyExistsError: it was another request.
    """
    known = store.answered(connection, request_id)
    if known is None:
        return None
    if known[0] != fingerprint:
        raise AlreadyExistsError(
            "the request id was used for another endpoint",
            reason="REQUEST_ID_REUSED",
            metadata={"request_id": request_id},
        )
    return known[1]


def require_free(connection: Connection, endpoint_id: str) -> None:
    """AlreadyExistsError if the id is taken."""
    taken = store.endpoint(connection, endpoint_id)
    if taken is not None:
        name = endpoint_name(endpoint_id)
        what = "is being deleted" if taken.deleting else "exists"
        raise AlreadyExistsError(f"{name} {what}", metadata={"name": name})


def create(connection: Connection, made: Endpoint, request_id: str, fingerprint: str) -> None:
    """Store a new endpoint with the request that made it."""
    require_free(connection, made.id)
    store.save_endpoint(connection, made)
    store.save_answer(connection, request_id, fingerprint, made)


def update(connection: Connection, after: Endpoint, etag: str) -> None:
    """Store a changed spec beside what else may have changed since it was read."""
    now = find(connection, after.id)
    require_etag(now, etag)
    require_kept(now)
    store.save_endpoint(connection, replace(after, desired=now.desired))


def delete(connection: Connection, endpoint_id: str, etag: str) -> None:
    """Mark an endpoint as deleted: nothing is aimed at any more."""
    found = find(connection, endpoint_id)
    require_etag(found, etag)
    store.save_endpoint(connection, replace(found, deleting=True, desired=0))


def require_etag(endpoint: Endpoint, etag: str) -> None:
    """AbortedError if the endpoint has another etag; an empty one matches any."""
    if etag and etag != endpoint.etag:
        name = endpoint_name(endpoint.id)
        raise AbortedError(f"{name} was changed meanwhile", reason="ETAG_MISMATCH", metadata={"name": name})


def require_kept(endpoint: Endpoint) -> None:
    """FailedPreconditionError if the endpoint is being deleted."""
    if endpoint.deleting:
        name = endpoint_name(endpoint.id)
        raise FailedPreconditionError(
            f"{name} is being deleted", reason="BEING_DELETED", metadata={"name": name}
        )


def set_replicas(
    connection: Connection, endpoint_id: str, replicas: int, current: int | None, who: str, wall: datetime
) -> Endpoint:
    """Store a person's order with its decision."""
    before = find(connection, endpoint_id)
    require_kept(before)
    require_room(before, replicas, current)
    after = replace(before, desired=replicas)
    store.save_endpoint(connection, after)
    live = replica_store.replicas(connection, endpoint_id)
    granted = sum(one.granted for one in live) if after.spec.template.gpu_count else replicas
    decision = compose(after, order(before.desired, replicas, who), Outcome(granted))
    decision_log.record(connection, decision, wall)
    return after


def require_room(endpoint: Endpoint, replicas: int, current: int | None) -> None:
    """FailedPreconditionError from another count than `current`, OutOfRangeError outside of min and max."""
    spec, name = endpoint.spec, endpoint_name(endpoint.id)
    if current is not None and current != endpoint.desired:
        raise FailedPreconditionError(
            f"{name} aims at {endpoint.desired} replicas, not {current}",
            reason="OTHER_CURRENT_REPLICAS",
            metadata={"name": name, "current_replicas": str(endpoint.desired)},
        )
    if not spec.min_replicas <= replicas <= spec.max_replicas:
        raise OutOfRangeError(
            f"{name} may have {spec.min_replicas} to {spec.max_replicas} replicas",
            metadata={"name": name, "min": str(spec.min_replicas), "max": str(spec.max_replicas)},
        )
