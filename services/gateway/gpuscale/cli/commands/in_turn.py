"""Jobs that wait: the service keeps their place, and a process of their user starts them when their turn comes.

It runs on the host of `run --via`, knows the lease token of the one reservation, and asks for its state once a second.
"""

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.client.over_ssh import SSH_FAILED, supervise_all, supervised
from gpuscale.common.errors import UNANSWERED, FailedPreconditionError, GpuscaleError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.cli.commands.supervise import LeaseHolder

LONGEST_START = 300.0
"""Seconds for which it tries to reach the hosts that were granted."""
PERIOD = 1.0
"""Seconds between two questions."""


def start_in_turn(holder: "LeaseHolder") -> int:
    """Wait until a reservation is granted, then start its members; the exit code of the first that did not start.

    Once the services have answered, nothing is written any more.

    Raises:
        GpuscaleError: they are not.
    """
    from gpuscale.common.rpc.channel import RPC_TIMEOUT
    from gpuscale.common.wire import seconds

    placed = holder.renew(RPC_TIMEOUT)
    os.write(1, b"1")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    granted = _granted(holder, placed)
    if granted is None:
        return 0
    members = [supervised(one) for one in holder.orders.of_members(granted, holder.orders.node)]
    started = threading.Event()
    keeping = (holder, seconds(granted.ttl), len(members), started)
    threading.Thread(target=keep_until_started, args=keeping, daemon=True).start()
    until = time.monotonic() + LONGEST_START
    codes: list[int] = []
    while True:
        try:
            left = until - time.monotonic()
            codes = supervise_all(
                members, stdout=1, patience=left, environment=TERMINAL.callers_environment()
            )
        except (FailedPreconditionError, UnavailableError) as error:
            if time.monotonic() >= until or not isinstance(error, UnavailableError):
                if not codes:  # else one of them may run
                    for one in members:
                        holder.of(one.orders).failed(error)
                    holder.of(members[0].orders).release()
                return 1
        else:
            if SSH_FAILED not in codes or time.monotonic() >= until:
                started.set()
                return next((code for code in codes if code), 0)
        time.sleep(PERIOD)  # the host may come back; what it has started it does not start again


def keep_until_started(holder: "LeaseHolder", ttl: float, members: int, started: threading.Event) -> None:
    """Keep what was granted until the supervisors of all members do, who tell of their start with it.

    A host that dies right after its start leaves a lease that runs out, though ssh does not know yet that the start succeeded.
    """
    while not started.wait(min(ttl / 8, PERIOD)):
        with suppress(GpuscaleError):
            known = holder.renew(ttl / 8).job.members
            if sum(one.HasField("start_time") for one in known) >= members:
                return


def _granted(holder: "LeaseHolder", placed: "Reservation") -> "Reservation | None":
    """What is granted in the end; None where the wait is over, or somebody ended it."""
    from gpuscale.common.rpc.channel import RPC_TIMEOUT
    from gpuscale.common.wire import seconds

    known = placed
    until = time.monotonic() + seconds(placed.remaining) + seconds(placed.ttl)
    while known.state == known.STATE_WAITING:
        time.sleep(PERIOD)
        try:
            known = holder.renew(RPC_TIMEOUT)
        except UNANSWERED:
            if time.monotonic() > until:
                return None
        except GpuscaleError:
            return None
    return known
