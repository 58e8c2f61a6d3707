"""What `stats` says below its table, at 80 columns."""

from datetime import UTC, datetime

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.commands.usage import Statistics
from gpuscale.common.wire import to_duration, to_timestamp

GPU = "nodes/host-1/gpus/gpu-00000000-0000-4000-8000-000000000000"


def test_each_gpu_has_a_line_for_its_clock_for_each_reason_of_throttling_and_for_faults() -> None:
    seen = api.GpuStatistics(
        name=GPU,
        mean_sm_clock_mhz=1371.4,
        min_sm_clock_mhz=345.0,
        throttled={"sw_power_cap": to_duration(71), "hw_slowdown": to_duration(2)},
        ecc_corrected_count=3,
        ecc_uncorrected_count=0,
    )
    fault = monitor_api.HealthEvent(gpu=GPU, xid=79, last_time=to_timestamp(datetime(2026, 3, 1, tzinfo=UTC)))
    dull = api.GpuStatistics(name="nodes/host-1/gpus/gpu-b")
    lines = Statistics(api.GetReservationUsageResponse(gpus=[seen, dull]), [fault]).lines()
    assert lines[:5] == [
        "host-1/gpu-00000000-0000-4000-8000-000000000000:",
        "  SM clock 1371 MHz on average, 345 at least",
        "  throttled by hw_slowdown for 2s",
        "  throttled by sw_power_cap for 1m11s",
        "  3 corrected ECC errors",
    ]
    assert lines[5].startswith("  XID 79 at 2026-0")
    assert len(lines) == 6
    assert max(map(len, lines)) <= 80
