"""Simulated GPUs, so that everything can be tried without hardware. Each says of itself that it is simulated.

The figures depend on the node, the index and the time only: an idle 80 GiB GPU with a slow, small ripple, so that a
chart shows life and two runs show the same.
"""

import math
from collections.abc import Callable
from uuid import NAMESPACE_URL, UUID, uuid5

from gpuscale.monitor.model.readings import (
    DriverEvent,
    GpuIdentity,
    GpuReading,
    GpuSample,
    GpuState,
    Inventory,
    RecoveryAction,
)

GIB = 1024**3
MEMORY_TOTAL_BYTES = 80 * GIB
MEMORY_RESERVED_BYTES = GIB // 2
MEMORY_USED_BYTES = GIB // 4

_NAMESPACE = uuid5(NAMESPACE_URL, "gpuscale:simulated-gpu")
_RIPPLE_SECONDS = 120.0
_HIGHEST_UTILIZATION = 5.0


_STEADY = GpuReading(
    memory_total_bytes=MEMORY_TOTAL_BYTES,
    memory_used_bytes=MEMORY_USED_BYTES,
    memory_free_bytes=MEMORY_TOTAL_BYTES - MEMORY_RESERVED_BYTES - MEMORY_USED_BYTES,
    memory_reserved_bytes=MEMORY_RESERVED_BYTES,
    power_limit_watts=400.0,
    power_limit_default_watts=400.0,
    power_limit_min_watts=100.0,
    power_limit_max_watts=400.0,
    sm_clock_mhz=345.0,
    memory_clock_mhz=1593.0,
    video_clock_mhz=765.0,
    performance_state=8,
    throttle_reason_mask=1,
    processes=(),
    encoder_utilization_percent=0.0,
    decoder_utilization_percent=0.0,
    pcie_link_generation=4,
    pcie_link_width=16,
    pcie_replay_count=0,
    pcie_sent_bytes=0,
    pcie_received_bytes=0,
    nvlink_active_count=0,
    nvlink_sent_bytes=0,
    nvlink_received_bytes=0,
    nvlink_crc_error_count=0,
    nvlink_replay_error_count=0,
    nvlink_recovery_error_count=0,
    ecc_volatile_corrected_count=0,
    ecc_volatile_uncorrected_count=0,
    ecc_aggregate_corrected_count=0,
    ecc_aggregate_uncorrected_count=0,
    retired_pages_corrected_count=0,
    retired_pages_uncorrected_count=0,
    retired_pages_pending=False,
    remapped_rows_corrected_count=0,
    remapped_rows_uncorrected_count=0,
    remapped_rows_pending=False,
    remapped_rows_failed=False,
    recovery_action=RecoveryAction.NONE,
)
"""What does not move."""


def simulated_uuid(node: str, index: int) -> str:
    """The UUID of a simulated GPU: the same at every start."""
    return f"SIM-{uuid5(_NAMESPACE, f'{node}/{index}')}"


class SimulatedSource:
    """A number of simulated GPUs of a node. `now` gives seconds of any clock."""

    simulated = True
    outdated = False

    def __init__(self, node: str, count: int, now: Callable[[], float]) -> None:
        self._now = now
        self._gpus = tuple(
            GpuIdentity(
                uuid=simulated_uuid(node, index),
                index=index,
                model="Simulated GPU 80GB",
                simulated=True,
            )
            for index in range(count)
        )
        self._phases = {gpu.uuid: (UUID(gpu.uuid[4:]).int % 997) / 997 for gpu in self._gpus}

    def open(self) -> Inventory:
        """List them."""
        return Inventory(self._gpus)

    def read(self, uuid: str) -> GpuSample:
        """Figures of an idle GPU at this time."""
        turn = self._now() / _RIPPLE_SECONDS + self._phases[uuid]
        ripple = (1 + math.sin(2 * math.pi * turn)) / 2
        return GpuSample(
            GpuState.OK,
            _STEADY._replace(
                utilization_percent=round(_HIGHEST_UTILIZATION * ripple, 1),
                memory_utilization_percent=round(_HIGHEST_UTILIZATION * ripple / 2, 1),
                temperature_celsius=round(31 + 4 * ripple, 1),
                memory_temperature_celsius=round(34 + 4 * ripple, 1),
                power_watts=round(62 + 12 * ripple, 1),
                energy_joules=round(68 * self._now(), 1),
            ),
        )

    def probe(self, uuid: str) -> None:
        """It answers."""

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Nothing ever happens on them."""

    def interrupt(self) -> bool:
        """No call of them is ever out for long."""
        return False

    def close(self) -> None:
        """Nothing is held."""
