"""Recordings and health events as JSON for the disk, with times shifted to the stored timeline, and back. Pure."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

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
    """A recording as JSON with `shift` seconds added to its times, in pieces: a large one has a megabyte."""
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
        texts: list[str] = []
        for gpu in gpus[start : start + GPUS_AT_ONCE]:
            figures = gpu.figures()
            fields = {
                "sample_count": figures.sample_count,
                "last_at": figures.last_at + shift if figures.sample_count else None,
                "tallies": {
                    metric.name: _fields(tally, _TALLY_FIELDS)
                    for metric, tally in zip(GPU_METRICS, figures.tallies, strict=False)
                    if tally.count
                },
            }
            texts.append(json.dumps(fields))
        yield (", " if start else "") + ", ".join(texts)
    yield "]}"


def recording_from_text(text: str, shift: float) -> Recording:
    """Parse a recording, subtracting `shift` seconds from its times. ValueError if it is invalid."""
    try:
        found: dict[str, Any] = json.loads(text)
        order = found["order"]
        targets = tuple(Target(**target) for target in order.pop("targets"))
        gpus: list[RecordedGpu] = []
        for target, gpu in zip(targets, found["gpus"], strict=True):
            last, kept = gpu["last_at"], gpu["tallies"]
            tallies = [MetricTally(**kept.get(metric.name, {})) for metric in GPU_METRICS]
            last_at = NEVER if last is None else last - shift
            gpus.append(RecordedGpu(target, Figures(gpu["sample_count"], last_at, tallies)))
        ended = found["ended_at"]
        return Recording(
            RecordingOrder(targets=targets, **order),
            found["started_at"] - shift,
            gpus,
            RecordingState[found["state"]],
            None if ended is None else ended - shift,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid recording: {error}") from error


def _fields(value: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in names}


def event_to_text(event: Event, shift: float) -> str:
    """An event as JSON with `shift` seconds added to its times."""
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
    """Parse an event, subtracting `shift` seconds from its times. ValueError if it is invalid."""
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
        raise ValueError(f"invalid health event: {error}") from error
