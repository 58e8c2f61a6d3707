"""How `run` starts a command: it finds signals and environment as whoever started `run` left them."""

import os
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
    ran = subprocess.run(
        [sys.executable, "-c", SILENCES], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout == sees
