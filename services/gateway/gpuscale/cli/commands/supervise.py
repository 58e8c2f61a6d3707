"""`gpuscalectl supervise`: runs a command on the host of its GPUs and renews the lease meanwhile. `run` starts it, over ssh or in itself.

It reads its orders as one line of JSON from standard input, so that no secret is in an argument or a variable. It has no credentials
of the user: the lease token renews and releases this one reservation only.

`Keeper` renews the lease in the background, and stops the command before the lease is lost. The lease starts when the renewal is sent,
by this host's clock, so the server always holds the GPUs for longer than assumed here. SIGTERM is sent early enough for SIGKILL to
follow before the end of the lease.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from mmap import mmap
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

from gpuscale.cli.commands import processes
from gpuscale.cli.commands.detached_jobs import JobFolder, detach, not_kept, start_granted, start_in_turn
from gpuscale.cli.commands.holding import RETRY, LeaseHolder
from gpuscale.cli.console.terminal import TERMINAL, note_of_run
from gpuscale.client.orders import GREETING, READY, Orders, shown, started_before
from gpuscale.client.over_ssh import OF_SIGNAL, exit_code
from gpuscale.common import errors, wire
from gpuscale.common.names import node_of
from gpuscale.common.rpc import channel

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import AllocatorServiceStub, Reservation, ReservedGpu
    from gpuscale.api.monitor.v1 import WorkServiceStub

RESERVATION = "GPUSCALE_RESERVATION"
"""Environment variable of the command with the name of the reservation."""
RENEWALS = 12
"""Fewest renewals per length of the lease: a network outage of half of it, plus seconds to recover, must not end the command."""
LONGEST_WARNING = 60.0
"""Most seconds between the warning of a time limit and its end; a quarter of the limit if less."""
LONGEST_PAUSE = 10.0
"""Most seconds between renewals, and so the longest that a drain or a lost GPU goes unnoticed."""
MEMBERS_PAUSE = 1.0
"""The same if a failed member stops the others."""
LONGEST_MOVE = 600.0
"""Seconds that a command without a grace has to end once it was told to move; then the move is given up."""
PREPARE_AGAIN = 20.0
"""Seconds between tries to start a supervisor on the node that a job is to move to."""
STOP_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL; a fifth of the lease if less."""
SETTLE = 1.0
"""Seconds for processes that a command leaves running, such as a `tee`, to end by themselves."""
TELLING = 1.0
"""Seconds to wait until the service knows the command of a detached job."""
AT_ONCE = 0.02
"""Seconds to wait for orders that are already sent."""
WHOLE = 1000
"""Thousandths of an unshared GPU."""
MOST_ORDERS = 1 << 24
"""Most bytes of orders: a command line of 2 MiB, the most that Linux takes, and how JSON writes it."""


def main() -> NoReturn:
    """Run the command of the orders on standard input under their lease; exits with its exit code.

    `gpuscalectl run` starts it on other hosts as `supervise`; as `supervise --job NAME` it outlives its caller.
    """
    TERMINAL.silence_grpc()
    try:
        code = _supervise(job="--job" in sys.argv)
    except errors.GpuscaleError as error:
        from gpuscale.cli.console.errors import report

        code = report(error)
    sys.exit(code)


def _supervise(*, job: bool) -> int:
    if not job:
        os.write(1, GREETING)
        if not select.select([0], [], [], AT_ONCE)[0]:
            # Import ahead of time what the start of a command needs.
            from gpuscale.api.allocator.v1 import AllocatorServiceStub
            from gpuscale.client.this_host import admit

            del AllocatorServiceStub, admit
    orders = _read_orders()
    if orders is None:
        return 0
    if orders.member is not None and not job:
        _enter(orders)
        orders = replace(orders, directory=str(Path.cwd()))
        os.write(1, READY)
        if not os.read(0, 1):
            return 0  # another member cannot start
    if orders.detached and not job:
        return _detach(orders)
    ends = memoryview(mmap(-1, 8)).cast("d")
    if not orders.waits and (code := processes.guard()) is not None:
        # Report a killed supervisor, and start a job that left its GPUs again, unless its caller does: here, since a process
        # that the supervisor starts ends with it.
        killed = code == OF_SIGNAL + signal.SIGKILL
        if killed or (orders.on_move and orders.detached):
            with _ways(orders) as (ways, _):
                holder = LeaseHolder(orders, ways, ends)
                if killed:
                    holder.killed(code)
                else:
                    holder.look()
                if holder.moved is not None and orders.detached:
                    holder.member = None
                    start_granted(holder, holder.moved)
        return code
    child = None if orders.waits or orders.adopts else processes.WaitingChild()
    with _ways(orders) as (ways, own):
        holder = LeaseHolder(orders, ways, ends)
        if orders.waits:
            return start_in_turn(holder)
        return run_under(holder, own=own, while_open=None if job else 1, child=child)


def _detach(orders: Orders) -> int:
    try:
        return detach(orders)
    except OSError as error:
        with _ways(orders) as (ways, _):
            holder, refused = LeaseHolder(orders, ways), not_kept(orders, error)
            if not orders.waits:
                holder.failed(refused)
            if holder.all_ended:
                holder.release()
        raise refused from error


def _read_orders() -> Orders | None:
    """Read the first line of standard input and not a byte more: the rest is the command's. None at the end of input."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MOST_ORDERS and (byte := os.read(0, 1)):
        line += byte
    try:
        return Orders(**json.loads(line)) if line else None
    except (ValueError, TypeError):  # hide the text, which holds the lease token
        raise errors.InvalidArgumentError(
            "standard input does not begin with orders of gpuscalectl run, of the version that is installed here"
        ) from None


@contextmanager
def _ways(orders: Orders) -> "Generator[tuple[list[AllocatorServiceStub], WorkServiceStub | None]]":
    """The ways to reach the allocator: through this host's agent, then by the caller's address, without its credentials.

    Also yields the stub that admits work at the caller's address, if that may be this host's agent.
    """
    from gpuscale.api.allocator import v1 as api
    from gpuscale.api.monitor.v1 import WorkServiceStub
    from gpuscale.client.this_host import AGENT_VARIABLE

    with ExitStack() as stack:
        agent = os.environ.get(AGENT_VARIABLE)
        if not agent and os.access(channel.AGENT_SOCKET, os.W_OK):
            agent = f"unix:{channel.AGENT_SOCKET}"
        channels = [channel.open_sync_channel(agent, urgent=True)] if agent else []
        if orders.local or not channel.is_local(orders.address):
            authority = stack.enter_context(os.fdopen(os.memfd_create("authority"), "wb", buffering=0))
            authority.write(orders.authority.encode())
            file = Path(f"/proc/self/fd/{authority.fileno()}")
            tls = channel.ClientTls(file) if orders.authority else None
            channels += [channel.open_sync_channel(orders.address, tls=tls, urgent=True)]
        open_now = [stack.enter_context(one) for one in channels]
        own = WorkServiceStub(open_now[-1]) if orders.local else None
        yield [api.AllocatorServiceStub(one) for one in open_now], own


def run_under(
    holder: LeaseHolder,
    *,
    own: "WorkServiceStub | None" = None,
    stdout: int | None = None,
    while_open: int | None = None,
    child: processes.WaitingChild | None = None,
) -> int:
    """Run a command under its lease, then release it; returns the command's exit code.

    `own` admits work at the address of the orders, if that may be this host's agent. A `child` becomes the command, and
    `stdout` is both of its outputs. The command is stopped when the reader of the descriptor `while_open` is gone.

    Raises:
        FailedPreconditionError: the directory does not exist (DIRECTORY_NOT_FOUND), or the lease is over or lost (LEASE_LOST).
        GpuscaleError: the lease cannot be renewed, or the work is not admitted; nothing was started.
    """
    from gpuscale.client.this_host import admission, admit

    orders = holder.orders
    alone = socket.socket(socket.AF_UNIX)  # the kernel frees the name when this process ends
    try:
        if not orders.detached:  # detached jobs have a lock
            alone.bind(f"\0gpuscale/{orders.reservation}/{orders.member or 0}")
    except OSError:
        raise started_before(orders.reservation) from None
    try:
        _enter(orders)
        reservation = holder.renew_patiently(channel.RPC_TIMEOUT)
        asked = admission(reservation, orders.lease_token, orders.node)
        if asked is None:
            raise errors.FailedPreconditionError(
                f"{orders.reservation} holds no GPUs of {orders.node}", reason="GPUS_ELSEWHERE"
            )
        for asked.pid in orders.adopts or (os.getpid(),):
            if why := admit(asked, own, orders.address):
                note_of_run(f"the agent does not count the command as the holder of its GPUs: {why}")
        if orders.detached:
            return _run_detached(holder, reservation, child)
        return _run(holder, reservation, stdout=stdout, while_open=while_open, child=child)
    except errors.GpuscaleError as error:
        if holder.member is None:  # which tells the other members
            holder.failed(error)
        raise
    finally:
        if holder.all_ended:
            holder.release()
        alone.close()


def _enter(orders: Orders) -> None:
    if orders.directory:
        try:
            os.chdir(orders.directory)
        except OSError as error:
            raise errors.FailedPreconditionError(
                f"{orders.node} has no directory {orders.directory} for this user ({error.strerror}): nothing was started;"
                " use a path that the hosts share, or say another with --directory",
                reason="DIRECTORY_NOT_FOUND",
            ) from error


def _run_detached(
    holder: LeaseHolder, reservation: "Reservation", child: processes.WaitingChild | None
) -> int:
    """Like `_run`, with a folder for the output. Of adopted processes it waits for the last; their exit codes are unknown."""
    try:
        folder = JobFolder(holder.orders)
    except OSError as error:
        raise not_kept(holder.orders, error) from error
    holder.last_lines = folder.last_lines
    try:
        if not holder.orders.adopts:
            return _run(holder, reservation, stdout=folder.writing, folder=folder, child=child)
        adopted = processes.Adopted(holder.orders.adopts)
        holder.started(holder.orders.adopts[0])
        with Keeper(holder, reservation, adopted) as keeper:
            folder.started()
            signal.signal(signal.SIGTERM, keeper.told_to_stop)
            adopted.wait_for_all()
        return 0
    finally:
        if holder.member is not None:
            folder.put(holder.member)
        folder.close()


def _run(
    holder: LeaseHolder,
    reservation: "Reservation",
    *,
    stdout: int | None,
    while_open: int | None = None,
    folder: JobFolder | None = None,
    child: processes.WaitingChild | None = None,
) -> int:
    """Run the command until it ends or its reservation is lost; returns its exit code."""
    orders = holder.orders
    own = [
        gpu for gpu in reservation.gpus if node_of(gpu) == orders.node and orders.member in {None, gpu.member}
    ]
    uuids = ",".join(gpu.uuid for gpu in own)
    simulated = "SIMULATED " if any(gpu.simulated for gpu in own) else ""
    note_of_run(f"{reservation.name} holds {simulated}{uuids.replace(',', ', ')}")
    if orders.check:
        reservation = _check(holder, own, reservation, 1 if stdout is None else stdout)
        if not orders.command:
            holder.started(os.getpid())
            holder.ended(0, "")
            return 0
    with ExitStack() as stack:
        signals = stack.enter_context(processes.Forwarding())
        offspring = stack.enter_context(processes.Offspring(child))
        variables = {
            **orders.environment,
            "CUDA_VISIBLE_DEVICES": uuids,
            "GPUSCALE_GPU_UUIDS": uuids,
            "GPUSCALE_NODE": orders.node,
            RESERVATION: reservation.name,
            "GPUSCALE_FENCE": str(reservation.fence),
            "GPUSCALE_ATTEMPT": str(orders.attempt),
        }
        process: processes.Started | int
        if child is not None:
            process = child.become(orders.command, variables, (stdout, stdout) if stdout else (1, 2))
        else:
            process = processes.start(orders.command, variables=variables, stdout=stdout, dies_with_us=True)
        if isinstance(process, int):
            stack.close()  # signals end us again: nobody may answer
            holder.started(0)
            why = "was not found" if process == processes.NOT_FOUND else "cannot be run"
            holder.ended(process, f"it did not start: {shown(orders.command[:1])} {why}")
            return process
        signals.to(process)
        holder.started(process.pid)
        with Keeper(holder, reservation, offspring, signals.send) as keeper:
            if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
                signal.signal(signal.SIGTSTP, keeper.told_to_pause)
            if while_open is not None:
                keeper.stop_unless_open(while_open)
            if folder is not None:
                keeper.told.wait(TELLING)
                folder.started()
                signal.signal(signal.SIGTERM, keeper.told_to_stop)
                if holder.member is not None:
                    folder.put(holder.member)
            code = offspring.wait(process)
            keeper.end()
    why = keeper.stopped
    if not why and signals.ending and exit_code(code) == 128 + signals.ending:
        why = f"{signal.Signals(signals.ending).name} ended it"
    holder.ended(exit_code(code), why, leaves=keeper.leaves and not signals.ending)
    if keeper.lost:
        raise errors.FailedPreconditionError(
            f"the command was stopped because {reservation.name} was lost: {keeper.lost}", reason="LEASE_LOST"
        )
    return exit_code(code)


def _check(
    holder: LeaseHolder, gpus: "Sequence[ReservedGpu]", reservation: "Reservation", stdout: int
) -> "Reservation":
    """Test the GPUs; without a command, write the results to standard output. Returns the renewed reservation.

    Raises FailedPreconditionError: a GPU failed (GPU_CHECK_FAILED).
    """
    from gpuscale.cli.commands.gpu_test import BROKEN, NOT_TESTED, UNUSABLE, GpuTest, test_gpu

    found: dict[str, GpuTest] = {}
    pause = min(LONGEST_PAUSE, wire.seconds(reservation.ttl) / RENEWALS)
    renew = partial(holder.renew_patiently, channel.RPC_TIMEOUT)
    for gpu in gpus:
        most = gpu.memory_bytes if gpu.milli < WHOLE else 0
        found[gpu.uuid] = (
            GpuTest(NOT_TESTED, "it is simulated")
            if gpu.simulated
            else test_gpu(gpu.uuid, most, pause, renew)
        )
    said = [f"{uuid} {one.state}: {one.found}" for uuid, one in found.items()]
    bad = [line for line, one in zip(said, found.values(), strict=True) if one.state in {BROKEN, UNUSABLE}]
    if not holder.orders.command:
        os.write(stdout, json.dumps(found).encode())
    elif not bad:
        for line in said:
            note_of_run(line)
    if bad:
        raise errors.FailedPreconditionError(
            f"a GPU failed its test: {'; '.join(bad)}", reason="GPU_CHECK_FAILED"
        )
    return renew()


class Keeper:
    """Keeps the lease of a reservation while its block runs. `lost` says why it is lost; empty while held.

    `stopped` says why the command was told to end, if it was; `leaves`, whether it is to start again elsewhere. `send` sends
    `offspring` a signal; None if there is no `--on-move`.
    """

    def __init__(
        self,
        holder: LeaseHolder,
        reservation: "Reservation",
        offspring: processes.Offspring,
        send: Callable[[int], object] | None = None,
    ) -> None:
        # Import before starting threads: of two threads that import the same module, one may see it half loaded.
        from psutil import Process

        from gpuscale.cli.console.output import to_dict
        from gpuscale.cli.grammar.parameters import format_duration
        from gpuscale.client.states import revoked_early

        del Process, to_dict, format_duration, revoked_early
        self.lost = self.stopped = ""
        self._holder = holder
        self._offspring = offspring
        self._send = send
        self._moved, self._move_by = "", float("inf")
        self._leaves_by, self._stays_ended = float("-inf"), False
        self._noticed = False
        self._ttl = wire.seconds(reservation.ttl)
        self._pause = min(LONGEST_PAUSE, self._ttl / RENEWALS)
        if holder.orders.member is not None and holder.orders.stop_together:
            self._pause = min(self._pause, MEMBERS_PAUSE)
        self._grace = min(STOP_GRACE, self._ttl / 5)
        self._ends = holder.asked_at + wire.seconds(reservation.remaining)
        limit = holder.orders.time_limit
        self._limit = time.monotonic() + limit if limit else float("inf")
        self._warning = self._limit - min(LONGEST_WARNING, limit / 4)
        self._told = ""
        self._revoked, self._notes_told = "", 0
        self.told = threading.Event()
        """Set once the service was told that the command runs."""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keep the lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def stop_unless_open(self, descriptor: int) -> None:
        """Stop the command when the reader of a pipe or socket is gone, and so its starter."""
        threading.Thread(target=self._follow, args=(descriptor,), name="follow", daemon=True).start()

    def _follow(self, descriptor: int) -> None:
        poll = select.poll()
        poll.register(descriptor, 0)
        poll.poll()  # until POLLERR or POLLHUP
        if self._done.is_set():
            return
        self._stays_ended = True
        self.stopped = self.stopped or "the connection to who started it ended"
        nowhere = os.open(os.devnull, os.O_RDWR)
        for one in (1, 2):  # later writes must not fail
            os.dup2(nowhere, one)
        self._stop_by(time.monotonic() + self._grace)

    @property
    def leaves(self) -> bool:
        """Whether a command that ends now was told to move, even if that was withdrawn while it saved its work."""
        return not self._stays_ended and (bool(self._moved) or time.monotonic() < self._leaves_by)

    def told_to_stop(self, _number: int, _frame: FrameType | None) -> None:
        """Stop the command; a signal handler."""
        threading.Thread(target=self._stop, args=("somebody stopped it",), name="stop", daemon=True).start()

    def told_to_pause(self, _number: int, _frame: FrameType | None) -> None:
        """Say when the lease ends that Ctrl-Z keeps from being renewed, and stand still; a signal handler."""
        from gpuscale.cli.grammar.parameters import format_duration

        left = format_duration(self._ends - self._grace - time.monotonic())
        note_of_run(f"the lease is not renewed while it is stopped: `fg` or `bg` within {left}")
        os.kill(os.getpid(), signal.SIGSTOP)

    def _stop(self, why: str, *, moves: bool = False) -> None:
        if moves:
            self.stopped = f"{self.stopped}; {why}"
        elif self.stopped == self._moved:
            self.stopped = why
        self._stays_ended = not moves
        note_of_run(f"stopping the command: {why}")
        self._stop_by(time.monotonic() + self._grace)

    def _keep(self) -> None:
        pause = 0.0 if self._holder.member else self._pause  # at once if there is something to report
        due = time.monotonic() + pause
        while True:
            next_at = min(due, self._ends - self._grace, self._warning, self._limit, self._move_by)
            if self._done.wait(max(0.0, next_at - time.monotonic())):
                return
            now = time.monotonic()
            if now >= min(self._warning, self._limit):
                from gpuscale.cli.grammar.parameters import format_duration

                limit, left = format_duration(self._holder.orders.time_limit), self._limit - now
                if now >= self._warning:
                    self._warning = float("inf")
                    self._tell(f"the time limit of {limit} ends the command in {format_duration(left)}")
                if now >= self._limit:
                    self._limit = float("inf")
                    self._stop(f"its time limit of {limit} is over")
            if time.monotonic() >= self._move_by:
                self._move_by = float("inf")
                self._stop("it did not end in the grace of --on-move", moves=True)
            if time.monotonic() < min(due, self._ends - self._grace):
                continue
            due = time.monotonic() + (self._pause if self._renewed() else RETRY)
            self.told.set()
            if self.lost or time.monotonic() >= self._ends - self._grace:
                self.lost = self.lost or self._revoked or "it was not renewed in time"
                self._stays_ended = True
                self.stopped = self.stopped or f"its reservation was lost: {self.lost}"
                note_of_run(f"the reservation is lost, stopping the command: {self.lost}")
                left = max(RETRY, min(self._grace, self._ends - time.monotonic()))
                self._stop_by(time.monotonic() + left)
                return

    def _renewed(self) -> bool:
        """Renew the lease, and warn if it will be revoked; returns whether there was an answer."""
        from gpuscale.client.states import revoked_early

        left = self._ends - self._grace - time.monotonic()
        try:
            renewed = self._holder.renew(max(RETRY, min(self._pause, left)))
        except errors.REFUSALS as error:
            self.lost = error.message
            return True
        except errors.GpuscaleError as error:
            self._tell(f"cannot renew the lease, trying again: {error.message}")
            return False
        self._ends = self._holder.asked_at + self._ttl
        self._revoked = ""
        orders = self._holder.orders
        if orders.member is not None and orders.stop_together and not (self.stopped or self._done.is_set()):
            for one in renewed.job.members:
                silent = one.end_reason and not one.HasField("exit_code")
                if one.member != orders.member and (one.exit_code or silent):
                    does = f": {one.end_reason}" if silent else f" ended with {one.exit_code}"
                    self._stop(f"member {one.member}{does}")
                    break
        if len(renewed.notes) > self._notes_told:
            self._tell(renewed.notes[-1])
        self._notes_told = len(renewed.notes)
        early = revoked_early(renewed)
        self._on_move(renewed.end_reason if early is not None else "")
        if early is not None:
            from gpuscale.cli.grammar.parameters import format_duration

            left = self._ends - time.monotonic() - early
            self._ends = min(self._ends, time.monotonic() + left)
            self._revoked = renewed.end_reason
            self._tell(f"{renewed.end_reason}: the GPUs are revoked in {format_duration(left)}")
        return True

    def _on_move(self, why: str) -> None:
        """Send the command the signal of `--on-move`, once per notice; `why` is empty without one, or once withdrawn."""
        orders, there = self._holder.orders, self._holder.next_node
        if self._send is None or not orders.on_move or bool(why) == self._noticed:
            return
        self._noticed = bool(why)
        if not why:
            if self.stopped == self._moved:
                self.stopped = self._moved = ""
            self._move_by = float("inf")
        elif orders.detached and there not in {"", orders.node}:
            threading.Thread(target=self._prepare, args=(why, there), name="prepare", daemon=True).start()
        else:
            self._signal(why)

    def _prepare(self, why: str, node: str) -> None:
        """Send the signal once a supervisor runs on the node that the job is to move to: it must not end here if it cannot start there.

        If it is no longer to move there, it is drained or preempted, and ends anyway.
        """
        from gpuscale.client.over_ssh import EarlyStart

        there = replace(self._holder.orders, node=node, local=False)
        while self._noticed and not self._done.is_set():
            with EarlyStart(node, there.user, ()) as early:
                up = early.take(there) is not None
            if up or self._holder.next_node != node:
                self._signal(why)
                return
            self._tell(
                f"the command stays: no supervisor came up on {node}, where its GPUs are to be: `ssh {node}` must work from here"
            )
            self._done.wait(PREPARE_AGAIN)

    def _signal(self, why: str) -> None:
        orders = self._holder.orders
        if self.stopped or not self._noticed or self._done.is_set() or self._send is None:
            return
        name = signal.Signals(orders.on_move).name
        self.stopped = self._moved = f"{why}; it was sent {name} to save its work"
        note_of_run(f"sending {name} to the command: {why}")
        self._send(orders.on_move)
        if self._holder.member is not None:
            self._holder.member.signal_time.GetCurrentTime()
        self._leaves_by = time.monotonic() + (orders.move_grace or LONGEST_MOVE)
        self._move_by = self._leaves_by if orders.move_grace else float("inf")

    def end(self) -> None:
        """Stop what the command left running, before its GPUs are released."""
        settled = time.monotonic() + SETTLE
        while (left := [] if self.lost else self._offspring.alive()) and time.monotonic() < settled:
            time.sleep(processes.PAUSE)
        if left:
            note_of_run(f"stopping processes that the command left running: {processes.named(left)}")
            self._stop_by(time.monotonic() + self._grace)

    def _tell(self, text: str) -> None:
        if text.partition(":")[0] != self._told:
            note_of_run(text)
        self._told = text.partition(":")[0]

    def _stop_by(self, until: float) -> None:
        left = self._offspring.stop(until)
        if left:
            note_of_run(
                f"cannot stop these, which may still use GPUs of the next holder: {processes.named(left)}"
            )


if __name__ == "__main__":
    main()
