# ruff: noqa: A002, N801, N802, N803, N815, N816, PYI021, SLF001
"""The part of nvidia-ml-py that the agent uses, with types: the package itself has none.

For type checkers only; nothing here is installed. Units are NVML's: bytes, milliwatts, percent, MHz, degrees Celsius.
"""

import ctypes
from collections.abc import Sequence
from typing import Self, overload

class NVMLError(Exception):
    value: int
    def __new__(cls, value: int) -> Self: ...
    def __init__(self, value: int) -> None: ...

class c_nvmlDevice_t(ctypes._Pointer[ctypes.Structure]): ...

class c_nvmlMemory_t:
    total: int
    free: int
    used: int

class c_nvmlMemory_v2_t(ctypes.Structure):
    total: int
    reserved: int
    free: int
    used: int

class c_nvmlBAR1Memory_t:
    bar1Total: int
    bar1Free: int
    bar1Used: int

class c_nvmlGridLicensableFeature_v4_t:
    featureCode: int
    featureState: int

class c_nvmlGridLicensableFeatures_v4_t:
    isGridLicenseSupported: int
    licensableFeaturesCount: int
    gridLicensableFeatures: Sequence[c_nvmlGridLicensableFeature_v4_t]

class c_nvmlUtilization_t(ctypes.Structure):
    gpu: int
    memory: int

class nvmlPciInfo_t:
    busId: str

class c_nvmlEventSet_t: ...

class c_nvmlEventData_t:
    device: c_nvmlDevice_t
    eventType: int
    eventData: int

class c_nvmlValue_t:
    dVal: float
    uiVal: int
    ulVal: int
    ullVal: int
    sllVal: int
    siVal: int

class c_nvmlFieldValue_t(ctypes.Structure):
    fieldId: int
    nvmlReturn: int
    valueType: int
    value: c_nvmlValue_t

class nvmlFriendlyObject:
    pid: int
    usedGpuMemory: int | None

class c_nvmlProcessUtilizationSample_t:
    pid: int
    timeStamp: int
    smUtil: int

class c_nvmlGpmSample_t: ...

class c_nvmlGpmMetric_t(ctypes.Structure):
    metricId: int
    nvmlReturn: int
    value: float

class c_nvmlGpmMetricsGet_t:
    version: int
    numMetrics: int
    sample1: c_nvmlGpmSample_t
    sample2: c_nvmlGpmSample_t
    metrics: ctypes.Array[c_nvmlGpmMetric_t]

class c_nvmlGpmSupport_t:
    isSupportedDevice: int

class c_nvmlGpuInstance_t(ctypes._Pointer[ctypes.Structure]): ...
class c_nvmlComputeInstance_t(ctypes._Pointer[ctypes.Structure]): ...

class c_nvmlGpuInstancePlacement_t(ctypes.Structure):
    start: int
    size: int

class c_nvmlGpuInstanceProfileInfo_v2_t:
    id: int
    instanceCount: int
    name: str

class c_nvmlGpuInstanceInfo_t:
    placement: c_nvmlGpuInstancePlacement_t

class c_nvmlComputeInstanceProfileInfo_v2_t:
    id: int
    sliceCount: int
    instanceCount: int

NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED: int
NVML_COMPUTE_INSTANCE_PROFILE_COUNT: int
NVML_GPU_INSTANCE_PROFILE_COUNT: int
NVML_ERROR_UNINITIALIZED: int
NVML_ERROR_NOT_FOUND: int
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
NVML_CLOCK_VIDEO: int
NVML_DEVICE_MIG_ENABLE: int
NVML_ERROR_INVALID_ARGUMENT: int
NVML_FI_DEV_ECC_DBE_AGG_TOTAL: int
NVML_FI_DEV_ECC_DBE_VOL_TOTAL: int
NVML_FI_DEV_ECC_SBE_AGG_TOTAL: int
NVML_FI_DEV_ECC_SBE_VOL_TOTAL: int
NVML_FI_DEV_ECC_CURRENT: int
NVML_FI_DEV_ECC_PENDING: int
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: int
NVML_FI_DEV_MEMORY_TEMP: int
NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL: int
NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL: int
NVML_FI_DEV_NVLINK_GET_STATE: int
NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL: int
NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL: int
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX: int
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX: int
NVML_FI_DEV_PCIE_COUNT_RX_BYTES: int
NVML_FI_DEV_PCIE_COUNT_TX_BYTES: int
NVML_FI_DEV_PCIE_REPLAY_COUNTER: int
NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT: int
NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION: int
NVML_FI_DEV_PERF_POLICY_POWER: int
NVML_FI_DEV_PERF_POLICY_RELIABILITY: int
NVML_FI_DEV_PERF_POLICY_SYNC_BOOST: int
NVML_FI_DEV_PERF_POLICY_THERMAL: int
NVML_FI_DEV_POWER_DEFAULT_LIMIT: int
NVML_FI_DEV_POWER_MAX_LIMIT: int
NVML_FI_DEV_POWER_MIN_LIMIT: int
NVML_FI_DEV_REMAPPED_COR: int
NVML_FI_DEV_REMAPPED_FAILURE: int
NVML_FI_DEV_REMAPPED_PENDING: int
NVML_FI_DEV_REMAPPED_UNC: int
NVML_FI_DEV_RETIRED_DBE: int
NVML_FI_DEV_RETIRED_PENDING: int
NVML_FI_DEV_RETIRED_SBE: int
NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION: int
NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: int
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: int
NVML_GPU_RECOVERY_ACTION_GPU_RESET: int
NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: int
NVML_GPU_RECOVERY_ACTION_NONE: int
NVML_GPM_METRICS_GET_VERSION: int
NVML_GPM_METRIC_ANY_TENSOR_UTIL: int
NVML_GPM_METRIC_DRAM_BW_UTIL: int
NVML_GPM_METRIC_FP16_UTIL: int
NVML_GPM_METRIC_FP32_UTIL: int
NVML_GPM_METRIC_FP64_UTIL: int
NVML_GPM_METRIC_GRAPHICS_UTIL: int
NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC: int
NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC: int
NVML_GPM_METRIC_PCIE_RX_PER_SEC: int
NVML_GPM_METRIC_PCIE_TX_PER_SEC: int
NVML_GPM_METRIC_SM_OCCUPANCY: int
NVML_GPM_METRIC_SM_UTIL: int
NVML_GRID_LICENSE_FEATURE_CODE_VGPU: int
NVML_SUCCESS: int
NVML_VALUE_TYPE_DOUBLE: int
NVML_VALUE_TYPE_SIGNED_INT: int
NVML_VALUE_TYPE_SIGNED_LONG_LONG: int
NVML_VALUE_TYPE_UNSIGNED_INT: int
NVML_VALUE_TYPE_UNSIGNED_LONG: int
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: int
nvmlEventTypeDoubleBitEccError: int
nvmlEventTypeSingleBitEccError: int
nvmlEventTypeXidCriticalError: int
nvmlMemory_v2: int

def nvmlInit() -> None: ...
def nvmlShutdown() -> None: ...
def nvmlSystemGetDriverVersion() -> str: ...
def nvmlSystemGetCudaDriverVersion_v2() -> int: ...
def nvmlDeviceGetCount() -> int: ...
def nvmlDeviceGetHandleByIndex(index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetUUID(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetName(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetSerial(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetVbiosVersion(handle: c_nvmlDevice_t) -> str: ...
def nvmlDeviceGetFanSpeed(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetBAR1MemoryInfo(handle: c_nvmlDevice_t) -> c_nvmlBAR1Memory_t: ...
def nvmlDeviceGetMaxClockInfo(handle: c_nvmlDevice_t, type: int) -> int: ...
def nvmlDeviceGetComputeMode(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetPersistenceMode(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetGridLicensableFeatures(handle: c_nvmlDevice_t) -> c_nvmlGridLicensableFeatures_v4_t: ...
def nvmlDeviceGetPciInfo(handle: c_nvmlDevice_t) -> nvmlPciInfo_t: ...
@overload
def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t) -> c_nvmlMemory_t: ...
@overload
def nvmlDeviceGetMemoryInfo(handle: c_nvmlDevice_t, version: int) -> c_nvmlMemory_v2_t: ...
def nvmlDeviceGetUtilizationRates(handle: c_nvmlDevice_t) -> c_nvmlUtilization_t: ...
def nvmlDeviceGetTemperature(handle: c_nvmlDevice_t, sensor: int) -> int: ...
def nvmlDeviceGetHandleByUUID(uuid: str) -> c_nvmlDevice_t: ...
def nvmlDeviceGetPowerUsage(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetEnforcedPowerLimit(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetPowerManagementLimit(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetPowerManagementLimitConstraints(handle: c_nvmlDevice_t) -> list[int]: ...
def nvmlDeviceSetPowerManagementLimit(handle: c_nvmlDevice_t, limit: int) -> None: ...
def nvmlDeviceGetClockInfo(handle: c_nvmlDevice_t, type: int) -> int: ...
def nvmlDeviceGetPerformanceState(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetComputeRunningProcesses_v2(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetComputeRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetGraphicsRunningProcesses_v2(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetGraphicsRunningProcesses_v3(handle: c_nvmlDevice_t) -> list[nvmlFriendlyObject]: ...
def nvmlDeviceGetProcessUtilization(
    handle: c_nvmlDevice_t, timeStamp: int
) -> list[c_nvmlProcessUtilizationSample_t]: ...
def nvmlDeviceGetEncoderUtilization(handle: c_nvmlDevice_t) -> list[int]: ...
def nvmlDeviceGetDecoderUtilization(handle: c_nvmlDevice_t) -> list[int]: ...
def nvmlDeviceGetCurrentClocksEventReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetCurrentClocksThrottleReasons(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetCurrPcieLinkGeneration(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetCurrPcieLinkWidth(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetFieldValues(
    handle: c_nvmlDevice_t, fieldIds: Sequence[int | tuple[int, int]]
) -> ctypes.Array[c_nvmlFieldValue_t]: ...
def nvmlDeviceGetMigMode(handle: c_nvmlDevice_t) -> list[int]: ...
def nvmlDeviceGetGpuInstanceId(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMaxMigDeviceCount(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceGetMigDeviceHandleByIndex(device: c_nvmlDevice_t, index: int) -> c_nvmlDevice_t: ...
def nvmlDeviceGetNvLinkState(device: c_nvmlDevice_t, link: int) -> int: ...
def nvmlDeviceGetNvLinkRemotePciInfo(device: c_nvmlDevice_t, link: int) -> nvmlPciInfo_t: ...
def nvmlDeviceGetSupportedEventTypes(handle: c_nvmlDevice_t) -> int: ...
def nvmlDeviceRegisterEvents(handle: c_nvmlDevice_t, eventTypes: int, eventSet: c_nvmlEventSet_t) -> None: ...
def nvmlEventSetCreate() -> c_nvmlEventSet_t: ...
def nvmlEventSetWait_v2(eventSet: c_nvmlEventSet_t, timeoutms: int) -> c_nvmlEventData_t: ...
def nvmlEventSetFree(eventSet: c_nvmlEventSet_t) -> None: ...
def nvmlGpmQueryDeviceSupport(device: c_nvmlDevice_t) -> c_nvmlGpmSupport_t: ...
def nvmlGpmSampleAlloc() -> c_nvmlGpmSample_t: ...
def nvmlGpmSampleFree(gpmSample: c_nvmlGpmSample_t) -> None: ...
def nvmlGpmSampleGet(device: c_nvmlDevice_t, gpmSample: c_nvmlGpmSample_t) -> c_nvmlGpmSample_t: ...
def nvmlGpmMigSampleGet(
    device: c_nvmlDevice_t, gpuInstanceId: int, gpmSample: c_nvmlGpmSample_t
) -> c_nvmlGpmSample_t: ...
def nvmlGpmMetricsGet(metricsGet: c_nvmlGpmMetricsGet_t) -> c_nvmlGpmMetricsGet_t: ...
def nvmlDeviceGetGpuInstanceProfileInfo(
    device: c_nvmlDevice_t, profile: int
) -> c_nvmlGpuInstanceProfileInfo_v2_t: ...
def nvmlDeviceGetGpuInstancePossiblePlacements(
    device: c_nvmlDevice_t,
    profileId: int,
    placementsRef: ctypes.Array[c_nvmlGpuInstancePlacement_t] | None,
    countRef: object,
) -> int: ...
def nvmlDeviceGetGpuInstances(
    device: c_nvmlDevice_t,
    profileId: int,
    gpuInstancesRef: ctypes.Array[c_nvmlGpuInstance_t],
    countRef: object,
) -> int: ...
def nvmlGpuInstanceGetInfo(gpuInstance: c_nvmlGpuInstance_t) -> c_nvmlGpuInstanceInfo_t: ...
def nvmlGpuInstanceGetComputeInstanceProfileInfo(
    device: c_nvmlGpuInstance_t, profile: int, engProfile: int
) -> c_nvmlComputeInstanceProfileInfo_v2_t: ...
def nvmlGpuInstanceGetComputeInstances(
    gpuInstance: c_nvmlGpuInstance_t,
    profileId: int,
    computeInstancesRef: ctypes.Array[c_nvmlComputeInstance_t],
    countRef: object,
) -> int: ...
def nvmlDeviceCreateGpuInstanceWithPlacement(
    device: c_nvmlDevice_t, profileId: int, placement: object
) -> c_nvmlGpuInstance_t: ...
def nvmlGpuInstanceCreateComputeInstance(
    gpuInstance: c_nvmlGpuInstance_t, profileId: int
) -> c_nvmlComputeInstance_t: ...
def nvmlGpuInstanceDestroy(gpuInstance: c_nvmlGpuInstance_t) -> int: ...
def nvmlComputeInstanceDestroy(computeInstance: c_nvmlComputeInstance_t) -> int: ...
