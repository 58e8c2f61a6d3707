"""The tables of series: complete, true to the contract, and in the units that their names say."""

import re
from collections import Counter

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


def test_the_names_of_dcgm_stand_for_readings_of_the_contract() -> None:
    known = {field.name for field in types_api.GpuReading.DESCRIPTOR.fields}
    assert {series.field for series in DCGM} <= known
    assert all(re.fullmatch(r"DCGM_FI_DEV_[A-Z_]+", series.family.name) for series in DCGM)


def test_no_name_is_used_twice_and_each_says_what_it_is() -> None:
    families = [series.family for series in (*DCGM, *GPU, *HOST)]
    assert [name for name, count in Counter(one.name for one in families).items() if count > 1] == []
    assert all(family.help.endswith(".") for family in families)


@pytest.mark.parametrize("series", [*GPU, *HOST], ids=lambda series: series.family.name)
def test_our_own_names_are_in_base_units_and_counters_end_in_total(series: ReadingSeries) -> None:
    name = series.family.name
    assert not re.search(r"mhz|percent|mib|_mw|milli", name)
    counter = name.endswith("_total")
    assert (series.family.kind == "counter") == counter


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
