"""Readings that NVML returns as field values, many per call, and the tables of those for ECC, throttling and NVLinks.

Ids and units are those of nvml.h (NVML_FI_DEV_*). A driver answers INVALID_ARGUMENT for a field that it does not know, which
counts as not supported.

GPM, the performance counters of Hopper and later, tells the activity of the units of a GPU or MIG instance, as means between two
samples (nvmlGpmMetricId_t). An error of GPM is no fault of the GPU, and GPM is then not asked again.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any

import pynvml

from gpuscale.monitor.agent.nvml.calls import Failure, Queries, explain, raise_if_driver_gone
from gpuscale.monitor.model.readings import ReadingStatus, RecoveryAction

# Readings by name. Tests check that names and types fit the model.
Values = dict[str, Any]
Value = float | int | bool | RecoveryAction
Key = int | tuple[int, int]

_HIGHEST_COUNT = 2.0**63 - 1
_VALUE = Struct("@24xIi8s")
"""An nvmlFieldValue_t: the type of its value, a code, and the value."""
_KINDS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: Struct("@d"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: Struct("@I"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: Struct("@L"),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: Struct("@Q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: Struct("@q"),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: Struct("@i"),
}


@dataclass(frozen=True, slots=True)
class FieldReading:
    """A reading that is the sum of field values, each an id or (id, scope), converted. `or_else` is a call to fall back on."""

    name: str
    keys: tuple[Key, ...]
    convert: Callable[[float], Value] = int
    high: float = _HIGHEST_COUNT
    or_else: Callable[[], int] | None = None


def ask(
    queries: Queries, handle: pynvml.c_nvmlDevice_t, question: str, fields: Iterable[FieldReading]
) -> Values:
    """Ask for readings in one call, without those known to be unsupported."""
    wanted: list[FieldReading] = []
    readings: Values = {}
    for field in fields:
        refusal = queries.unsupported(field.name)
        if refusal is None:
            wanted.append(field)
        else:
            _stand_in(queries, field, refusal, readings)
    if not wanted:
        return readings
    keys = [key for field in wanted for key in field.keys]
    found = queries.attempt(question, lambda: pynvml.nvmlDeviceGetFieldValues(handle, keys))
    if isinstance(found, Failure):
        for field in wanted:
            _stand_in(queries, field, found, readings)
        return readings
    told = _VALUE.iter_unpack(memoryview(found).cast("B"))
    for field in wanted:
        value = _total(queries, field, [next(told) for _ in field.keys])
        if isinstance(value, Failure):
            _stand_in(queries, field, value, readings)
        elif 0.0 <= value <= field.high or queries.within(field.name, value, high=field.high) is not None:
            readings[field.name] = field.convert(value)
    return readings


def _stand_in(queries: Queries, field: FieldReading, refusal: Failure, readings: Values) -> None:
    """Fall back on another call for a reading, or note that it is absent."""
    answer: int | Failure = refusal
    if field.or_else is not None and refusal.status is ReadingStatus.NOT_SUPPORTED:
        answer = queries.attempt(f"{field.name} by a call", field.or_else)
    if isinstance(answer, Failure):
        queries.note((field.name,), answer)
    else:
        readings[field.name] = answer


def _total(queries: Queries, field: FieldReading, told: Iterable[tuple[int, int, bytes]]) -> float | Failure:
    total: float = 0
    for kind, code, value in told:
        of_kind = None if code else _KINDS.get(kind)
        if of_kind is None:
            return queries.attempt(field.name, _refusal, kind, code, counted=False)
        total += of_kind.unpack_from(value)[0]
    return total


def _refusal(kind: int, code: int) -> Failure:
    if code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return Failure(ReadingStatus.NOT_SUPPORTED, "unknown to the driver")
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    return Failure(ReadingStatus.ERROR, f"the driver gave a value of unknown type {kind}")


ECC = (
    FieldReading("ecc_volatile_corrected_count", (pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL,)),
    FieldReading("ecc_volatile_uncorrected_count", (pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,)),
    FieldReading("ecc_aggregate_corrected_count", (pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL,)),
    FieldReading("ecc_aggregate_uncorrected_count", (pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL,)),
    FieldReading("retired_pages_corrected_count", (pynvml.NVML_FI_DEV_RETIRED_SBE,)),
    FieldReading("retired_pages_uncorrected_count", (pynvml.NVML_FI_DEV_RETIRED_DBE,)),
    FieldReading("retired_pages_pending", (pynvml.NVML_FI_DEV_RETIRED_PENDING,), bool),
    FieldReading("remapped_rows_corrected_count", (pynvml.NVML_FI_DEV_REMAPPED_COR,)),
    FieldReading("remapped_rows_uncorrected_count", (pynvml.NVML_FI_DEV_REMAPPED_UNC,)),
    FieldReading("remapped_rows_pending", (pynvml.NVML_FI_DEV_REMAPPED_PENDING,), bool),
    FieldReading("remapped_rows_failed", (pynvml.NVML_FI_DEV_REMAPPED_FAILURE,), bool),
    FieldReading("ecc_mode", (pynvml.NVML_FI_DEV_ECC_CURRENT,), bool),
    FieldReading("ecc_mode_pending", (pynvml.NVML_FI_DEV_ECC_PENDING,), bool),
)


def _nano(value: float) -> float:
    return value / 1e9


VIOLATIONS = (
    FieldReading("power_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_POWER,), _nano),
    FieldReading("thermal_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_THERMAL,), _nano),
    FieldReading("sync_boost_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,), _nano),
    FieldReading("board_limit_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,), _nano),
    FieldReading(
        "low_utilization_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION,), _nano
    ),
    FieldReading("reliability_violation_seconds", (pynvml.NVML_FI_DEV_PERF_POLICY_RELIABILITY,), _nano),
)
"""How long each cause throttled clocks."""


# The scope of a field per NVLink that means all links.
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
"""The reading that sums the states of all links."""

_MOST_LINKS = 36
# Errors of a link number that does not exist.
_NO_MORE = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
}


@dataclass(frozen=True, slots=True)
class Links:
    """How many NVLinks a GPU has, and the UUIDs at the other `ends` of those that are up (None is a switch).

    `known`: False while links are down or did not answer, so that the GPU is asked again.
    """

    count: int = 0
    ends: tuple[str | None, ...] = ()
    known: bool = False


def find_links(handle: pynvml.c_nvmlDevice_t, by_address: Mapping[str, str]) -> Links:
    """Ask for each link. GpuSourceError if NVML is gone."""
    ends: list[str | None] = []
    for link in range(_MOST_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(handle, link):
                ends.append(by_address.get(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            return Links(link, tuple(ends), len(ends) == link) if error.value in _NO_MORE else Links()
    return Links(_MOST_LINKS, tuple(ends), len(ends) == _MOST_LINKS)


_PERCENT = 100.0
_MIB = 1024.0**2

GPM_METRICS = {
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
_ANSWERS = Struct("@" + len(GPM_METRICS) * "Iid24x")
"""As many nvmlGpmMetric_t: of each the metric, a code, the value, and three names."""


class Activity:
    """The samples of a GPU, or of MIG instance `instance` on it; `close` frees them."""

    def __init__(self, handle: pynvml.c_nvmlDevice_t, instance: int | None) -> None:
        self._handle = handle
        self._instance = instance
        self._samples: list[pynvml.c_nvmlGpmSample_t] = []  # older, newer
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(GPM_METRICS)
        for answer, metric in zip(self._request.metrics, GPM_METRICS.values(), strict=False):
            answer.metricId = metric
        self._sampled = False

    def ask(self, queries: Queries) -> Values:
        """The readings since the last call; none on the first."""
        found = queries.attempt("activity", self._since_last)
        if isinstance(found, Failure):
            queries.note(GPM_METRICS, found)
            return {}
        queries.calls += found  # nvmlGpmMetricsGet
        readings: Values = {}
        told = _ANSWERS.unpack_from(self._request.metrics) if found else ()
        answers = zip(GPM_METRICS.items(), told[::3], told[1::3], told[2::3], strict=False)
        for (name, metric), of_metric, code, value in answers:
            if code or not value >= 0 or of_metric != metric:  # or NaN
                detail = f"GPM said {value:g} with code {code}"
                queries.note((name,), Failure(ReadingStatus.NOT_SUPPORTED, detail))
            else:
                readings[name] = min(value, _PERCENT) if name.endswith("_percent") else value * _MIB
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
            self._request.sample1, self._request.sample2 = self._samples
            pynvml.nvmlGpmMetricsGet(self._request)
        except pynvml.NVMLError as error:
            failure = explain(error)
            return failure if failure.gone else Failure(ReadingStatus.NOT_SUPPORTED, f"GPM: {failure.detail}")
        return True
