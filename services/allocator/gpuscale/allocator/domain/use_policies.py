"""Use policies: what to do, and when, about GPUs that are held but unused, or used but not held. Pure.

A policy is a condition, a scope and stages: e.g. `idle` in the tenant vision by day gets a note after one hour and is revoked
after two. `judge` looks at one subject, a reservation or (for `outsider`) a process on a GPU, whenever something is known of
it:

    False ──True──> counting ──held >= after──> stage 1 ──held >= after──> stage 2 ...      True again: from the start
                       │ unknown, or not its hours: stops, and goes on with the next True           │ False: over

- Unknown never counts: only the time between two looks that both found the condition counts, and none after nothing was
  known for `MOST_SILENCE`. A `Track` is all the memory: since it is on disk, a restart neither starts over nor repeats acts.
- A stage follows the one before it no sooner than the policy says, however long the condition held before the first look.
- A policy in shadow goes through its stages without acting; so does any policy for exempt subjects until the exemption ends:
  then it starts over for them. Both are recorded, as are conditions that ended shortly before a stage.

A dry run (`replay`) runs the same `judge` over recorded steps. A step without a record of a GPU is unknown, like a silent
agent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import ceil, floor
from zoneinfo import ZoneInfo

from gpuscale.common.sizes import counted, duration_text

MOST_KILL_GRACE = 60.0
"""Most seconds from SIGTERM to SIGKILL."""
MOST_GAP = 60.0
"""Most seconds between two consecutive looks: a process that was suspended did not look."""
MOST_SILENCE = 3600.0
"""Seconds without knowledge after which the time counted before is dropped."""
NEAR = 0.8
"""Share of a stage's time from which an averted stage is recorded."""
_DAY = 1440


class PolicyCondition(StrEnum):
    """The condition of a policy."""

    IDLE = "idle"
    OUTSIDER = "outsider"
    OVER_USE = "over_use"
    OVER_TIME = "over_time"
    UNHEALTHY = "unhealthy"


class Action(StrEnum):
    """What a stage does: note it on the reservation, notify, revoke the reservation, or kill an outsider."""

    NOTE = "note"
    NOTIFY = "notify"
    REVOKE = "revoke"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class PolicyStage:
    """What to do once the condition has held for `after` seconds; revoke and kill allow `grace` seconds."""

    after: float
    actions: tuple[Action, ...]
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class WeeklyHours:
    """From minute `begin` to minute `end` of these days (0 is Monday) in a time zone; past midnight if `end` is not later."""

    days: tuple[int, ...]
    begin: int
    end: int
    zone: str

    def __contains__(self, wall: datetime) -> bool:
        """Whether a moment is within the hours. Time past midnight belongs to the day on which it begins."""
        local = wall.astimezone(ZoneInfo(self.zone))
        day, minute = local.weekday(), local.hour * 60 + local.minute
        if self.begin < self.end:
            return day in self.days and self.begin <= minute < self.end
        return day in self.days if minute >= self.begin else minute < self.end and (day - 1) % 7 in self.days


@dataclass(frozen=True, slots=True)
class PolicySubject:
    """A reservation or a process by its resource name, and the attributes that scopes match.

    `process` is the pid and its start time in clock ticks of its host: a pid alone may be reused before the next look.
    """

    name: str
    reservations: tuple[str, ...] = ()
    tenants: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    labels: frozenset[tuple[str, str]] = frozenset()
    nodes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    process: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """The subjects of a policy, and its hours: all fields that are set must match. `models` are parts of model names."""

    tenants: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    nodes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    hours: tuple[WeeklyHours, ...] = ()

    def holds(self, subject: PolicySubject) -> bool:
        """Whether it includes a subject, at some hour."""
        chosen = (
            (self.tenants, subject.tenants),
            (self.holders, subject.holders),
            (self.nodes, subject.nodes),
        )
        if any(wanted and subject_has.isdisjoint(wanted) for wanted, subject_has in chosen):
            return False
        models = [one.lower() for one in subject.models]
        if self.models and not any(part.lower() in model for part in self.models for model in models):
            return False
        return subject.labels.issuperset(self.labels)

    def now(self, wall: datetime) -> bool:
        """Whether it applies at this hour."""
        return not self.hours or any(wall in one for one in self.hours)


@dataclass(frozen=True, slots=True)
class Exemption:
    """Reservations with a label are exempt until a date, for a reason."""

    label: tuple[str, str]
    reason: str
    until: datetime


@dataclass(frozen=True, slots=True)
class UsePolicy:
    """A policy. `all_gpus`: `idle` means all GPUs of a reservation, not any. Stages run in order."""

    condition: PolicyCondition
    stages: tuple[PolicyStage, ...]
    scope: Scope = Scope()
    all_gpus: bool = True
    exemptions: tuple[Exemption, ...] = ()
    shadow: bool = True

    def exemption(self, subject: PolicySubject, wall: datetime) -> Exemption | None:
        """The exemption that applies to a subject now."""
        found = (one for one in self.exemptions if one.label in subject.labels and wall < one.until)
        return next(found, None)


@dataclass(frozen=True, slots=True)
class GpuSighting:
    """The state of a GPU at a moment; None is unknown. `outsiders` are pids of processes of no reservation on it."""

    uuid: str
    idle: bool | None
    over_use: bool | None
    outsiders: tuple[int, ...] | None
    quarantined: bool | None


@dataclass(frozen=True, slots=True)
class SeenSubject:
    """A subject with its GPUs at a moment; `age` is how many seconds it has been held."""

    subject: PolicySubject
    gpus: tuple[GpuSighting, ...]
    age: float = 0.0


class StageOutcome(StrEnum):
    """The outcome of a stage: done, refused, asked without an answer (kills), or not done and why; or a revocation lifted."""

    DONE = "done"
    SHADOW = "shadow"
    EXEMPT = "exempt"
    AVERTED = "averted"
    LIFTED = "lifted"
    REFUSED = "refused"
    ASKED = "asked"


@dataclass(frozen=True, slots=True)
class PolicyAct:
    """What a policy did, or nearly did, at `time`: the stage's index, how long the condition had held, and why."""

    policy: str
    subject: str
    reservations: tuple[str, ...]
    stage: int
    actions: tuple[Action, ...]
    outcome: StageOutcome
    held: float
    reason: str
    time: datetime
    grace: float = 0.0


@dataclass(frozen=True, slots=True)
class Track:
    """How long a condition has held for a subject, and what was done.

    `held` seconds were counted until `seen`, and counting goes on while `counting`; `done` stages are over, the last at
    `acted`; one of them `revoked` the subject. Nothing was done to a `spared` one. `what` describes what was last seen.
    """

    held: float
    seen: float
    counting: bool
    began: datetime
    subject: PolicySubject
    what: str
    done: int = 0
    acted: float = 0.0
    spared: bool = False
    revoked: bool = False

    def after_gap(self, until: float) -> "Track":
        """The track as its previous program last saw it, at `until`: nothing is known of the time since."""
        if not self.counting or until <= self.seen:
            return replace(self, counting=False)
        return replace(self, held=self.held + until - self.seen, seen=until, counting=False)

    def rebased(self, now: float) -> "Track":
        """A track of an earlier boot: nobody watched its clock, so the time starts over; what was done stays done."""
        return replace(self, held=0.0, seen=now, counting=False, acted=now)

    def foreseen(self, seen: float) -> float:
        """The time that will have counted at the next look, if nothing changes."""
        return self.held + (seen - self.seen if self.counting else 0.0)

    def next_due(self, policy: UsePolicy) -> float | None:
        """Seconds from `seen` until the next stage if the condition lasts; None after the last."""
        if self.done == len(policy.stages):
            return None
        due = policy.stages[self.done].after - self.held
        if self.done:
            spacing = policy.stages[self.done].after - policy.stages[self.done - 1].after
            due = max(due, self.acted + spacing - self.seen)
        return max(0.0, due)


def judge(
    name: str, policy: UsePolicy, sighting: SeenSubject, track: Track | None, now: float, wall: datetime
) -> tuple[Track | None, list[PolicyAct]]:
    """Look at a subject in scope: its next track, None if the condition does not hold, and the acts due.

    At most one stage is due at a time. `now` never goes back.
    """
    subject, (holds, what) = sighting.subject, verdict(policy, sighting)
    if track is not None and track.subject.process != subject.process:
        track = None
    if holds is False:
        return None, ended(name, policy, track, what, wall) if track else []
    if holds is None:
        return (replace(track, counting=False) if track else None), []
    exemption = policy.exemption(subject, wall)
    spared = exemption is not None
    if track is None or track.spared is not spared:
        track = Track(0.0, now, counting=False, began=wall, subject=subject, what=what, spared=spared)
    held = track.held
    if policy.condition is PolicyCondition.OVER_TIME:
        held = sighting.age
    elif track.counting and now - track.seen <= MOST_GAP:
        held += now - track.seen
    elif now - track.seen > MOST_SILENCE:
        held = 0.0
    on = policy.scope.now(wall)
    track = replace(track, held=held, seen=now, counting=on, what=what, subject=subject)
    if not on or track.next_due(policy) != 0.0:
        return track, []
    stage = policy.stages[track.done]
    outcome = StageOutcome.EXEMPT if spared else StageOutcome.SHADOW if policy.shadow else StageOutcome.DONE
    reason = f"{what} for {span(held)}" if held >= 1 else what
    if exemption:
        reason += f"; exempt until {exemption.until:%Y-%m-%d %H:%M} UTC: {exemption.reason}"
    act = PolicyAct(
        name,
        subject.name,
        subject.reservations,
        track.done,
        stage.actions,
        outcome,
        held,
        reason,
        wall,
        stage.grace,
    )
    revoked = outcome is StageOutcome.DONE and Action.REVOKE in stage.actions
    return replace(track, done=track.done + 1, acted=now, revoked=revoked), [act]


def ended(
    name: str, policy: UsePolicy | None, track: Track, why: str, wall: datetime, *, gone: bool = False
) -> list[PolicyAct]:
    """The acts when a condition no longer holds, its subject is `gone`, or the policy has changed (None)."""
    actions: tuple[Action, ...]
    coming = policy.stages[track.done] if policy and track.done < len(policy.stages) else None
    if track.revoked and not gone:
        outcome, stage, actions = StageOutcome.LIFTED, track.done - 1, (Action.REVOKE,)
    elif coming is not None and coming.after and track.held >= NEAR * coming.after:
        outcome, stage, actions = StageOutcome.AVERTED, track.done, coming.actions
    else:
        return []
    of, reason = track.subject, f"{why}, after {track.what} for {span(track.held)}"
    return [PolicyAct(name, of.name, of.reservations, stage, actions, outcome, track.held, reason, wall)]


def verdict(policy: UsePolicy, sighting: SeenSubject) -> tuple[bool | None, str]:
    """Whether the condition holds for a subject now, None if unknown, and a description of what is seen."""
    gpus = sighting.gpus
    match policy.condition:
        case PolicyCondition.OVER_TIME:
            return True, "held"
        case PolicyCondition.IDLE:
            idle = [one.idle for one in gpus]
            found = _found(idle, by=not policy.all_gpus)
            count = idle.count(True)
            which = f"{count} of {counted(len(gpus), 'GPU')}"
            if count == len(gpus):
                which = f"all {count} GPUs" if count > 1 else "the GPU"
            return found, _said(found, f"{which} idle", "in use")
        case PolicyCondition.OVER_USE:
            found = _found([one.over_use for one in gpus])
            return found, _said(found, "more memory used than held", "no more memory used than held")
        case PolicyCondition.UNHEALTHY:
            found = _found([one.quarantined for one in gpus])
            bad = ", ".join(one.uuid for one in gpus if one.quarantined)
            return found, _said(found, f"GPU {bad} quarantined", "no GPU quarantined")
        case PolicyCondition.OUTSIDER:
            found = _found([None if one.outsiders is None else bool(one.outsiders) for one in gpus])
            pids = ", ".join(str(pid) for one in gpus for pid in one.outsiders or ())
            return found, _said(found, f"used without a reservation by process {pids}", "no outsider")


def notice(name: str, policy: UsePolicy, track: Track) -> str:
    """What the holder reads while a stage with a note is the last one done; else empty."""
    stages = policy.stages[: track.done]
    if policy.shadow or track.spared or not any(Action.NOTE in one.actions for one in stages):
        return ""
    said = f"policy {name}: {track.what}" + (f" for {span(track.held)}" if track.held >= 1 else "")
    due = track.next_due(policy)
    if due is not None and Action.REVOKE in policy.stages[track.done].actions:
        said += f"; it will be revoked in {span(due + policy.stages[track.done].grace)} if this continues"
    return said


def problems(policy: UsePolicy) -> list[tuple[str, str]]:
    """Contradictions in a policy: (field of the spec, what is wrong)."""
    found: list[tuple[str, str]] = []
    if not policy.stages:
        found.append(("stages", "must have at least one stage"))
    for index, stage in enumerate(policy.stages):
        if index and stage.after <= policy.stages[index - 1].after:
            found.append((f"stages[{index}].after", "must be greater than that of the previous stage"))
        if not stage.actions:
            found.append((f"stages[{index}].actions", "must have at least one"))
        if Action.REVOKE in stage.actions and policy.condition is PolicyCondition.OUTSIDER:
            fault = "REVOKE would revoke the GPU's holder, not the outsider"
            found.append((f"stages[{index}].actions", fault))
        if Action.KILL in stage.actions and policy.condition is not PolicyCondition.OUTSIDER:
            found.append((f"stages[{index}].actions", "KILL is only valid for OUTSIDER"))
        if Action.KILL in stage.actions and stage.grace > MOST_KILL_GRACE:
            most = duration_text(MOST_KILL_GRACE)
            found.append((f"stages[{index}].grace", f"must be at most {most} with KILL"))
        last = {Action.REVOKE, Action.KILL}.intersection(stage.actions)
        if last and index + 1 < len(policy.stages):
            found.append((f"stages[{index}].actions", f"{min(last).name} must be in the last stage"))
    for index, hours in enumerate(policy.scope.hours):
        if not (0 <= hours.begin < _DAY and 0 < hours.end <= _DAY):
            found.append((f"scope.hours[{index}]", "must be from 00:00 to 24:00"))
    return found


def span(seconds: float) -> str:
    """A duration for people, in its two largest units: `1 h 5 min`."""
    left, said = round(seconds), list[str]()
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        said += [f"{count} {unit}"] if count else []
    return " ".join(said[:2]) or "0 s"


def _found(answers: Sequence[bool | None], *, by: bool = True) -> bool | None:
    """The answer `by` if one GPU gives it; else the other one, if all answers are known."""
    return by if by in answers else None if None in answers or not answers else not by


def _said(found: bool | None, yes: str, no: str) -> str:
    return yes if found else no if found is False else ""


UNKNOWN, BUSY, IDLE = range(3)
"""The recorded state of a GPU in a step."""


@dataclass(frozen=True, slots=True)
class RecordedHold:
    """What a reservation held, from `begin` to `end` in seconds since 1970; only part of the `shared` GPUs."""

    subject: PolicySubject
    gpus: tuple[str, ...]
    shared: frozenset[str]
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class RecordedUse:
    """The recorded state of GPUs by UUID: one of the three for each of `count` steps of `step` seconds from `start`."""

    start: float
    step: float
    count: int
    gpus: dict[str, bytearray] = field(default_factory=dict[str, bytearray])

    def of(self, hold: RecordedHold, index: int) -> tuple[int, ...]:
        """The recorded states of a hold, for its holder: who uses a shared GPU is not recorded."""
        found = ((uuid, self.gpus[uuid][index] if uuid in self.gpus else UNKNOWN) for uuid in hold.gpus)
        return tuple(UNKNOWN if one is BUSY and uuid in hold.shared else one for uuid, one in found)


@dataclass(slots=True)
class DryRun:
    """What would have been done, and how many seconds of all holds together are known and unknown."""

    acts: list[PolicyAct] = field(default_factory=list[PolicyAct])
    known: float = 0.0
    unknown: float = 0.0
    subjects: int = 0

    def replay(self, name: str, policy: UsePolicy, hold: RecordedHold, use: RecordedUse) -> None:
        """Add what a policy in shadow would have done to a hold, over the steps entirely within it."""
        policy = replace(policy, shadow=True)
        track: Track | None = None
        before: tuple[int, ...] | None = None
        seen, known = tuple[GpuSighting, ...](), False
        first = max(0, ceil((hold.begin - use.start) / use.step))
        last = min(use.count, floor((hold.end - use.start) / use.step))
        self.subjects += 1
        for index in range(first, last):
            states = use.of(hold, index)
            if states != before:  # it has been so since the step began
                pairs = zip(hold.gpus, states, strict=True)
                seen = tuple(
                    GpuSighting(uuid, {IDLE: True, BUSY: False}.get(one), None, None, None)
                    for uuid, one in pairs
                )
                known = verdict(policy, SeenSubject(hold.subject, seen))[0] is not None
            for now in (index, index + 1) if states != before else (index + 1,):
                at = use.start + now * use.step
                sighting = SeenSubject(hold.subject, seen, max(0.0, at - hold.begin))
                track, acts = judge(name, policy, sighting, track, at, moment(at))
                self.acts += acts
            before = states
            self.known += use.step * known
            self.unknown += use.step * (not known)
        if track is not None and hold.end <= use.start + use.count * use.step:
            self.acts += ended(name, policy, track, "it ended", moment(hold.end), gone=True)


def moment(seconds: float) -> datetime:
    """A date in UTC, from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
