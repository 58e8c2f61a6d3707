"""The next steps from the observed to the desired state, and the report on each replica. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpuscale.autoscaler.adapters.engine import (
    Desired,
    Finish,
    Kill,
    Remove,
    Sighting,
    Start,
    Step,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.journal import JournalRecord, Phase
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaReport, ReplicaState
from gpuscale.common.sizes import counted

VANISHED_AFTER = 10.0
"""Seconds after which a started replica missing in the engine counts as ended."""
KILLED = "killed, because it did not finish its work in time"
NEVER_STARTED = "it was never started here"
GONE = "it was removed from the engine by somebody else; its exit code is unknown"
ENDED_ASKED = "it ended after it was asked to; its exit code is unknown"

_STATES = {
    (WorkerLife.WAITING, False): ReplicaState.STARTING,
    (WorkerLife.WAITING, True): ReplicaState.DRAINING,
    (WorkerLife.STARTING, False): ReplicaState.STARTING,
    (WorkerLife.STARTING, True): ReplicaState.DRAINING,
    (WorkerLife.READY, False): ReplicaState.READY,
    (WorkerLife.READY, True): ReplicaState.DRAINING,
    (WorkerLife.ENDED, False): ReplicaState.FAILED,
    (WorkerLife.ENDED, True): ReplicaState.STOPPED,
}
"""By the engine's view, and whether the replica was asked to stop."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The desired and the observed state at one moment."""

    wanted: Mapping[str, Desired]  # the autoscaler's last word, by name of the replica
    seen: Mapping[str, Sighting]  # what the engine has
    records: Mapping[str, JournalRecord]  # the journal: what was started, asked to stop, or refused
    # since when a started replica is missing in the engine, in seconds since boot
    missing_since: Mapping[str, float]
    now: float  # seconds since boot
    boot_id: str  # of this boot
    most: int = 0  # most replicas at a time; 0 for no limit


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do next: `write` records, take `steps` and `starts`, write `done`, and `forget` replicas."""

    write: list[JournalRecord] = field(default_factory=list[JournalRecord])
    steps: list[Step] = field(default_factory=list[Step])
    starts: list[Start] = field(default_factory=list[Start])
    done: list[JournalRecord] = field(default_factory=list[JournalRecord])
    forget: list[str] = field(default_factory=list[str])


def plan_steps(at: Situation) -> StepPlan:
    """The next steps, by name of the replica.

    A start is on disk before the engine is told, so that a vanished replica is not started again. A request to finish is on
    disk after the engine was told: a crash in between repeats it and never loses it.
    """
    plan, room = StepPlan(), math.inf
    if at.most:  # how many more may run, beside those that run, may run, or are being started
        living = {name for name, sighting in at.seen.items() if sighting.life is not WorkerLife.ENDED}
        not_shown = {
            name
            for name, record in at.records.items()
            if name not in at.seen
            and (record.phase is Phase.INTENT or (record.phase is Phase.RUNNING and not _lost(at, name)))
        }
        room = at.most - len(living | not_shown)
    for name in sorted(at.wanted):
        desired, sighting, record = at.wanted[name], at.seen.get(name), at.records.get(name)
        phase = record.phase if record else None
        if desired.goal is Goal.FORGET:  # once nothing of it runs
            if sighting is None and phase is Phase.ENDED:
                plan.forget.append(name)
            elif sighting is not None and sighting.life in {WorkerLife.ENDED, WorkerLife.WAITING}:
                plan.steps.append(Remove(name))
                plan.forget.append(name)
        elif sighting is not None and sighting.life is not WorkerLife.WAITING:
            _tend(at, desired, sighting, record, plan)
        elif phase is Phase.ENDED or desired.goal is Goal.STOP:
            _end_absent(at, name, record, plan)
        elif phase is Phase.INTENT:
            plan.starts.append(Start(desired.order, desired.template))
        elif record is not None:
            if _lost(at, name):
                plan.write.append(replace(record, phase=Phase.ENDED, failed=True, reason=GONE))
        elif room > 0:
            room -= 1
            plan.write.append(JournalRecord(name, Phase.INTENT, at.boot_id))
            plan.starts.append(Start(desired.order, desired.template))
        else:
            most = f"this adapter runs {counted(at.most, 'replica')} at most"
            plan.write.append(refused(name, most, at.boot_id))
    return plan


def _end_absent(at: Situation, name: str, record: JournalRecord | None, plan: StepPlan) -> None:
    """Handle a replica that should not run, and that the engine does not run."""
    waits = name in at.seen
    if waits:
        plan.steps.append(Remove(name))
    if record is not None and record.phase is Phase.ENDED:
        return
    reason = NEVER_STARTED if record is None or record.phase is Phase.INTENT else ENDED_ASKED
    ended = JournalRecord(name, Phase.ENDED, at.boot_id, reason=reason)
    if waits:
        plan.done.append(ended)
    elif record is None or _lost(at, name):
        plan.write.append(ended)


def _lost(at: Situation, name: str) -> bool:
    """Whether the engine has not started it after all, or has omitted it for longer than listings may lag."""
    return name in at.seen or at.now - at.missing_since.get(name, at.now) >= VANISHED_AFTER


def _tend(
    at: Situation, desired: Desired, sighting: Sighting, before: JournalRecord | None, plan: StepPlan
) -> None:
    """Record a replica of the engine, and end it if it should stop."""
    name = desired.order.replica
    record = before or JournalRecord(name, Phase.RUNNING, at.boot_id)
    if record.phase is Phase.INTENT:
        record = replace(record, phase=Phase.RUNNING)
    if sighting.kept is not None:
        record = replace(record, kept=sighting.kept)
    asked_at = record.asked_to_stop_at
    if sighting.life is WorkerLife.ENDED:  # an engine may forget that
        record = replace(
            record,
            phase=Phase.ENDED,
            failed=asked_at is None,
            exit_code=sighting.exit_code,
            reason=sighting.reason,
        )
    elif desired.goal is Goal.STOP:
        asked_now = replace(record, boot_id=at.boot_id, asked_to_stop_at=at.now)
        if asked_at is None:
            plan.steps.append(Finish(name, desired.drain_timeout))
            plan.done.append(asked_now)
            return
        if record.boot_id != at.boot_id:  # the time of that request is unknown: its timeout starts again
            record = asked_now
        elif desired.drain_timeout is not None and at.now - asked_at >= desired.drain_timeout:
            plan.steps.append(Kill(name))
    if record != before:
        plan.write.append(record)


def refused(name: str, why: str, boot_id: str) -> JournalRecord:
    """The record of a replica that will never be started."""
    return JournalRecord(name, Phase.ENDED, boot_id, failed=True, reason=why)


def reports(
    seen: Mapping[str, Sighting], records: Mapping[str, JournalRecord], killed: Collection[str]
) -> dict[str, ReplicaReport]:
    """The report on every replica: those of the engine, those about to be started, and those that never were."""
    found: dict[str, ReplicaReport] = {}
    for name, sighting in seen.items():
        record = records.get(name)
        if sighting.life is WorkerLife.WAITING and record is not None and record.phase is Phase.ENDED:
            continue
        asked = record is not None and record.asked_to_stop_at is not None
        reason = KILLED if name in killed and sighting.life is WorkerLife.ENDED else sighting.reason
        found[name] = ReplicaReport(_STATES[sighting.life, asked], sighting.pid, sighting.exit_code, reason)
    for name, record in records.items():
        if name in found:
            continue
        if record.phase is Phase.ENDED:
            state = ReplicaState.FAILED if record.failed else ReplicaState.STOPPED
            found[name] = ReplicaReport(state, exit_code=record.exit_code, reason=record.reason)
        else:
            found[name] = ReplicaReport(_STATES[WorkerLife.STARTING, record.asked_to_stop_at is not None])
    return found
