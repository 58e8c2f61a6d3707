"""How a GPU is shown while its driver is slow or silent. Pure: all times are arguments, in seconds.

A GPU whose call is out longer than the soft deadline is SLOW and keeps its last readings, with their age. From the
hard deadline on it is HUNG: its last readings say nothing about it any more and are absent. (A monitor that keeps
exporting the last values of a hung GPU hid such faults in NVIDIA/dcgm-exporter#164 and microsoft/pai#889.)
"""

from dataclasses import dataclass

from gpuscale.monitor.model.readings import (
    GpuIdentity,
    GpuReading,
    GpuSample,
    GpuState,
    GpuView,
    ReadingStatus,
    Timed,
)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long a tick of one GPU may take: SLOW beyond `soft`, HUNG from `hard` on."""

    soft: float = 2.0
    hard: float = 10.0


def view(
    identity: GpuIdentity,
    last: Timed[GpuSample] | None,
    *,
    ordered_at: float | None,
    now: float,
    deadlines: Deadlines,
) -> GpuView:
    """The GPU as it is to be shown at `now`; `ordered_at` is when the call that is out now was made, None for none."""
    waiting = 0.0 if ordered_at is None else now - ordered_at
    read_at = last.read_at if last else None
    if waiting >= deadlines.hard:
        reading = GpuReading.nothing(ReadingStatus.TIMEOUT, f"no answer for {waiting:.0f} s")
        return GpuView(identity, GpuState.HUNG, reading, read_at)
    if last is None:
        reading = GpuReading.nothing(ReadingStatus.TIMEOUT, "no answer yet")
        return GpuView(identity, GpuState.SLOW, reading, None)
    late = max(waiting, last.read_at - last.ordered_at) >= deadlines.soft
    state = _at_least_slow(last.value.state) if late else last.value.state
    return GpuView(identity, state, last.value.reading, read_at)


def _at_least_slow(state: GpuState) -> GpuState:
    """A GPU that is gone or needs a reset stays so; any other is SLOW."""
    return state if state in {GpuState.LOST, GpuState.RESET_REQUIRED} else GpuState.SLOW
