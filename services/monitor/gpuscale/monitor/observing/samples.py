"""Samples for history and recordings, from the snapshots of nodes.

A reading counts once, although snapshots repeat it while its GPU is slow: it is new if made at least a quarter of the agent's
period after the last. Nodes without memory for history and without recordings are skipped. Readings are kept by column, as
tables of numbers arrive, so that changes need no lookup in a snapshot. The fleet keeps times on its monotonic clock, and converts
them to dates with the current wall clock when asked.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain
from math import isnan
from typing import Self

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import seconds, to_datetime, to_timestamp
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.history.history import History, Together
from gpuscale.monitor.model.metrics import ABSENT, GPU_METRICS, Metric, Sample, Stats
from gpuscale.monitor.recording import Recordings
from gpuscale.monitor.wire import Change, Numbers, Picture

NEW_AFTER_PERIODS = 0.25
_HUNDRED = 100.0
_NEVER = float("-inf")
_FIELDS = types_api.GpuReading.DESCRIPTOR.fields_by_name
_TOTAL = _FIELDS["memory_total_bytes"].number
_MEMORY = {_TOTAL, _FIELDS["memory_used_bytes"].number}
_PERCENT = GPU_METRICS.index(Metric.MEMORY_USED_PERCENT)
_USED = GPU_METRICS.index(Metric.MEMORY_USED_BYTES)
_COLUMNS = {
    _FIELDS[metric.name.lower()].number: place
    for place, metric in enumerate(GPU_METRICS)
    if metric is not Metric.MEMORY_USED_PERCENT
}
"""Indexes in `GPU_METRICS` by field number of GpuReading."""


@dataclass(slots=True)
class _Gpus:
    uuids: tuple[str, ...]  # in lower case
    newest: list[float]  # times of their newest samples
    ages: list[float | None]  # seconds, when the newest snapshot came; None if never read
    values: "array[float]"  # per metric of `GPU_METRICS`, the value of each GPU
    totals: Sequence[float]  # memory of each; 0 if absent
    together: Together | None = None  # where their samples wait

    @classmethod
    def of(cls, picture: Picture, before: "_Gpus | None") -> "_Gpus":
        newest = dict(zip(before.uuids, before.newest, strict=True)) if before is not None else {}
        readings = [gpu.reading for gpu in picture.snapshot.gpus]
        return cls(
            picture.uuids,
            [newest.get(uuid, _NEVER) for uuid in picture.uuids],
            [_age(reading) for reading in readings],
            array("d", chain(*zip(*map(gpu_sample, readings), strict=True))),
            picture.column(_TOTAL),
            before.together if before is not None and before.uuids == picture.uuids else None,
        )

    def column(self, metric: int) -> "array[float]":
        return self.values[metric * len(self.uuids) : (metric + 1) * len(self.uuids)]

    def merge(self, numbers: Numbers) -> None:
        count, (places, fields, columns, table) = len(self.uuids), numbers
        for at, field in enumerate(fields if columns else ()):
            if (metric := _COLUMNS.get(field)) is not None:
                begin = metric * count
                if not places:  # as nearly always
                    self.values[begin : begin + count] = table[at * count : (at + 1) * count]
                    continue
                for place, value in zip(places, columns[at], strict=True):
                    self.values[begin + place] = value
            elif field == _TOTAL:
                self.totals = array("d", self.totals if places else columns[at])
                for place, value in zip(places, columns[at] if places else (), strict=True):
                    self.totals[place] = value
        if not _MEMORY.isdisjoint(fields):
            percent = [
                _HUNDRED * used / total if total else ABSENT
                for used, total in zip(self.column(_USED), self.totals, strict=True)
            ]
            self.values[_PERCENT * count : (_PERCENT + 1) * count] = array("d", percent)


@dataclass(slots=True)
class _Host:
    """The kept readings of a host (CPU, memory, load), and their age when the newest snapshot came."""

    age: float | None
    newest: float
    readings: tuple[float, float, float]


class SampleObserver:
    """An observer of nodes that feeds history and recordings."""

    def __init__(self, history: History, recordings: Recordings) -> None:
        self._history = history
        self._recordings = recordings
        self._gpus: dict[str, _Gpus] = {}
        self._hosts: dict[str, _Host] = {}
        self._kept: set[str] = set()  # nodes with history, or room for it

    def observe(self, node: str, picture: Picture, now: float, change: Change | None) -> None:
        """Take in the new readings of a snapshot; `change` is None for a whole one."""
        if node in self._kept or self._history.make_room():
            self._kept.add(node)
        elif node not in self._recordings.nodes:
            self._history.leave_out()
            self._gpus.pop(node, None)
            self._hosts.pop(node, None)
            return
        gpus, apart = self._gpus.get(node), NEW_AFTER_PERIODS * picture.period
        if gpus is None or change is None or change.gpus:
            gpus = self._gpus[node] = _Gpus.of(picture, gpus)
        elif change.numbers.fields:
            gpus.merge(change.numbers)
        if not self._taken_together(gpus, now, apart):
            for place, (uuid, age) in enumerate(zip(gpus.uuids, gpus.ages, strict=True)):
                if age is None or now - age - gpus.newest[place] < apart:
                    continue
                gpus.newest[place] = at = now - age
                sample = tuple(gpus.values[place :: len(gpus.uuids)])
                if not all(map(isnan, sample)):
                    self._history.add(uuid, at, sample)
                    self._recordings.add(uuid, at, sample)
        host = self._hosts.get(node)
        if host is None or change is None or change.host is not None:
            reading = picture.host_reading
            readings = (
                reading.cpu_percent or _zero(reading, "cpu_percent"),
                float(reading.memory_used_bytes) or _zero(reading, "memory_used_bytes"),
                reading.load_1m or _zero(reading, "load_1m"),
            )
            host = self._hosts[node] = _Host(_age(reading), _NEVER if host is None else host.newest, readings)
        if host.age is not None and now - host.age - host.newest >= apart:
            host.newest = at = now - host.age
            used = [value for value in gpus.column(0) if not isnan(value)]
            utilization = sum(used) / len(used) if used else ABSENT
            self._history.add(node_name(node), at, (*host.readings, utilization))

    def _taken_together(self, gpus: _Gpus, now: float, apart: float) -> bool:
        """Take in the readings of all GPUs at once; returns False if each has to be looked at alone.

        That is where their ages differ, or a GPU may have no reading, or there is no memory for all. While anything is
        recorded, on any node, it is too: recordings take samples by GPU.
        """
        ages, newest = gpus.ages, gpus.newest
        if (
            not ages
            or (age := ages[0]) is None
            or self._recordings.nodes
            or ages.count(age) < len(ages)
            or newest.count(newest[0]) < len(newest)
            or (isnan(sum(gpus.column(0))) and all(isnan(sum(gpus.column(one))) for one in _COLUMNS.values()))
        ):
            return False
        if (at := now - age) - newest[0] < apart:
            return True
        if gpus.together is None or not gpus.together.series:
            gpus.together = self._history.together(gpus.uuids)
        if gpus.together is not None:
            gpus.together.add(at, gpus.values)
            gpus.newest = [at] * len(newest)
        return gpus.together is not None

    def forget_unknown(self, nodes: Nodes) -> None:
        """Drop unknown nodes."""
        for node in [node for node in self._hosts if nodes.find(node) is None]:
            del self._hosts[node], self._gpus[node]
            self._kept.discard(node)


def gpu_sample(reading: types_api.GpuReading) -> Sample:
    """The sample of a reading, in the order of `GPU_METRICS`."""
    used = float(reading.memory_used_bytes) or _zero(reading, "memory_used_bytes")
    total = reading.memory_total_bytes
    return (
        reading.utilization_percent or _zero(reading, "utilization_percent"),
        reading.memory_utilization_percent or _zero(reading, "memory_utilization_percent"),
        used,
        _HUNDRED * used / total if total else ABSENT,
        reading.temperature_celsius or _zero(reading, "temperature_celsius"),
        reading.power_watts or _zero(reading, "power_watts"),
        reading.sm_clock_mhz or _zero(reading, "sm_clock_mhz"),
    )


def _zero(reading: Message, field: str) -> float:
    """0 if a reading has this field, which is 0 or absent; else NaN. HasField is only called for zeros, as it is slow."""
    return 0.0 if reading.HasField(field) else ABSENT


def _age(reading: types_api.GpuReading | types_api.HostReading) -> float | None:
    """The age of a reading in its snapshot; None if it was never made."""
    age: Duration = reading.age
    return seconds(age) if reading.HasField("age") else None


SET_BY = timedelta(seconds=1)
"""By how much the date of a host changes at least where it was set; the clocks are read one after the other."""


@dataclass(frozen=True, slots=True)
class Dates:
    """The current moment on the clock, and the date of its time 0."""

    now: float
    zero: datetime

    @classmethod
    def of(cls, clock: Clock, before: Self | None = None) -> Self:
        """The current moment. A time has the same date as `before`, to the microsecond, unless the host's date was set since."""
        now = clock.now()
        zero = clock.wall() - timedelta(seconds=now)
        return cls(now, before.zero if before and abs(zero - before.zero) < SET_BY else zero)

    def timestamp(self, at: float) -> Timestamp:
        """The date of a time on the clock."""
        return to_timestamp(self.zero + timedelta(seconds=at))

    def span(self, start: float, end: float | None) -> tuple[datetime, datetime | None]:
        """The dates of two times on the clock."""
        began = self.zero + timedelta(seconds=start)
        return began, None if end is None else began + timedelta(seconds=end - start)

    def seconds(self, timestamp: Timestamp) -> float:
        """The time on the clock of a date."""
        return (to_datetime(timestamp) - self.zero).total_seconds()


_METRICS = {metric: api.Metric.Value(f"METRIC_{metric.name}") for metric in Metric}


def to_stats(metric: Metric, stats: Stats) -> api.MetricStats:
    """Statistics of a metric as a message."""
    return api.MetricStats(
        metric=_METRICS[metric], min=stats.min, max=stats.max, mean=stats.mean, sample_count=stats.count
    )
