"""Users' operations on endpoints: create, change, scale, delete, read; each change is one transaction."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import NamedTuple, TypeVar
from uuid import uuid4

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import DecisionOutcome, compose
from gpuscale.autoscaler.domain.engine import order, tuned
from gpuscale.autoscaler.domain.replicas import Replica
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.validate import SPEC
from gpuscale.autoscaler.loop.hub import Wakes
from gpuscale.autoscaler.loop.reconciler import Dependencies
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.autoscaler.state.decision_log import StoredDecision
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.decisions import EndpointView, endpoint_to_wire, replica_to_wire
from gpuscale.autoscaler.wire.specs import spec_violations
from gpuscale.common import errors
from gpuscale.common.filters import ListRequest, listed
from gpuscale.common.names import decision_name, endpoint_name, replica_name, watcher_name
from gpuscale.common.runtime.tasks import uninterrupted
from gpuscale.common.sizes import counted
from gpuscale.common.wire import asked_period, forged_token, page_limit


class AskedOnce(NamedTuple):
    """A request that gets the same answer when repeated."""

    request_id: str
    fingerprint: str


def find_endpoint(connection: Connection, endpoint_id: str) -> Endpoint:
    """The endpoint; NotFoundError if there is none with that id."""
    return errors.NotFoundError.unless(store.endpoint(connection, endpoint_id), endpoint_name(endpoint_id))


def find_replica(connection: Connection, endpoint_id: str, replica_id: str) -> Replica:
    """The replica, which may have ended; NotFoundError if the endpoint has none with that id."""
    found = store.replica(connection, replica_id)
    if found is None or found.endpoint != endpoint_id:
        raise errors.NotFoundError.of(replica_name(endpoint_id, replica_id))
    return found


def repeated(connection: Connection, request_id: str, fingerprint: str) -> Endpoint | None:
    """What a request with this id created, if anything; AlreadyExistsError for a different request."""
    known = store.answered(connection, request_id)
    if known is None:
        return None
    if known[0] != fingerprint:
        raise errors.request_id_reused(request_id)
    return known[1]


def circles(connection: Connection, endpoint_id: str, spec: EndpointSpec) -> list[errors.FieldViolation]:
    """Signals of a spec that read an endpoint which follows this one, directly or through others."""
    follows = {one.id: one.spec.follows.keys() for one in store.endpoints(connection)}
    found: list[errors.FieldViolation] = []
    for leader, index in spec.follows.items():
        path, ahead = [leader], [leader]
        while ahead and endpoint_id not in ahead:
            ahead = [one for each in ahead for one in follows.get(each, ()) if one not in path]
            path += ahead
        if endpoint_id in ahead:
            field = f"{SPEC}.signals[{index}].endpoint.endpoint"
            text = f"must not lead back to {endpoint_name(endpoint_id)}, as {endpoint_name(leader)} does"
            found.append(errors.FieldViolation(field, text))
    return found


def require_free(connection: Connection, endpoint_id: str) -> None:
    """AlreadyExistsError if the id is taken."""
    taken = store.endpoint(connection, endpoint_id)
    if taken is not None:
        name = endpoint_name(endpoint_id)
        what = "is being deleted" if taken.deleting else "exists"
        raise errors.AlreadyExistsError(f"{name} {what}", metadata={"name": name})


def update(
    connection: Connection, after: Endpoint, etag: str, asked: AskedOnce | None, wall: datetime, why: str = ""
) -> None:
    """Store a changed spec, keeping the current counts, and the request, so that it is not repeated.

    `why`: another policy was chosen for it, as its decisions will say.
    """
    now = find_endpoint(connection, after.id)
    errors.expect_etag(endpoint_name(now.id), etag, now.etag)
    require_kept(now)
    after = replace(after, desired=now.desired, sets=now.sets)
    store.save_endpoint(connection, after)
    if why:
        own = store.replicas(connection, after.id)
        granted = sum(one.granted for one in own) if after.spec.template.gpu_count else after.desired
        decision = compose(after, tuned(after.desired, why), DecisionOutcome(granted))
        decision_log.record(connection, decision, wall)
    if asked is not None:
        store.save_answer(connection, *asked, after, wall)


def require_kept(endpoint: Endpoint) -> None:
    """FailedPreconditionError if the endpoint is being deleted."""
    if endpoint.deleting:
        name = endpoint_name(endpoint.id)
        raise errors.FailedPreconditionError(
            f"{name} is being deleted", reason="BEING_DELETED", metadata={"name": name}
        )


def require_set(endpoint: Endpoint, set_id: str) -> None:
    """InvalidArgumentError unless the set is one of the endpoint's, or it has none and none is named."""
    if set_id not in endpoint.targets:
        known = ", ".join(one.id for one in endpoint.spec.capability_sets)
        what = (
            f"must be one of {known}" if known else f"must be left out: {endpoint_name(endpoint.id)} has none"
        )
        raise errors.InvalidArgumentError(f"capability_set {what}", field="capability_set")


def require_room(endpoint: Endpoint, replicas: int, current: int | None, set_id: str) -> None:
    """FailedPreconditionError if the count is not `current`, OutOfRangeError outside min and max."""
    spec, name, aimed = endpoint.spec.of_set(set_id), endpoint_name(endpoint.id), endpoint.targets[set_id]
    what = f"{set_id} replica".lstrip()
    if current is not None and current != aimed:
        raise errors.FailedPreconditionError(
            f"{name} aims at {counted(aimed, what)}, not {current}",
            reason="OTHER_CURRENT_REPLICAS",
            metadata={"name": name, "current_replicas": str(aimed)},
        )
    others = sum(endpoint.targets.values()) - aimed
    most = min(spec.max_replicas, endpoint.spec.max_replicas - others) if set_id else spec.max_replicas
    if not spec.min_replicas <= replicas <= most:
        raise errors.OutOfRangeError(
            f"{name} may have {spec.min_replicas} to {most} {what}s",
            metadata={"name": name, "min": str(spec.min_replicas), "max": str(most)},
        )


T = TypeVar("T")


@dataclass(eq=False)
class Endpoints:
    """The endpoints. Every change is on disk, and the reconciler called, before its answer."""

    deps: Dependencies
    wakes: Wakes
    watcher_exists: Callable[[str], bool]
    prometheus: Collection[str]
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @uninterrupted
    async def create(
        self,
        endpoint_id: str,
        spec: EndpointSpec,
        *,
        tenant: str = "",
        creator: str = "",
        request_id: str,
        fingerprint: str,
        validate_only: bool,
    ) -> EndpointView:
        """Create an endpoint that starts at its min, or return what this request id created; raises like `update`.

        `tenant`: whose quota its GPUs count against; the autoscaler's own if empty. `creator`: whose reservations.
        """
        wall = self.deps.clock.wall()
        made = Endpoint(
            endpoint_id, spec, uuid4().hex, spec.least, wall, wall, tenant=tenant, creator=creator
        )

        def store_new(connection: Connection) -> None:
            require_free(connection, endpoint_id)
            store.save_endpoint(connection, made)
            store.save_answer(connection, request_id, fingerprint, made, wall)

        async with self._changing:
            known = await self.deps.store.read(
                partial(repeated, request_id=request_id, fingerprint=fingerprint)
            )
            if known is not None:
                return await self._view(replace(known, tenant=tenant, creator=creator))
            await self._check(endpoint_id, spec)
            if validate_only:
                await self.deps.store.read(partial(require_free, endpoint_id=endpoint_id))
                return EndpointView(made)
            await self._write_spec(made, store_new)
        return await self._view(made)

    @uninterrupted
    async def update(
        self,
        endpoint_id: str,
        change: Callable[[EndpointSpec], EndpointSpec],
        *,
        etag: str,
        validate_only: bool = False,
        frees: bool = False,
        asked: AskedOnce | None = None,
        why: str = "",
    ) -> EndpointView:
        """Replace the spec by `change` of it, which may free space on disk; an empty etag matches any.

        `why`: a decision says that another policy was chosen.

        With `asked` it is done once, and a repetition gets the same answer. FailedPreconditionError if it names a missing
        watcher or Prometheus server, or the endpoint is being deleted.
        """
        async with self._changing:
            if asked is not None:
                known = await self.deps.store.read(partial(repeated, **asked._asdict()))
                if known is not None:
                    return EndpointView(known)
            before = await self.deps.store.read(partial(find_endpoint, endpoint_id=endpoint_id))
            errors.expect_etag(endpoint_name(before.id), etag, before.etag)
            require_kept(before)
            spec = change(before.spec)
            await self._check(endpoint_id, spec)
            wall, same = self.deps.clock.wall(), spec == before.spec
            if validate_only or (same and asked is None):
                return await self._view(replace(before, spec=spec))
            after = before if same else replace(before, spec=spec, etag=uuid4().hex, update_time=wall)
            work = partial(update, after=after, etag=before.etag, asked=asked, wall=wall, why=why)
            await self._write_spec(after, work, frees=frees)
        return await self._view(after)

    @uninterrupted
    async def delete(self, endpoint_id: str, *, etag: str) -> EndpointView:
        """Let all replicas finish and stop, then remove the endpoint; returns its state until then."""
        wall = self.deps.clock.wall()

        def mark(connection: Connection) -> Endpoint:
            """Mark it as deleted, once: it wants no replicas any more."""
            found = find_endpoint(connection, endpoint_id)
            errors.expect_etag(endpoint_name(found.id), etag, found.etag)
            if not found.deleting:
                found = replace(found, deleting=True, desired=0, delete_time=wall)
                store.save_endpoint(connection, found)
            return found

        return await self._view(await self._write(endpoint_id, mark, frees=True))

    @uninterrupted
    async def set_replicas(
        self, endpoint_id: str, replicas: int, *, current: int | None, who: str, capability_set: str = ""
    ) -> EndpointView:
        """Set the count, of one capability set if there are any; rules continue from there.

        OutOfRangeError outside its min and max, FailedPreconditionError if the count is not `current`.
        """
        wall = self.deps.clock.wall()

        def order_them(connection: Connection) -> Endpoint:
            before = find_endpoint(connection, endpoint_id)
            require_kept(before)
            require_set(before, capability_set)
            require_room(before, replicas, current, capability_set)
            sets = {**before.targets, capability_set: replicas} if capability_set else {}
            after = replace(before, desired=sum(sets.values()) if capability_set else replicas, sets=sets)
            store.save_endpoint(connection, after)
            granted = replicas
            if after.spec.of_set(capability_set).template.gpu_count:
                live = store.replicas(connection, endpoint_id)
                granted = sum(one.granted for one in live if one.group.set == capability_set)
            ordered = order(before.targets[capability_set], replicas, who, capability_set)
            decision_log.record(connection, compose(after, ordered, DecisionOutcome(granted)), wall)
            return after

        return await self._view(await self._write(endpoint_id, order_them))

    async def get(self, endpoint_id: str) -> EndpointView:
        """One endpoint; NotFoundError if there is none."""
        return await self._view(await self.deps.store.read(partial(find_endpoint, endpoint_id=endpoint_id)))

    async def list(self, request: ListRequest) -> tuple[Sequence[api.Endpoint], str]:
        """A page of endpoints, by id unless ordered otherwise; only the needed parts are read."""
        most = page_limit(request.page_size) + 1

        def read(connection: Connection) -> tuple[Sequence[api.Endpoint], str]:
            def views(last: str) -> Iterator[EndpointView]:
                while some := store.endpoints(connection, last, most):
                    yield from self._look(connection, some)
                    last = some[-1].id

            return listed(
                views, request, api.Endpoint, key=lambda view: view.endpoint.id, encode=endpoint_to_wire
            )

        return await self.deps.store.read(read)

    async def replica(self, endpoint_id: str, replica_id: str) -> api.Replica:
        """One replica; NotFoundError if there is none."""
        work = partial(find_replica, endpoint_id=endpoint_id, replica_id=replica_id)
        return self._replica(await self.deps.store.read(work))

    async def replicas(
        self, endpoint_id: str, request: api.ListReplicasRequest
    ) -> tuple[Sequence[api.Replica], str]:
        """A page of replicas of one endpoint, or of all, oldest first unless ordered otherwise."""
        period, most = asked_period(request), page_limit(request.page_size) + 1

        def read(connection: Connection) -> tuple[Sequence[api.Replica], str]:
            def numbered(last: str) -> Iterator[tuple[int, Replica]]:
                if not last.isdecimal():
                    raise forged_token()
                return store.replicas_after(
                    connection,
                    int(last),
                    most,
                    endpoint=endpoint_id,
                    show_ended=request.show_ended,
                    gpu_uuid=request.gpu_uuid,
                    period=period,
                )

            return listed(
                lambda last: numbered(last or "0"),
                request,
                api.Replica,
                key=lambda one: f"{one[0]:016}",
                encode=lambda one: self._replica(one[1]),
            )

        return await self.deps.store.read(read)

    async def _check(self, endpoint_id: str, spec: EndpointSpec) -> None:
        found = spec_violations(spec)
        if spec.follows:
            found += await self.deps.store.read(partial(circles, endpoint_id=endpoint_id, spec=spec))
        if found:
            raise errors.InvalidArgumentError.of(found)
        missing = sorted(one for one in spec.watchers if not self.watcher_exists(one))
        if missing:
            names = ", ".join(watcher_name(one) for one in missing)
            raise errors.FailedPreconditionError(
                f"there is no {names}", reason="UNKNOWN_WATCHER", metadata={"names": names}
            )
        if unknown := ", ".join(sorted(spec.prometheus_servers - set(self.prometheus))):
            raise errors.FailedPreconditionError(
                f"the configuration names no prometheus {unknown}",
                reason="UNKNOWN_PROMETHEUS",
                metadata={"names": unknown},
            )

    async def _write_spec(
        self, endpoint: Endpoint, work: Callable[[Connection], None], *, frees: bool = False
    ) -> None:
        """Store a spec; its watchers are marked as read before it is stored, so that none is deleted meanwhile."""
        before = self.deps.uses.reads(endpoint.id)
        self.deps.uses.set(endpoint.id, before | endpoint.spec.watchers)
        try:
            await self._write(endpoint.id, work, evaluate=True, frees=frees)
        except errors.GpuscaleError:
            self.deps.uses.set(endpoint.id, before)
            raise
        self.deps.uses.set(endpoint.id, endpoint.spec.watchers)

    async def _write(
        self,
        endpoint_id: str,
        work: Callable[[Connection], T],
        *,
        evaluate: bool = False,
        frees: bool = False,
    ) -> T:
        changed = await self.deps.store.write(work, frees=frees)
        self.wakes.call(endpoint_id, evaluate=evaluate)
        self.deps.followers.tell(endpoint_id)
        return changed

    async def _view(self, endpoint: Endpoint) -> EndpointView:
        return next(await self.deps.store.read(partial(self._look, endpoints=[endpoint])))

    def _look(self, connection: Connection, endpoints: Sequence[Endpoint]) -> Iterator[EndpointView]:
        """Endpoints with their replicas and last decisions, in as many statements as for one."""
        own = {one.id: list[Replica]() for one in endpoints}
        for one in store.replicas(connection, *own):
            own[one.endpoint].append(one)
        latest = decision_log.latest(connection, *own)
        return (self._shown(one, own[one.id], latest.get(one.id)) for one in endpoints)

    def _shown(
        self, endpoint: Endpoint, replicas: Sequence[Replica], last: StoredDecision | None
    ) -> EndpointView:
        silent = self.deps.hub.silent(replicas)
        if last is None:
            return EndpointView(endpoint, replicas, silent)
        name = decision_name(endpoint.id, decision_log.id_text(last.id))
        return EndpointView(endpoint, replicas, silent, name, self.deps.repetitions.summary(last))

    def _replica(self, one: Replica) -> api.Replica:
        return replica_to_wire(one, silent=not self.deps.hub.live(one.adapter))
