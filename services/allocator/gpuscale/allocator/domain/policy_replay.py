"""Dry runs: what a use policy would have done over a recorded past, by the same `judge`, at the resolution of the record. Pure.

The past comes in steps. A step in which nothing was recorded of a GPU is unknown, as a silent agent is to a policy that runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import ceil, floor

from gpuscale.allocator.domain.use_policies import (
    GpuSighting,
    PolicyAct,
    PolicySubject,
    SeenSubject,
    Track,
    UsePolicy,
    ended,
    judge,
    verdict,
)

UNKNOWN, BUSY, IDLE = range(3)
"""What is recorded of a GPU in a step."""


@dataclass(frozen=True, slots=True)
class RecordedHold:
    """What a reservation held, from `begin` to `end` in seconds since 1970; of the `shared` GPUs only a part."""

    subject: PolicySubject
    gpus: tuple[str, ...]
    shared: frozenset[str]
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """What is recorded of GPUs, by UUID: one of the three for each of `count` steps of `step` seconds from `start` on."""

    start: float
    step: float
    count: int
    gpus: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def of(self, hold: RecordedHold, index: int) -> tuple[int, ...]:
        """What is recorded of what was held, for whoever held it: who uses a shared GPU is not recorded."""
        found = ((uuid, self.gpus[uuid][index] if uuid in self.gpus else UNKNOWN) for uuid in hold.gpus)
        return tuple(UNKNOWN if one is BUSY and uuid in hold.shared else one for uuid, one in found)


@dataclass(slots=True)
class DryRun:
    """What would have been done, and for how many seconds, of all holds together, that is known and not known."""

    acts: list[PolicyAct] = field(default_factory=list[PolicyAct])
    known: float = 0.0
    unknown: float = 0.0
    subjects: int = 0

    def replay(self, name: str, policy: UsePolicy, hold: RecordedHold, use: RecordedUse) -> None:
        """Add what a policy in shadow would have done to a hold. The steps count that lie within it as a whole."""
        policy = replace(policy, shadow=True)
        track: Track | None = None
        before: tuple[int, ...] | None = None
        seen, known = tuple[GpuSighting, ...](), False
        first = max(0, ceil((hold.begin - use.start) / use.step))
        last = min(use.count, floor((hold.end - use.start) / use.step))
        self.subjects += 1
        for index in range(first, last):
            states = use.of(hold, index)
            if states != before:  # so it was from the beginning of the step on
                seen = _sightings(hold.gpus, states)
                known = verdict(policy, SeenSubject(hold.subject, seen))[0] is not None
            for now in (index, index + 1) if states != before else (index + 1,):
                at = use.start + now * use.step
                sighting = SeenSubject(hold.subject, seen, max(0.0, at - hold.begin))
                track, acts = judge(name, policy, sighting, track, at, _wall(at))
                self.acts += acts
            before = states
            self.known += use.step * known
            self.unknown += use.step * (not known)
        if track is not None and hold.end <= use.start + use.count * use.step:
            self.acts += ended(name, policy, track, "it ended", _wall(hold.end), gone=True)


def _sightings(gpus: Sequence[str], states: Sequence[int]) -> tuple[GpuSighting, ...]:
    idle: Mapping[int, bool] = {IDLE: True, BUSY: False}
    pairs = zip(gpus, states, strict=True)
    return tuple(GpuSighting(uuid, idle.get(one), None, None, None) for uuid, one in pairs)


def _wall(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
