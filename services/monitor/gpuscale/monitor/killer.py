"""The program `gpuscale-killer`: ends processes that use GPUs without a reservation, for the agent of its host.

The agent has no right to; this program has CAP_KILL and nothing else, and is small: the standard library alone. It checks each
order by itself: the pid is still that process, held by a pidfd so that no other can get it meanwhile; it is no system user's; it
does not descend from work that was admitted; and it is neither this program, the agent, nor anything that started them. It
sends SIGTERM, and SIGKILL to what is left after the grace.
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
"""Lower numbers are those of system users, on most hosts."""
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
    def of(cls, found: Any) -> "SignalOrder":
        """The order of what JSON says. Raises ValueError, KeyError or TypeError: it is none."""
        admitted = frozenset((int(pid), int(started)) for pid, started in found["admitted"])
        grace = min(MOST_GRACE, max(0.0, float(found["grace"])))
        return cls((int(found["pid"]), int(found["started"])), grace, admitted)


class Killer:
    """Ends processes of users from `first_user` on."""

    def __init__(self, first_user: int, group: asyncio.TaskGroup) -> None:
        self._first_user = first_user
        self._group = group
        self._ending: set[Key] = set()

    async def take(self, found: Any, agent: int) -> Mapping[str, object]:
        """Take an order, and say why it is not carried out; nothing where it is."""
        order = SignalOrder.of(found)
        problem = self.begin(order, agent)
        pid, started = order.process
        if problem:
            _log.warning("refused: process %d, started at tick %d: %s", pid, started, problem)
        return {"problem": problem}

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
            for then in (order.grace, PATIENCE):
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


def parser() -> argparse.ArgumentParser:
    """What it is told."""
    made = helper_parser("gpuscale-killer", "Ends processes that use GPUs without a reservation.")
    made.add_argument(
        "--first-user",
        type=int,
        default=FIRST_USER,
        help="processes of users below it are let be (%(default)s)",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Run the program, and in the end see to what was sent SIGTERM."""
    given = parser().parse_args(argv)
    return run_helper(given, lambda group: nullcontext(Killer(given.first_user, group).take))


if __name__ == "__main__":
    sys.exit(main())
