"""The next steps from the observed to the desired state, and the report of each replica. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from gpuscale.autoscaler.adapters.engine import (
    Desired,
    Finish,
    Kill,
    Remove,
    Sighting,
    Start,
    Step,
    WorkerGoal,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.journal import JournalRecord, Phase
from gpuscale.autoscaler.domain.replicas import ReplicaReport, ReplicaState

VANISHED_AFTER = 10.0
"""Seconds after which a started replica that the engine no longer shows counts as ended."""
KILLED = "killed, since it had not finished its work in the time it may take"
NEVER_STARTED = "it was never started here"
GONE = "it was removed from the engine by somebody else; its exit code is unknown"
ENDED_ASKED = "it ended after it was asked to; its exit code is unknown"


@dataclass(frozen=True, slots=True)
class Situation:
    """The desired and the observed state at one moment.

    Attributes:
        wanted: what the autoscaler said last, by name of the replica.
        seen: what the engine has.
        records: the journal: what was started, asked to stop, or refused.
        missing_since: since when the engine does not show a replica that was started, in seconds since boot.
        now: seconds since boot.
        boot_id: of this boot.
        most: replicas that may run at a time; 0 for no limit.
    """

    wanted: Mapping[str, Desired]
    seen: Mapping[str, Sighting]
    records: Mapping[str, JournalRecord]
    missing_since: Mapping[str, float]
    now: float
    boot_id: str
    most: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What to do next, in this order: `write` records, take `steps`, write `done`, and `forget` replicas."""

    write: list[JournalRecord] = field(default_factory=list[JournalRecord])
    steps: list[Step] = field(default_factory=list[Step])
    done: list[JournalRecord] = field(default_factory=list[JournalRecord])
    forget: list[str] = field(default_factory=list[str])


def plan_steps(at: Situation) -> StepPlan:
    """The next steps, by name of the replica.

    A start is on disk before the engine hears of it, so that a replica that vanished is not started again. A request to
    finish is on disk after the engine heard of it: a crash in between repeats it and never loses it.
    """
    plan = StepPlan()
    room = _room(at)
    for name in sorted(at.wanted):
        desired = at.wanted[name]
        if desired.goal is WorkerGoal.FORGET:
            _forget(at, name, plan)
        elif name in at.seen and at.seen[name].life is not WorkerLife.WAITING:
            _tend(at, name, desired, plan)
        elif not _over(at, name, desired, plan):
            if name not in at.records:
                if room <= 0:
                    plan.write.append(
                        refused(name, f"this adapter runs {at.most} replicas at most", at.boot_id)
                    )
                    continue
                room -= 1
                plan.write.append(JournalRecord(name, Phase.INTENT, at.boot_id))
            plan.steps.append(Start(desired.order, desired.template))
    return plan


def _room(at: Situation) -> float:
    """How many more replicas may run, beside those that run, may run, or are being started."""
    if not at.most:
        return math.inf
    living = {name for name, one in at.seen.items() if one.life is not WorkerLife.ENDED}
    not_shown = {
        name
        for name, one in at.records.items()
        if name not in at.seen
        and (one.phase is Phase.INTENT or (one.phase is Phase.RUNNING and not _vanished(at, name)))
    }
    return at.most - len(living | not_shown)


def refused(name: str, why: str, boot_id: str) -> JournalRecord:
    """The record of a replica that will never be started."""
    return JournalRecord(name, Phase.ENDED, boot_id, failed=True, reason=why)


def reports(
    seen: Mapping[str, Sighting], records: Mapping[str, JournalRecord], killed: Iterable[str]
) -> dict[str, ReplicaReport]:
    """The report of every replica: those the engine has, those about to be started, and those that never were."""
    by_force = frozenset(killed)
    found = {
        name: _sighted(one, records.get(name), killed=name in by_force)
        for name, one in seen.items()
        if one.life is not WorkerLife.WAITING or name not in records or records[name].phase is not Phase.ENDED
    }
    for name, record in records.items():
        if name not in found:
            found[name] = _recorded(record)
    return found


def _forget(at: Situation, name: str, plan: StepPlan) -> None:
    sighting, record = at.seen.get(name), at.records.get(name)
    if sighting is not None and sighting.life not in {WorkerLife.ENDED, WorkerLife.WAITING}:
        return
    if sighting is not None:
        plan.steps.append(Remove(name))
    if sighting is not None or (record is not None and record.phase is Phase.ENDED):
        plan.forget.append(name)


def _over(at: Situation, name: str, desired: Desired, plan: StepPlan) -> bool:
    """Whether a replica that the engine does not run must not be started: it ended, vanished, or should stop."""
    record, waits = at.records.get(name), name in at.seen
    if record is not None and record.phase is Phase.ENDED:
        if waits:
            plan.steps.append(Remove(name))
        return True
    if desired.goal is WorkerGoal.STOP and waits:
        plan.steps.append(Remove(name))
        plan.done.append(_absent(at, name))
        return True
    if desired.goal is WorkerGoal.STOP:
        if record is None or _vanished(at, name):
            plan.write.append(_absent(at, name))
        return True
    if record is None or record.phase is Phase.INTENT:
        return False
    if waits or _vanished(at, name):
        plan.write.append(replace(record, phase=Phase.ENDED, failed=True, reason=GONE))
    return True


def _vanished(at: Situation, name: str) -> bool:
    """Whether the engine has not shown it for longer than its listing may lag."""
    return at.now - at.missing_since.get(name, at.now) >= VANISHED_AFTER


def _tend(at: Situation, name: str, desired: Desired, plan: StepPlan) -> None:
    """JournalRecord a replica that the engine has, and end it if it should stop."""
    before = at.records.get(name)
    record = before or JournalRecord(name, Phase.RUNNING, at.boot_id)
    if record.phase is Phase.INTENT:
        record = replace(record, phase=Phase.RUNNING)
    sighting = at.seen[name]
    if sighting.kept is not None:
        record = replace(record, kept=sighting.kept)
    if sighting.life is WorkerLife.ENDED:  # an engine forgets that one day
        record = replace(
            record,
            phase=Phase.ENDED,
            failed=record.asked_to_stop_at is None,
            exit_code=sighting.exit_code,
            reason=sighting.reason,
        )
    if desired.goal is not WorkerGoal.STOP or sighting.life is WorkerLife.ENDED:
        if record != before:
            plan.write.append(record)
        return
    asked_at, asked_now = (
        record.asked_to_stop_at,
        replace(record, boot_id=at.boot_id, asked_to_stop_at=at.now),
    )
    if asked_at is None:
        plan.steps.append(Finish(name, desired.drain_timeout))
        plan.done.append(asked_now)
        return
    if record.boot_id != at.boot_id:  # nobody knows how long ago it was asked: its time begins again
        record = asked_now
    elif desired.drain_timeout is not None and at.now - asked_at >= desired.drain_timeout:
        plan.steps.append(Kill(name))
    if record != before:
        plan.write.append(record)


def _absent(at: Situation, name: str) -> JournalRecord:
    """The record of a replica that should stop and that the engine does not have."""
    record = at.records.get(name)
    reason = NEVER_STARTED if record is None or record.phase is Phase.INTENT else ENDED_ASKED
    return JournalRecord(name, Phase.ENDED, at.boot_id, reason=reason)


def _sighted(sighting: Sighting, record: JournalRecord | None, *, killed: bool) -> ReplicaReport:
    asked = record is not None and record.asked_to_stop_at is not None
    if sighting.life is WorkerLife.ENDED:
        state = ReplicaState.STOPPED if asked else ReplicaState.FAILED
    elif asked:
        state = ReplicaState.DRAINING
    else:
        state = ReplicaState.READY if sighting.life is WorkerLife.READY else ReplicaState.STARTING
    reason = KILLED if killed and sighting.life is WorkerLife.ENDED else sighting.reason
    return ReplicaReport(state, sighting.pid, sighting.exit_code, reason)


def _recorded(record: JournalRecord) -> ReplicaReport:
    if record.phase is not Phase.ENDED:
        asked = record.asked_to_stop_at is not None
        return ReplicaReport(ReplicaState.DRAINING if asked else ReplicaState.STARTING)
    state = ReplicaState.FAILED if record.failed else ReplicaState.STOPPED
    return ReplicaReport(state, exit_code=record.exit_code, reason=record.reason)
