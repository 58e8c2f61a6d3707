"""How `run` starts a command: it finds signals and environment as whoever started `run` left them."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.support.cli import Ran, python

STARTS = """
import signal
from gpuscale.cli.commands.processes import start

signal.signal(signal.SIGINT, signal.{0})
start(["sh", "-c", "kill -INT $$; echo alive"], dies_with_us=True).wait()
"""


@pytest.mark.parametrize(("before", "says"), [("SIG_IGN", "alive\n"), ("SIG_DFL", "")])
def test_an_ignored_interrupt_stays_ignored_and_another_ends_the_command(before: str, says: str) -> None:
    """A shell starts what runs in the background with SIGINT ignored."""
    assert python(STARTS.format(before)) == Ran(0, says, "")


SILENCES = """
import sys
from gpuscale.cli import main
from gpuscale.cli.commands.processes import start

def command(_arguments):
    return start(["sh", "-c", 'echo "${GRPC_VERBOSITY-unset} $OWN"'], variables={"OWN": "own"}).wait()

main.run_command = command
main.main()
"""


@pytest.mark.parametrize(
    ("callers", "sees"), [({}, "unset own\n"), ({"GRPC_VERBOSITY": "INFO"}, "INFO own\n")]
)
def test_a_command_does_not_see_what_the_program_sets_for_itself(callers: dict[str, str], sees: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"} | callers
    assert python(SILENCES, environment=environment).out == sees


INTERRUPTED = """
import fcntl, subprocess, termios
from gpuscale.cli.commands.processes import Forwarding

fcntl.ioctl(1, termios.TIOCSCTTY, 0)
script = "trap 'echo got' INT; trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"
with Forwarding() as signals, subprocess.Popen(["sh", "-c", script]) as command:
    signals.to(command)
    command.wait()
"""


def test_ctrl_c_reaches_a_command_once_also_where_its_input_is_no_terminal() -> None:
    """The terminal sends it to both; a second one would end a command that saves its work at the first."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        said = b""
        with suppress(OSError):  # at its end
            while part := os.read(ours, 1000):
                before, said = said, said + part
                if b"ready" in said and b"ready" not in before:
                    os.write(ours, b"\x03")
                if b"got" in said and b"got" not in before:
                    process.send_signal(signal.SIGTERM)
        os.close(ours)
    assert (said.count(b"got"), process.returncode) == (1, 0), said
