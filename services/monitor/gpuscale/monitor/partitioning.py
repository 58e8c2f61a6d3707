"""MIG partitioning of idle GPUs, for gpuscale-power.

An order lists all instances that a GPU gets. The instances it has are on disk before the first change, and are restored on an
error and on the next start after a crash. MIG mode is never switched on or off, since that takes a reset.
"""

import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from ctypes import byref, c_uint
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pynvml

from gpuscale.monitor.helper import keep

T = TypeVar("T")
Place: TypeAlias = tuple[int, int, int]
"""A GPU instance: profile id, first memory slice, number of slices."""
_Profiles: TypeAlias = Mapping[str, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t]
_log = logging.getLogger("gpuscale-power")


class MigPartitions:
    """MIG instances of this host's GPUs. `file` keeps the unfinished order of each GPU, by its UUID."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.begun: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def put(self, order: str, uuid: str, profiles: Sequence[str]) -> dict[str, Any]:
        """Partition a GPU into these profiles, or restore it if an earlier order is unfinished.

        Returns `problem`, empty on success, and `instances`, the UUIDs of its MIG devices, None if it may be half-partitioned.
        """
        problem, instances = "", None
        try:
            with _opened(uuid) as gpu:
                self._change(order, uuid, gpu, profiles)
        except (pynvml.NVMLError, ValueError, OSError) as error:
            problem = str(error)
        if uuid not in self.begun:
            # A new NVML session, since the old one may list the instances it started with.
            with suppress(pynvml.NVMLError), _opened(uuid) as gpu:
                instances = [pynvml.nvmlDeviceGetUUID(device) for device in _devices(gpu)]
        _log.warning("%s: %s", uuid, problem or f"has MIG instances {', '.join(profiles)}")
        return {"problem": problem, "instances": instances}

    def _change(self, order: str, uuid: str, gpu: pynvml.c_nvmlDevice_t, profiles: Sequence[str]) -> None:
        """Raises ValueError if its instances are unchanged or restored, NVMLError or OSError otherwise."""
        if pynvml.nvmlDeviceGetMigMode(gpu) != [pynvml.NVML_DEVICE_MIG_ENABLE] * 2:
            raise ValueError("its MIG mode is off or pending: an operator must enable it and reset the GPU")
        call = partial(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu)
        infos = _supported(call, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        known = {info.name.removeprefix("MIG "): info for info in infos}
        if uuid in self.begun:
            self._take_back(uuid, gpu, known)
            raise ValueError("the order was interrupted: its original instances are restored")
        before: list[Place] = []
        for place, one in _instances(gpu, known):
            whole, parts = _compute(one)
            if [profile for profile, _ in parts] != [whole]:
                raise ValueError("it has GPU instances without a compute instance that spans them")
            before.append(place)
        wanted = _placed(gpu, known, profiles, before)
        if sorted(wanted) == sorted(before):
            return
        for handle in (gpu, *_devices(gpu)):
            for listed in (
                pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
            ):
                if found := listed(handle):
                    raise ValueError(f"process {found[0].pid} uses it")
        self._write(self.begun | {uuid: {"order": order, "before": before, "wanted": wanted}})
        try:
            _cut(gpu, known, wanted)
        except pynvml.NVMLError as error:
            self._take_back(uuid, gpu, known)
            raise ValueError(f"the driver refuses: {error}; its original instances are restored") from error
        self._end(uuid)

    def _take_back(self, uuid: str, gpu: pynvml.c_nvmlDevice_t, known: _Profiles) -> None:
        """Restore the instances from before the unfinished order. ValueError if someone else changed them since."""
        before, wanted = ([tuple(place) for place in self.begun[uuid][key]] for key in ("before", "wanted"))
        if not {place for place, _ in _instances(gpu, known)} <= {*before, *wanted}:
            self._end(uuid)
            raise ValueError("the order was interrupted, and its instances were changed since: they are kept")
        _cut(gpu, known, before)
        self._end(uuid)

    def _end(self, uuid: str) -> None:
        self._write({key: begun for key, begun in self.begun.items() if key != uuid})

    def _write(self, begun: dict[str, Any]) -> None:
        keep(self._file, begun)
        self.begun = begun


class PartitionOrders:
    """Carries out the agent's orders one after another in a thread, unfinished ones of the last run first."""

    def __init__(self, partitions: MigPartitions) -> None:
        self._partitions = partitions
        self._thread = ThreadPoolExecutor(1, "partitions")
        self._made: dict[str, Future[dict[str, Any]]] = {}
        for uuid, begun in partitions.begun.items():
            self._begin(begun["order"], uuid, ())

    def take(self, orders: Mapping[str, Mapping[str, Any]] | None) -> dict[str, object]:
        """Start new orders and forget those no longer listed, unless None; returns the results of finished ones by id."""
        if orders is not None:
            self._made = {key: made for key, made in self._made.items() if key in orders or not made.done()}
            for key, order in orders.items():
                if key not in self._made:
                    self._begin(key, str(order["uuid"]), [*map(str, order["profiles"])])
        return {key: made.result() for key, made in self._made.items() if made.done()}

    def _begin(self, order: str, uuid: str, profiles: Sequence[str]) -> None:
        self._made[order] = self._thread.submit(self._partitions.put, order, uuid, profiles)


@contextmanager
def _opened(uuid: str) -> Generator[pynvml.c_nvmlDevice_t]:
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByUUID(uuid)
    finally:
        pynvml.nvmlShutdown()


def _devices(gpu: pynvml.c_nvmlDevice_t) -> Iterator[pynvml.c_nvmlDevice_t]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                raise


def _supported(call: Callable[[int], T], count: int) -> Iterator[T]:
    """The results of a call for profile numbers below `count`, without unsupported profiles."""
    for number in range(count):
        try:
            yield call(number)
        except pynvml.NVMLError as error:
            if error.value not in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT}:
                raise


def _instances(
    gpu: pynvml.c_nvmlDevice_t, known: _Profiles
) -> Iterator[tuple[Place, pynvml.c_nvmlGpuInstance_t]]:
    for info in known.values():
        room, count = (pynvml.c_nvmlGpuInstance_t * info.instanceCount)(), c_uint(info.instanceCount)
        pynvml.nvmlDeviceGetGpuInstances(gpu, info.id, room, byref(count))
        for one in room[: count.value]:
            at = pynvml.nvmlGpuInstanceGetInfo(one).placement
            yield (info.id, at.start, at.size), one


def _compute(
    instance: pynvml.c_nvmlGpuInstance_t,
) -> tuple[int, list[tuple[int, pynvml.c_nvmlComputeInstance_t]]]:
    """The profile id of a compute instance that spans a whole GPU instance, and its compute instances with their profile ids."""
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    infos = [
        *_supported(
            lambda number: pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, shared),
            pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT,
        )
    ]
    found: list[tuple[int, pynvml.c_nvmlComputeInstance_t]] = []
    for info in infos:
        room, count = (pynvml.c_nvmlComputeInstance_t * info.instanceCount)(), c_uint(info.instanceCount)
        pynvml.nvmlGpuInstanceGetComputeInstances(instance, info.id, room, byref(count))
        found += [(info.id, one) for one in room[: count.value]]
    return max(infos, key=lambda info: info.sliceCount).id, found


def _placed(
    gpu: pynvml.c_nvmlDevice_t, known: _Profiles, profiles: Iterable[str], before: Sequence[Place]
) -> list[Place]:
    """Places for instances of these profiles, keeping existing ones where possible. ValueError if they do not fit."""
    options: list[list[Place]] = []
    for profile in profiles:
        if profile not in known:
            raise ValueError(f"it has no profile {profile}, only {', '.join(known)}")
        key, count = known[profile].id, c_uint()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, key, None, byref(count))
        room = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
        pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(gpu, key, room, byref(count))
        options.append(
            sorted(((key, at.start, at.size) for at in room), key=lambda place: place not in before)
        )
    options.sort(key=lambda places: max((size for _, _, size in places), default=0), reverse=True)
    found = _apart(options, frozenset())
    if found is None:
        raise ValueError("there is no room for these instances together")
    return found


def _apart(options: Sequence[Sequence[Place]], taken: frozenset[int]) -> list[Place] | None:
    """One place from each option such that none overlap; None if there is no such choice."""
    if not options:
        return []
    for place in options[0]:
        slices = frozenset(range(place[1], place[1] + place[2]))
        if not slices & taken and (others := _apart(options[1:], taken | slices)) is not None:
            return [place, *others]
    return None


def _cut(gpu: pynvml.c_nvmlDevice_t, known: _Profiles, wanted: Sequence[Place]) -> None:
    """Make a GPU have exactly these instances, leaving those it already has untouched."""
    missing, empty = [*wanted], list[pynvml.c_nvmlGpuInstance_t]()
    for place, one in [*_instances(gpu, known)]:
        _, parts = _compute(one)
        if place not in missing:
            for _, part in parts:
                pynvml.nvmlComputeInstanceDestroy(part)
            pynvml.nvmlGpuInstanceDestroy(one)
            continue
        missing.remove(place)
        if not parts:
            empty.append(one)
    for profile, start, size in missing:
        at = pynvml.c_nvmlGpuInstancePlacement_t(start, size)
        empty.append(pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, profile, byref(at)))
    for one in empty:
        pynvml.nvmlGpuInstanceCreateComputeInstance(one, _compute(one)[0])
