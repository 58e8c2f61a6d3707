"""How gpuscale-power gives idle GPUs other MIG instances, where it was started with a file for that.

An order says all the instances that a GPU is to have. What it had is on disk before the first change; whatever goes wrong on
the way, and at the next start after an end that was not seen, it gets that back. A GPU whose MIG mode is off is left alone, as
that takes a reset.
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
"""A GPU instance: the id of its profile, and its slices of memory: the first, and how many."""
_Profiles: TypeAlias = Mapping[str, pynvml.c_nvmlGpuInstanceProfileInfo_v2_t]
_log = logging.getLogger("gpuscale-power")


class MigPartitions:
    """MIG instances of this host's GPUs. `file` has, by UUID of the GPU, the orders that were begun and have not ended."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.begun: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.exists() else {}

    def put(self, order: str, uuid: str, profiles: Sequence[str]) -> dict[str, Any]:
        """Give a GPU instances of these profiles, or back what it had before an order that was begun; how it ended.

        `instances` are the UUIDs of those that it has then; None where it may be left with something between.
        """
        problem, instances = "", None
        try:
            with _opened(uuid) as gpu:
                self._change(order, uuid, gpu, profiles)
        except (pynvml.NVMLError, ValueError, OSError) as error:  # what is not on disk is not changed
            problem = str(error)
        if uuid not in self.begun:
            with suppress(pynvml.NVMLError), _opened(uuid) as gpu:  # NVML may list those of its start
                instances = [pynvml.nvmlDeviceGetUUID(one) for one in _devices(gpu)]
        _log.warning("%s: %s", uuid, problem or f"has MIG instances {', '.join(profiles)}")
        return {"problem": problem, "instances": instances}

    def _change(self, order: str, uuid: str, gpu: pynvml.c_nvmlDevice_t, profiles: Sequence[str]) -> None:
        """Raises ValueError: it has what it had; NVMLError, OSError: so too, if it is not begun."""
        if pynvml.nvmlDeviceGetMigMode(gpu) != [pynvml.NVML_DEVICE_MIG_ENABLE] * 2:
            raise ValueError(
                "its MIG mode is off, or about to be: that takes a reset, which is left to an operator"
            )
        call = partial(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, gpu)
        infos = _supported(call, pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)
        known = {info.name.removeprefix("MIG "): info for info in infos}
        if uuid in self.begun:
            self._take_back(uuid, gpu, known)
            raise ValueError("the order was interrupted: it has its former instances again")
        before = _plain(gpu, known)
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
            raise ValueError(f"the driver refuses: {error}; it has its former instances again") from error
        self._end(uuid)

    def _take_back(self, uuid: str, gpu: pynvml.c_nvmlDevice_t, known: _Profiles) -> None:
        before, wanted = ([tuple(one) for one in self.begun[uuid][key]] for key in ("before", "wanted"))
        if not {place for place, _ in _instances(gpu, known)} <= {*before, *wanted}:
            self._end(uuid)
            raise ValueError("the order was interrupted, and others gave it instances since: they stay")
        _cut(gpu, known, before)
        self._end(uuid)

    def _end(self, uuid: str) -> None:
        self._write({one: begun for one, begun in self.begun.items() if one != uuid})

    def _write(self, begun: dict[str, Any]) -> None:
        keep(self._file, begun)
        self.begun = begun


class PartitionOrders:
    """Takes the agent's orders: one is carried out after the other, what was interrupted first."""

    def __init__(self, partitions: MigPartitions) -> None:
        self._partitions = partitions
        self._thread = ThreadPoolExecutor(1, "partitions")
        self._made: dict[str, Future[dict[str, Any]]] = {}
        for uuid, one in partitions.begun.items():
            self._begin(one["order"], uuid, ())

    def take(self, orders: Mapping[str, Mapping[str, Any]] | None) -> dict[str, object]:
        """Begin what is new, forget what is ordered no more, unless orders are not known; how each ended, by its id."""
        if orders is not None:
            self._made = {key: one for key, one in self._made.items() if key in orders or not one.done()}
            for key, order in orders.items():
                if key not in self._made:
                    self._begin(key, str(order["uuid"]), [*map(str, order["profiles"])])
        return {key: one.result() for key, one in self._made.items() if one.done()}

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
    """The MIG devices of a GPU."""
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_FOUND:
                raise


def _supported(call: Callable[[int], T], count: int) -> Iterator[T]:
    """What NVML knows of the profiles with these numbers."""
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
    """The profile of a compute instance that takes all of a GPU instance; and those that it has, with their profiles."""
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


def _plain(gpu: pynvml.c_nvmlDevice_t, known: _Profiles) -> list[Place]:
    """What a GPU has. Raises ValueError where that could not be made again."""
    found: list[Place] = []
    for place, one in _instances(gpu, known):
        whole, parts = _compute(one)
        if [profile for profile, _ in parts] != [whole]:
            raise ValueError(
                "it has GPU instances without a compute instance, or with others than the whole one"
            )
        found.append(place)
    return found


def _placed(
    gpu: pynvml.c_nvmlDevice_t, known: _Profiles, profiles: Iterable[str], before: Sequence[Place]
) -> list[Place]:
    """Where instances of these profiles have room together, those that are there in place where they can stay."""
    options: list[list[Place]] = []
    for profile in profiles:
        if profile not in known:
            raise ValueError(f"its profiles are {', '.join(known)}: {profile} is none")
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
    """A place of each of the options, so that none overlap."""
    if not options:
        return []
    for place in options[0]:
        slices = frozenset(range(place[1], place[1] + place[2]))
        if not slices & taken and (others := _apart(options[1:], taken | slices)) is not None:
            return [place, *others]
    return None


def _cut(gpu: pynvml.c_nvmlDevice_t, known: _Profiles, wanted: Sequence[Place]) -> None:
    """Leave a GPU with these instances alone: those of them that it has are not touched."""
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
