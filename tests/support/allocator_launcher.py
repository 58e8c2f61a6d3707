"""Launcher of allocators for tests that kill them: imports everything once, then forks a process for each life.

    python -m tests.support.allocator_launcher [PLANT]

Reads one JSON object a line, {"life": n, "args": [...], "failpoints": "...", "log": path, "wall": path}, and forks an
allocator with these arguments whose stderr goes to `log`, and whose wall clock is off by the seconds that stand in the
file `wall`. Writes {"life": n, "pid": pid} and, when it has ended, {"life": n, "code": code}. PLANT names a bug that is
put into all of them (`tests.fault.allocator.planted_bugs`).
"""

import json
import os
import signal
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path

from gpuscale.allocator.main import main
from gpuscale.allocator.usecases import endings as sweeper
from gpuscale.common.runtime import tasks
from gpuscale.common.runtime.tasks import SystemClock
from tests.fault.allocator.planted_bugs import PLANTS

START_DELAY = 0.5
"""Seconds instead of the program's two: lives are short here, and without a sweep in them all GPUs would soon be held."""


def step_wall_clock(offset: Path) -> None:
    """Let the wall clock of this process be off by what stands in a file."""
    true_wall = SystemClock.wall

    def wall(self: SystemClock) -> datetime:
        return true_wall(self) + timedelta(seconds=float(offset.read_text() or 0))

    SystemClock.wall = wall  # type: ignore[method-assign]


def live(order: dict[str, str], plant: str) -> int:
    """Be an allocator, in a forked process."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    tasks._points = tasks.parse_failpoints(order["failpoints"])
    step_wall_clock(Path(order["wall"]))
    sweeper.START_DELAY = START_DELAY
    if plant:
        PLANTS[plant]()
    return main([*order["args"], "--log-level", "error"])


def tell(**fields: object) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def watch(life: int, pid: int) -> None:
    """Tell when a process has ended."""
    _, status = os.waitpid(pid, 0)
    tell(life=life, code=os.waitstatus_to_exitcode(status))


def serve(plant: str) -> None:
    """Fork what is ordered until the end of stdin; then end what still lives."""
    pids: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(live(order, plant))
        pids.append(pid)
        tell(life=order["life"], pid=pid)
        threading.Thread(target=watch, args=(order["life"], pid), daemon=True).start()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(*(sys.argv[1:] or [""]))
