"""The program `gpuscale-killer`: kills processes that use GPUs without a reservation, on behalf of the agent.

It has CAP_KILL, which the agent lacks, and checks each order itself. The pid must still be the same process (a pidfd pins it),
must not belong to a system user or descend from admitted work, and must not be this program, the agent or an ancestor of
either. It sends SIGTERM, then SIGKILL after the grace period.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuscale.monitor.helper import PATIENCE, helper_parser, run_helper

MOST_GRACE = 60.0
FIRST_USER = 1000
"""The first user id that is not a system user's, on most hosts."""
_STARTED, _PARENT = 19, 1  # fields after the program's name in /proc/PID/stat
_log = logging.getLogger("gpuscale-killer")

Key = tuple[int, int]
"""A pid, and the start time of its process in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class SignalOrder:
    """An order to kill a process. Processes in `admitted` and their descendants are spared."""

    process: Key
    grace: float
    admitted: frozenset[Key]

    @classmethod
    def of(cls, found: Any) -> "SignalOrder":
        """Parse decoded JSON. ValueError, KeyError or TypeError if it is malformed."""
        admitted = frozenset((int(pid), int(started)) for pid, started in found["admitted"])
        grace = min(MOST_GRACE, max(0.0, float(found["grace"])))
        return cls((int(found["pid"]), int(found["started"])), grace, admitted)


class Killer:
    """Kills processes of users whose id is at least `first_user`."""

    def __init__(self, first_user: int, group: asyncio.TaskGroup) -> None:
        self._first_user = first_user
        self._group = group
        self._ending: set[Key] = set()

    async def take(self, found: Any, agent: int) -> Mapping[str, object]:
        """Carry out an order; `problem` says why not and is empty on success."""
        order = SignalOrder.of(found)
        problem = "" if order.process in self._ending else self._begin(order, agent)
        if problem:
            _log.warning("refused: process %d, started at tick %d: %s", *order.process, problem)
        return {"problem": problem}

    def _begin(self, order: SignalOrder, agent: int) -> str:
        """Send SIGTERM and schedule SIGKILL; returns why not, empty on success."""
        try:
            handle = os.pidfd_open(order.process[0])
        except (OSError, ValueError):
            return "it has ended"
        problem = self._refusal(order, agent)
        if not problem:
            try:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
            except OSError as error:
                problem = f"cannot send SIGTERM: {error.strerror}"
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
            return "it is the agent, gpuscale-killer or an ancestor of them"
        if admitted := order.admitted.intersection(lineage):
            return f"it descends from process {min(admitted)[0]}, which was admitted"
        user = lowest_user(order.process[0])
        return "" if user >= self._first_user else f"its user {user} is below --first-user {self._first_user}"

    async def _end(self, order: SignalOrder, handle: int) -> None:
        """Wait until the process ends (its pidfd becomes readable), and send SIGKILL after the grace period."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            for patience in (order.grace, PATIENCE):
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience):
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
    """A process and its ancestors, nearest first; empty if it does not exist."""
    found: list[Key] = []
    while pid > 0:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        words = stat.rpartition(")")[2].split()
        found.append((pid, int(words[_STARTED])))
        pid = int(words[_PARENT])
    return found


def lowest_user(pid: int) -> int:
    """The lowest of a process's real, effective and saved user ids; 0 if they cannot be read."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return min(int(word) for word in line.split()[1:4])
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = helper_parser("gpuscale-killer", "Kills processes that use GPUs without a reservation.")
    made.add_argument(
        "--first-user", type=int, default=FIRST_USER, help="spare users with a lower id (%(default)s)"
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the program; it exits once every process that got SIGTERM has ended."""
    given = parser().parse_args(argv)
    return run_helper(given, lambda group: nullcontext(Killer(given.first_user, group).take))


if __name__ == "__main__":
    sys.exit(main())
