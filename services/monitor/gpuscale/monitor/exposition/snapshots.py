"""From a snapshot to the series of its host and GPUs, labelled with who holds them as the allocator says when a page is made."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from heapq import nlargest
from operator import attrgetter
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.metrics_text import MetricsPage, labels
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import seconds
from gpuscale.monitor.model.prometheus import (
    DCGM,
    DCGM_CHECKED,
    GPU,
    HOST,
    Names,
    ReadingSeries,
    Style,
    gauge,
)

GPU_INFO = gauge("gpuscale_gpu_info", "What a GPU is; always 1.")
GPU_POD = gauge("gpuscale_gpu_pod_info", "1 for each pod that was given a GPU, as the kubelet tells.")
GPU_STATE = gauge("gpuscale_gpu_state", "1 for the state that a GPU is in; other states have no series.")
GPU_AGE = gauge("gpuscale_gpu_reading_age_seconds", "How long ago a GPU was read.")
GPU_ABSENT = gauge("gpuscale_gpu_absent_readings", "Readings of a GPU that are absent, by reason.")
GPU_PROCESSES = gauge("gpuscale_gpu_processes", "Processes that hold memory of a GPU.")
PROCESS_MEMORY = gauge("gpuscale_gpu_process_memory_used_bytes", "Memory of a GPU that a process holds.")
PROCESS_USE = gauge("gpuscale_gpu_process_utilization_ratio", "Share of time in which its kernels ran.")
PROCESS_MEMORY_USE = gauge(
    "gpuscale_gpu_process_memory_utilization_ratio", "Share of time in which it read or wrote memory."
)
PROCESS_ENCODER_USE = gauge(
    "gpuscale_gpu_process_encoder_utilization_ratio", "Share of time in which it encoded video."
)
PROCESS_DECODER_USE = gauge(
    "gpuscale_gpu_process_decoder_utilization_ratio", "Share of time in which it decoded video."
)
MOST_PROCESSES = 16
"""Processes of a GPU that have series: those that hold most."""
GPU_QUARANTINED = gauge("gpuscale_gpu_quarantined", "1 while no new work should be placed on a GPU.")
GPU_THROTTLED = gauge("gpuscale_gpu_throttled", "1 for each reason why clocks of a GPU are held down.")
GPU_RECOVERY = gauge("gpuscale_gpu_recovery_action", "1 for what the driver asks for to bring a GPU back.")
GPUS = gauge("gpuscale_node_gpus", "GPUs of a node that were ever found.")
GPUS_WORKING = gauge("gpuscale_node_gpus_working", "GPUs of a node that answer and need no reset.")
GPU_PROBLEM = gauge("gpuscale_node_gpu_problem", "1 while GPUs of a node cannot be read or found.")

Held: TypeAlias = Mapping[str, Mapping[str, str]]
"""Labels of those who hold GPUs, by UUID."""
NOBODY: Held = {}

_DCGM: Mapping[Names, tuple[ReadingSeries, ...]] = {
    "checked": DCGM_CHECKED,
    "all": DCGM,
    "dcgm": DCGM,
    "gpuscale": (),
}
_STATES = {number: name.removeprefix("GPU_STATE_") for name, number in types_api.GpuState.items()}
_REASONS = {number: name.removeprefix("READING_STATUS_") for name, number in types_api.ReadingStatus.items()}
_ACTIONS = {
    number: name.removeprefix("RECOVERY_ACTION_") for name, number in types_api.RecoveryAction.items()
}
# In any other state the last readings no longer count.
_WORKING = frozenset(
    {
        types_api.GpuState.GPU_STATE_OK,
        types_api.GpuState.GPU_STATE_DIVIDED,
        types_api.GpuState.GPU_STATE_DEGRADED,
        types_api.GpuState.GPU_STATE_SLOW,
    }
)


def add_snapshot(
    page: MetricsPage,
    snapshot: types_api.Snapshot,
    style: Style,
    *,
    fresh: bool,
    elapsed: float = 0.0,
    gpus: bool = True,
    quarantined: Container[str] | None,
    held: Held = NOBODY,
) -> None:
    """Add what the one snapshot of a node says, sent or received `elapsed` seconds ago.

    `fresh`: whether its readings still count; else states and counts are shown alone. `gpus`: whether each GPU has its own
    series. `quarantined`: UUIDs in lower case of GPUs for no new work; None where that is not known. `held`: labels that series
    of a GPU have more, by its UUID.
    """
    node = labels({"node": snapshot.node})
    _add_readings(page, HOST, snapshot.host_reading if fresh else types_api.HostReading(), node)
    for gpu in snapshot.gpus if gpus else ():
        _add_gpu(page, snapshot, gpu, style, held, fresh=fresh, elapsed=elapsed)
        for pod in gpu.pods:
            page.add(GPU_POD, labels(own_labels(snapshot, gpu, held) | _pod_labels([pod])), 1)
        if quarantined is not None:
            found = gpu.uuid.lower() in quarantined or gpu.parent_uuid.lower() in quarantined
            page.add(GPU_QUARANTINED, labels(own_labels(snapshot, gpu, held)), int(found))
    working = sum(1 for gpu in snapshot.gpus if gpu.state in _WORKING) if fresh else 0
    page.add(GPUS, node, len(snapshot.gpus))
    page.add(GPUS_WORKING, node, working)
    page.add(GPU_PROBLEM, node, int(snapshot.gpu_problem != "" or working < len(snapshot.gpus)))


def _add_process(
    page: MetricsPage,
    snapshot: types_api.Snapshot,
    gpu: types_api.Gpu,
    held: Held,
    process: types_api.GpuProcess,
) -> None:
    said = labels(own_labels(snapshot, gpu, held) | _process_labels(process))
    if process.HasField("memory_used_bytes"):
        page.add(PROCESS_MEMORY, said, process.memory_used_bytes)
    if process.HasField("utilization_percent"):
        page.add(PROCESS_USE, said, process.utilization_percent / 100)
    if process.HasField("memory_utilization_percent"):
        page.add(PROCESS_MEMORY_USE, said, process.memory_utilization_percent / 100)
    if process.HasField("encoder_utilization_percent"):
        page.add(PROCESS_ENCODER_USE, said, process.encoder_utilization_percent / 100)
    if process.HasField("decoder_utilization_percent"):
        page.add(PROCESS_DECODER_USE, said, process.decoder_utilization_percent / 100)


def _add_gpu(
    page: MetricsPage,
    snapshot: types_api.Snapshot,
    gpu: types_api.Gpu,
    style: Style,
    held: Held,
    *,
    fresh: bool,
    elapsed: float,
) -> None:
    whose = own_labels(snapshot, gpu, held)
    state = gpu.state if fresh else types_api.GpuState.GPU_STATE_STALE
    page.add(GPU_STATE, labels({**whose, "state": _STATES.get(state, "UNSPECIFIED")}), 1)
    identity = {
        "model": gpu.model,
        "pci_bus_id": gpu.pci_bus_id,
        "driver_version": snapshot.host.driver_version,
        "cuda_version": snapshot.host.cuda_version,
        "serial": gpu.serial,
        "vbios_version": gpu.vbios_version,
        "simulated": "true" if gpu.simulated else "",
        "mig_profile": gpu.mig_profile,
        "parent_uuid": gpu.parent_uuid,
    }
    page.add(GPU_INFO, labels(whose | identity), 1)
    if gpu.reading.HasField("age"):
        page.add(GPU_AGE, labels(whose), round(seconds(gpu.reading.age) + elapsed, 3))
    if not fresh:
        return
    absent = gpu.reading.absent_readings
    for status, count in sorted(Counter(map(attrgetter("status"), absent)).items()):
        page.add(GPU_ABSENT, labels({**whose, "reason": _REASONS.get(status, "UNSPECIFIED")}), count)
    if state not in _WORKING:
        return
    reading, own = gpu.reading, labels(whose)
    if "processes" not in map(attrgetter("field"), absent):
        page.add(GPU_PROCESSES, own, len(reading.processes))
    for process in nlargest(MOST_PROCESSES, reading.processes, key=attrgetter("memory_used_bytes")):
        _add_process(page, snapshot, gpu, held, process)
    for reason in reading.throttle_reasons:
        page.add(GPU_THROTTLED, labels({**whose, "reason": reason}), 1)
    if reading.HasField("recovery_action"):
        action = _ACTIONS.get(reading.recovery_action, "UNSPECIFIED")
        page.add(GPU_RECOVERY, labels({**whose, "action": action}), 1)
    if style.names != "dcgm":
        _add_readings(page, GPU, reading, own)
    _add_readings(page, _DCGM[style.names], reading, dcgm_labels(snapshot, gpu, style, held))


def with_pods(held: Held, gpus: Iterable[types_api.Gpu]) -> Held:
    """These labels, and those of the pods that were given GPUs."""
    return {
        **held,
        **{gpu.uuid: {**held.get(gpu.uuid, {}), **_pod_labels(gpu.pods)} for gpu in gpus if gpu.pods},
    }


def _pod_labels(pods: Iterable[str]) -> dict[str, str]:
    """As dcgm-exporter labels the series of a GPU; several stand with commas between."""
    spaces, names = zip(*(pod.split("/", 1) for pod in pods), strict=True)
    return {"namespace": ",".join(sorted({*spaces})), "pod": ",".join(names)}


def _process_labels(process: types_api.GpuProcess) -> dict[str, str]:
    reservation = process.reservation.removeprefix("reservations/")
    namespace, _, pod = process.pod.rpartition("/")
    return {
        "pid": str(process.pid),
        "user": process.user,
        "program": process.program,
        "container": process.container,
        "namespace": namespace,
        "pod": pod,
        "reservation": reservation,
    }


def _add_readings(page: MetricsPage, table: Iterable[ReadingSeries], reading: Message, text: str) -> None:
    for series in table:
        if reading.HasField(series.field):
            value: float = getattr(reading, series.field)
            page.add(series.family, text, series.convert(value))


def own_labels(snapshot: types_api.Snapshot, gpu: types_api.Gpu, held: Held = NOBODY) -> dict[str, str]:
    """The labels of our own series of a GPU. The UUID tells it apart; the index is for eyes."""
    return {"node": snapshot.node, "gpu": str(gpu.index), "uuid": gpu.uuid, **held.get(gpu.uuid, {})}


def dcgm_labels(snapshot: types_api.Snapshot, gpu: types_api.Gpu, style: Style, held: Held = NOBODY) -> str:
    """The labels of dcgm-exporter, in its order; without modelName where promtool, who wants snake_case, is to pass.

    A MIG instance has the index and address of its GPU, its profile, its number on the GPU, and its own UUID.
    """
    host = snapshot.host
    return labels(
        {
            "gpu": str(gpu.index),
            "UUID": gpu.uuid,
            "pci_bus_id": gpu.pci_bus_id,
            "device": f"nvidia{gpu.index}",
            "modelName": "" if style.names == "checked" else gpu.model,
            "GPU_I_PROFILE": gpu.mig_profile,
            "GPU_I_ID": str(gpu.gpu_instance_id) if gpu.HasField("gpu_instance_id") else "",
            style.host_label: host.hostname or snapshot.node,
            "DCGM_FI_DRIVER_VERSION": host.driver_version,
            "DCGM_FI_DEV_SERIAL": gpu.serial,
            "DCGM_FI_DEV_VBIOS_VERSION": gpu.vbios_version,
            "node": snapshot.node if style.many_nodes else "",
            **held.get(gpu.uuid, {}),
        }
    )


TIMEOUT_SECONDS = 1.0
KEPT_SECONDS = 60.0
"""How long the last answer serves while the allocator gives none: series that come and go are no use."""


class HolderLabels:
    """Asks the allocator at the end of a channel, of one node, or of all where it has no name.

    Raises:
        FailedPreconditionError: there is no channel.
    """

    def __init__(self, allocator: grpc.aio.Channel | None, clock: Clock, node: str = "") -> None:
        if allocator is None:
            raise FailedPreconditionError("metrics_holders needs allocator_address", reason="NO_ALLOCATOR")
        self._stub = allocator_api.AllocatorServiceStub(allocator)
        self._filter = f'gpus.node:"{node}"' if node else ""
        self._clock = clock
        self._last: Mapping[str, Mapping[str, str]] = {}
        self._until = 0.0

    async def ask(self) -> Mapping[str, Mapping[str, str]]:
        """The labels of each GPU that is held, by UUID; those who share one stand with commas between."""
        found: defaultdict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        request = allocator_api.ListReservationsRequest(page_size=1000, filter=self._filter)
        while True:
            try:
                answer = await self._stub.ListReservations(request, timeout=TIMEOUT_SECONDS)
            except grpc.aio.AioRpcError:
                return self._last if self._clock.now() < self._until else {}
            for one in answer.reservations:
                job = one.name.removeprefix("reservations/") if one.HasField("job") else ""
                for gpu in one.gpus:
                    for label, value in (("holder", one.holder), ("tenant", one.tenant), ("hpc_job", job)):
                        found[gpu.uuid][label].add(value)
            request.page_token = answer.next_page_token
            if not request.page_token:
                break
        self._last = {
            uuid: {label: ",".join(sorted(filter(None, values))) for label, values in labels.items()}
            for uuid, labels in found.items()
        }
        self._until = self._clock.now() + KEPT_SECONDS
        return self._last
