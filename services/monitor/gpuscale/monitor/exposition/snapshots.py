"""The series of a snapshot's host and GPUs, labelled with who holds each GPU."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from heapq import nlargest
from operator import attrgetter
from typing import Any, TypeAlias

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
    PROCESS,
    ReadingSeries,
    Style,
    gauge,
)

GPU_INFO = gauge("gpuscale_gpu_info", "Identity of a GPU; always 1.")
GPU_POD = gauge("gpuscale_gpu_pod_info", "1 for each pod that the kubelet gave a GPU.")
GPU_STATE = gauge("gpuscale_gpu_state", "1 for the current state of a GPU; other states have no series.")
GPU_AGE = gauge("gpuscale_gpu_reading_age_seconds", "How long ago a GPU was read.")
GPU_ABSENT = gauge("gpuscale_gpu_absent_readings", "Readings of a GPU that are absent, by reason.")
GPU_PROCESSES = gauge("gpuscale_gpu_processes", "Processes that hold memory of a GPU.")
MOST_PROCESSES = 16
"""How many processes of a GPU have series: those that hold the most memory."""
GPU_QUARANTINED = gauge("gpuscale_gpu_quarantined", "1 while no new work should be placed on a GPU.")
GPU_THROTTLED = gauge("gpuscale_gpu_throttled", "1 for each reason that throttles the clocks of a GPU.")
GPU_RECOVERY = gauge("gpuscale_gpu_recovery_action", "1 for the recovery action that the driver asks for.")
GPUS = gauge("gpuscale_node_gpus", "GPUs of a node, including lost ones.")
GPUS_WORKING = gauge("gpuscale_node_gpus_working", "GPUs of a node that answer and need no reset.")
GPU_PROBLEM = gauge("gpuscale_node_gpu_problem", "1 while GPUs of a node cannot be read or found.")

Held: TypeAlias = Mapping[str, Mapping[str, str]]
"""Labels that name the holders of GPUs, by UUID."""
NOBODY: Held = {}

_DCGM = {"checked": DCGM_CHECKED, "all": DCGM, "dcgm": DCGM, "gpuscale": ()}
_KINDS = types_api.HostReading, types_api.GpuReading, types_api.GpuProcess
_FIELDS = {field: field.name for kind in _KINDS for field in kind.DESCRIPTOR.fields}
_STATES = {number: name.removeprefix("GPU_STATE_") for name, number in types_api.GpuState.items()}
_REASONS = {number: name.removeprefix("READING_STATUS_") for name, number in types_api.ReadingStatus.items()}
_ACTIONS = {
    number: name.removeprefix("RECOVERY_ACTION_") for name, number in types_api.RecoveryAction.items()
}
# In other states, the last readings are out of date.
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
    """Add a snapshot that was sent or received `elapsed` seconds ago.

    `fresh`: False leaves out readings. `gpus`: False leaves out series of single GPUs. `quarantined`: lower-case UUIDs, None if
    unknown.
    """
    node = labels({"node": snapshot.node})
    _add_readings(page, HOST, _values(snapshot.host_reading) if fresh else {}, node)
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
        namespace, _, pod = process.pod.rpartition("/")
        of_process = {
            "pid": str(process.pid),
            "user": process.user,
            "program": process.program,
            "container": process.container,
            "namespace": namespace,
            "pod": pod,
            "reservation": process.reservation.removeprefix("reservations/"),
        }
        _add_readings(page, PROCESS, _values(process), labels(whose | of_process))
    for reason in reading.throttle_reasons:
        page.add(GPU_THROTTLED, labels({**whose, "reason": reason}), 1)
    if reading.HasField("recovery_action"):
        action = _ACTIONS.get(reading.recovery_action, "UNSPECIFIED")
        page.add(GPU_RECOVERY, labels({**whose, "action": action}), 1)
    values = _values(reading)
    if style.names != "dcgm":
        _add_readings(page, GPU, values, own)
    _add_readings(page, _DCGM[style.names], values, dcgm_labels(snapshot, gpu, style, held))


def with_pods(held: Held, gpus: Iterable[types_api.Gpu]) -> Held:
    """`held`, with the labels of pods added."""
    return {
        **held,
        **{gpu.uuid: {**held.get(gpu.uuid, {}), **_pod_labels(gpu.pods)} for gpu in gpus if gpu.pods},
    }


def _pod_labels(pods: Iterable[str]) -> dict[str, str]:
    """The labels that dcgm-exporter gives a GPU of these pods, joined by commas."""
    spaces, names = zip(*(pod.split("/", 1) for pod in pods), strict=True)
    return {"namespace": ",".join(sorted({*spaces})), "pod": ",".join(names)}


def _add_readings(
    page: MetricsPage, table: Iterable[ReadingSeries], values: Mapping[str, Any], text: str
) -> None:
    for series in table:
        if (value := values.get(series.field)) is not None:
            page.add(series.family, text, series.convert(value))


def _values(reading: Message) -> dict[str, Any]:
    """The fields that a message has: sooner had together than each by its name."""
    return {_FIELDS[field]: value for field, value in reading.ListFields()}


def own_labels(snapshot: types_api.Snapshot, gpu: types_api.Gpu, held: Held) -> dict[str, str]:
    """The labels of gpuscale's own series of a GPU."""
    return {"node": snapshot.node, "gpu": str(gpu.index), "uuid": gpu.uuid, **held.get(gpu.uuid, {})}


def dcgm_labels(snapshot: types_api.Snapshot, gpu: types_api.Gpu, style: Style, held: Held) -> str:
    """The labels of dcgm-exporter, in its order; without modelName in style `checked`, as promtool wants snake_case.

    A MIG instance has the index and address of its GPU.
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
"""How long the last answer serves while the allocator does not answer."""


class HolderLabels:
    """Asks the allocator who holds the GPUs of a node, or of all. Raises FailedPreconditionError without an allocator."""

    def __init__(self, allocator: grpc.aio.Channel | None, clock: Clock, node: str = "") -> None:
        if allocator is None:
            raise FailedPreconditionError("metrics_holders needs allocator_address", reason="NO_ALLOCATOR")
        self._stub = allocator_api.AllocatorServiceStub(allocator)
        self._filter = f'gpus.node:"{node}"' if node else ""
        self._clock = clock
        self._last: Held = {}
        self._until = 0.0

    async def ask(self) -> Held:
        """The labels of held GPUs; holders that share a GPU are joined by commas."""
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
