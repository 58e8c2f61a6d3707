"""The endpoints of a fake server: replicas are ready as soon as they are desired, unless a test says otherwise."""

import threading
from datetime import UTC, datetime

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, OutOfRangeError
from gpuscale.common.names import ENDPOINT, parse
from gpuscale.common.wire import page, to_timestamp


class FakeEndpoints:
    """Keeps endpoints; their rules are not evaluated."""

    service = "gpuscale.api.autoscaler.v1.EndpointService"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._endpoints: dict[str, api.Endpoint] = {}
        self._edits = 0
        self.ready_at_once = True
        """Whether replicas are READY as soon as they are desired."""

    def set_ready(self, name: str, replicas: int) -> None:
        """So many replicas of an endpoint are READY.

        Raises:
            NotFoundError: there is none of that name.
        """
        with self._lock:
            self._found(name).status.ready_replicas = replicas

    def CreateEndpoint(
        self, request: api.CreateEndpointRequest, context: grpc.ServicerContext
    ) -> api.CreateEndpointResponse:
        """Begins with its least number of replicas."""
        name = request.endpoint.name
        parse(ENDPOINT, name, "endpoint.name")
        with self._lock:
            if name in self._endpoints:
                raise AlreadyExistsError(f"{name} exists", metadata={"name": name})
            made = api.Endpoint(
                name=name, spec=request.endpoint.spec, create_time=to_timestamp(datetime.now(UTC))
            )
            self._aim(made, made.spec.min_replicas)
            if not request.validate_only:
                self._endpoints[name] = made
            return api.CreateEndpointResponse(endpoint=made)

    def GetEndpoint(
        self, request: api.GetEndpointRequest, context: grpc.ServicerContext
    ) -> api.GetEndpointResponse:
        """One endpoint."""
        with self._lock:
            return api.GetEndpointResponse(endpoint=self._found(request.name))

    def ListEndpoints(
        self, request: api.ListEndpointsRequest, context: grpc.ServicerContext
    ) -> api.ListEndpointsResponse:
        """A page of endpoints."""
        with self._lock:
            found = [self._endpoints[name] for name in sorted(self._endpoints)]
            shown, token = page(
                found, key=lambda one: one.name, page_size=request.page_size, page_token=request.page_token
            )
            return api.ListEndpointsResponse(endpoints=shown, next_page_token=token)

    def SetReplicas(
        self, request: api.SetReplicasRequest, context: grpc.ServicerContext
    ) -> api.SetReplicasResponse:
        """Aims at so many, within bounds."""
        with self._lock:
            found = self._found(request.name)
            desired = found.status.desired_replicas
            if request.HasField("current_replicas") and request.current_replicas != desired:
                raise FailedPreconditionError(f"{desired} are aimed at", reason="OTHER_CURRENT_REPLICAS")
            if not found.spec.min_replicas <= request.replicas <= found.spec.max_replicas:
                raise OutOfRangeError(f"between {found.spec.min_replicas} and {found.spec.max_replicas}")
            self._aim(found, request.replicas)
            return api.SetReplicasResponse(endpoint=found)

    def DeleteEndpoint(
        self, request: api.DeleteEndpointRequest, context: grpc.ServicerContext
    ) -> api.DeleteEndpointResponse:
        """Goes at once."""
        with self._lock:
            del self._endpoints[self._found(request.name).name]
        return api.DeleteEndpointResponse()

    def _found(self, name: str) -> api.Endpoint:
        if name not in self._endpoints:
            raise NotFoundError(f"there is no {name}", metadata={"name": name})
        return self._endpoints[name]

    def _aim(self, endpoint: api.Endpoint, replicas: int) -> None:
        self._edits += 1
        endpoint.etag = str(self._edits)
        status = endpoint.status
        status.desired_replicas = status.granted_replicas = replicas
        status.ready_replicas = replicas if self.ready_at_once else min(replicas, status.ready_replicas)
        status.summary = f"aims at {replicas}"
