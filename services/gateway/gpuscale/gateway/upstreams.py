"""Which service runs where."""

from collections.abc import Mapping

from gpuscale.api import externalscaler as _keda_api
from gpuscale.api.allocator import v1 as _allocator_api
from gpuscale.api.autoscaler import v1 as _autoscaler_api
from gpuscale.api.monitor import v1 as _monitor_api
from gpuscale.internal.autoscaler import v1 as _autoscaler_internal
from gpuscale.internal.monitor import v1 as _monitor_internal

# Importing the contract makes its services known to the descriptor pool, which the forwarder reads.
_CONTRACT = (
    _allocator_api,
    _autoscaler_api,
    _keda_api,
    _monitor_api,
    _autoscaler_internal,
    _monitor_internal,
)

SERVICES: Mapping[str, tuple[str, ...]] = {
    "fleet": (
        "gpuscale.api.monitor.v1.FleetService",
        "gpuscale.api.monitor.v1.RecordingService",
        "gpuscale.api.monitor.v1.HistoryService",
        "gpuscale.api.monitor.v1.HealthService",
        "gpuscale.api.monitor.v1.JoinService",
        "gpuscale.api.monitor.v1.LoginService",
        "gpuscale.internal.monitor.v1.TelemetryService",
    ),
    "allocator": (
        "gpuscale.api.allocator.v1.AllocatorService",
        "gpuscale.api.allocator.v1.CapacityService",
        "gpuscale.api.allocator.v1.NodeService",
        "gpuscale.api.allocator.v1.QuotaService",
    ),
    "autoscaler": (
        "gpuscale.api.autoscaler.v1.EndpointService",
        "gpuscale.api.autoscaler.v1.QueueWatcherService",
        "gpuscale.api.autoscaler.v1.DecisionService",
        "gpuscale.api.autoscaler.v1.MetricService",
        "gpuscale.api.autoscaler.v1.PresetService",
        "gpuscale.api.autoscaler.v1.RuleService",
        "gpuscale.api.autoscaler.v1.BacktestService",
        "gpuscale.api.autoscaler.v1.AdapterService",
        "gpuscale.internal.autoscaler.v1.AdapterStreamService",
        "externalscaler.ExternalScaler",
    ),
}
"""The services of each program. The agents' service is not among them: there is one on every host."""
