"""What of a node's snapshots decides which GPUs fit: a scheduler needs no more of them. Pure.

How busy a GPU is that leases alone use decides nothing: its utilization counts for those who come while nobody holds it.
"""

from collections.abc import Iterable, Sequence

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import seconds
from gpuscale.monitor.wire.merging import Change, Picture

RELAXED = 10.0
"""Seconds after which what decides nothing is told."""
SETTLED = 2.0
"""The same once processes came or went: their use shows by then, of work too that ends before RELAXED."""
UTILIZATION_STEP, MEMORY_STEP = 5.0, 1 / 64
"""What counts as a change: points of utilization, and a part of a GPU's memory."""
_USED, _FREE = (
    types_api.GpuReading.DESCRIPTOR.fields_by_name[name].number
    for name in ("utilization_percent", "memory_free_bytes")
)


class Fit:
    """What was told of a node that decides which GPUs fit; `number` changes whenever that is to be told again."""

    __slots__ = ("_at", "_free", "_gpus", "_host", "_lags", "_leased", "_relaxed", "_used", "number")

    def __init__(self) -> None:
        self.number = 0
        self._at = float("-inf")
        self._relaxed = RELAXED
        self._host: tuple[int, int] | None = None
        self._gpus: list[tuple[object, ...]] = []
        self._leased: list[bool] = []
        self._lags = False
        self._used: Sequence[float] = ()
        self._free: Sequence[float] = ()

    def take(self, picture: Picture, now: float, change: Change | None) -> bool:
        """Whether a picture is to be told, which `change` led to, or a whole snapshot."""
        if change is not None and now < self._at + self._relaxed and not self._decides(picture, change):
            return False
        host, gpus = picture.host_reading, picture.snapshot.gpus
        self._at, self._host = now, (host.cpu_count, host.memory_total_bytes)
        facts = [*map(_facts, gpus)]
        self._relaxed = RELAXED if change is None or facts == self._gpus else SETTLED
        self._gpus, self._leased = facts, [*map(_is_leased, gpus)]
        self._lags = any(seconds(gpu.reading.age) > picture.period / 2 for gpu in gpus)
        self._used, self._free = picture.column(_USED), picture.column(_FREE)
        return True

    def _decides(self, picture: Picture, change: Change) -> bool:
        host = picture.host_reading if change.host is not None else None
        if self._lags or (host is not None and self._host != (host.cpu_count, host.memory_total_bytes)):
            return True
        gpus = picture.snapshot.gpus if change.gpus else ()
        for place in [one.place for one in change.gpus]:
            reading = gpus[place].reading
            if _facts(gpus[place]) != self._gpus[place] or seconds(reading.age) > picture.period / 2:
                return True
            now = ([reading.utilization_percent], [reading.memory_free_bytes])
            if self._moved(picture, (_USED, _FREE), [place], now):
                return True
        numbers = change.numbers
        return self._moved(picture, numbers.fields, numbers.places, numbers.columns)

    def _moved(
        self,
        picture: Picture,
        fields: Iterable[int],
        places: Sequence[int],
        columns: Iterable[Sequence[float]],
    ) -> bool:
        """Whether one of these readings is far from what was told of it, and decides."""
        for field, values in zip(fields, columns, strict=False):
            if field not in (_USED, _FREE):
                continue
            for place, value in zip(places or range(len(values)), values, strict=True):
                if field == _FREE:
                    moved = abs(value - self._free[place]) > picture.memory_totals[place] * MEMORY_STEP
                else:
                    moved = not self._leased[place] and abs(value - self._used[place]) > UTILIZATION_STEP
                if moved:
                    return True
        return False


def _facts(gpu: types_api.Gpu) -> tuple[object, ...]:
    """What else decides of a GPU."""
    reading = gpu.reading
    processes = {(one.pid, one.reservation, one.holder_unknown) for one in reading.processes}
    known = reading.HasField("utilization_percent"), reading.HasField("memory_free_bytes")
    return gpu.state, reading.memory_total_bytes, known, _cannot_read_processes(gpu), processes


def _is_leased(gpu: types_api.Gpu) -> bool:
    """Whether leases alone use it."""
    processes = gpu.reading.processes
    return bool(processes) and not _cannot_read_processes(gpu) and all(one.reservation for one in processes)


def _cannot_read_processes(gpu: types_api.Gpu) -> bool:
    return any(one.field == "processes" for one in gpu.reading.absent_readings)
