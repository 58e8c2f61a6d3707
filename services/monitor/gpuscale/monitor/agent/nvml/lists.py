"""Processes of a GPU, by whichever of NVML's calls gives ids that can be believed.

Early 535 drivers fill the v3 records with another stride than callers expect (NVIDIA's nvidia-ml-py and nvitop both
read nonsense there): where an id cannot be one, the v2 call is asked, and v3 is not asked again.
"""

from collections.abc import Callable

import pynvml

from gpuscale.monitor.agent.asking import Asking, Failure
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import GpuProcess, ReadingStatus

_Processes = list[pynvml.nvmlFriendlyObject]
_ProcessCall = Callable[[pynvml.c_nvmlDevice_t], _Processes]
_COMPUTE: tuple[_ProcessCall, _ProcessCall] = (
    pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
)
_GRAPHICS: tuple[_ProcessCall, _ProcessCall] = (
    pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2,
)


def ask_processes(
    asking: Asking[pynvml.NVMLError], handle: pynvml.c_nvmlDevice_t, names: ProcessNames
) -> tuple[GpuProcess, ...] | None:
    """Those that compute and those that draw; one kind alone where the GPU does not list the other."""
    kinds = [
        _list(asking, handle, names, "compute", *_COMPUTE),
        _list(asking, handle, names, "graphics", *_GRAPHICS),
    ]
    failures = [found for found in kinds if isinstance(found, Failure)]
    serious = [failure for failure in failures if failure.status is not ReadingStatus.NOT_SUPPORTED]
    if serious or len(failures) == len(kinds):
        asking.note(("processes",), (serious or failures)[0])
        return None
    lists = [found for found in kinds if not isinstance(found, Failure)]
    return names.merge((process.pid, process.usedGpuMemory) for found in lists for process in found)


def _list(
    asking: Asking[pynvml.NVMLError],
    handle: pynvml.c_nvmlDevice_t,
    names: ProcessNames,
    kind: str,
    newer: _ProcessCall,
    older: _ProcessCall,
) -> _Processes | Failure:
    """By the v3 call; by the v2 call where v3 is missing, or its records have another driver's layout."""
    found = asking.attempt(f"{kind} v3", lambda: _believed(newer, handle, names))
    if isinstance(found, Failure) and found.status is ReadingStatus.NOT_SUPPORTED:
        return asking.attempt(f"{kind} v2", lambda: _believed(older, handle, names))
    return found


def _believed(call: _ProcessCall, handle: pynvml.c_nvmlDevice_t, names: ProcessNames) -> _Processes | Failure:
    found = call(handle)
    if names.believable(process.pid for process in found):
        return found
    return Failure(ReadingStatus.NOT_SUPPORTED, "the driver gives impossible process ids")
