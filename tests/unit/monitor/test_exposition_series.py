"""The tables of series: complete, true to the contract, and in the units that their names say."""

import pytest
from google.protobuf.message import Message

from gpuscale.api.types import v1 as types_api
from gpuscale.monitor.model.prometheus import DCGM, GPU, HOST, ReadingSeries

ELSEWHERE = {"throttle_reason_mask", "recovery_action", "age"}
"""Readings that are shown with a label of their own, by exposition/snapshots.py."""


def readings(message: type[Message]) -> set[str]:
    """The single readings of a message of the contract."""
    return {field.name for field in message.DESCRIPTOR.fields if not field.is_repeated} - ELSEWHERE


@pytest.mark.parametrize(
    ("table", "message"), [(GPU, types_api.GpuReading), (HOST, types_api.HostReading)], ids=["gpu", "host"]
)
def test_every_reading_of_the_contract_has_a_series(
    table: tuple[ReadingSeries, ...], message: type[Message]
) -> None:
    assert {series.field for series in table} == readings(message)


@pytest.mark.parametrize(
    ("name", "field", "read", "shown"),
    [
        ("DCGM_FI_DEV_FB_FREE", "memory_free_bytes", 3 * 2**20 + 5, 3),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "energy_joules", 12.3456, 12346),
        ("DCGM_FI_DEV_POWER_USAGE", "power_watts", 70.5, 70.5),
        ("DCGM_FI_DEV_SM_CLOCK", "sm_clock_mhz", 1980.0, 1980.0),
        ("DCGM_FI_DEV_GPU_UTIL", "utilization_percent", 95.0, 95.0),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "remapped_rows_failed", True, 1),
        ("gpuscale_gpu_memory_free_bytes", "memory_free_bytes", 3, 3),
        ("gpuscale_gpu_utilization_ratio", "utilization_percent", 95.0, 0.95),
        ("gpuscale_gpu_sm_clock_hertz", "sm_clock_mhz", 1980.0, 1.98e9),
        ("gpuscale_gpu_energy_joules_total", "energy_joules", 12.5, 12.5),
        ("gpuscale_gpu_remapped_rows_failed", "remapped_rows_failed", False, 0),
        ("gpuscale_host_cpu_utilization_ratio", "cpu_percent", 12.5, 0.125),
    ],
)
def test_units_are_those_of_the_name(name: str, field: str, read: float, shown: float) -> None:
    [series] = [one for one in (*DCGM, *GPU, *HOST) if one.family.name == name]
    assert series.field == field
    assert series.convert(read) == shown
    assert not isinstance(series.convert(read), bool)
