"""NVLinks of a GPU: where they lead, and what NVML counts on all of them together."""

from collections.abc import Mapping

import pynvml

from gpuscale.monitor.agent.nvml.field_values import FieldReading
from gpuscale.monitor.agent.nvml.queries import raise_if_driver_gone

# The scope of a field that is kept per NVLink: all of them together.
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024


def _kib(value: float) -> int:
    return int(value) * _KIB


NVLINK = (
    FieldReading("nvlink_sent_bytes", ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),), _kib),
    FieldReading(
        "nvlink_received_bytes", ((pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),), _kib
    ),
    FieldReading(
        "nvlink_crc_error_count",
        (
            pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
            pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        ),
    ),
    FieldReading("nvlink_replay_error_count", (pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,)),
    FieldReading("nvlink_recovery_error_count", (pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,)),
)
NVLINK_COUNT = "nvlink_active_count"
"""The reading that is the sum of the states of all links."""

_MOST_LINKS = 36
# There is no link of that number, or none at all.
_NO_MORE = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
}


def link_ends(handle: pynvml.c_nvmlDevice_t, by_address: Mapping[str, str]) -> dict[int, str | None] | None:
    """Each active link by number, with the UUID of the GPU at its other end; None for a switch.

    Returns None where the GPU gave an error: it is to be asked again.

    Raises:
        GpuSourceError: NVML is gone.
    """
    ends: dict[int, str | None] = {}
    for link in range(_MOST_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                ends[link] = by_address.get(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            return ends if error.value in _NO_MORE else None
    return ends
