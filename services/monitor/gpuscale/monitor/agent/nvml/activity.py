"""Activity of the units of a GPU or MIG instance, by GPM, NVML's performance counters of Hopper and later.

Readings are means between two samples. Ids and units are those of nvml.h (nvmlGpmMetricId_t). An error of GPM is no fault of the
GPU, and GPM is then not asked again.
"""

from contextlib import suppress

import pynvml

from gpuscale.monitor.agent.nvml.field_values import Values
from gpuscale.monitor.agent.nvml.queries import Failure, Queries, explain
from gpuscale.monitor.model.readings import ReadingStatus

_PERCENT = 100.0
_MIB = 1024.0**2

METRICS = {
    "graphics_activity_percent": pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm_activity_percent": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "sm_occupancy_percent": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor_activity_percent": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "memory_bandwidth_percent": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp64_activity_percent": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32_activity_percent": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16_activity_percent": pynvml.NVML_GPM_METRIC_FP16_UTIL,
    "pcie_sent_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "pcie_received_bytes_per_second": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
    "nvlink_sent_bytes_per_second": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "nvlink_received_bytes_per_second": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
"""GPM metrics by reading; GPM's units are percent and MiB/s."""


class Activity:
    """The samples of a GPU, or of MIG instance `instance` on it; `close` frees them."""

    def __init__(self, handle: pynvml.c_nvmlDevice_t, instance: int | None) -> None:
        self._handle = handle
        self._instance = instance
        self._samples: list[pynvml.c_nvmlGpmSample_t] = []  # older, newer
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._sampled = False

    def ask(self, queries: Queries) -> Values:
        """The readings since the last call; none on the first."""
        found = queries.attempt("activity", self._since_last)
        if isinstance(found, Failure):
            queries.note(METRICS, found)
            return {}
        queries.calls += found  # nvmlGpmMetricsGet
        readings: Values = {}
        for (name, metric), answer in zip(
            METRICS.items() if found else (), self._request.metrics, strict=False
        ):
            if answer.nvmlReturn or not answer.value >= 0 or answer.metricId != metric:  # or NaN
                detail = f"GPM said {answer.value:g} with code {answer.nvmlReturn}"
                queries.note((name,), Failure(ReadingStatus.NOT_SUPPORTED, detail))
            else:
                percent = name.endswith("_percent")
                readings[name] = min(answer.value, _PERCENT) if percent else answer.value * _MIB
        return readings

    def close(self) -> None:
        """Free the samples. Failures are ignored, since NVML is shut down next."""
        for sample in self._samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)

    def _since_last(self) -> bool | Failure:
        """Take a sample; returns whether the request has answers since the one before."""
        try:
            if not self._samples:
                if not pynvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                    return Failure(ReadingStatus.NOT_SUPPORTED, "the GPU has no GPM")
                self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
            older, newer = self._samples
            self._samples = [newer, older]
            if self._instance is None:
                pynvml.nvmlGpmSampleGet(self._handle, older)
            else:
                pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, older)
            if not self._sampled:
                self._sampled = True
                return False
            self._request.version, self._request.numMetrics = (
                pynvml.NVML_GPM_METRICS_GET_VERSION,
                len(METRICS),
            )
            self._request.sample1, self._request.sample2 = self._samples
            for answer, metric in zip(self._request.metrics, METRICS.values(), strict=False):
                answer.metricId = metric
            pynvml.nvmlGpmMetricsGet(self._request)
        except pynvml.NVMLError as error:
            failure = explain(error)
            return failure if failure.gone else Failure(ReadingStatus.NOT_SUPPORTED, f"GPM: {failure.detail}")
        return True
