"""What KEDA asks of an external scaler."""

from gpuscale.api.keda import v1 as api
from tests.support.autoscaler_app import TIMEOUT


def scaled_object(endpoint: str = "e", **metadata: str) -> api.ScaledObjectRef:
    """A ScaledObject that follows an endpoint, with the metadata of its trigger as KEDA passes it on."""
    given = {"scalerAddress": "gpuscale:7070", "endpoint": endpoint, **metadata}
    return api.ScaledObjectRef(name="workers", namespace="default", scalerMetadata=given)


class Keda:
    """One connection, as all ScaledObjects of a cluster share it."""

    def __init__(self, stub: api.ExternalScalerStub) -> None:
        self._stub = stub

    async def active(self, ref: api.ScaledObjectRef) -> bool:
        return (await self._stub.IsActive(ref, timeout=TIMEOUT)).result

    async def spec(self, ref: api.ScaledObjectRef) -> tuple[str, int, float]:
        [one] = (await self._stub.GetMetricSpec(ref, timeout=TIMEOUT)).metricSpecs
        return one.metricName, one.targetSize, one.targetSizeFloat

    async def value(self, ref: api.ScaledObjectRef, metric: str = "desired") -> tuple[str, int, float]:
        request = api.GetMetricsRequest(scaledObjectRef=ref, metricName=metric)
        [one] = (await self._stub.GetMetrics(request, timeout=TIMEOUT)).metricValues
        return one.metricName, one.metricValue, one.metricValueFloat
