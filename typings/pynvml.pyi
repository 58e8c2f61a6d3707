# ruff: noqa: A002, N801, N802, N815, N816, PYI021
"""The part of nvidia-ml-py that the agent uses, with types: the package itself has none.

For type checkers only; nothing here is installed. Units are NVML's: bytes, milliwatts, percent, MHz, degrees Celsius.
"""

from typing import overload

class NVMLError(Exception):
    value: int

class c_nvmlDevice_t: ...

class c_nvmlMemory_t:
    total: int
    free: int
    used: int

class c_nvmlMemory_v2_t:
    total: int
    reserved: int
    free: int
    used: int

class c_nvmlUtilization_t:
    gpu: int
    memory: int

class nvmlPciInfo_t:
    busId: str

class nvmlFriendlyObject:
    pid: int
    usedGpuMemory: int | None

NVML_ERROR_UNINITIALIZED: int
NVML_ERROR_NOT_SUPPORTED: int
NVML_ERROR_NO_PERMISSION: int
NVML_ERROR_DRIVER_NOT_LOADED: int
NVML_ERROR_TIMEOUT: int
NVML_ERROR_LIBRARY_NOT_FOUND: int
NVML_ERROR_FUNCTION_NOT_FOUND: int
NVML_ERROR_GPU_IS_LOST: int
NVML_ERROR_RESET_REQUIRED: int
NVML_ERROR_LIB_RM_VERSION_MISMATCH: int
NVML_ERROR_ARGUMENT_VERSION_MISMATCH: int
NVML_ERROR_DEPRECATED: int
NVML_ERROR_GPU_NOT_FOUND: int
NVML_TEMPERATURE_GPU: int
NVML_CLOCK_SM: int
NVML_CLOCK_MEM: int
nvmlMemory_v2: int

def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetPciInfo(handle: c_nvmlDevice_t) -> nvmlPciInfo_t: ...
@overload
def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t) -> c_nvmlMemory_t: ...
@overload
def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t, version: int) -> c_nvmlMemory_v2_t: ...
def nvmlDeviceGetUtilizationRates(handle: c_nvmlDevice_t) -> c_nvmlUtilization_t: ...
def nvmlDeviceGetTemperature(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetPowerUsage(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetEnforcedPowerLimit(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetClockInfo(handle: c_nvmlDevice_t, type: int) -> int: ...
def nvmlDeviceGetPerformanceState(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeRunningProcesses_v2(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetComputeRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetGraphicsRunningProcesses_v2(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetGraphicsRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
