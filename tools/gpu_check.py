"""Check gpuscale on real GPUs of NVIDIA, and write a page about it: `make gpu-check`.

    python tools/gpu_check.py [--seconds 60] [--output docs/hardware]

Runs the agent beside raw NVML, and beside nvidia-smi where it is there, and compares reading by reading; measures what the
agent costs; then reserves a GPU on a `gpuscalectl up` of its own, runs a load on it (copies of device memory through the CUDA
driver, where that is there) and looks whether use, process and recording are seen. Only getters of the driver are called: MIG
is looked at and left as it is. Exits with 1 where a reading is wrong. The page says what could not be checked, and why; how far
figures may be apart, and how many different ones there were: what never moved was compared at one value only.
"""

import argparse
import ctypes
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pynvml
from google.protobuf.duration_pb2 import Duration

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client import Client, connect
from gpuscale.common.errors import GpuscaleError

nvml: Any = pynvml
"""More of it than the agent uses, which is what there are types for."""
BIN = Path(sys.executable).parent
MIB = 1 << 20
NO_ROOM = 5
"""The exit code of a command for which there was no room."""
SLOW_SECONDS = 31.0
"""The agent reads some at most so seldom, so they may be as old."""
ENERGY_JOULES = 5 * 1500.0
"""Energy is read every 5 s, and no GPU takes more than 1,500 W."""


@dataclass(frozen=True)
class Check:
    """A reading, how raw NVML tells it in the same unit, and how far both may be apart for the time between them."""

    name: str
    raw: Callable[[Any], float]
    apart: float = 0.0


def fields(*keys: int | tuple[int, int], unit: float = 1.0) -> Callable[[Any], float]:
    """What the sum of NVML's field values tells; `unit` is how many of the reading's units one of NVML's is."""
    members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")  # by nvmlValueType_t

    def raw(gpu: Any) -> float:
        total = 0.0
        told: Sequence[Any] = nvml.nvmlDeviceGetFieldValues(gpu, list(keys))
        for one in told:
            if one.nvmlReturn:
                raise pynvml.NVMLError(one.nvmlReturn)
            kind: int = one.valueType
            total += getattr(one.value, members[kind])
        return total * unit

    return raw


def clock(kind: int, ask: str = "nvmlDeviceGetClockInfo") -> Callable[[Any], float]:
    """A clock in MHz."""
    return lambda gpu: getattr(nvml, ask)(gpu, kind)


def rows(place: int) -> Callable[[Any], float]:
    """One of the figures of remapped rows."""
    return lambda gpu: nvml.nvmlDeviceGetRemappedRows(gpu)[place]


def links_up(gpu: Any) -> float:
    """How many NVLinks are up; NVMLError where there is none."""
    up = [nvml.nvmlDeviceGetNvLinkState(gpu, 0)]
    with suppress(pynvml.NVMLError):
        up.extend(nvml.nvmlDeviceGetNvLinkState(gpu, link) for link in range(1, 36))
    return sum(up)


def licensed(gpu: Any) -> float:
    """Whether a vGPU has its licence; NVMLError where none is needed."""
    found = nvml.nvmlDeviceGetGridLicensableFeatures(gpu)
    states = {one.featureCode: one.featureState > 0 for one in found.gridLicensableFeatures}
    vgpu = nvml.NVML_GRID_LICENSE_FEATURE_CODE_VGPU
    if not found.isGridLicenseSupported or vgpu not in states:
        raise pynvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return float(states[vgpu])


def running(gpu: Any) -> float:
    """How many processes use the GPU."""
    lists = (nvml.nvmlDeviceGetComputeRunningProcesses(gpu), nvml.nvmlDeviceGetGraphicsRunningProcesses(gpu))
    return len({one.pid for found in lists for one in found})


class Counters:
    """What GPM counted of each GPU between the last two calls of `sample`, by metric."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._means: dict[str, dict[int, float]] = {}

    def sample(self, gpu: Any) -> None:
        """Take a sample, and see what there was since the one before."""
        uuid, newer = nvml.nvmlDeviceGetUUID(gpu), nvml.nvmlGpmSampleAlloc()
        with suppress(pynvml.NVMLError):
            nvml.nvmlGpmSampleGet(gpu, newer)
            older, self._last[uuid] = self._last.get(uuid), newer
            if older is None:
                return
            asked = nvml.c_nvmlGpmMetricsGet_t()
            asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
            asked.sample1, asked.sample2 = older, newer
            for one, metric in zip(asked.metrics, GPM.values(), strict=False):
                one.metricId = metric
            nvml.nvmlGpmMetricsGet(asked)
            told = asked.metrics[: len(GPM)]
            self._means[uuid] = {one.metricId: one.value for one in told if not one.nvmlReturn}
            nvml.nvmlGpmSampleFree(older)

    def mean(self, metric: int) -> Callable[[Any], float]:
        """Tells a metric of a GPU, rates in bytes; NVMLError where there is none."""

        def raw(gpu: Any) -> float:
            found = self._means.get(nvml.nvmlDeviceGetUUID(gpu), {})
            if metric not in found:
                raise pynvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
            return found[metric] * (MIB if metric >= nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC else 1)

        return raw


GPM: dict[str, int] = {
    "graphics_activity_percent": nvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm_activity_percent": nvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_percent": nvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_activity_percent": nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "memory_bandwidth_percent": nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64_activity_percent": nvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32_activity_percent": nvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16_activity_percent": nvml.NVML_GPM_METRIC_FP16_UTIL,
    "pcie_sent_bytes_per_second": nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_received_bytes_per_second": nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_sent_bytes_per_second": nvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_received_bytes_per_second": nvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
COUNTERS = Counters()
"""The agent's own means are of other 5 s, so these are compared where the load is steady, and roughly."""
ALL_LINKS = 0xFFFFFFFF
CHECKS = (
    Check("memory_total_bytes", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    Check("memory_free_bytes", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free, 64 * MIB),
    Check(
        "memory_used_bytes", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used, 64 * MIB
    ),
    Check(
        "memory_reserved_bytes", lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).reserved
    ),
    Check("utilization_percent", lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, 10),
    Check("memory_utilization_percent", lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory, 10),
    Check("encoder_utilization_percent", lambda gpu: nvml.nvmlDeviceGetEncoderUtilization(gpu)[0], 20),
    Check("decoder_utilization_percent", lambda gpu: nvml.nvmlDeviceGetDecoderUtilization(gpu)[0], 20),
    *(
        Check(name, COUNTERS.mean(metric), 40 if name.endswith("_percent") else 1e11)
        for name, metric in GPM.items()
    ),
    Check("temperature_celsius", lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, 0), 2),
    Check("memory_temperature_celsius", fields(nvml.NVML_FI_DEV_MEMORY_TEMP), 5),
    Check("fan_speed_percent", nvml.nvmlDeviceGetFanSpeed, 30),
    Check("power_watts", lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, 60),
    Check("power_limit_watts", lambda gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
    Check("power_limit_default_watts", lambda gpu: nvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu) / 1000),
    Check(
        "power_limit_min_watts", lambda gpu: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[0] / 1000
    ),
    Check(
        "power_limit_max_watts", lambda gpu: nvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1] / 1000
    ),
    Check("energy_joules", lambda gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000, ENERGY_JOULES),
    Check("sm_clock_mhz", clock(nvml.NVML_CLOCK_SM), 200),
    Check("memory_clock_mhz", clock(nvml.NVML_CLOCK_MEM), 200),
    Check("video_clock_mhz", clock(nvml.NVML_CLOCK_VIDEO), 200),
    Check("sm_clock_max_mhz", clock(nvml.NVML_CLOCK_SM, "nvmlDeviceGetMaxClockInfo")),
    Check("memory_clock_max_mhz", clock(nvml.NVML_CLOCK_MEM, "nvmlDeviceGetMaxClockInfo")),
    Check("performance_state", nvml.nvmlDeviceGetPerformanceState, 16),
    Check("throttle_reason_mask", nvml.nvmlDeviceGetCurrentClocksEventReasons, 1 << 16),
    *(
        Check(
            f"{why}_violation_seconds",
            fields(getattr(nvml, f"NVML_FI_DEV_PERF_POLICY_{why.upper()}"), unit=1e-9),
            SLOW_SECONDS,
        )
        for why in ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
    ),
    Check("pcie_link_generation", nvml.nvmlDeviceGetCurrPcieLinkGeneration, 5),
    Check("pcie_link_width", nvml.nvmlDeviceGetCurrPcieLinkWidth),
    Check("pcie_replay_count", fields(nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER), 100),
    Check("pcie_sent_bytes", fields(nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES), SLOW_SECONDS * 128e9),
    Check("pcie_received_bytes", fields(nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES), SLOW_SECONDS * 128e9),
    Check("bar1_total_bytes", lambda gpu: nvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Total),
    Check("bar1_used_bytes", lambda gpu: nvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Used, 64 * MIB),
    Check("bar1_free_bytes", lambda gpu: nvml.nvmlDeviceGetBAR1MemoryInfo(gpu).bar1Free, 64 * MIB),
    Check("nvlink_active_count", links_up),
    *(
        Check(f"nvlink_{way}_bytes", fields((key, ALL_LINKS), unit=1024), SLOW_SECONDS * 1e12)
        for way, key in (
            ("sent", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            ("received", nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
        )
    ),
    Check(
        "nvlink_crc_error_count",
        fields(
            nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        ),
        100,
    ),
    Check("nvlink_replay_error_count", fields(nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL), 100),
    Check("nvlink_recovery_error_count", fields(nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL), 100),
    Check("ecc_mode", fields(nvml.NVML_FI_DEV_ECC_CURRENT)),
    Check("ecc_mode_pending", fields(nvml.NVML_FI_DEV_ECC_PENDING)),
    Check("ecc_volatile_corrected_count", fields(nvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL), 100),
    Check("ecc_volatile_uncorrected_count", lambda gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, 1, 0)),
    Check("ecc_aggregate_corrected_count", fields(nvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL), 100),
    Check("ecc_aggregate_uncorrected_count", fields(nvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL)),
    Check("retired_pages_corrected_count", fields(nvml.NVML_FI_DEV_RETIRED_SBE)),
    Check("retired_pages_uncorrected_count", fields(nvml.NVML_FI_DEV_RETIRED_DBE)),
    Check("retired_pages_pending", fields(nvml.NVML_FI_DEV_RETIRED_PENDING)),
    Check("remapped_rows_corrected_count", rows(0)),
    Check("remapped_rows_uncorrected_count", rows(1)),
    Check("remapped_rows_pending", rows(2)),
    Check("remapped_rows_failed", rows(3)),
    # The contract counts from 1: its 0 is "not stated".
    Check("recovery_action", lambda gpu: 1 + fields(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)(gpu)),
    Check("compute_mode", nvml.nvmlDeviceGetComputeMode),
    Check("persistence_mode", nvml.nvmlDeviceGetPersistenceMode),
    Check("vgpu_licensed", licensed),
    Check("processes", running),
)
NOT_COMPARED = {"nvlink_bytes_per_second": "the growth of nvlink_sent_bytes and nvlink_received_bytes"}
SMI = {
    "memory.total": ("memory_total_bytes", MIB, MIB),
    "temperature.gpu": ("temperature_celsius", 1, 2),
    "power.limit": ("power_limit_watts", 1, 0.01),
    "pcie.link.width.current": ("pcie_link_width", 1, 0),
}
"""Columns of nvidia-smi: the reading, how many of its units one is, and how far both may be apart."""


@dataclass
class Compared:
    """How often a reading was compared, how often it was wrong, how far it was off, and what raw NVML said of it."""

    apart: float = 0.0
    times: int = 0
    wrong: int = 0
    largest: float = 0.0
    absent: int = 0
    values: set[float] = field(default_factory=set[float])


@dataclass
class Found:
    """What is written on the page."""

    model: str = ""
    facts: dict[str, str] = field(default_factory=dict[str, str])
    compared: dict[str, Compared] = field(default_factory=dict[str, Compared])
    load: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    @property
    def wrong(self) -> list[str]:
        """The readings that were wrong at least once."""
        return [name for name, one in self.compared.items() if one.wrong]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def program(*words: str) -> Generator[psutil.Process]:
    """A program that runs while this does; its output is shown where it ends by itself."""
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(words, stdout=log, stderr=log) as started:
        try:
            yield psutil.Process(started.pid)
        finally:
            ended = started.poll()
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
            if ended is not None:
                log.seek(0)
                sys.stderr.write(log.read())


def compare(name: str, found: Found, ours: float | None, raw: Sequence[float | None], apart: float) -> None:
    """Whether a reading lies between two raw ones, one before it and one after it, or near them."""
    one = found.compared.setdefault(name, Compared(apart))
    told = [value for value in raw if value is not None]
    if ours is None or not told:
        one.absent += 1
        one.wrong += ours is None and bool(told)  # what the driver tells by that call, and the agent does not
        return
    one.times += 1
    one.values.update(told)
    difference = max(min(told) - ours, ours - max(told), 0.0)
    one.largest = max(one.largest, difference)
    one.wrong += difference > apart


def raw_value(check: Check, handle: Any) -> float | None:
    """What raw NVML tells; None where it does not."""
    with suppress(pynvml.NVMLError):
        return float(check.raw(handle))
    return None


def our_value(reading: types_api.GpuReading, name: str) -> float | None:
    """What the agent tells; None where it does not."""
    if name == "processes":
        return float(len(reading.processes))
    message: Any = reading
    return float(getattr(message, name)) if message.HasField(name) else None


def beside_nvml(found: Found, seconds: float) -> None:
    """Compare each reading once a second, and measure the agent."""
    address = f"127.0.0.1:{free_port()}"
    words = (str(BIN / "gpuscale-agent"), "--source", "nvml", "--listen", address, "--node", "gpu-check")
    with (
        tempfile.TemporaryDirectory() as state,
        program(*words, "--state-dir", state) as agent,
        connect(address, dial_timeout=30) as client,
    ):
        wait_until(lambda: client.agent.GetSnapshot(monitor_api.GetSnapshotRequest()).snapshot.gpus)
        time.sleep(min(8.0, 2 * seconds))  # every tier has been read, GPM twice
        cpu, began = cpu_seconds(agent), time.monotonic()
        time.sleep(seconds)
        spent, lasted = cpu_seconds(agent) - cpu, time.monotonic() - began
        found.facts["agent, CPU of a core"] = (
            f"{100 * spent / lasted:.2f} % in {lasted:.0f} s, asked by nobody"
        )
        look(found, client)
        while time.monotonic() < began + 2 * seconds:
            time.sleep(1.0)
            look(found, client)
        found.facts["agent, resident memory"] = f"{agent.memory_info().rss / MIB:.0f} MiB"
        beside_smi(found, client)


def look(found: Found, client: Client) -> None:
    """Compare a snapshot with raw NVML before and after it."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    for handle in handles:
        COUNTERS.sample(handle)
    before = [[raw_value(check, handle) for check in CHECKS] for handle in handles]
    now = monitor_api.GetSnapshotRequest(
        max_age=Duration()
    )  # read between the two, not up to a second before
    snapshot = client.agent.GetSnapshot(now).snapshot
    after = [[raw_value(check, handle) for check in CHECKS] for handle in handles]
    whole = {gpu.index: gpu for gpu in snapshot.gpus if not gpu.parent_uuid}
    for index, gpu in sorted(whole.items()):
        found.model = found.model or gpu.model
        for place, check in enumerate(CHECKS):
            raw = (before[index][place], after[index][place])
            compare(check.name, found, our_value(gpu.reading, check.name), raw, check.apart)
    facts = found.facts
    facts["GPUs"] = f"{len(whole)} x {found.model}"
    facts["driver"] = snapshot.host.driver_version
    facts["kernel module"] = kernel_module()
    facts["MIG"] = ", ".join(gpu.mig_profile for gpu in snapshot.gpus if gpu.parent_uuid) or "off"
    facts["not supported"] = (
        ", ".join(sorted({one.field for one in whole[0].reading.absent_readings})) or "nothing"
    )


def kernel_module() -> str:
    """What says that there is hardware: a library alone may be a stand-in."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "**none** (usual under WSL only): a library that stands in for a driver says nothing about hardware"


def beside_smi(found: Found, client: Client) -> None:
    """Compare a snapshot with a line of nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        found.notes.append("nvidia-smi is not there: nothing was compared with it.")
        return
    asked = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    snapshot = client.agent.GetSnapshot(monitor_api.GetSnapshotRequest()).snapshot
    for gpu in (one for one in snapshot.gpus if not one.parent_uuid):
        for (column, (name, unit, apart)), cell in zip(SMI.items(), lines[gpu.index].split(","), strict=True):
            with suppress(ValueError):
                told = float(cell) * unit
                compare(f"{name} (nvidia-smi {column})", found, our_value(gpu.reading, name), [told], apart)


def cpu_seconds(process: psutil.Process) -> float:
    """By the scheduler's own count, which is finer than clock ticks."""
    return (
        sum(
            int(path.read_text().split()[0]) for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        )
        / 1e9
    )


def under_load(found: Found, seconds: float) -> None:
    """Reserve a GPU, run a load on it, and look whether it is seen."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        found.notes.append(
            "the CUDA driver library is not there: a command that does nothing ran in place of a load."
        )
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as state:
        up = (str(BIN / "gpuscalectl"), "up", "--no-dashboard", "--data-dir", state, "--listen", address)
        with program(*up), connect(address, dial_timeout=60) as client:
            wait_until(lambda: any(node.snapshot.gpus for node in nodes(client)))
            ctl = (str(BIN / "gpuscalectl"), "--address", address)
            load = (sys.executable, __file__, "--load", str(seconds))
            with subprocess.Popen(
                [*ctl, "run", "--gpus", "1", "--wait", "60s", "--", *load], stdout=subprocess.PIPE, text=True
            ) as ran:
                seen = watch_load(client, ran, time.monotonic() + seconds + 120)
                said = ran.communicate(timeout=10)[0].strip()
            found.load["run --gpus 1"] = f"exit code {ran.returncode}; {said or 'said nothing'}"
            found.load |= seen
            left = json.loads(ask(ctl, "get", "reservations", "-o", "json"))["reservations"]
            found.load["reservations left"] = str(len(left))
            if ran.returncode == NO_ROOM and not left:
                found.notes.append("no GPU was free: no load ran, and nothing about one was checked.")
            elif ran.returncode or left:
                found.compared.setdefault("run under a reservation", Compared()).wrong += 1
            recorded = ask(ctl, "record", "--", "sleep", str(min(3.0, seconds)))
            found.load["record"] = "; ".join(" ".join(line.split()) for line in recorded.splitlines()[:3])


def nodes(client: Client) -> Iterable[monitor_api.Node]:
    """What the fleet says of its nodes."""
    return client.fleet.ListNodes(monitor_api.ListNodesRequest()).nodes


def wait_until(there: Callable[[], object]) -> None:
    """Wait until the services answer, and this is so."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with suppress(GpuscaleError):
            if there():
                return
        time.sleep(0.2)


def watch_load(client: Client, load: subprocess.Popen[str], until: float) -> dict[str, str]:
    """The highest readings while the load runs, and whether its process is seen under its reservation."""
    highest: dict[str, float] = {}
    processes = set[str]()
    while load.poll() is None and time.monotonic() < until:
        with suppress(GpuscaleError):
            for node in nodes(client):
                for gpu in node.snapshot.gpus:
                    for name, value in readings(gpu.reading):
                        highest[name] = max(highest.get(name, 0.0), value)
                    processes |= {
                        f"{one.program} ({one.user})" for one in gpu.reading.processes if one.reservation
                    }
        time.sleep(0.5)
    return {
        **{f"highest {name}": f"{value:g}" for name, value in highest.items()},
        "processes seen under the reservation": ", ".join(sorted(processes)) or "none",
    }


def readings(reading: types_api.GpuReading) -> Iterable[tuple[str, float]]:
    """What a load moves."""
    names = ("utilization_percent", "power_watts", "sm_activity_percent", "memory_bandwidth_percent")
    found = ((name, our_value(reading, name)) for name in names)
    return [(name, value) for name, value in found if value is not None]


def ask(ctl: Sequence[str], *words: str) -> str:
    """What a command prints, or how it failed."""
    ran = subprocess.run([*ctl, *words], capture_output=True, text=True, timeout=120, check=False)
    return ran.stdout if ran.returncode == 0 else f"exit code {ran.returncode}: {ran.stderr.strip()}"


def copy_memory(seconds: float) -> str:
    """Copy device memory over and over on the first GPU that is visible; what was done, in words."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        time.sleep(seconds)
        return "no CUDA driver library: slept"
    size, context, buffers = 1 << 30, ctypes.c_void_p(), (ctypes.c_uint64 * 2)()

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} gave {code}")

    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    for place in range(2):
        call("cuMemAlloc_v2", ctypes.byref(buffers, 8 * place), ctypes.c_size_t(size))
    copies, began = 0, time.monotonic()
    while time.monotonic() < began + seconds:
        for _ in range(64):
            target, source = (ctypes.c_uint64(buffers[copies % 2]), ctypes.c_uint64(buffers[1 - copies % 2]))
            call("cuMemcpyDtoDAsync_v2", target, source, ctypes.c_size_t(size), None)
            copies += 1
        call("cuCtxSynchronize")
    return f"copied {copies * size / (time.monotonic() - began) / 1e9:.0f} GB/s"


def page(found: Found, seconds: float) -> str:
    """The page about this hardware."""
    lines = [
        f"# {found.model}",
        "",
        f"By `make gpu-check` of gpuscale {version('gpuscale')}, {time.strftime('%Y-%m-%d', time.gmtime())}, {seconds:.0f} s.",
        f"Wrong: {', '.join(found.wrong) or 'nothing'}.",
        "",
    ]
    lines += [
        "| what | found |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in found.facts.items()),
        "",
    ]
    lines += ["Readings beside raw NVML, once a second and GPU; those of nvidia-smi once:", ""]
    lines += [
        "| reading | compared | different values | may be off by | was off by | wrong | not told |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in found.compared.items():
        figures = (one.times, len(one.values), f"{one.apart:g}", f"{one.largest:g}", one.wrong, one.absent)
        lines.append(f"| `{name}` | {' | '.join(map(str, figures))} |")
    lines += ["", *(f"Not compared: `{name}`, {why}." for name, why in NOT_COMPARED.items())]
    lines += [
        "",
        "| under load | found |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in found.load.items()),
    ]
    lines += ["", *found.notes] if found.notes else []
    return "\n".join(lines) + "\n"


def add_to_index(path: Path, model: str) -> None:
    """Name a page in the list of pages beside it, where there is one."""
    index, line = path.with_name("README.md"), f"- [{model}]({path.name})\n"
    if index.exists() and line not in (text := index.read_text(encoding="utf-8")):
        index.write_text(text.replace("- none yet\n", "") + line, encoding="utf-8")


def main() -> None:
    """Check, write the page, and say where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=Path("docs/hardware"))
    parser.add_argument("--load", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load is not None:
        print(copy_memory(asked.load))
        return
    try:
        nvml.nvmlInit()
    except pynvml.NVMLError as error:
        sys.exit(f"there is no NVIDIA driver to check: {error}")
    found = Found()
    beside_nvml(found, asked.seconds)
    under_load(found, min(asked.seconds, 15.0))
    asked.output.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", found.model.lower()).strip("-")
    path = asked.output / f"{name}.md"
    path.write_text(page(found, asked.seconds), encoding="utf-8")
    add_to_index(path, found.model)
    print(f"wrote {path}")
    if found.wrong:
        sys.exit(f"wrong: {', '.join(found.wrong)}")


if __name__ == "__main__":
    main()
