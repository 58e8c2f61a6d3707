"""`gpuscalectl logs`, `attach`, `wait` and `stop` of a job: what it wrote and writes lies on its nodes, and is read there over ssh."""

import shlex
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from gpuscale.cli.commands.over_ssh import Member, this_node, words_on, write_together
from gpuscale.cli.console.command import command, one_name
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import Progress, note, pause, write_lines
from gpuscale.cli.grammar.nouns import without_noun
from gpuscale.common.errors import DeadlineExceededError, FailedPreconditionError, UnavailableError
from gpuscale.common.names import node_of

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

PERIOD = 0.5
"""Seconds between two looks at a job."""
STOP_SECONDS = 30.0
"""Seconds in which a job that is told to stop does."""
ATTACHED_BYTES = 8192
"""Bytes of what was written before that `attach` shows."""
# In the folder of `detaching.JobFolder`.
_FOLDER = 'cd "${XDG_STATE_HOME:-$HOME/.local/state}/gpuscale/jobs/%s" 2>/dev/null || exit 66; '
_READ = "cat output.1 output 2>/dev/null | tail -c %d"
_FOLLOW = "exec tail -s 0.2 -c %d -F --pid=$(cat pid 2>/dev/null || echo 2147483647) output 2>/dev/null"
_STOP = "p=$(cat pid 2>/dev/null) || exit 0; grep -q %s /proc/$p/cmdline && kill $p"
NO_FOLDER = 66
"""Exit code where a node has no folder of a job."""


@command("attach r3fa7kq2vnb4d")
@one_name("jobs")
def attach(session: Session, name: str) -> None:
    """Show what a detached job writes until it ends, with its exit code. Ctrl-C leaves it running."""
    with session.connect() as client:
        read(client, _find(client, name), follow=True, last=ATTACHED_BYTES)
        _leave_as(_ended(client, name, None))


@command("stop job r3fa7kq2vnb4d")
@one_name("jobs")
def stop(session: Session, name: str) -> None:
    """Stop a detached job on all its nodes: SIGTERM, and SIGKILL 10 s later; then its GPUs are given back."""
    from gpuscale.api.allocator import v1 as api

    with session.connect() as client:
        found = _begun(client, name, wait=False)
        if found.job.state in {found.job.STATE_WAITING, found.job.STATE_STARTING}:
            found = client.allocator.ReleaseReservation(
                api.ReleaseReservationRequest(name=found.name, fence=found.fence)
            ).reservation
        elif not found.HasField("end_time"):
            for member in _members(client, found, _STOP % found.name.partition("/")[2]):
                ran = subprocess.run(member.words, check=False, stdin=subprocess.DEVNULL)
                if ran.returncode:
                    raise _not_there(found, member, ran.returncode, "to be stopped")
            found = _ended(client, found.name, STOP_SECONDS)
    if session.output.human:
        write_lines([f"{found.name} stopped"])
    else:
        from gpuscale.cli.views.allocator import JOBS

        session.output.write_one(found, JOBS)


def wait(session: Session, names: Sequence[str], timeout: float | None) -> NoReturn:
    """Wait for jobs to end; with the exit code of the first that failed."""
    with session.connect() as client:
        ended = [_ended(client, one, timeout) for one in names]
    write_lines([f"{one.name} {one.job.State.Name(one.job.state).removeprefix('STATE_')}" for one in ended])
    _leave_as(
        next((one for one in ended if one.job.exit_code or not one.job.HasField("exit_code")), ended[0])
    )


def read(client: "Client", found: "Reservation", *, follow: bool, last: int) -> None:
    """Write what a job wrote, at most `last` bytes of each member; with `follow` until it ends.

    Raises:
        FailedPreconditionError: a node keeps nothing of it (NO_OUTPUT).
        UnavailableError: a node cannot be reached.
    """
    if follow:
        found = _begun(client, found.name, wait=True)
    elif found.job.state == found.job.STATE_WAITING:
        raise FailedPreconditionError(f"{found.name} waits: {found.job.queue_reason}", reason="JOB_WAITING")
    follow = follow and not found.HasField("end_time")
    members = _members(client, found, (_FOLLOW if follow else _READ) % last)
    for member, code in zip(members, write_together(members, 1, in_turn=not follow), strict=True):
        if code:
            known = _find(client, found.name).job
            for one in known.members:
                if one.member == member.number and one.last_lines:
                    note(f"{member.node} cannot be read; the last that is known of it:")
                    write_lines(one.last_lines)
            raise _not_there(found, member, code, "to be read")


def _find(client: "Client", typed: str) -> "Reservation":
    from gpuscale.cli.console import lookup

    [name] = without_noun([typed], "jobs")[1]
    return lookup.job(client, name)


def _members(client: "Client", found: "Reservation", script: str) -> list[Member]:
    """What runs a script of the shell in the folder of each member, on its node."""
    here = this_node(client)
    user, job = found.job.user, found.name.partition("/")[2]
    nodes = {gpu.member: node_of(gpu) for gpu in found.gpus}
    made: list[Member] = []
    for number, node in sorted(nodes.items()):
        words = _FOLDER % f"{job}-{number}" + script
        local = node == here and not user
        made.append(
            Member(
                number,
                node,
                words_on(node, words if local else f"sh -c {shlex.quote(words)}", user=user, local=local),
            )
        )
    return made


def _not_there(
    found: "Reservation", member: Member, code: int, what: str
) -> FailedPreconditionError | UnavailableError:
    if code == NO_FOLDER:
        return FailedPreconditionError(
            f"{member.node} keeps nothing of {found.name} {what}: only a job that was started with `run -d`, by the"
            f" same user, has that",
            reason="NO_OUTPUT",
        )
    return UnavailableError(
        f"{found.name} is not there {what}: on {member.node}, {shlex.join(member.words[:-1])} ended with {code}",
        reason="NO_SUPERVISOR",
    )


def _begun(client: "Client", typed: str, *, wait: bool) -> "Reservation":
    """A job once what starts it has; one that waits for GPUs only with `wait`, else as it stands."""
    progress = Progress()
    try:
        while (found := _find(client, typed)).job.state in {
            found.job.STATE_WAITING,
            found.job.STATE_STARTING,
        }:
            waits = found.job.state == found.job.STATE_WAITING
            if not wait and (waits or progress.elapsed > STOP_SECONDS):
                break
            before = f"{found.job.queue_position} before it: {found.job.queue_reason}"
            progress.tell(f"{found.name} waits, {before}" if waits else f"{found.name} starts")
            pause(PERIOD)
    finally:
        progress.end()
    return found


def _ended(client: "Client", typed: str, timeout: float | None) -> "Reservation":
    """A job once it has ended.

    Raises:
        DeadlineExceededError: it has not, in so many seconds.
    """
    progress = Progress()
    try:
        while not (found := _find(client, typed)).HasField("end_time"):
            if timeout is not None and progress.elapsed > timeout:
                raise DeadlineExceededError(
                    f"{found.name} has not ended after {timeout:g} s", reason="NOT_READY"
                )
            waits = found.job.state == found.job.STATE_WAITING
            progress.tell(f"{found.name} {'waits' if waits else 'runs'}")
            pause(PERIOD)
    finally:
        progress.end()
    return found


def _leave_as(found: "Reservation") -> NoReturn:
    """Leave with the exit code of a job.

    Raises:
        FailedPreconditionError: it has none.
    """
    if not found.job.HasField("exit_code"):
        state = found.job.State.Name(found.job.state).removeprefix("STATE_")
        raise FailedPreconditionError(
            f"{found.name} is {state}: {found.end_reason or 'no exit code was reported'}",
            reason=f"JOB_{state}",
        )
    leave(found.job.exit_code)
