"""Values of the monitor room for tests: GPUs of the agent, and messages as an agent sends them."""

from datetime import UTC, datetime
from typing import Any
from uuid import NAMESPACE_OID, uuid5

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.monitor.model import readings

GIB = 1024**3
DEFAULT_TIERS = FleetSettings.model_construct().history_tiers()


def identity(index: int = 0) -> readings.GpuIdentity:
    """GPU number `index` of a host."""
    return readings.GpuIdentity(
        uuid=f"GPU-{index:08d}", index=index, model="Test GPU", pci_bus_id=f"00000000:{index:02X}:00.0"
    )


def sample(utilization: float = 10.0, state: readings.GpuState = readings.GpuState.OK) -> readings.GpuSample:
    """A reading in which nothing is absent but what the test does not care about."""
    return readings.GpuSample(
        state, readings.GpuReading(utilization_percent=utilization, memory_total_bytes=80 * GIB)
    )


def snapshot_read(at: float, **more: Any) -> readings.Snapshot:
    """What the agent of alpha read at a moment, of its host too."""
    fields: dict[str, Any] = {
        "node": "alpha", "epoch": epoch_id(1), "seq": 1, "taken_at": at, "host_read_at": at, "period": 1.0,
        "sample_time": datetime(2026, 1, 1, tzinfo=UTC), "host": readings.HostIdentity("alpha", "Test OS", "boot"),
        "host_reading": readings.HostReading(),
    }  # fmt: skip
    return readings.Snapshot(**(fields | more))


def epoch_id(number: int) -> str:
    return str(uuid5(NAMESPACE_OID, f"epoch {number}"))


def gpu(
    uuid: str = "GPU-1", *, total: int = 80 * GIB, free: int = 70 * GIB, used: int = 9 * GIB
) -> types_api.Gpu:
    """A healthy GPU as an agent reports it."""
    return types_api.Gpu(
        uuid=uuid,
        model="Test GPU",
        state=types_api.GpuState.GPU_STATE_OK,
        reading=types_api.GpuReading(
            utilization_percent=10,
            memory_total_bytes=total,
            memory_free_bytes=free,
            memory_used_bytes=used,
            age=to_duration(0.25),
        ),
    )


def snapshot(
    node: str = "alpha", *, epoch: int = 1, age: float = 0.0, period: float = 1.0, **fields: Any
) -> types_api.Snapshot:
    """A snapshot as an agent sends it, number 1 unless told; `age` and `period` in seconds."""
    return types_api.Snapshot(
        node=node,
        epoch=epoch_id(epoch),
        age=to_duration(age),
        period=to_duration(period),
        host_reading=types_api.HostReading(cpu_percent=5, age=to_duration(0.5)),
        **{"seq": 1, "gpus": [gpu(f"GPU-{node}")]} | fields,
    )


def hello(node: str = "alpha", *, epoch: int = 1) -> monitor_internal.Hello:
    """Hello of run number `epoch`, which started at that second."""
    return monitor_internal.Hello(
        node=node, epoch=epoch_id(epoch), agent_version="1.2.3", start_time=Timestamp(seconds=epoch)
    )


def telemetry(
    message: monitor_internal.Hello | types_api.Snapshot,
) -> monitor_internal.StreamTelemetryRequest:
    if isinstance(message, monitor_internal.Hello):
        return monitor_internal.StreamTelemetryRequest(hello=message)
    return monitor_internal.StreamTelemetryRequest(snapshot=message)
