"""NVLinks of a GPU: their numbers, and where they lead. Asked once, since wires do not change."""

from collections.abc import Mapping

import pynvml

from gpuscale.monitor.agent.nvml.errors import raise_if_driver_gone

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
