"""Jobs: the command that a reservation was made for, as reported by its supervisors. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum

MOST_EARLIER = 8
"""Earlier attempts of a job that are kept."""


class JobState(StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class JobMember:
    """The process of one member. `end_reason` says why it was stopped, did not start or is presumed lost; else it is empty.

    `heard` is when its supervisor last reported it, on the clock of leases; 0 if unknown.
    """

    member: int
    node: str
    pid: int = 0
    started: datetime | None = None
    ended: datetime | None = None
    exit_code: int | None = None
    end_reason: str = ""
    signalled: datetime | None = None
    heard: float = field(default=0.0, compare=False)
    last_lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def stopped(self) -> bool:
        """Whether it ran until it was stopped."""
        return self.started is not None and self.end_reason != ""


@dataclass(frozen=True, slots=True)
class ReservedJob:
    """A command line for people, and the state of its members, in order.

    A restarted job is at another `attempt`; the results of the latest `earlier` ones are kept.
    """

    title: str
    command: str
    user: str = ""
    members: tuple[JobMember, ...] = ()
    attempt: int = 1
    earlier: tuple[JobMember, ...] = ()

    def with_member(
        self, known: JobMember, nodes: Mapping[int, str], now: float, patience: float
    ) -> "ReservedJob":
        """The job after a report on a member; members not heard from for `patience` seconds are presumed lost.

        A member that ended stays ended: a late renewal by its supervisor may arrive after the end. `nodes` are those of all
        members.
        """
        there = {number: JobMember(number, node) for number, node in nodes.items()}
        there |= {one.member: replace(one, heard=one.heard or now) for one in self.members}
        if (before := there.get(known.member)) is None or before.exit_code is None:
            there[known.member] = replace(known, heard=now)
        for one in there.values():
            heard = one.heard or now
            silent = one.exit_code is None and now - heard > patience
            reason = f"nothing was heard of it for {patience:g} s" if silent else one.end_reason
            there[one.member] = replace(one, heard=heard, end_reason=reason)
        return replace(self, members=tuple(there[number] for number in sorted(there)))

    def again(self, ended: JobMember) -> "ReservedJob":
        """The job before its next attempt."""
        earlier = (*self.earlier, replace(ended, last_lines=()))[-MOST_EARLIER:]
        return replace(self, members=(), attempt=self.attempt + 1, earlier=earlier)

    def unheard(self) -> "ReservedJob":
        """The job after a reboot: on the new clock, no member has been heard from yet."""
        return replace(self, members=tuple(replace(one, heard=0.0) for one in self.members))

    def exit_code(self, member_count: int) -> int | None:
        """The exit code of the member that failed first, on its own if any did; None until all have ended."""
        codes = [
            (one.exit_code == 0, one.stopped, one.ended, one.exit_code)
            for one in self.members
            if one.exit_code is not None and one.ended is not None
        ]
        return min(codes)[-1] if len(codes) == member_count else None

    def state(self, member_count: int, *, live: bool, lost: bool, waiting: bool = False) -> JobState:
        """The state of the job, given whether its reservation is live, lost or waiting."""
        code = self.exit_code(member_count)
        if code is None:
            if waiting:
                return JobState.WAITING if live else JobState.STOPPED
            if live:
                started = any(one.started for one in self.members)
                return JobState.RUNNING if started else JobState.STARTING
            return JobState.LOST if lost else JobState.STOPPED
        if any(one.exit_code and not one.stopped for one in self.members):
            return JobState.FAILED
        return JobState.STOPPED if any(one.stopped for one in self.members) else JobState.SUCCEEDED
