"""Changes of endpoints, each for one transaction, and what must hold for them."""

from dataclasses import replace
from datetime import datetime

from gpuscale.autoscaler.domain.decisions import Outcome, compose
from gpuscale.autoscaler.domain.engine import order
from gpuscale.autoscaler.domain.model import Endpoint
from gpuscale.autoscaler.state import decision_log, replica_store, store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
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
    store.save_endpoint(connection, replace(after, desired=now.desired, sets=now.sets))


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
    connection: Connection,
    endpoint_id: str,
    replicas: int,
    current: int | None,
    who: str,
    wall: datetime,
    set_id: str = "",
) -> Endpoint:
    """Store a person's order, of one capability set where there are some, with its decision."""
    before = find(connection, endpoint_id)
    require_kept(before)
    require_set(before, set_id)
    require_room(before, replicas, current, set_id)
    sets = {**before.targets, set_id: replicas} if set_id else {}
    after = replace(before, desired=sum(sets.values()) if set_id else replicas, sets=sets)
    store.save_endpoint(connection, after)
    live = replica_store.replicas(connection, endpoint_id)
    own = [one for one in live if one.group.set == set_id]
    needs_gpus = after.spec.of_set(set_id).template.gpu_count
    granted = sum(one.granted for one in own) if needs_gpus else replicas
    decision = compose(after, order(before.targets[set_id], replicas, who, set_id), Outcome(granted))
    decision_log.record(connection, decision, wall)
    return after


def require_set(endpoint: Endpoint, set_id: str) -> None:
    """InvalidArgumentError unless the set is one of the endpoint's, or it has none and none is named."""
    if set_id not in endpoint.targets:
        known = ", ".join(one.id for one in endpoint.spec.capability_sets)
        what = (
            f"must be one of {known}" if known else f"must be left out: {endpoint_name(endpoint.id)} has none"
        )
        raise InvalidArgumentError(f"capability_set {what}", field="capability_set")


def require_room(endpoint: Endpoint, replicas: int, current: int | None, set_id: str = "") -> None:
    """FailedPreconditionError from another count than `current`, OutOfRangeError outside of min and max."""
    spec, name, aimed = endpoint.spec.of_set(set_id), endpoint_name(endpoint.id), endpoint.targets[set_id]
    what = f"{set_id} replicas" if set_id else "replicas"
    if current is not None and current != aimed:
        raise FailedPreconditionError(
            f"{name} aims at {aimed} {what}, not {current}",
            reason="OTHER_CURRENT_REPLICAS",
            metadata={"name": name, "current_replicas": str(aimed)},
        )
    others = sum(endpoint.targets.values()) - aimed
    most = min(spec.max_replicas, endpoint.spec.max_replicas - others) if set_id else spec.max_replicas
    if not spec.min_replicas <= replicas <= most:
        raise OutOfRangeError(
            f"{name} may have {spec.min_replicas} to {most} {what}",
            metadata={"name": name, "min": str(spec.min_replicas), "max": str(most)},
        )
