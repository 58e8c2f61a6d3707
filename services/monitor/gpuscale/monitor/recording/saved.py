"""Recordings as text and back, for the disk. Pure. Times are shifted to the count that is stored, and back."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpuscale.monitor.model.metrics import GPU_METRICS, Tally
from gpuscale.monitor.model.recordings import (
    NEVER,
    Figures,
    Order,
    RecordedGpu,
    Recording,
    RecordingState,
    Target,
)

GPUS_AT_ONCE = 64


def to_text(recording: Recording, shift: float) -> str:
    """A recording with what it has come to so far; `shift` seconds are added to its times."""
    return "".join(pieces(recording, shift))


def pieces(recording: Recording, shift: float) -> Iterator[str]:
    """The same in pieces that each take a moment to make: those of large recordings have a megabyte in all."""
    targets, gpus = recording.order.targets, recording.gpus
    ended = recording.ended_at
    yield json.dumps(
        {
            "state": recording.state.name,
            "started_at": recording.started_at + shift,
            "ended_at": None if ended is None else ended + shift,
        }
    ).removesuffix("}")
    yield f', "order": {json.dumps(_from_order(recording.order)).removesuffix("}")}, "targets": ['
    for start in range(0, len(targets), GPUS_AT_ONCE):
        part = targets[start : start + GPUS_AT_ONCE]
        yield (", " if start else "") + ", ".join(json.dumps(_from_target(one)) for one in part)
    yield ']}, "gpus": ['
    for start in range(0, len(gpus), GPUS_AT_ONCE):
        each = gpus[start : start + GPUS_AT_ONCE]
        yield (", " if start else "") + ", ".join(json.dumps(_from_gpu(one, shift)) for one in each)
    yield "]}"


def from_text(text: str, shift: float) -> Recording:
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
            Order(targets=targets, **order),
            found["started_at"] - shift,
            [_to_gpu(target, gpu, shift) for target, gpu in gpus],
            RecordingState[found["state"]],
            None if ended is None else ended - shift,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no recording: {error}") from error


def _from_order(order: Order) -> dict[str, object]:
    return {
        "id": order.id,
        "request_id": order.request_id,
        "fingerprint": order.fingerprint,
        "interval": order.interval,
        "max_duration": order.max_duration,
    }


def _from_target(target: Target) -> dict[str, object]:
    return {
        "name": target.name,
        "uuid": target.uuid,
        "index": target.index,
        "model": target.model,
        "period": target.period,
    }


def _from_gpu(gpu: RecordedGpu, shift: float) -> dict[str, object]:
    figures = gpu.figures()
    return {
        "sample_count": figures.sample_count,
        "last_at": figures.last_at + shift if figures.sample_count else None,
        "tallies": {
            metric.name: {"min": tally.min, "max": tally.max, "total": tally.total, "count": tally.count}
            for metric, tally in zip(GPU_METRICS, figures.tallies, strict=False)
            if tally.count
        },
    }


def _to_gpu(target: Target, found: Mapping[str, Any], shift: float) -> RecordedGpu:
    last, tallies = found["last_at"], found["tallies"]
    each = [Tally(**tallies[metric.name]) if metric.name in tallies else Tally() for metric in GPU_METRICS]
    return RecordedGpu(target, Figures(found["sample_count"], NEVER if last is None else last - shift, each))
