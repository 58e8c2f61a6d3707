"""Readings that NVML gives as field values, many in one call: name, ids, unit, bounds.

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

_HIGHEST_COUNT = 2.0**63 - 1
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


def ask(
    queries: Queries, handle: pynvml.c_nvmlDevice_t, question: str, fields: Iterable[FieldReading]
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
        value = _reading(queries, field, found[place : place + len(field.keys)])
        place += len(field.keys)
        if value is not None:
            readings[field.name] = value
    return readings


def _reading(
    queries: Queries, field: FieldReading, values: Sequence[pynvml.c_nvmlFieldValue_t]
) -> Value | None:
    total: float = 0
    for value in values:
        answer = queries.attempt(field.name, partial(_number, value), counted=False)
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
