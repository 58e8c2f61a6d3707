"""Readings that NVML gives as field values, many in one call. The tables are data: name, ids, unit, bounds.

The ids and their units are those of nvml.h (NVML_FI_DEV_*). A field that an older driver does not know is answered with
INVALID_ARGUMENT and is as good as not supported.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml

from gpuscale.monitor.agent.nvml.queries import Failure, Queries
from gpuscale.monitor.model.readings import ReadingStatus, RecoveryAction

# Readings by name, as the tables give them; that name and type fit the model is what the tests are for.
Values = dict[str, Any]
Value = float | int | bool | RecoveryAction
Key = int | tuple[int, int]

# The scope of a field that is kept per NVLink: all of them together.
_ALL_LINKS = 0xFFFFFFFF
_MILLI = 1000.0
_KIB = 1024
_HIGHEST_COUNT = 2.0**63 - 1
_HIGHEST_CELSIUS = 300.0
_HIGHEST_WATTS = 100_000.0
_HIGHEST_MILLIWATTS = _HIGHEST_WATTS * _MILLI
_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: RecoveryAction.NONE,
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: RecoveryAction.GPU_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: RecoveryAction.NODE_REBOOT,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: RecoveryAction.DRAIN_PEERS,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: RecoveryAction.DRAIN_AND_RESET,
}


_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}


@dataclass(frozen=True, slots=True)
class FieldReading:
    """A reading by field values: the sum of those that `keys` name (id, or id and scope), converted."""

    name: str
    keys: tuple[Key, ...]
    convert: Callable[[float], Value] = int
    high: float = _HIGHEST_COUNT


def _thousandth(value: float) -> float:
    return value / _MILLI


def _kib(value: float) -> int:
    return int(value) * _KIB


def _recovery(value: float) -> RecoveryAction:
    return _RECOVERY.get(int(value), RecoveryAction.OTHER)


METERS = (
    FieldReading("memory_temperature_celsius", (pynvml.NVML_FI_DEV_MEMORY_TEMP,), float, _HIGHEST_CELSIUS),
    FieldReading("energy_joules", (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,), _thousandth),
)
"""What moves slowly or only adds up, and is worth a call every few seconds."""

SLOW = (
    FieldReading(
        "power_limit_default_watts",
        (pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT,),
        _thousandth,
        _HIGHEST_MILLIWATTS,
    ),
    FieldReading(
        "power_limit_min_watts", (pynvml.NVML_FI_DEV_POWER_MIN_LIMIT,), _thousandth, _HIGHEST_MILLIWATTS
    ),
    FieldReading(
        "power_limit_max_watts", (pynvml.NVML_FI_DEV_POWER_MAX_LIMIT,), _thousandth, _HIGHEST_MILLIWATTS
    ),
    FieldReading("pcie_replay_count", (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,)),
    FieldReading("pcie_sent_bytes", (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,)),
    FieldReading("pcie_received_bytes", (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,)),
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
    FieldReading("recovery_action", (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,), _recovery),
)
"""What changes seldom."""

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
"""What changes seldom, of a GPU that has NVLinks."""
_NVLINK_STATE = "nvlink_active_count"
_NO_LINKS = Failure(ReadingStatus.NOT_SUPPORTED, "the GPU has no NVLink")


def ask_slow(
    queries: Queries[pynvml.NVMLError], handle: pynvml.c_nvmlDevice_t, links: tuple[int, ...]
) -> Values:
    """Everything that is read seldom, in one call; `links` are the GPU's NVLinks."""
    if not links:
        queries.note((*(field.name for field in NVLINK), _NVLINK_STATE), _NO_LINKS)
        return ask(queries, handle, "slow fields", SLOW)
    state = FieldReading(_NVLINK_STATE, tuple((pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in links))
    return ask(queries, handle, "slow fields", (*SLOW, *NVLINK, state))


def ask(
    queries: Queries[pynvml.NVMLError],
    handle: pynvml.c_nvmlDevice_t,
    question: str,
    fields: Iterable[FieldReading],
) -> Values:
    """Readings by name, in one call; those the GPU is known not to support are left out."""
    wanted: list[FieldReading] = []
    for field in fields:
        refusal = queries.unsupported(field.name)
        if refusal is None:
            wanted.append(field)
        else:
            queries.note((field.name,), refusal)
    if not wanted:
        return {}
    keys = [key for field in wanted for key in field.keys]
    found = queries.attempt(question, lambda: pynvml.nvmlDeviceGetFieldValues(handle, keys))
    if isinstance(found, Failure):
        queries.note((field.name for field in wanted), found)
        return {}
    readings: Values = {}
    place = 0
    for field in wanted:
        value = _reading(queries, field, found, place)
        place += len(field.keys)
        if value is not None:
            readings[field.name] = value
    return readings


def _reading(
    queries: Queries[pynvml.NVMLError],
    field: FieldReading,
    found: Sequence[pynvml.c_nvmlFieldValue_t],
    place: int,
) -> Value | None:
    total: float = 0
    for at in range(place, place + len(field.keys)):
        answer = queries.attempt(field.name, partial(_number, found[at]), counted=False)
        if isinstance(answer, Failure):
            queries.note((field.name,), answer)
            return None
        total += answer
    if queries.within(field.name, total, high=field.high) is None:
        return None
    return field.convert(total)


def _number(value: pynvml.c_nvmlFieldValue_t) -> float | Failure:
    """The number of a field value.

    Raises:
        NVMLError: the driver's reason for not giving it.
    """
    code = value.nvmlReturn
    if code == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return Failure(ReadingStatus.NOT_SUPPORTED, "the driver does not know it")
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)
    member = _MEMBERS.get(value.valueType)
    if member is None:
        return Failure(ReadingStatus.ERROR, f"the driver gave a value of unknown type {value.valueType}")
    number: float = getattr(value.value, member)
    return number
