"""Jobs from Python: commands on reserved GPUs that keep running without their caller.

    job = client.run(["python", "train.py"], gpus=2, members=2)
    for line in job.logs(follow=True):
        print(line)
    code = job.wait()

As a context manager, a job is stopped at the end of the block. `gpuscalectl run -d`, `logs`, `wait` and `stop` use this module too.
"""

import asyncio
import os
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Self

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import over_ssh
from gpuscale.client.asks import RunOptions, as_seconds, moving
from gpuscale.client.lease import abandon
from gpuscale.client.orders import Orders, folder_name
from gpuscale.client.retries import retrying, retrying_async
from gpuscale.client.states import queued
from gpuscale.client.this_host import confine, only_here
from gpuscale.common.errors import (
    CancelledCallError,
    DeadlineExceededError,
    FailedPreconditionError,
    GpuscaleError,
    UnavailableError,
)
from gpuscale.common.names import node_name, node_of
from gpuscale.common.rpc.channel import split_addresses
from gpuscale.common.rpc.status import PROBLEM_KEY

if TYPE_CHECKING:
    from gpuscale.client.client import AsyncClient, Client

LONGEST_START = 300.0
"""Seconds for a supervisor to start; ssh may prompt the user."""
PERIOD = 0.5
"""Seconds between polls of a job."""
STOP_SECONDS = 30.0
"""Seconds for a job to stop."""
KEPT_BYTES = 32 << 20
"""Most bytes kept of a member's output."""
# In the folder of `gpuscale.cli.commands.detached_jobs.JobFolder`.
_CLAIM = 'd="${XDG_STATE_HOME:-$HOME/.local/state}/gpuscale/jobs/%s"; umask 077; mkdir -p "$d" && flock -n "$d/lock" touch "$d/output"'
"""Marks a member as started, so that no supervisor starts it; fails if one has taken the orders."""
_FOLDER = 'cd "${XDG_STATE_HOME:-$HOME/.local/state}/gpuscale/jobs/%s" 2>/dev/null || exit 66; '
_READ = "cat output.1 output 2>/dev/null | tail {portion}"
_FOLLOW = "exec tail -s 0.2 {portion} -F --pid=$(cat pid 2>/dev/null || echo 2147483647) output 2>/dev/null"
_BEGIN = (
    "f() {{ cat {files} 2>/dev/null; }}; s=$(f | wc -c); b=1; "
    'if [ "$s" -gt {last} ]; then k=$(f | head -c "$s" | tail -c $(({last}+1)) | head -n 1 | wc -c); '
    '[ "$k" -le {last} ] || k=1; b=$((s-{last}+k)); '
    'echo "earlier output is left out; more of it: gpuscalectl logs --tail N {job}" >&2; fi; '
)
"""Sets b to the first byte of the last ones that begins a line, if any does, and tells of what is before."""
_STOP = "p=$(cat pid 2>/dev/null) || exit 0; grep -q %s /proc/$p/cmdline && kill $p"
NO_FOLDER = 66
"""Exit code if a node has no folder for the job."""
_STATES = allocator_api.Job.State
NOT_BEGUN = (_STATES.STATE_WAITING, _STATES.STATE_STARTING)
_FOR_PEOPLE = {"CERTIFICATE_EXPIRED", "OTHER_HOST", "UNKNOWN_AUTHORITY"}
"""Reasons why a service is not reached that no restart mends. That its name is unknown may pass, as with the network."""

Tell = Callable[[str], object]
"""Called with the reason why a wait continues."""


def this_node(client: "Client") -> str | None:
    """This host's node; None if there is none, or several match."""
    try:
        return client.this_node(check=True)
    except FailedPreconditionError as error:
        if error.reason != "NODE_AMBIGUOUS":
            raise
        return None


def place(client: "Client", ask: allocator_api.Ask, *, anywhere: bool) -> str | None:
    """This host's node, if any. Limits the ask to it, unless it names a place or has several members."""
    here = this_node(client)
    free = anywhere or ask.nodes or ask.gpus or ask.member_count > 1
    if here is not None and not free and node_name(here) not in ask.excluded_nodes:
        confine(ask, here)
    return here


def refused(error: GpuscaleError, ask: allocator_api.Ask, here: str | None, remedy: str) -> GpuscaleError:
    """The error of a refused ask; says so if only this host was tried."""
    confined = here is not None and list(ask.nodes) == [node_name(here)]
    return only_here(error, here if confined else None, remedy)


def starter(client: "Client", via: str, here: str | None) -> str:
    """The host that starts a queued job: the one named, this one if it is a node, or that of the services."""
    return via or here or split_addresses(client.address)[0].rpartition(":")[0]


def start_job(
    client: "Client", request: allocator_api.ReserveRequest, command: Sequence[str], options: RunOptions
) -> "Job":
    """Start a job; returns once it runs or is queued. Raises the same errors as `Client.run`."""
    here = place(client, request.ask, anywhere=options.get("anywhere", False))
    orders = Orders(
        node=starter(client, options.get("via", ""), here),
        command=list(command),
        environment=options.get("environment", {}),
        directory=options.get("directory", ""),
        address=client.address,
        authority=client.authority(),
        stop_together=options.get("stop_together", True),
        detached=True,
        time_limit=as_seconds("time_limit", options.get("time_limit")) or 0.0,
        user=request.job.user,
        **moving(options),
    )
    try:
        granted = retrying(lambda: client.allocator.Reserve(request))
        job = Job(client, granted.reservation.name)
        if made := [over_ssh.supervised(one) for one in orders.of_grant(granted, here)]:
            once = "request_id" not in options
            with Path(os.devnull).open("wb") as nowhere:
                quiet = nowhere.fileno()
                code = supervise(client, granted.reservation, made, stdout=quiet, stderr=quiet, once=once)
            if code:
                job.expect_started(code)
    except KeyboardInterrupt:
        abandon(client.allocator, request)
        raise
    except GpuscaleError as error:
        raise refused(error, request.ask, here, "pass anywhere=True for any host") from None
    return job


def supervise(
    client: "Client",
    reservation: allocator_api.Reservation,
    members: Sequence[over_ssh.Supervised],
    *,
    stdout: int,
    once: bool,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
    on_start: over_ssh.OnStart = id,
) -> int:
    """Run a job's command under supervisors; returns the exit code of the first member that failed.

    If nothing was started, the reservation is released, unless the call may be repeated or is a repetition (not `once`).

    Raises:
        FailedPreconditionError: no ssh here (NO_SSH).
        UnavailableError: no supervisor came up (NO_SUPERVISOR), or the connection was lost (CONNECTION_LOST).
    """
    patience = min(LONGEST_START, reservation.remaining.ToTimedelta().total_seconds())
    try:
        codes = over_ssh.supervise_all(
            members,
            stdout=stdout,
            patience=patience,
            stderr=stderr,
            environment=environment,
            on_start=on_start,
        )
    except (FailedPreconditionError, UnavailableError):
        if once:
            give_back(client, reservation)
        raise
    first = next((code for code in codes if code), 0)
    if members[0].orders.waits:
        if first and once:
            give_back(client, reservation)
        return first
    if len(members) == 1 and over_ssh.SSH_FAILED not in codes:
        return first
    try:
        found = Job(client, reservation.name).look()
    except (DeadlineExceededError, UnavailableError):  # this host lost its network, and so the connection
        if over_ssh.SSH_FAILED not in codes:
            raise
        found = reservation
    if over_ssh.SSH_FAILED in codes and not found.HasField("end_time"):
        orders = members[codes.index(over_ssh.SSH_FAILED)].orders
        then = (
            f"`gpuscalectl get jobs` shows whether the command runs ({reservation.name})"
            if orders.detached
            else f"the command is stopped there, then {reservation.name} is released"
        )
        raise UnavailableError(f"the connection to {orders.node} ended: {then}", reason="CONNECTION_LOST")
    return found.job.exit_code or first


def give_back(client: "Client", reservation: allocator_api.Reservation) -> None:
    """Release a reservation; if that fails, it expires by itself."""
    request = allocator_api.ReleaseReservationRequest(name=reservation.name, fence=reservation.fence)
    with suppress(GpuscaleError):
        client.allocator.ReleaseReservation(request)


class Job:
    """A detached job. As a context manager, it is stopped at the end of the block.

    Attributes:
        name: `reservations/{reservation}`.
    """

    def __init__(self, client: "Client", name: str) -> None:
        self.name = name
        self._client = client

    def look(self) -> allocator_api.Reservation:
        """Its current state: `job.state`, `job.members`, `gpus`. Raises NotFoundError: it is no longer known."""
        request = allocator_api.GetReservationRequest(name=self.name)
        return retrying(lambda: self._client.allocator.GetReservation(request)).reservation

    def wait(self, timeout: float | str | None = None) -> int:
        """Wait until it ends; returns its exit code.

        Raises:
            DeadlineExceededError: it did not end in time (NOT_READY).
            FailedPreconditionError: it ended without an exit code (JOB_STOPPED, JOB_LOST).
        """
        return exit_code_of(self.until_ended(as_seconds("timeout", timeout)))

    def logs(self, *, follow: bool = False) -> Generator[str]:
        """The lines of its output, up to 32 MiB of each member; with `follow` until it ends.

        Raises:
            FailedPreconditionError: it is queued (JOB_WAITING), or a node has no output of it (NO_OUTPUT).
            UnavailableError: a node cannot be reached (NO_SUPERVISOR), or the connection was lost (CONNECTION_LOST).
        """
        reading = _Reading(self, follow=follow)
        with reading, reading.source:
            yield from (_text(line) for line in reading.source)
            reading.check()

    def stop(self) -> allocator_api.Reservation:
        """Stop it on all its nodes: SIGTERM, and SIGKILL 10 s later. A queued job leaves the queue.

        A job that no supervisor has taken is released at once, or after 30 s if a node cannot confirm that.

        Raises:
            FailedPreconditionError: a node has no folder of it (NO_OUTPUT).
            UnavailableError: a node cannot be reached (NO_SUPERVISOR).
            DeadlineExceededError: it did not end within 30 s (NOT_READY).
        """
        found = self.look()
        if found.job.state == found.job.STATE_STARTING:
            claims = [
                subprocess.run(
                    one.words, check=False, stdin=subprocess.DEVNULL, capture_output=True
                ).returncode
                for one in self._on_nodes(found, _CLAIM)
            ]
            found = self.until_begun(patience=STOP_SECONDS if any(claims) else 0.0)
        if found.job.state in NOT_BEGUN:
            request = allocator_api.ReleaseReservationRequest(name=found.name, fence=found.fence)
            return self._client.allocator.ReleaseReservation(request).reservation
        if not found.HasField("end_time"):
            for member in self._on_nodes(found, _FOLDER + _STOP % found.name.partition("/")[2]):
                ran = subprocess.run(member.words, check=False, stdin=subprocess.DEVNULL)
                if ran.returncode:
                    raise _not_there(found, member, ran.returncode, "stop")
            try:
                found = self.until_ended(STOP_SECONDS)
            except DeadlineExceededError as error:
                asked = allocator_api.GetReservationRequest(name=self.name)
                _, call = self._client.allocator.GetReservation.with_call(asked)
                problem = dict(call.trailing_metadata() or ()).get(PROBLEM_KEY)
                message = f"{error.message}: {problem!s}" if problem else error.message
                raise DeadlineExceededError(message, reason=error.reason, metadata=error.metadata) from None
        return found

    def write(
        self,
        descriptor: int,
        *,
        follow: bool,
        last: int = KEPT_BYTES,
        lines: int | None = None,
        tell: Tell = id,
        on_start: over_ssh.OnStart = id,
    ) -> None:
        """Write its output, at most `last` bytes or so many lines of each member; with `follow` until it ends. Raises like `Job.logs`."""
        found = self.until_begun(tell=tell) if follow else self.look()
        if found.job.state == found.job.STATE_WAITING:
            raise FailedPreconditionError(
                f"{found.name} waits: {found.job.queue_reason}", reason="JOB_WAITING"
            )
        follow = follow and not found.HasField("end_time")
        script = _shell_reading(found.name.partition("/")[2], follow=follow, last=last, lines=lines)
        members = self._on_nodes(found, _FOLDER + script)
        read = over_ssh.write_together(members, descriptor, in_turn=not follow, on_start=on_start)
        for member, (code, began) in zip(members, read, strict=True):
            if began and code == over_ssh.SSH_FAILED:
                raise UnavailableError(
                    f"the connection to {member.node} ended while {found.name} was read; the job does not depend on it",
                    reason="CONNECTION_LOST",
                )
            if code:
                known = [
                    line
                    for one in self.look().job.members
                    if one.member == member.number
                    for line in one.last_lines
                ]
                os.write(descriptor, "".join(f"{line}\n" for line in known).encode())
                raise _not_there(found, member, code, "read more of" if known else "read")
        if follow and self.begun_anew(found.job.attempt, tell) is not None:
            self.write(descriptor, follow=True, last=last, lines=lines, tell=tell, on_start=on_start)

    def begun_anew(self, attempt: int, tell: Tell = id) -> allocator_api.Reservation | None:
        """Its state once it has GPUs for another attempt after this one; None if there is none.

        Raises FailedPreconditionError: it was stopped while it waited for them (JOB_STOPPED).
        """
        found = self.look()
        if found.job.attempt <= attempt:
            return None
        while found.job.state == found.job.STATE_WAITING:
            found = self._later(found, tell)
        if found.HasField("end_time"):
            exit_code_of(found)
        return found

    def until_begun(self, *, tell: Tell = id, patience: float | None = None) -> allocator_api.Reservation:
        """Its state once it runs or has ended; with `patience`, also once it is queued, or after so many seconds of starting."""
        began, found = time.monotonic(), self.look()
        while found.job.state in NOT_BEGUN:
            waits = found.job.state == found.job.STATE_WAITING
            if patience is not None and (waits or time.monotonic() - began > patience):
                break
            tell(f"{found.name} waits, {queued(found.job)}" if waits else f"{found.name} starts")
            found = self._later(found, tell, inf if patience is None else began + patience)
        return found

    def until_ended(
        self, timeout: float | None, tell: Tell = id, began: float | None = None
    ) -> allocator_api.Reservation:
        """Wait for its end; returns the reservation. The timeout counts from `began` (of `time.monotonic`), by default now.

        Raises DeadlineExceededError: it did not end in time (NOT_READY).
        """
        began, found = time.monotonic() if began is None else began, self.look()
        while not found.HasField("end_time"):
            expect_time(found, timeout, began)
            tell(f"{found.name} {'waits' if found.job.state == found.job.STATE_WAITING else 'runs'}")
            found = self._later(found, tell, inf if timeout is None else began + timeout)
        return found

    def _later(
        self, found: allocator_api.Reservation, tell: Tell = id, until: float = inf
    ) -> allocator_api.Reservation:
        """Its state a moment later, however long nothing answers, as in a restart; what was `found` after `until`."""
        while True:
            time.sleep(PERIOD)
            try:
                return self.look()
            except (DeadlineExceededError, UnavailableError) as error:
                if error.reason in _FOR_PEOPLE:
                    raise
                tell(error.message)
                if time.monotonic() >= until:
                    return found

    def expect_started(self, code: int) -> None:
        """Check that its command ran. Raises FailedPreconditionError: it did not run (JOB_NOT_STARTED)."""
        members = self.look().job.members
        if not any(one.HasField("start_time") for one in members):
            why = next((one.end_reason for one in members if one.end_reason), f"exit code {code}")
            raise FailedPreconditionError(
                f"{self.name} is released: {why}", reason="JOB_NOT_STARTED", metadata={"name": self.name}
            )

    def _on_nodes(self, found: allocator_api.Reservation, script: str) -> list[over_ssh.Member]:
        """Shell commands for each member's node, with `%s` replaced by the name of its folder."""
        here = this_node(self._client)
        user, job = found.job.user, found.name.partition("/")[2]
        made: list[over_ssh.Member] = []
        for number, node in sorted({gpu.member: node_of(gpu) for gpu in found.gpus}.items()):
            words = script % folder_name(job, number, found.job.attempt)
            local = node == here and not user
            words = words if local else f"sh -c {shlex.quote(words)}"
            made.append(over_ssh.Member(number, node, over_ssh.words_on(node, words, user=user, local=local)))
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _shell_reading(job: str, *, follow: bool, last: int, lines: int | None) -> str:
    """Shell words that write at most `last` bytes from the end of a member's output, or so many lines."""
    read, files = (_FOLLOW, "output") if follow else (_READ, "output.1 output")
    if lines is not None or last >= KEPT_BYTES:
        return read.format(portion=f"-c {last}" if lines is None else f"-n {lines}")
    return _BEGIN.format(files=files, last=last, job=job) + read.format(portion="-c +$b")


def _not_there(
    found: allocator_api.Reservation, member: over_ssh.Member, code: int, what: str
) -> FailedPreconditionError | UnavailableError:
    where, job = f"cannot {what} {found.name} on {member.node}", found.name.partition("/")[2]
    end = (
        f". Its owner {found.owner} or an admin can end it: gpuscalectl release {job}"
        if what == "stop"
        else ""
    )
    if code == NO_FOLDER:
        return FailedPreconditionError(
            f"{where}: nothing of it is kept there for this user. If `run -d` started it, its owner {found.owner} ({found.holder})"
            " finds it until 14 days after its end, unless that host was wiped, and admins see its last lines in"
            f" `gpuscalectl get job {job} -o yaml`; else it wrote to their terminal{end}",
            reason="NO_OUTPUT",
        )
    ran = shlex.join(member.words[:-1])
    return UnavailableError(f"{where}: {ran} ended with {code}{end}", reason="NO_SUPERVISOR")


def expect_time(found: allocator_api.Reservation, timeout: float | None, began: float) -> None:
    """Check that `timeout` seconds since `began` have not passed. Raises DeadlineExceededError: they have (NOT_READY)."""
    if timeout is not None and time.monotonic() - began > timeout:
        message = f"{found.name} has not ended after {timeout:g} s"
        raise DeadlineExceededError(message, reason="NOT_READY", metadata={"name": found.name})


def why_ended(found: allocator_api.Reservation) -> str:
    """Why a job ended, if that is known and its command did not end by itself."""
    if found.job.state == found.job.STATE_LOST and not found.end_reason:
        return "nobody renewed its lease: its node died or could not reach the services"
    return found.end_reason


def exit_code_of(ended: allocator_api.Reservation) -> int:
    """The exit code of an ended job. Raises FailedPreconditionError: it has no exit code."""
    if not ended.job.HasField("exit_code"):
        state = _STATES.Name(ended.job.state).removeprefix("STATE_")
        raise FailedPreconditionError(
            f"{ended.name} is {state}: {why_ended(ended) or 'no exit code was reported'}",
            reason=f"JOB_{state}",
        )
    return ended.job.exit_code


def _text(line: bytes) -> str:
    return line.decode(errors="replace").removesuffix("\n")


class _Reading:
    """Reads a job's output into `source` while its block runs."""

    def __init__(self, job: Job, *, follow: bool) -> None:
        reading, self._writing = os.pipe()
        self.source = os.fdopen(reading, "rb")
        self._job, self._follow = job, follow
        self._started: list[subprocess.Popen[bytes]] = []
        self._failed: GpuscaleError | None = None
        self._done = False
        self._thread = threading.Thread(target=self._write, name=f"logs of {job.name}", daemon=True)

    def _write(self) -> None:
        try:
            self._job.write(self._writing, follow=self._follow, tell=self._go_on, on_start=self._note)
        except GpuscaleError as error:
            self._failed = error
        except BrokenPipeError:
            pass  # the reader is gone
        finally:
            os.close(self._writing)

    def _go_on(self, _: str) -> None:
        if self._done:
            raise CancelledCallError(f"{self._job.name} is read no more")

    def _note(self, process: "subprocess.Popen[bytes]") -> None:
        self._started.append(process)
        if self._done:
            process.terminate()

    def check(self) -> None:
        """Check that everything was read. Raises like `Job.logs`."""
        self._thread.join()
        if self._failed:
            raise self._failed

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True
        for process in self._started:
            process.terminate()


class AsyncJob:
    """`Job` for async code, with the same errors. As a context manager, it is stopped at the end of the block.

    Attributes:
        name: `reservations/{reservation}`.
    """

    def __init__(self, client: "AsyncClient", job: Job) -> None:
        self.name: str = job.name
        self._client, self._job = client, job

    async def look(self) -> allocator_api.Reservation:
        """Its current state."""
        request = allocator_api.GetReservationRequest(name=self.name)
        return (await retrying_async(lambda: self._client.allocator.GetReservation(request))).reservation

    async def wait(self, timeout: float | str | None = None) -> int:  # noqa: ASYNC109
        """Wait until it ends; returns its exit code."""
        limit, began = as_seconds("timeout", timeout), time.monotonic()
        found = await self.look()
        while not found.HasField("end_time"):
            expect_time(found, limit, began)
            await asyncio.sleep(PERIOD)
            try:
                found = await self.look()
            except (DeadlineExceededError, UnavailableError) as error:  # as in `Job._later`
                if error.reason in _FOR_PEOPLE:
                    raise
        return exit_code_of(found)

    async def logs(self, *, follow: bool = False) -> AsyncGenerator[str]:
        """The lines of its output; with `follow` until it ends."""
        reader = asyncio.StreamReader(limit=KEPT_BYTES)
        with _Reading(self._job, follow=follow) as reading:
            protocol = asyncio.StreamReaderProtocol(reader)
            loop = asyncio.get_running_loop()
            pipe, _ = await loop.connect_read_pipe(lambda: protocol, reading.source)
            try:
                async for line in reader:
                    yield _text(line)
                await asyncio.to_thread(reading.check)
            finally:
                pipe.close()

    async def stop(self) -> allocator_api.Reservation:
        """Stop it, like `Job.stop`."""
        return await asyncio.to_thread(self._job.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
