"""Other monitors of GPUs, each asked once a second for ever: what bench/telemetry.py compares the agent with.

python bench/_telemetry_peers.py minimal|gpustat|nvitop|nvitop_exporter|empty
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

PERIOD = 1.0


def minimal() -> Callable[[], object]:
    """The least that a monitor can do: five readings of each GPU, straight from nvidia-ml-py."""
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def ask() -> object:
        return [
            (
                pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2),
                pynvml.nvmlDeviceGetUtilizationRates(handle),
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                pynvml.nvmlDeviceGetPowerUsage(handle),
                pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
            )
            for handle in handles
        ]

    return ask


def gpustat() -> Callable[[], object]:
    """Gpustat's query, as its --json and --watch make it."""
    from gpustat import new_query

    return new_query


def nvitop() -> Callable[[], object]:
    """Nvitop's snapshot of every device and of the processes on it."""
    from nvitop import Device

    devices = Device.all()
    return lambda: [(device.as_snapshot(), device.processes()) for device in devices]


def nvitop_exporter() -> Callable[[], object]:
    """Nvitop-exporter's update each second, and its page for a scrape every 5 s."""
    from nvitop import Device
    from nvitop_exporter.exporter import PrometheusExporter
    from prometheus_client import CollectorRegistry, generate_latest

    devices, registry, count = Device.all(), CollectorRegistry(), 0
    exporter = PrometheusExporter(devices, registry=registry)

    def ask() -> object:
        nonlocal count
        count += 1
        exporter.update_host()
        for device in devices:
            exporter.update_device(device)
        return count % 5 or generate_latest(registry)

    return ask


def empty() -> Callable[[], object]:
    """Python asleep."""
    return lambda: None


def main() -> None:
    """Ask once a second; a question that takes longer than that is asked again at once."""
    known = {one.__name__: one for one in (minimal, gpustat, nvitop, nvitop_exporter, empty)}
    ask = known[sys.argv[1]]()
    due = time.monotonic()
    while True:
        ask()
        due = max(due + PERIOD, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main()
