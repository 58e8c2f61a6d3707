"""How `run` starts a command: it finds the signals as whoever started `run` left them."""

import subprocess
import sys

import pytest

STARTS = """
import signal
from gpuscale.cli.commands.processes import start

signal.signal(signal.SIGINT, signal.{0})
start(["sh", "-c", "kill -INT $$; echo alive"], dies_with_us=True).wait()
"""


@pytest.mark.parametrize(("before", "says"), [("SIG_IGN", "alive\n"), ("SIG_DFL", "")])
def test_an_ignored_interrupt_stays_ignored_and_another_ends_the_command(before: str, says: str) -> None:
    """A shell starts what runs in the background with SIGINT ignored."""
    ran = subprocess.run(
        [sys.executable, "-c", STARTS.format(before)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == says
