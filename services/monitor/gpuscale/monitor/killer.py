"""The program `gpuscale-killer`: ends processes that use GPUs without a reservation, for the agent of its host.

The agent has no right to; this program has CAP_KILL and nothing else, and is small: the standard library alone. It hears the
agent's user on a unix socket, one order a connection, and checks each by itself: the pid is still that process, held by a pidfd
so that no other can get it meanwhile; it is no system user's; it does not descend from work that was admitted; and it is
neither this program, the agent, nor anything that started them. It sends SIGTERM, and SIGKILL to what is left after the grace.
"""

import argparse
import asyncio
import json
import logging
import os
import pwd
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MOST_GRACE = 60.0
FIRST_USER = 1000
"""Lower numbers are those of system users, on most hosts."""
_PATIENCE = 5.0
_LONGEST = 1 << 20
_STARTED, _PARENT = 19, 1  # of the fields after the name of the program in /proc/PID/stat
_log = logging.getLogger("gpuscale-killer")

Key = tuple[int, int]
"""A pid, and when the process started, in clock ticks since the boot."""


@dataclass(frozen=True, slots=True)
class SignalOrder:
    """To end a process, with what was admitted on the host: that and its descendants are let be."""

    process: Key
    grace: float
    admitted: frozenset[Key]

    @classmethod
    def of(cls, line: bytes) -> "SignalOrder":
        """The order of a line of JSON. Raises ValueError, KeyError or TypeError: it is none."""
        found = json.loads(line)
        admitted = frozenset((int(pid), int(started)) for pid, started in found["admitted"])
        grace = min(MOST_GRACE, max(0.0, float(found["grace"])))
        return cls((int(found["pid"]), int(found["started"])), grace, admitted)


class Killer:
    """Hears one user, and ends processes of users from `first_user` on."""

    def __init__(self, agent_user: int, first_user: int, group: asyncio.TaskGroup) -> None:
        self._agent_user = agent_user
        self._first_user = first_user
        self._group = group
        self._ending: set[Key] = set()

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one order, and answer why it is not carried out; nothing where it is."""
        with suppress(OSError, TimeoutError):
            try:
                connected: socket.socket = writer.get_extra_info("socket")
                size = struct.calcsize("3i")
                pid, user, _ = struct.unpack(
                    "3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
                )
                async with asyncio.timeout(_PATIENCE):
                    line = await reader.readline()
                    problem = self._take(line, pid, user)
                    writer.write(json.dumps({"problem": problem}).encode() + b"\n")
                    await writer.drain()
            finally:
                writer.close()

    def _take(self, line: bytes, agent: int, user: int) -> str:
        if user not in {0, self._agent_user}:
            _log.warning("refused: user %d, process %d, is not the agent", user, agent)
            return "only the agent may ask for that"
        try:
            order = SignalOrder.of(line)
        except (ValueError, KeyError, TypeError):
            return "that is no order"
        problem = self.begin(order, agent)
        pid, started = order.process
        if problem:
            _log.warning("refused: process %d, started at tick %d: %s", pid, started, problem)
        return problem

    def begin(self, order: SignalOrder, agent: int) -> str:
        """Send SIGTERM, and see to the rest; why not, empty if it is done."""
        if order.process in self._ending:
            return ""
        try:
            handle = os.pidfd_open(order.process[0])
        except (OSError, ValueError):
            return "it has ended"
        problem = self._refusal(order, agent)
        if not problem:
            try:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            except OSError as error:
                problem = f"it cannot be ended: {error.strerror}"
        if problem:
            os.close(handle)
            return problem
        _log.warning(
            "SIGTERM to process %d, started at tick %d, SIGKILL in %g s", *order.process, order.grace
        )
        self._ending.add(order.process)
        self._group.create_task(self._end(order, handle), name=f"end {order.process[0]}")
        return ""

    def _refusal(self, order: SignalOrder, agent: int) -> str:
        lineage = ancestry(order.process[0])
        own = {pid for one in (os.getpid(), agent) for pid, _ in ancestry(one)}
        if lineage[:1] != [order.process]:
            return "it has ended"
        if not agent:
            return "the agent is in another PID namespace"
        if order.process[0] in {1, *own}:
            return "it is the agent, gpuscale-killer, or what started them"
        if admitted := order.admitted.intersection(lineage):
            return f"it descends from process {min(admitted)[0]}, whose work was admitted"
        user = lowest_user(order.process[0])
        return (
            ""
            if user >= self._first_user
            else f"it is of user {user}, and those below {self._first_user} are let be"
        )

    async def _end(self, order: SignalOrder, handle: int) -> None:
        """Wait for the end, which makes a pidfd readable, and see to it after the grace."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            for then in (order.grace, _PATIENCE):
                with suppress(TimeoutError):
                    async with asyncio.timeout(then):
                        await ended.wait()
                if ended.is_set():
                    _log.warning("process %d has ended", order.process[0])
                    return
                _log.warning("SIGKILL to process %d", order.process[0])
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            loop.remove_reader(handle)
            os.close(handle)
            self._ending.discard(order.process)


def ancestry(pid: int) -> list[Key]:
    """A process and those that it descends from, nearest first; empty if there is none."""
    found: list[Key] = []
    while pid > 0:
        try:
            words = (
                Path(f"/proc/{pid}/stat")
                .read_text(encoding="utf-8", errors="replace")
                .rpartition(")")[2]
                .split()
            )
        except OSError:
            break
        found.append((pid, int(words[_STARTED])))
        pid = int(words[_PARENT])
    return found


def lowest_user(pid: int) -> int:
    """The lowest of a process's users, real, effective and saved; 0 where that cannot be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return min(int(word) for word in line.split()[1:4])
    return 0


async def serve(listening: socket.socket, agent_user: int, first_user: int) -> None:
    """Serve until SIGTERM or SIGINT, and then end what was sent SIGTERM before."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group:
        killer = Killer(agent_user, first_user, group)
        async with await asyncio.start_unix_server(killer.hear, sock=listening, limit=_LONGEST):
            await stop.wait()
            os.unlink(listening.getsockname())  # noqa: PTH108 - at once


def parser() -> argparse.ArgumentParser:
    """What it is told."""
    made = argparse.ArgumentParser(
        "gpuscale-killer", description="Ends processes that use GPUs without a reservation."
    )
    made.add_argument("--socket", type=Path, required=True, help="unix socket at which the agent asks")
    made.add_argument("--agent-user", default="gpuscale", help="Unix user of the agent (%(default)s)")
    made.add_argument(
        "--first-user",
        type=int,
        default=FIRST_USER,
        help="processes of users below it are let be (%(default)s)",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    given = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        user = (
            int(given.agent_user) if given.agent_user.isdecimal() else pwd.getpwnam(given.agent_user).pw_uid
        )
    except KeyError:
        sys.exit(f"--agent-user: this host has no user {given.agent_user}")
    place: Path = given.socket
    with socket.socket(socket.AF_UNIX) as listening:
        place.unlink(missing_ok=True)
        listening.bind(str(place))
        place.chmod(0o666)  # whoever connects is asked by the kernel for their user
        _log.warning("hears user %d at %s", user, place)
        asyncio.run(serve(listening, user, given.first_user))
    return 0


if __name__ == "__main__":
    sys.exit(main())
