"""docs/tutorial.md does what it says: its commands are taken from the page and run in shells, of which that for one program forks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import shell as forking
from tests.support.rabbitmq import RabbitBroker
from tests.support.up import Up, ctl_environment

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
STEPS = [
    (command, shown.splitlines())
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
]
"""Each command of the page, with the lines that it is shown to say."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def shell(tmp_path: Path, rabbitmq: RabbitBroker) -> Iterator[Shell]:
    one = Shell(tmp_path, rabbitmq)
    try:
        yield one
    finally:
        one.end()


class Shell:
    """Runs the commands of the page; `up` in the background, each ending the one before, as the page says."""

    def __init__(self, folder: Path, broker: RabbitBroker) -> None:
        self.folder = folder
        self.broker = broker
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        self.environment = ctl_environment(PATH=path, XDG_STATE_HOME=str(folder))
        self._up: Up | None = None
        self._typed = forking.Shell(self.environment)

    def run(self, command: str) -> str:
        """Run one line; what it wrote. It has to succeed."""
        words = shlex.split(command)
        name, _, value = command.removeprefix("export ").partition("=")
        if command.startswith("export "):
            self.environment[name] = self._own(value)
            return ""
        if command.startswith("gpuscalectl up"):
            return self._start(words[2:])
        if words[0] == "gpuscalectl" and "||" not in words:
            ran = self._typed.ctl(*words[1:], environment=self.environment)
            assert ran.code == 0, f"{command}: {ran}"
            return ran.out + ran.err
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def _own(self, value: str) -> str:
        """The broker of this test, where the page names the one at its usual address."""
        if value.startswith("$"):
            return self.environment[value[1:]]
        if value.startswith("amqp:"):
            return self.broker.amqp_url
        return f"http://{self.broker.user}:{self.broker.password}@127.0.0.1:{self.broker.management_port}"

    def _start(self, arguments: list[str]) -> str:
        self._stop()
        self._up = Up(self.folder, simulate=4, arguments=arguments, environment=self.environment)
        self.environment["GPUSCALE_ADDRESS"] = self._up.address
        return self._up.banner

    def end(self) -> None:
        self._typed.close()
        self._stop()

    def _stop(self) -> None:
        if self._up is not None:
            assert self._up.stop() == 0
            self._up = None


def test_the_page_has_commands() -> None:
    assert len(STEPS) >= 20
    assert STEPS[0][0] == "gpuscalectl up"
    assert sum(len(shown) for _, shown in STEPS) >= 20


def missing(shown: list[str], said: str) -> list[str]:
    """Lines of the page that were not said: those without a number, which are the same on every machine.

    The page has what a terminal of 80 columns shows; nothing is left out here, so there may be columns between.
    """
    lines = [line.split() for line in said.splitlines()]
    fixed = [line for line in shown if line != "..." and not re.search(r"\d|SIM-", line)]
    return [line for line in fixed if not any(_in_order(line.split(), words) for words in lines)]


def _in_order(some: list[str], words: list[str]) -> bool:
    """Whether these words are all there, in their order."""
    rest = iter(words)
    return all(word in rest for word in some)


def test_every_command_of_the_page_does_what_the_page_says(shell: Shell) -> None:
    said: dict[str, str] = {}
    for command, shown in STEPS:
        said[command] = shell.run(command)
        if not command.startswith("gpuscalectl up"):
            assert missing(shown, said[command]) == [], said[command]
    assert "Simulated" in said["gpuscalectl get gpus"]
    assert "mine: SIM-" in said["gpuscalectl run --gpus 2 -- sh -c 'echo \"mine: $CUDA_VISIBLE_DEVICES\"'"]
    assert "exit code 5" in said['gpuscalectl check --gpus 64 || echo "exit code $?"']
    [diff] = [text for command, text in said.items() if command.startswith("gpuscalectl diff")]
    assert "there is something to apply" in diff
    [history] = [text for command, text in said.items() if command.startswith("gpuscalectl history")]
    assert "UTILIZATION_PERCENT" in history
    assert "depth" in said["gpuscalectl explain endpoint jobs"]
