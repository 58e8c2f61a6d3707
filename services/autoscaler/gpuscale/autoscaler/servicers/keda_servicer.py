"""KEDA's ExternalScaler on the wire: endpoints as a metric by which a Kubernetes cluster scales.

The metric is the wanted number of replicas and its target is 1, so that the cluster's own arithmetic, which divides one by the
other, arrives at our number. All answers come from the store: no missing signal delays them.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar

from gpuscale.api.keda import v1 as api
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import Followers
from gpuscale.autoscaler.state import store
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.names import endpoint_name, is_id
from gpuscale.common.rpc.server import Registration
from gpuscale.common.security.auth import Context
from gpuscale.common.store.store import Store

METRIC: Final = "desired"
"""The only metric."""
TARGET: Final = 1
"""The amount of it per replica."""

SERVICE: Final = "externalscaler.ExternalScaler"
_T = TypeVar("_T")


def registration(state: Store, followers: Followers) -> Registration:
    """The service for a server."""
    servicer = KedaServicer(state, followers)
    return Registration(SERVICE, partial(api.add_ExternalScalerServicer_to_server, servicer))


class KedaServicer(api.ExternalScalerServicer):
    """Shows endpoints to KEDA; any number of ScaledObjects share one connection."""

    def __init__(self, state: Store, followers: Followers) -> None:
        self._state = state
        self._followers = followers

    async def IsActive(self, request: api.ScaledObjectRef, context: Context) -> api.IsActiveResponse:
        return _active(await self._find(_endpoint_id(request)))

    async def StreamIsActive(
        self, request: api.ScaledObjectRef, context: Context
    ) -> AsyncGenerator[api.IsActiveResponse]:
        async with aclosing(self._follow(_endpoint_id(request), _active)) as answers:
            async for answer in answers:
                yield answer

    async def GetMetricSpec(
        self, request: api.ScaledObjectRef, context: Context
    ) -> api.GetMetricSpecResponse:
        return _spec(await self._find(_endpoint_id(request)))

    async def StreamMetricSpec(
        self, request: api.ScaledObjectRef, context: Context
    ) -> AsyncGenerator[api.GetMetricSpecResponse]:
        async with aclosing(self._follow(_endpoint_id(request), _spec)) as answers:
            async for answer in answers:
                yield answer

    async def GetMetrics(self, request: api.GetMetricsRequest, context: Context) -> api.GetMetricsResponse:
        endpoint_id = _endpoint_id(request.scaledObjectRef, "scaledObjectRef.")
        _require_metric(request.metricName, "metricName")
        wanted = (await self._find(endpoint_id)).desired
        value = api.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=wanted)
        return api.GetMetricsResponse(metricValues=[value])

    async def _follow(self, endpoint_id: str, show: Callable[[Endpoint], _T]) -> AsyncGenerator[_T]:
        """What `show` returns for the endpoint, now and whenever that changes.

        Nothing accumulates: a slow reader skips intermediate values.
        """
        last: _T | None = None
        with self._followers.follow(endpoint_id) as changed:
            while True:
                changed.clear()
                shown = show(await self._find(endpoint_id))
                if shown != last:
                    yield shown
                    last = shown
                await changed.wait()

    async def _find(self, endpoint_id: str) -> Endpoint:
        found = await self._state.read(partial(store.endpoint, endpoint_id=endpoint_id))
        if found is None:
            name = endpoint_name(endpoint_id)
            raise NotFoundError(
                f'there is no {name}, which scalerMetadata["endpoint"] names', metadata={"name": name}
            )
        return found


def _endpoint_id(ref: api.ScaledObjectRef, path: str = "") -> str:
    """The endpoint that a ScaledObject follows; `path` is the path of `ref` in the request."""
    named = ref.scalerMetadata.get("endpoint", "") or ref.scalerMetadata.get("endpointFromEnv", "")
    endpoint_id = named.removeprefix("endpoints/")
    if not is_id(endpoint_id):
        field = f'{path}scalerMetadata["endpoint"]'
        raise InvalidArgumentError(f"{field} must be the id of an endpoint, such as jobs", field=field)
    _require_metric(ref.scalerMetadata.get("metric", ""), f'{path}scalerMetadata["metric"]')
    return endpoint_id


def _require_metric(metric: str, field: str) -> None:
    if metric not in {"", METRIC}:
        raise InvalidArgumentError(f"{field} must be {METRIC}, or be left out", field=field)


def _active(endpoint: Endpoint) -> api.IsActiveResponse:
    return api.IsActiveResponse(result=endpoint.desired > 0)


def _spec(_endpoint: Endpoint) -> api.GetMetricSpecResponse:
    """The same for all endpoints: only the value differs."""
    spec = api.MetricSpec(metricName=METRIC, targetSize=TARGET, targetSizeFloat=TARGET)
    return api.GetMetricSpecResponse(metricSpecs=[spec])
