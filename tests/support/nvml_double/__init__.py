"""A test double of the NVIDIA management library, driven through the real, unmodified `pynvml`.

A small C library stands in the place of libnvidia-ml.so.1 and answers from a control file that a test writes:

    double = NvmlDouble(tmp_path, gpu_count=8)
    double.gpus[0].utilization_percent = 95
    double.gpus[1].fail("*", NvmlReturn.GPU_IS_LOST)
    double.write()

Use it in this process with the fixture `nvml_double` (or `in_process`), or in another with `env_with_double`.
"""

# ruff: noqa: F401 - what others import from here
from tests.support.nvml_double.build import why_unavailable
from tests.support.nvml_double.double import (
    FIELD_IDS,
    HEALTHY_FIELDS,
    XID_EVENT,
    CallCount,
    NvmlDouble,
    divide,
    env_with_double,
    in_process,
    plain_gpu,
    wired_gpus,
)
from tests.support.nvml_double.model import GIB, DoubleGpu, DoubleProcess, NvmlReturn, ProcessKind, Rules
