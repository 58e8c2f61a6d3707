"""What the GPUs and the host of one node say of a metric, from the fleet's message about it."""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import wire

FRESH_PERIODS = 3
"""Periods for which a reading counts (DESIGN: older than three is STALE)."""
DEFAULT_PERIOD = 1.0
"""Seconds between two snapshots of an agent that does not say."""
_PERCENT = 100.0
_READ_FOR = {
    "memory_used_percent": ("memory_used_bytes", "memory_total_bytes"),
    "load_per_core": ("load_1m", "cpu_count"),
}
"""What a derived metric is made of."""
# A GPU in one of these answers; whether its readings are fresh is judged one by one.
_ANSWERING = frozenset(
    {
        types_api.GpuState.GPU_STATE_OK,
        types_api.GpuState.GPU_STATE_DEGRADED,
        types_api.GpuState.GPU_STATE_SLOW,
    }
)


@dataclass(frozen=True, slots=True)
class Told:
    """What one GPU or host says.

    Attributes:
        value: None where it says nothing.
        at: when it was read, in seconds since boot.
        fresh_until: when it will be three periods old.
        able: whether it can tell at all; a device that does not offer the reading is not silent.
    """

    value: float | None = None
    at: float = 0.0
    fresh_until: float = 0.0
    able: bool = True


SILENT = Told()


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node as the fleet last sent it, and when that arrived, in seconds since boot."""

    message: monitor_api.Node
    arrived: float

    def gpus(self, metric: str) -> Iterator[tuple[str, Told]]:
        """The UUID of each GPU, in lower case, with what it says; none of one that is divided into others."""
        snapshot = self.message.snapshot
        for gpu in snapshot.gpus:
            if gpu.state == types_api.GpuState.GPU_STATE_DIVIDED:
                continue
            told = self._told(gpu.reading, metric, _gpu_value(gpu.reading, metric))
            yield gpu.uuid.lower(), told if gpu.state in _ANSWERING or not told.able else SILENT
        if snapshot.gpu_problem and not snapshot.gpus:
            yield "", SILENT  # nobody knows how many there are

    def host(self, metric: str) -> Told:
        """What its host says."""
        reading = self.message.snapshot.host_reading
        return self._told(reading, metric, _host_value(reading, metric))

    def _told(
        self, reading: types_api.GpuReading | types_api.HostReading, metric: str, value: float | None
    ) -> Told:
        if value is None and _cannot_tell(reading, metric):
            return Told(able=False)
        if self.message.state != monitor_api.NodeState.NODE_STATE_ONLINE:
            return SILENT
        snapshot = self.message.snapshot
        at = self.arrived - max(wire.seconds(snapshot.age), wire.seconds(reading.age))
        return Told(value, at, at + FRESH_PERIODS * (wire.seconds(snapshot.period) or DEFAULT_PERIOD))


def _gpu_value(reading: types_api.GpuReading, metric: str) -> float | None:
    if metric == "memory_used_percent":
        used, total = _number(reading, "memory_used_bytes"), _number(reading, "memory_total_bytes")
        return _PERCENT * used / total if used is not None and total else None
    return _number(reading, metric)


def _host_value(reading: types_api.HostReading, metric: str) -> float | None:
    if metric == "memory_used_percent":
        left, total = _number(reading, "memory_available_bytes"), _number(reading, "memory_total_bytes")
        return _PERCENT * (1 - left / total) if left is not None and total else None
    if metric == "load_per_core":
        load, cores = _number(reading, "load_1m"), _number(reading, "cpu_count")
        return load / cores if load is not None and cores else None
    return _number(reading, metric)


def _number(reading: Message, field: str) -> float | None:
    return float(getattr(reading, field)) if reading.HasField(field) else None


def _cannot_tell(reading: types_api.GpuReading | types_api.HostReading, metric: str) -> bool:
    unsupported = {
        one.field
        for one in reading.absent_readings
        if one.status == types_api.ReadingStatus.READING_STATUS_NOT_SUPPORTED
    }
    return not unsupported.isdisjoint(_READ_FOR.get(metric, (metric,)))
