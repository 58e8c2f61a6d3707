"""The GPU's page shows all that is read, under words and units that people use."""

from typing import Any

from gpuscale.api.types import v1 as types_api
from gpuscale.dashboard.rows import PROCESSES, TOPICS, by_topic

OF_LISTS = {"throttle_reason_mask", "processes", "absent_readings", "age", "throttle_reasons"}


def test_every_reading_of_the_contract_has_a_row_in_a_topic_of_its_own_kind() -> None:
    names = [one.name for one in types_api.GpuReading.DESCRIPTOR.fields if one.name not in OF_LISTS]
    ones: dict[str, Any] = dict.fromkeys(names, 1)
    shown = by_topic(types_api.GpuReading(**ones, throttle_reasons=["sw_power_cap"]))
    assert sum(map(len, shown.values())) == len(names) + 1
    assert set(shown) == set(TOPICS)
    assert all(shown.values())
    assert all(len({row["reading"] for row in rows}) == len(rows) for rows in shown.values())
    by_name = {row["reading"]: (topic, row["value"]) for topic, rows in shown.items() for row in rows}
    for name, topic, value in (
        ("SM clock", "clocks", "1 MHz"),
        ("throttle reasons", "clocks", "sw_power_cap"),
        ("memory temperature", "power and heat", "1 °C"),
        ("ECC volatile corrected", "memory and errors", "1"),
        ("NVLink sent", "NVLink", "1 B"),
        ("NVLink sent rate", "NVLink", "1 B/s"),
        ("BAR1 used", "PCIe", "1 B"),
        ("energy", "power and heat", "0.0 kWh"),
        ("encoder utilization", "activity", "1.0 %"),
        ("SM occupancy", "activity", "1.0 %"),
        ("power violation", "throttled for", "1 s"),
        ("persistence mode", "modes", "yes"),
    ):
        assert by_name[name] == (topic, value)


def test_what_is_absent_has_no_row_and_what_is_zero_has() -> None:
    shown = by_topic(types_api.GpuReading(utilization_percent=0, remapped_rows_failed=False))
    assert shown["activity"] == [{"reading": "utilization", "value": "0.0 %"}]
    assert shown["memory and errors"] == [{"reading": "remapped rows failed", "value": "no"}]
    assert shown["NVLink"] == []


def test_a_process_that_nobody_can_tell_much_of_is_shown_so() -> None:
    known = types_api.GpuProcess(pid=7, user="ann", program="python train.py", utilization_percent=61)
    known.memory_used_bytes, known.reservation, known.start_time.seconds = 2**30, "reservations/r1", 60
    first, second = PROCESSES.rows([known, types_api.GpuProcess(pid=8, holder_unknown=True)])
    assert (first["user"], first["program"], first["memory"]) == ("ann", "python train.py", "1.0 GiB")
    assert (first["used"], first["reservation"], first["start"]) == ("61 %", "r1", "1970-01-01 00:01:00")
    assert {second[key] for key in ("user", "program", "memory", "used", "start")} == {"-"}
    assert second["reservation"] == "unknown"
