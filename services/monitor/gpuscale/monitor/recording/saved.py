"""Recordings as text and back, for the disk. Pure. Times are shifted to the count that is stored, and back."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gpuscale.monitor.history.metrics import GPU_METRICS, Tally
from gpuscale.monitor.recording.model import Order, RecordedGpu, Recording, RecordingState, Target


def to_text(recording: Recording, shift: float) -> str:
    """A recording with what it has come to so far; `shift` seconds are added to its times."""
    return json.dumps(
        {
            "order": asdict(recording.order),
            "state": recording.state.name,
            "started_at": recording.started_at + shift,
            "ended_at": None if recording.ended_at is None else recording.ended_at + shift,
            "gpus": [_from_gpu(gpu, shift) for gpu in recording.gpus],
        }
    )


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


def _from_gpu(gpu: RecordedGpu, shift: float) -> dict[str, object]:
    return {
        "sample_count": gpu.sample_count,
        "last_at": gpu.last_at + shift if gpu.sample_count else None,
        "tallies": {
            metric.name: asdict(tally)
            for metric, tally in zip(GPU_METRICS, gpu.tallies, strict=True)
            if tally.count
        },
    }


def _to_gpu(target: Target, found: Mapping[str, Any], shift: float) -> RecordedGpu:
    gpu = RecordedGpu(target, sample_count=found["sample_count"])
    if found["last_at"] is not None:
        gpu.last_at = found["last_at"] - shift
    tallies = found["tallies"]
    gpu.tallies = [
        Tally(**tallies[metric.name]) if metric.name in tallies else Tally() for metric in GPU_METRICS
    ]
    return gpu
