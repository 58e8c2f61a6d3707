"""Each reading of a GPU from raw NVML to JSON, /metrics and the GPU's page: the same value, in the unit that its name says.

What raw NVML says of a reading is told by the table of `make gpu-check`, which has every one.
"""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pynvml
import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.output import to_dict
from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.dashboard.rows import by_topic
from gpuscale.monitor.agent.nvml import NvmlSource
from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS
from gpuscale.monitor.exposition.snapshots import add_snapshot
from gpuscale.monitor.model.prometheus import DCGM, GPU, Style
from gpuscale.monitor.model.readings import GPU_FIELDS, GpuView
from gpuscale.monitor.wire import to_snapshot
from tests.support.monitor_values import snapshot_read
from tests.support.nvml_double import FIELD_IDS, GIB, DoubleGpu, DoubleProcess, NvmlDouble, NvmlReturn
from tests.support.promtool import named, samples, value

BY_LABEL = {"throttle_reason_mask", "recovery_action", "processes"}
"""Readings that `/metrics` shows by labels."""
RATE = "nvlink_bytes_per_second"
OWN: dict[str, Callable[[float], float]] = {"ratio": lambda raw: raw / 100, "hertz": lambda raw: raw * 1e6}
"""From the unit of a reading to that of our own series, by the last word of its name."""
DCGMS: dict[str, Callable[[float], float]] = {
    "bytes": lambda raw: raw // 2**20,
    "joules": lambda raw: raw * 1e3,
    "seconds": lambda raw: raw * 1e9,
    "second": lambda raw: raw // (1024 * 1000),
}
"""The same of DCGM's, by the unit of the reading."""


def distinct(gpu: DoubleGpu) -> None:
    """Another number for every reading that is no switch."""
    gpu.utilization_percent, gpu.memory_utilization_percent = 95, 40
    gpu.memory_used_bytes, gpu.memory_reserved_bytes = 30 * GIB, GIB // 2
    gpu.memory_free_bytes = 11 * GIB  # on some GPUs more is reserved than the driver tells
    gpu.temperature_celsius, gpu.power_watts, gpu.enforced_power_limit_watts = 71, 512.345, 650.0
    gpu.sm_clock_mhz, gpu.memory_clock_mhz, gpu.video_clock_mhz = 1755, 2619, 1545
    gpu.max_sm_clock_mhz, gpu.max_memory_clock_mhz = 1981, 2620
    gpu.performance_state, gpu.event_reasons, gpu.encoder_percent, gpu.decoder_percent = 2, 0x84, 11, 12
    gpu.energy_joules, gpu.fan_percent, gpu.compute_mode, gpu.persistence_mode = 5001.5, 33, 3, 1
    gpu.pcie_generation, gpu.pcie_width, gpu.bar1_used_bytes, gpu.vgpu_licensed = 4, 8, 5 * GIB, 0
    gpu.nvlinks, gpu.processes = [-1] * 9, [DoubleProcess(pid) for pid in range(101, 124)]
    gpu.activity = {metric: 50.5 + place for place, metric in enumerate(GPM_METRICS.values())}
    gpu.fields |= {key: 1000 + place for place, key in enumerate(FIELD_IDS)}
    watts = {187: 210_000, 188: 720_000, 189: 700_000}  # lowest, highest and default limit
    switches = {1: 1, 2: 0, 31: 1, 144: 1, 145: 0, 165: 1}
    gpu.fields |= {82: 47, 83: 5_001_500, 230: 4} | watts | switches
    gpu.fields |= {74 + nth: (15 + 10 * nth) * 100_000_000 for nth in range(6)}
    gpu.ecc_corrected, gpu.ecc_uncorrected = (int(gpu.fields[key]) for key in (3, 4))
    gpu.remapped_rows = (int(gpu.fields[142]), int(gpu.fields[143]), 1, 0)


SNAPSHOT = snapshot_read(100.0)


class Shown:
    """What is shown of the readings of a GPU: as JSON, as a page of metrics, and as rows of the dashboard."""

    def __init__(self, source: NvmlSource, gpu: DoubleGpu, identity: Any) -> None:
        sample = source.read(gpu.uuid)
        view = GpuView(identity, sample.state, sample.reading, 99.0)
        message = to_snapshot(replace(SNAPSHOT, gpus=(view,)), now=100.0)
        self.reading: Any = message.gpus[0].reading
        data: Any = to_dict(message.gpus[0])
        self.json: dict[str, Any] = data["reading"]
        page = MetricsPage()
        add_snapshot(page, message, Style("all"), fresh=True, quarantined=None)
        self.page = b"".join(page.chunks()).decode()
        self.rows = by_topic(self.reading)


def numbered(field: Any, told: Any) -> float:
    """The number that a field of JSON tells."""
    if field.enum_type is not None:
        return float(field.enum_type.values_by_name[told].number)
    return float(len(told)) if isinstance(told, list) else float(told)


def test_each_reading_is_what_raw_nvml_says_wherever_it_is_shown(
    nvml_double: NvmlDouble, gpu_check: ModuleType
) -> None:
    gpu, now = nvml_double.gpus[0], 0.0
    distinct(gpu)
    nvml_double.write()
    source = NvmlSource(lambda: now)
    [identity, _] = source.open().gpus
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    for now in (0.0, 400.0):  # the last tier is read again after 5 min
        gpu.fields[138] = int(now) * 1000 + 50_000  # KiB sent
        nvml_double.write()
        shown = Shown(source, gpu, identity)
        gpu_check.COUNTERS.sample(handle)
    raw: dict[str, float] = {one.name: float(one.raw(handle)) for one in gpu_check.CHECKS}
    source.close()
    raw[RATE] = 400_000 * 1024 / 400.0
    assert set(raw) == set(GPU_FIELDS)  # none is forgotten, here and on real hardware
    counted = [number for number in raw.values() if number > 3]
    assert len(set(counted)) > 0.9 * len(counted)
    fields = shown.reading.DESCRIPTOR.fields_by_name
    told = {name: numbered(fields[name], shown.json[fields[name].json_name]) for name in raw}
    assert told == pytest.approx(raw)
    series = {one.field: one.family.name for one in GPU}
    assert series.keys() | BY_LABEL == raw.keys()
    for name, family in series.items():
        unit = family.removesuffix("_total").rpartition("_")[2]
        wanted = OWN.get(unit, float)(raw[name])
        assert value(shown.page, family, uuid=gpu.uuid) == pytest.approx(wanted), family
    for one in DCGM:
        unit = one.field.rpartition("_")[2]
        units = {"percent": OWN["ratio"]} if one.family.name.startswith("DCGM_FI_PROF_") else DCGMS
        wanted = units.get(unit, float)(raw[one.field])
        assert value(shown.page, one.family.name, UUID=gpu.uuid) == pytest.approx(wanted), one.family.name
    assert value(shown.page, "gpuscale_gpu_processes") == raw["processes"]
    assert value(shown.page, "gpuscale_gpu_recovery_action", action="DRAIN_AND_RESET") == 1
    reasons = [one.labels["reason"] for one in named(shown.page, "gpuscale_gpu_throttled")]
    assert reasons == ["sw_power_cap", "hw_power_brake"]
    of_raw: Any = types_api.GpuReading(throttle_reasons=reasons)
    for name, number in raw.items():
        if name != "processes":
            setattr(
                of_raw, name, number if fields[name].cpp_type == fields[name].CPPTYPE_DOUBLE else int(number)
            )
    assert shown.rows == by_topic(of_raw)


def test_what_is_not_supported_is_shown_nowhere(nvml_double: NvmlDouble) -> None:
    source = NvmlSource(lambda: 0.0)
    gpu, identity = nvml_double.gpus[0], source.open().gpus[0]
    gpu.fail("*", NvmlReturn.NOT_SUPPORTED)
    nvml_double.write()
    shown = Shown(source, gpu, identity)
    source.close()
    assert {one["field"]: one["status"] for one in shown.json["absentReadings"]} == dict.fromkeys(
        GPU_FIELDS, "READING_STATUS_NOT_SUPPORTED"
    )
    empty = {"processes", "throttleReasons", "throttleReasonMask"}
    fields = shown.reading.DESCRIPTOR.fields_by_name
    assert not [name for name in GPU_FIELDS if shown.json.get(fields[name].json_name)]
    assert {name for name in shown.json if name not in empty} == {"absentReadings", "age"}
    series = {one.family.name for one in (*GPU, *DCGM)} | {"gpuscale_gpu_processes", "gpuscale_gpu_throttled"}
    assert not [one.name for one in samples(shown.page) if one.name in series]
    assert value(shown.page, "gpuscale_gpu_absent_readings", reason="NOT_SUPPORTED") == len(GPU_FIELDS)
    assert not any(shown.rows.values())
