"""Recordings and health events as text, and rows of history as bytes, for the disk. Pure.

Times are shifted to the count that is stored, and back. The bytes of rows are their arrays one after another, in the byte
order of nearly all machines: numbers (32 bits), minima, means and maxima (32-bit floats), counts (16 bits).
"""

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpuscale.monitor.history.ring import Rows
from gpuscale.monitor.model.health import Event, Finding, HealthAction, HealthCheck, HealthSeverity
from gpuscale.monitor.model.metrics import GPU_METRICS, MetricTally
from gpuscale.monitor.model.recordings import (
    NEVER,
    Figures,
    RecordedGpu,
    Recording,
    RecordingOrder,
    RecordingState,
    Target,
)

GPUS_AT_ONCE = 64

_ORDER_FIELDS = ("id", "request_id", "fingerprint", "interval", "max_duration")
_TARGET_FIELDS = ("name", "uuid", "index", "model", "period")
_TALLY_FIELDS = ("min", "max", "total", "count")
_EVENT_FIELDS = ("id", "node", "uuid", "xid", "count", "cleared", "boot_id")


def recording_to_text(recording: Recording, shift: float) -> Iterator[str]:
    """A recording with what it has come to so far; `shift` seconds are added to its times.

    In pieces that each take a moment to make: those of large recordings have a megabyte in all.
    """
    targets, gpus = recording.order.targets, recording.gpus
    ended = recording.ended_at
    yield json.dumps(
        {
            "state": recording.state.name,
            "started_at": recording.started_at + shift,
            "ended_at": None if ended is None else ended + shift,
        }
    ).removesuffix("}")
    yield f', "order": {json.dumps(_fields(recording.order, _ORDER_FIELDS)).removesuffix("}")}, "targets": ['
    for start in range(0, len(targets), GPUS_AT_ONCE):
        part = targets[start : start + GPUS_AT_ONCE]
        yield (", " if start else "") + ", ".join(
            json.dumps(_fields(target, _TARGET_FIELDS)) for target in part
        )
    yield ']}, "gpus": ['
    for start in range(0, len(gpus), GPUS_AT_ONCE):
        each = gpus[start : start + GPUS_AT_ONCE]
        yield (", " if start else "") + ", ".join(json.dumps(_from_gpu(gpu, shift)) for gpu in each)
    yield "]}"


def recording_from_text(text: str, shift: float) -> Recording:
    """The recording of a text; `shift` seconds are taken off its times.

    Raises:
        ValueError: it is not the text of one.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        order = found["order"]
        targets = tuple(Target(**target) for target in order.pop("targets"))
        gpus = zip(targets, found["gpus"], strict=True)
        ended = found["ended_at"]
        return Recording(
            RecordingOrder(targets=targets, **order),
            found["started_at"] - shift,
            [_to_gpu(target, gpu, shift) for target, gpu in gpus],
            RecordingState[found["state"]],
            None if ended is None else ended - shift,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no recording: {error}") from error


def _fields(value: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}


def _from_gpu(gpu: RecordedGpu, shift: float) -> dict[str, object]:
    figures = gpu.figures()
    return {
        "sample_count": figures.sample_count,
        "last_at": figures.last_at + shift if figures.sample_count else None,
        "tallies": {
            metric.name: _fields(tally, _TALLY_FIELDS)
            for metric, tally in zip(GPU_METRICS, figures.tallies, strict=False)
            if tally.count
        },
    }


def _to_gpu(target: Target, found: Mapping[str, Any], shift: float) -> RecordedGpu:
    last, tallies = found["last_at"], found["tallies"]
    each = [
        MetricTally(**tallies[metric.name]) if metric.name in tallies else MetricTally()
        for metric in GPU_METRICS
    ]
    return RecordedGpu(target, Figures(found["sample_count"], NEVER if last is None else last - shift, each))


def event_to_text(event: Event, shift: float) -> str:
    """An event; `shift` seconds are added to its times."""
    finding, resolved = event.finding, event.resolved_at
    return json.dumps(
        {
            **_fields(event, _EVENT_FIELDS),
            "check": event.check.name,
            "severity": finding.severity.name,
            "action": finding.action.name,
            "message": finding.message,
            "fatal": finding.fatal,
            "started_at": event.started_at + shift,
            "last_at": event.last_at + shift,
            "resolved_at": None if resolved is None else resolved + shift,
        }
    )


def event_from_text(text: str, shift: float) -> Event:
    """The event of a text; `shift` seconds are taken off its times.

    Raises:
        ValueError: it is not the text of one.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        resolved = found["resolved_at"]
        return Event(
            id=found["id"],
            check=HealthCheck[found["check"]],
            node=found["node"],
            uuid=found["uuid"],
            finding=Finding(
                HealthSeverity[found["severity"]],
                HealthAction[found["action"]],
                found["message"],
                found["fatal"],
            ),
            started_at=found["started_at"] - shift,
            last_at=found["last_at"] - shift,
            xid=found["xid"],
            resolved_at=None if resolved is None else resolved - shift,
            count=found["count"],
            cleared=found["cleared"],
            boot_id=found.get("boot_id", ""),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no health event: {error}") from error


CHUNK = 30
"""Steps in a chunk, which is what is stored at a time: half an hour of the coarsest tier."""
_BYTES_OF_NUMBER, _BYTES_OF_METRIC = 4, 3 * 4 + 2


def chunks(rows: Rows, width: int, shift: int) -> Iterator[tuple[int, bytes]]:
    """Rows of `width` metrics by chunk: its number and its bytes. Numbers are stored with `shift` added."""
    stored = array("i", [number + shift for number in rows.numbers])
    begin = 0
    while begin < len(stored):
        chunk = stored[begin] // CHUNK
        end = begin + sum(number // CHUNK == chunk for number in stored[begin : begin + CHUNK])
        part = rows._replace(numbers=stored).part(begin, end, width)
        yield chunk, b"".join(_ordered(column).tobytes() for column in part)
        begin = end


def unpack(body: bytes, width: int, shift: int) -> Rows:
    """The rows of a chunk; what was added to their numbers is taken off.

    Raises:
        ValueError: these are not the bytes of rows with so many metrics.
    """
    count, rest = divmod(len(body), _BYTES_OF_NUMBER + width * _BYTES_OF_METRIC)
    if rest:
        raise ValueError(f"{len(body)} bytes are no rows of {width} metrics")
    rows = Rows.empty()
    at = 0
    for column in rows:
        size = (count if column is rows.numbers else count * width) * column.itemsize
        column.frombytes(body[at : at + size])
        _ordered(column)
        at += size
    try:
        return rows._replace(numbers=array("i", [number - shift for number in rows.numbers]))
    except OverflowError as error:
        raise ValueError(f"a row has a number that is no number of a step: {error}") from error


def _ordered(numbers: "array[int] | array[float]") -> "array[int] | array[float]":
    """Numbers with their bytes in the stored order, or back from it."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
