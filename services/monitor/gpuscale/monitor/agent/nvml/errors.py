"""What NVML's result codes mean: for the GPU that was asked, and for the driver as a whole."""

import pynvml

from gpuscale.monitor.agent.asking import Failure
from gpuscale.monitor.agent.ports import GpuSourceError
from gpuscale.monitor.model.readings import GpuState, ReadingStatus

_NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# Errors that no single GPU causes: NVML itself has to be started again.
_DRIVER_GONE = _NO_DRIVER | {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
_GPU_GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuState.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: GpuState.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuState.RESET_REQUIRED,
}
_STATUS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: ReadingStatus.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: ReadingStatus.TIMEOUT,
    pynvml.NVML_ERROR_GPU_IS_LOST: ReadingStatus.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: ReadingStatus.LOST,
}


def explain(error: pynvml.NVMLError) -> Failure:
    """What an error says about the GPU that was asked.

    Raises:
        GpuSourceError: it says that NVML itself is gone.
    """
    raise_if_driver_gone(error)
    status = _STATUS.get(error.value, ReadingStatus.ERROR)
    return Failure(status, str(error), _GPU_GONE.get(error.value))


def raise_if_driver_gone(error: pynvml.NVMLError) -> None:
    """Go on only if the error speaks of one GPU and not of NVML as a whole.

    Raises:
        GpuSourceError: NVML itself is gone.
    """
    if error.value in _DRIVER_GONE:
        raise source_error(error) from error


def source_error(error: pynvml.NVMLError) -> GpuSourceError:
    """An error as the source tells it."""
    return GpuSourceError(f"NVML: {error}", no_driver=error.value in _NO_DRIVER)
