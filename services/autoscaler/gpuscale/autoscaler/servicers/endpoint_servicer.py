"""EndpointService on the wire."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Final

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.spec import EndpointSpec
from gpuscale.autoscaler.loop.reconciler import Dependencies
from gpuscale.autoscaler.servicers.endpoints import Endpoints, absence, find_replica
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.wire.decisions import endpoint_to_wire
from gpuscale.autoscaler.wire.specs import merged, spec_from_wire, spec_to_wire
from gpuscale.common.errors import FailedPreconditionError, PermissionDeniedError
from gpuscale.common.names import ENDPOINT, REPLICA, parse
from gpuscale.common.security.auth import (
    RESERVED_NAMES,
    Context,
    Principal,
    current_principal,
    require_priority,
)
from gpuscale.common.wire import fingerprint, optional_timestamp

DEFAULT_BYTES: Final = 65_536
"""Bytes of a part where nobody says how many."""


class EndpointServicer(api.EndpointServiceServicer):
    """Translates between the wire and `Endpoints`; requests were validated against the contract before."""

    def __init__(self, endpoints: Endpoints, deps: Dependencies, feeds: Feeds) -> None:
        self._endpoints = endpoints
        self._deps = deps
        self._feeds = feeds

    async def CreateEndpoint(
        self, request: api.CreateEndpointRequest, context: Context
    ) -> api.CreateEndpointResponse:
        wire, caller = request.endpoint, current_principal()
        require_priority(caller, wire.spec.priority, "endpoint.spec.priority")
        view = await self._endpoints.create(
            _id(wire.name, "endpoint.name"),
            spec_from_wire(wire.spec),
            tenant=_tenant(wire.tenant, caller),
            creator="" if caller.name in RESERVED_NAMES else caller.name,
            request_id=request.request_id,
            fingerprint=fingerprint(api.Endpoint(name=wire.name, spec=wire.spec, tenant=wire.tenant)),
            validate_only=request.validate_only,
        )
        return api.CreateEndpointResponse(endpoint=endpoint_to_wire(view))

    async def GetEndpoint(self, request: api.GetEndpointRequest, context: Context) -> api.GetEndpointResponse:
        view = await self._endpoints.get(_id(request.name))
        return api.GetEndpointResponse(endpoint=endpoint_to_wire(view))

    async def ListEndpoints(
        self, request: api.ListEndpointsRequest, context: Context
    ) -> api.ListEndpointsResponse:
        found, token = await self._endpoints.list(request)
        return api.ListEndpointsResponse(endpoints=found, next_page_token=token)

    async def UpdateEndpoint(
        self, request: api.UpdateEndpointRequest, context: Context
    ) -> api.UpdateEndpointResponse:
        mask = request.update_mask if request.HasField("update_mask") else None

        def changed(current: EndpointSpec) -> EndpointSpec:
            now = api.Endpoint(name=request.endpoint.name, spec=spec_to_wire(current))
            spec = spec_from_wire(merged(now, request.endpoint, mask).spec)
            if spec.priority != current.priority:
                require_priority(current_principal(), spec.priority or 0, "endpoint.spec.priority")
            return spec

        view = await self._endpoints.update(
            _id(request.endpoint.name, "endpoint.name"),
            changed,
            etag=request.endpoint.etag,
            validate_only=request.validate_only,
        )
        return api.UpdateEndpointResponse(endpoint=endpoint_to_wire(view))

    async def DeleteEndpoint(
        self, request: api.DeleteEndpointRequest, context: Context
    ) -> api.DeleteEndpointResponse:
        answer = api.DeleteEndpointResponse()
        with absence(request):
            view = await self._endpoints.delete(_id(request.name), etag=request.etag)
            answer.endpoint.CopyFrom(endpoint_to_wire(view))
        return answer

    async def SetReplicas(self, request: api.SetReplicasRequest, context: Context) -> api.SetReplicasResponse:
        view = await self._endpoints.set_replicas(
            _id(request.name),
            request.replicas,
            current=request.current_replicas if request.HasField("current_replicas") else None,
            who=current_principal().name,
            capability_set=request.capability_set,
        )
        return api.SetReplicasResponse(endpoint=endpoint_to_wire(view))

    async def ListReplicas(
        self, request: api.ListReplicasRequest, context: Context
    ) -> api.ListReplicasResponse:
        endpoint = _id(request.parent, "parent") if request.parent else ""
        found, token = await self._endpoints.replicas(endpoint, request)
        since = await self._endpoints.replicas_kept_since(endpoint) if request.show_ended else None
        return api.ListReplicasResponse(
            replicas=found, next_page_token=token, kept_since=optional_timestamp(since)
        )

    async def GetReplica(self, request: api.GetReplicaRequest, context: Context) -> api.GetReplicaResponse:
        ids = parse(REPLICA, request.name)
        return api.GetReplicaResponse(replica=await self._endpoints.replica(ids["endpoint"], ids["replica"]))

    async def WatchEndpoints(
        self, request: api.WatchEndpointsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.endpoints, request, api.Endpoint):
            yield message

    async def WatchReplicas(self, request: api.WatchReplicasRequest, context: Context) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.replicas, request, api.Replica):
            yield message

    async def ReadReplicaLog(
        self, request: api.ReadReplicaLogRequest, context: Context
    ) -> api.ReadReplicaLogResponse:
        """Read a part of what a replica wrote, of at most `DEFAULT_BYTES` where no size is stated."""
        ids, most = parse(REPLICA, request.name), request.max_bytes or DEFAULT_BYTES
        work = partial(find_replica, endpoint_id=ids["endpoint"], replica_id=ids["replica"])
        one = await self._deps.store.read(work)
        if not one.adapter:
            raise FailedPreconditionError(f"{request.name} has not run yet", reason="NO_LOG")
        offset = request.offset if request.HasField("offset") else None
        part = await self._deps.hub.read_log(one, offset, most)
        if part.problem:
            text = f"the log of {request.name} cannot be read: {part.problem}"
            raise FailedPreconditionError(text, reason="NO_LOG")
        content = part.content[:most]
        return api.ReadReplicaLogResponse(
            content=content, offset=part.offset, next_offset=part.offset + len(content), ended=one.ended
        )


def _tenant(stated: str, caller: Principal) -> str:
    """Whose quota an endpoint counts against: as stated, or its creator's; the autoscaler's own for who bears no name."""
    if caller.name in RESERVED_NAMES:
        return stated
    if stated and not caller.may_use(stated):
        may = ", ".join(caller.tenants)
        raise PermissionDeniedError(
            f"endpoint.tenant: {caller.name} may not use the quota of {stated}, only of: {may}",
            reason="OTHER_TENANT",
            metadata={"field": "endpoint.tenant", "tenant": stated},
        )
    return stated or caller.tenants[0]


def _id(name: str, field: str = "name") -> str:
    return parse(ENDPOINT, name, field)["endpoint"]
