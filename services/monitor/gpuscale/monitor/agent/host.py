"""Readings of the host through psutil; in a container too, they are of the whole host.

CPU, load and memory are read every time, and the more expensive swap, disks, network and pressure every five seconds. Read
without psutil, which lacks them: /proc/pressure (Documentation/accounting/psi.rst), and which disks and network cards are
hardware.

Also which pods have which GPUs, from the kubelet's v1.PodResourcesLister. It reports names of pods, and cgroups their UIDs. So the
pod of a process has a name only if it alone has the GPU.
"""

import asyncio
import os
import platform
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc
import psutil

from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Clock, network_namespace
from gpuscale.internal.monitor.v1 import PodResourcesList
from gpuscale.monitor.agent.pci import find_adapters
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import Absent, HostIdentity, HostReading, ReadingStatus

# Shorter spans have too few clock ticks of 10 ms for a percentage.
SHORTEST_CPU_SPAN_SECONDS = 0.1
# The window of `cpu_smoothed_percent`.
CPU_WINDOW_SECONDS = 10.0
SELDOM_SECONDS = 5.0

_MEMORY_FIELDS = ("memory_total_bytes", "memory_available_bytes", "memory_used_bytes")
_SWAP_FIELDS = ("swap_total_bytes", "swap_used_bytes")
_DISK_FIELDS = ("disk_read_bytes", "disk_written_bytes")
_NETWORK_FIELDS = ("network_received_bytes", "network_sent_bytes")
_PRESSURES = {"cpu": ("some",), "memory": ("some", "full"), "io": ("some", "full")}

T = TypeVar("T")


class ProcHost:
    """Reads this host, always in the same thread. `now`: a monotonic clock, in seconds."""

    def __init__(
        self, boot_id: str, now: Callable[[], float] = time.monotonic, sys: Path = Path("/sys")
    ) -> None:
        self._boot_id = boot_id
        self._now = now
        self._sys = sys
        self._cpu_percent: float | None = None
        self._cpu_read_at: float | None = None
        self._cpu_samples: deque[tuple[float, float]] = deque()
        self._pressures = [(Path(psutil.PROCFS_PATH, "pressure", name), name) for name in _PRESSURES]
        self._seldom = HostReading()
        self._seldom_until = float("-inf")

    def identity(self) -> HostIdentity:
        """The identity of this host."""
        try:
            operating_system = platform.freedesktop_os_release()["PRETTY_NAME"]
        except (OSError, KeyError):
            operating_system = f"{platform.system()} {platform.release()}"
        return HostIdentity(
            socket.gethostname(),
            operating_system,
            self._boot_id,
            ProcessNames().foreign,
            network_namespace(Path(psutil.PROCFS_PATH)),
            find_adapters(self._sys),
        )

    def read(self) -> HostReading:
        """Read the host."""
        now = self._now()
        if now >= self._seldom_until:
            self._seldom, self._seldom_until = self._read_seldom(), now + SELDOM_SECONDS
        seldom, absent = self._seldom, list[Absent]()
        memory = _attempt(psutil.virtual_memory, _MEMORY_FIELDS, absent)
        load = _attempt(os.getloadavg, ("load_1m", "load_5m", "load_15m", "load_1m_per_core"), absent)
        cpu, samples = self._cpu(now, absent), self._cpu_samples
        while samples and samples[0][0] <= now - CPU_WINDOW_SECONDS:
            samples.popleft()
        if not samples:
            absent.append(Absent("cpu_smoothed_percent", ReadingStatus.ERROR, "needs two readings"))
        return seldom._replace(
            cpu_percent=cpu,
            cpu_smoothed_percent=sum(percent for _, percent in samples) / len(samples) if samples else None,
            load_1m=load[0] if load else None,
            load_5m=load[1] if load else None,
            load_15m=load[2] if load else None,
            load_1m_per_core=load[0] / seldom.cpu_count if load and seldom.cpu_count else None,
            memory_total_bytes=memory.total if memory else None,
            memory_available_bytes=memory.available if memory else None,
            memory_used_bytes=memory.total - memory.available if memory else None,
            absent=(*seldom.absent, *absent),
        )

    def _cpu(self, now: float, absent: list[Absent]) -> float | None:
        """Use of all cores since the last reading; a reading right after another repeats it."""
        before = self._cpu_read_at
        if before is None or now - before >= SHORTEST_CPU_SPAN_SECONDS:
            percent = _attempt(psutil.cpu_percent, ("cpu_percent",), absent)
            self._cpu_read_at = None if percent is None else now
            if percent is None:
                return None
            if before is not None:  # psutil's first value in a thread has no defined span
                self._cpu_percent = percent
                self._cpu_samples.append((now, percent))
        if self._cpu_percent is None:
            absent.append(Absent("cpu_percent", ReadingStatus.ERROR, "needs two readings"))
        return self._cpu_percent

    def _read_seldom(self) -> HostReading:
        absent: list[Absent] = []
        swap = _attempt(psutil.swap_memory, _SWAP_FIELDS, absent)
        read, written = _attempt(self._disks, _DISK_FIELDS, absent) or (None, None)
        received, sent = _attempt(self._network, _NETWORK_FIELDS, absent) or (None, None)
        # Averages over ten seconds, 0-100, by field name.
        pressure: dict[str, Any] = {}
        for place, resource in self._pressures:
            names = {kind: f"pressure_{resource}_{kind}_percent" for kind in _PRESSURES[resource]}
            try:
                with place.open(encoding="ascii") as lines:
                    averages = dict(line.split()[:2] for line in lines)
                pressure |= {
                    name: float(averages[kind].removeprefix("avg10=")) for kind, name in names.items()
                }
            except PermissionError as error:
                absent.extend(
                    Absent(name, ReadingStatus.NO_PERMISSION, str(error)) for name in names.values()
                )
            except (OSError, ValueError, KeyError):
                detail = "the kernel does not report it"
                absent.extend(Absent(name, ReadingStatus.NOT_SUPPORTED, detail) for name in names.values())
        return HostReading(
            cpu_count=psutil.cpu_count(),
            swap_total_bytes=swap.total if swap else None,
            swap_used_bytes=swap.used if swap else None,
            disk_read_bytes=read,
            disk_written_bytes=written,
            network_received_bytes=received,
            network_sent_bytes=sent,
            absent=tuple(absent),
            **pressure,
        )

    def _disks(self) -> tuple[int, int]:
        """Bytes read from and written to hardware disks. Partitions, LVM, RAID and loops would count them again."""
        hardware = _hardware(self._sys / "block")
        found = psutil.disk_io_counters(perdisk=True, nowrap=False)
        disks = [disk for name, disk in found.items() if name in hardware]
        return sum(disk.read_bytes for disk in disks), sum(disk.write_bytes for disk in disks)

    def _network(self) -> tuple[int, int]:
        """Bytes received and sent by network cards, or by all interfaces but the loopback if there is none.

        Bridges, bonds and virtual interfaces would count the same bytes again.
        """
        found = psutil.net_io_counters(pernic=True, nowrap=False)
        cards = found.keys() & _hardware(self._sys / "class/net") or found.keys() - {"lo"}
        return sum(found[name].bytes_recv for name in cards), sum(found[name].bytes_sent for name in cards)


def _attempt(call: Callable[[], T], fields: Iterable[str], absent: list[Absent]) -> T | None:
    try:
        return call()
    except PermissionError as error:
        status, detail = ReadingStatus.NO_PERMISSION, str(error)
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        status, detail = ReadingStatus.ERROR, str(error)
    absent.extend(Absent(name, status, detail) for name in fields)
    return None


def _hardware(folder: Path) -> set[str]:
    """The entries of a /sys folder that have a device; empty without the folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if os.access(f"{entry.path}/device", os.F_OK)}
    except FileNotFoundError:
        return set()


LOOK_SECONDS, PATIENCE_SECONDS = 15.0, 2.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while the kubelet restarts."""
METHOD = "/v1.PodResourcesLister/List"
_MOST_PODS = 64
_log = get_logger(__name__)


class Pods:
    """Polls the kubelet. `by_gpu` has the pods of each GPU or MIG instance, namespace/name by UUID."""

    def __init__(self, place: Path | None, clock: Clock) -> None:
        self._place = place
        self._clock = clock
        self.by_gpu: Mapping[str, tuple[str, ...]] = {}

    async def run(self) -> None:
        """Poll until cancelled; return at once without a socket."""
        until, asking = 0.0, Attempts(_log, "cannot ask the kubelet which pods have GPUs", GpuscaleError)
        while self._place is not None:
            with asking, rpc_errors():
                # One connection per poll: an open one costs keepalive pings on both ends.
                async with open_channel(f"unix:{self._place}") as channel:
                    ask: grpc.aio.UnaryUnaryMultiCallable[bytes, PodResourcesList] = channel.unary_unary(
                        METHOD, response_deserializer=PodResourcesList.FromString
                    )
                    answer = await ask(b"", timeout=PATIENCE_SECONDS)
                found: defaultdict[str, set[str]] = defaultdict(set)
                for pod in answer.pod_resources:
                    for container in pod.containers:
                        for devices in container.devices:
                            for device in devices.device_ids:  # "GPU-…::2" is a share of a GPU
                                found[device.partition("::")[0]].add(f"{pod.namespace}/{pod.name}")
                self.by_gpu = {uuid: tuple(sorted(names)[:_MOST_PODS]) for uuid, names in found.items()}
                until = self._clock.now() + KEPT_SECONDS
            if asking.failing and self._clock.now() >= until:
                self.by_gpu = {}
            await asyncio.sleep(LOOK_SECONDS)
