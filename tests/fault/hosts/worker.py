"""A worker of the site: takes one message after the other from a folder, and finishes the one in hand when it is told to leave.

A message is a file below `new`; who moves it to `taken` has it, and writes a line when it is done: message, GPU, process.
"""

import os
import signal
import sys
import time
from pathlib import Path

SECONDS = 0.1
"""That a message takes."""


def main() -> None:
    """Work until SIGTERM."""
    place, leave = Path(sys.argv[1]), list[int]()
    signal.signal(signal.SIGTERM, lambda number, _frame: leave.append(number))
    own = f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()}"
    waiting = list[Path]()  # the next one last: to list thousands for each would take a tenth of a core
    while not leave:
        waiting = waiting or sorted((place / "new").iterdir(), reverse=True)
        if not waiting:
            time.sleep(SECONDS)
            continue
        message = waiting.pop()
        try:
            message.rename(place / "taken" / message.name)
        except FileNotFoundError:
            continue  # another worker has it
        time.sleep(SECONDS)
        with (place / "done").open("a") as done:
            done.write(f"{message.name} {own}\n")


if __name__ == "__main__":
    main()
