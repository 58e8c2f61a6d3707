"""Names of the readings of GPUs and hosts that a signal may name. Pure.

They are the numeric fields of `GpuReading` and `HostReading` in the contract, and what is derived from them.
"""

from __future__ import annotations

DERIVED_GPU_METRICS = frozenset({"memory_used_percent"})
"""Of a GPU: device memory in use as a share of its size, 0-100."""
DERIVED_HOST_METRICS = frozenset({"load_per_core", "memory_used_percent"})
"""Of a host: load average of 1 minute for each core; main memory that is not available as a share of its size, 0-100."""

GPU_METRICS = DERIVED_GPU_METRICS | frozenset(
    [
        "utilization_percent",
        "memory_utilization_percent",
        "encoder_utilization_percent",
        "decoder_utilization_percent",
        "memory_total_bytes",
        "memory_used_bytes",
        "memory_free_bytes",
        "memory_reserved_bytes",
        "temperature_celsius",
        "memory_temperature_celsius",
        "energy_joules",
        "power_watts",
        "power_limit_watts",
        "power_limit_default_watts",
        "power_limit_min_watts",
        "power_limit_max_watts",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "video_clock_mhz",
        "performance_state",
        "throttle_reason_mask",
        "pcie_link_generation",
        "pcie_link_width",
        "pcie_replay_count",
        "pcie_sent_bytes",
        "pcie_received_bytes",
        "nvlink_active_count",
        "nvlink_sent_bytes",
        "nvlink_received_bytes",
        "nvlink_crc_error_count",
        "nvlink_replay_error_count",
        "nvlink_recovery_error_count",
        "ecc_volatile_corrected_count",
        "ecc_volatile_uncorrected_count",
        "ecc_aggregate_corrected_count",
        "ecc_aggregate_uncorrected_count",
        "retired_pages_corrected_count",
        "retired_pages_uncorrected_count",
        "remapped_rows_corrected_count",
        "remapped_rows_uncorrected_count",
    ]
)
"""What a `GpuSignal` may name."""
HOST_METRICS = DERIVED_HOST_METRICS | frozenset(
    [
        "cpu_percent",
        "cpu_smoothed_percent",
        "cpu_count",
        "load_1m",
        "load_5m",
        "load_15m",
        "load_1m_per_core",
        "memory_total_bytes",
        "memory_available_bytes",
        "memory_used_bytes",
        "swap_total_bytes",
        "swap_used_bytes",
        "disk_read_bytes",
        "disk_written_bytes",
        "network_received_bytes",
        "network_sent_bytes",
        "pressure_cpu_some_percent",
        "pressure_memory_some_percent",
        "pressure_memory_full_percent",
        "pressure_io_some_percent",
        "pressure_io_full_percent",
    ]
)
"""What a `HostSignal` may name."""
