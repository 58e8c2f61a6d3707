"""From the snapshots that agents stream to samples, for history and for recordings.

A reading counts once, however often a snapshot repeats it (that of a GPU whose driver is slow stays, with its age): it
is new if it was made a quarter of the agent's period or more after the one before. Of nodes whose samples nobody takes,
since there is no memory for more history and no recording of them, nothing is looked at.
"""

from dataclasses import dataclass
from math import isnan

from google.protobuf.duration_pb2 import Duration

from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.wire import seconds
from gpuscale.monitor.history.history import History
from gpuscale.monitor.history.metrics import ABSENT, Sample
from gpuscale.monitor.merging import Change, Picture
from gpuscale.monitor.recording.recordings import Recordings

NEW_AFTER_PERIODS = 0.25
_HUNDRED = 100.0


@dataclass(slots=True)
class _Seen:
    """The newest sample of a GPU."""

    at: float
    sample: Sample | None


class SampleObserver:
    """An observer of the fleet's nodes: what it is told goes into history and recordings."""

    def __init__(self, history: History, recordings: Recordings) -> None:
        self._history = history
        self._recordings = recordings
        self._gpus: dict[str, dict[str, _Seen]] = {}
        self._hosts: dict[str, float] = {}
        self._kept: set[str] = set()  # nodes of which there is, or may be, history

    def observe(self, node: str, picture: Picture, now: float, change: Change | None) -> None:
        """Take in the new readings of a snapshot. `change`: what changed; None for a whole snapshot."""
        if self._history.has_room:
            self._kept.add(node)
        elif node not in self._kept and node not in self._recordings.nodes:
            self._gpus.pop(node, None)
            return
        snapshot, changed = picture.snapshot, None if change is None else change.changed_places()
        apart = NEW_AFTER_PERIODS * seconds(snapshot.period)
        before, seen = self._gpus.get(node, {}), dict[str, _Seen]()
        for index, gpu in enumerate(snapshot.gpus):
            uuid = gpu.uuid.lower()
            old = before.get(uuid)
            at = _read_at(gpu.reading, now)
            if at is None or (old is not None and at - old.at < apart):
                if old is not None:
                    seen[uuid] = old
                continue
            same = old is not None and changed is not None and index not in changed
            sample = old.sample if old is not None and same else gpu_sample(gpu.reading)
            seen[uuid] = _Seen(at, sample)
            if sample is not None:
                self._history.add_gpu(uuid, at, sample)
                self._recordings.add(uuid, at, sample)
        self._gpus[node] = seen
        at = _read_at(snapshot.host_reading, now)
        if at is not None and at - self._hosts.get(node, float("-inf")) >= apart:
            self._hosts[node] = at
            self._history.add_node(node_name(node), at, _node_sample(snapshot))


def gpu_sample(reading: types_api.GpuReading) -> Sample | None:
    """What is kept of a reading, in the order of `GPU_METRICS`; None where every part is absent."""
    used = float(reading.memory_used_bytes) if reading.HasField("memory_used_bytes") else ABSENT
    total = reading.memory_total_bytes
    sample = (
        reading.utilization_percent if reading.HasField("utilization_percent") else ABSENT,
        reading.memory_utilization_percent if reading.HasField("memory_utilization_percent") else ABSENT,
        used,
        _HUNDRED * used / total if total else ABSENT,
        reading.temperature_celsius if reading.HasField("temperature_celsius") else ABSENT,
        reading.power_watts if reading.HasField("power_watts") else ABSENT,
        reading.sm_clock_mhz if reading.HasField("sm_clock_mhz") else ABSENT,
    )
    return None if all(map(isnan, sample)) else sample


def _node_sample(snapshot: types_api.Snapshot) -> Sample:
    """What is kept of a host, in the order of `NODE_METRICS`."""
    host = snapshot.host_reading
    busy = [
        gpu.reading.utilization_percent
        for gpu in snapshot.gpus
        if gpu.reading.HasField("utilization_percent")
    ]
    return (
        host.cpu_percent if host.HasField("cpu_percent") else ABSENT,
        float(host.memory_used_bytes) if host.HasField("memory_used_bytes") else ABSENT,
        host.load_1m if host.HasField("load_1m") else ABSENT,
        sum(busy) / len(busy) if busy else ABSENT,
    )


def _read_at(reading: types_api.GpuReading | types_api.HostReading, now: float) -> float | None:
    """When a reading was made; None if it never was."""
    age: Duration = reading.age
    return now - seconds(age) if reading.HasField("age") else None
