"""gpuscale-killer as a process of its own: whom it hears, whom it ends, and whom never."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest

from gpuscale.monitor.killer import Key, ancestry
from tests.support.waiting import eventually_sync

GRACE = 0.3
ENDS_AT_ONCE, IGNORES_TERM = ("sleep", "900"), ("sh", "-c", "trap '' TERM; echo; exec sleep 900")
STARTS_ANOTHER = ("sh", "-c", "sleep 900 & echo $!; wait")


class Helper:
    """The helper, and the processes that a test starts."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.socket = folder / "killer.sock"
        self.log = folder / "killer.log"
        self.started: list[subprocess.Popen[str]] = []
        user = ("--agent-user", str(os.getuid()), "--first-user", str(os.getuid()))
        program = (sys.executable, "-m", "gpuscale.monitor.killer", "--socket", str(self.socket))
        command = [*program, *user, *words]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)
        eventually_sync(self.socket.exists, interval=0.0001)
        assert self.say("") == "invalid order", "once its socket is there it hears"

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A process that uses a GPU, so to say."""
        self.started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return self.started[-1]

    def end(self, key: Key, *, admitted: tuple[Key, ...] = (), grace: float = GRACE) -> str:
        """Ask for the end of a process; why that is not done."""
        return self.say(json.dumps({"pid": key[0], "started": key[1], "grace": grace, "admitted": admitted}))

    def say(self, line: str) -> str:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.socket))
            link.sendall(line.encode() + b"\n")
            answer: str = json.loads(link.makefile().readline())["problem"]
            return answer

    def close(self) -> None:
        self.process.terminate()
        self.ended()

    def ended(self) -> None:
        """Once it has ended, nothing is left."""
        assert self.process.wait(60) == 0
        assert not self.socket.exists()
        for one in self.started:
            one.kill()
            one.communicate()


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    found = Helper(tmp_path_factory.mktemp("killer"))
    yield found
    found.close()


def key_of(pid: int) -> Key:
    return ancestry(pid)[0]


def test_it_ends_a_process_with_sigterm_and_what_ignores_that_after_the_grace(helper: Helper) -> None:
    first, other = helper.start(*ENDS_AT_ONCE), helper.start(*IGNORES_TERM)
    assert other.stdout is not None
    other.stdout.readline()
    began = time.monotonic()
    assert helper.end(key_of(first.pid)) == ""
    assert helper.end(key_of(other.pid)) == ""
    assert helper.end(key_of(other.pid)) == "", "asked twice, it is the same"
    assert first.wait(60) == -signal.SIGTERM
    assert other.wait(60) == -signal.SIGKILL
    assert time.monotonic() - began >= GRACE
    log = helper.log.read_text()
    assert log.count(f"SIGTERM to process {other.pid},") == 1
    assert f"SIGKILL to process {other.pid}" in log
    assert f"SIGKILL to process {first.pid}" not in log


def test_what_has_its_sigterm_is_ended_though_the_helper_is_stopped_meanwhile(tmp_path: Path) -> None:
    stopped = Helper(tmp_path)
    one = stopped.start(*IGNORES_TERM)
    assert one.stdout is not None
    one.stdout.readline()
    assert stopped.end(key_of(one.pid), grace=1.0) == ""
    stopped.process.terminate()
    assert one.wait(60) == -signal.SIGKILL
    stopped.ended()


def test_a_pid_that_is_another_process_now_is_let_be(helper: Helper) -> None:
    one = helper.start(*ENDS_AT_ONCE)
    pid, started = key_of(one.pid)
    assert helper.end((pid, started - 1)) == "it has ended"
    assert one.poll() is None
    one.kill()
    one.wait()
    assert helper.end((pid, started)) == "it has ended"


def test_work_that_was_admitted_and_what_descends_from_it_is_let_be(helper: Helper) -> None:
    holder = helper.start(*STARTS_ANOTHER)
    assert holder.stdout is not None
    child, admitted = int(holder.stdout.readline()), (key_of(holder.pid),)
    for pid in (holder.pid, child):
        problem = helper.end(key_of(pid), admitted=admitted)
        assert problem == f"it descends from process {holder.pid}, which was admitted"
    assert holder.poll() is None
    assert ancestry(child)
    assert f"refused: process {child}, " in helper.log.read_text()
    assert helper.end(key_of(child)) == ""


def test_the_first_process_itself_and_the_agent_with_what_started_it_are_let_be(helper: Helper) -> None:
    for pid in (1, helper.process.pid, os.getpid(), os.getppid()):
        problem = helper.end(key_of(pid))
        assert problem == "it is the agent, gpuscale-killer or an ancestor of them", pid
    assert helper.process.poll() is None


@pytest.mark.parametrize(
    "line", ["", "[]", '{"pid": 1}', '{"pid": "x", "started": 0, "grace": 1, "admitted": []}']
)
def test_what_is_no_order_is_refused(helper: Helper, line: str) -> None:
    assert helper.say(line) == "invalid order"


def test_processes_of_system_users_and_other_callers_are_told_no() -> None:
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if os.getuid() or python is None:
        pytest.skip("takes root, to be somebody else, and a Python that others may run")
    folder = Path(mkdtemp())  # with no parent that is closed to others
    folder.chmod(0o755)
    careful = Helper(folder, "--agent-user", "65534", "--first-user", "1000")
    try:
        root = careful.start(*ENDS_AT_ONCE)
        assert careful.end(key_of(root.pid)) == "its user 0 is below --first-user 1000"
        assert root.poll() is None
        ask = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            " s.sendall(b'{}\\n'); print(s.makefile().readline())"
        )
        answers = [
            subprocess.run(
                [python, "-I", "-S", "-c", ask, str(careful.socket)],
                user=user,
                capture_output=True,
                text=True,
            ).stdout
            for user in (65534, 65533)
        ]
        assert "invalid order" in answers[0]
        assert "only the agent may do that" in answers[1]
    finally:
        careful.close()
        shutil.rmtree(folder)
