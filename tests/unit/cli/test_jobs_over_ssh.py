"""Jobs over ssh: a host that turns ssh away, a connection that is lost, and the output of several members."""

import os
import signal
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands import run
from gpuscale.client import jobs, over_ssh
from gpuscale.client.orders import GREETING, Orders
from gpuscale.client.over_ssh import Member
from gpuscale.common.errors import UnavailableError
from gpuscale.common.wire import to_duration

NO_TEXTS = dict.fromkeys(("node", "address", "authority"), "")
HELD = api.Reservation(ttl=to_duration(600), remaining=to_duration(600))


def test_a_lost_connection_is_told_where_the_services_are_lost_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It said that nothing answers, and how to start everything on this machine."""

    def away(*_: object, **__: object) -> None:
        raise UnavailableError("nothing answers")

    monkeypatch.setattr(over_ssh, "supervise_all", lambda *_, **__: [over_ssh.SSH_FAILED])
    monkeypatch.setattr(jobs.Job, "look", away)
    made = [over_ssh.Supervised(Orders(**NO_TEXTS), [])]
    with pytest.raises(UnavailableError, match="the command is stopped there"):
        jobs.supervise(None, api.Reservation(), made, stdout=1, once=True)


GREETS = f"echo {GREETING.decode().strip()}; read orders"
SSHD = f"""
echo >> {{log}}
test $(wc -l < {{log}}) -gt {{times}} || {{{{ echo "{{why}}" >&2; exit 255; }}}}
{GREETS}; echo done; echo warned >&2
"""


@pytest.mark.parametrize(
    ("why", "times", "tries"),
    [
        ("kex_exchange_identification: Connection closed by remote host", 2, 3),
        ("kex_exchange_identification: read: Connection reset by peer", 9, 5),
        ("Host key verification failed.", 1, 1),
        ("stdio forwarding failed\nkex_exchange_identification: Connection closed by remote host", 1, 1),
    ],
    ids=["for-now", "always", "for-another-reason", "on-the-way"],
)
def test_ssh_tries_again_where_a_host_turns_it_away_before_it_says_who_it_is(
    why: str,
    times: int,
    tries: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As sshd does when a loop starts thirty jobs at once."""
    monkeypatch.setattr(over_ssh, "FIRST_PAUSE", 0.002)
    log, started = tmp_path / "log", list[object]()
    script = SSHD.format(log=log, times=times, why=why)
    made = [over_ssh.Supervised(Orders(detached=True, **NO_TEXTS), ["sh", "-c", script])]
    refused = pytest.raises(UnavailableError, match=why) if times >= tries else nullcontext()
    with refused:
        assert over_ssh.supervise_all(made, stdout=1, patience=60.0, on_start=started.append) == [0]
    assert (log.read_text().count("\n"), len(started)) == (tries, 2 * tries - 1), "with pauses"
    assert capfd.readouterr() == (("done\n", "warned\n") if times < tries else ("", ""))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("signalled", [True, False])
def test_a_pause_before_ssh_is_tried_again_ends_with_a_signal_and_not_after_the_patience(
    signalled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.common.runtime.tasks.Backoff.next", lambda _: 60.0)
    started, why = (
        list[subprocess.Popen[bytes]](),
        "kex_exchange_identification: read: Connection reset by peer",
    )

    def begun(process: "subprocess.Popen[bytes]") -> None:
        started.append(process)
        if len(started) == 2:
            process.terminate()

    script = SSHD.format(log=tmp_path / "log", times=9, why=why)
    script, began = f"sleep 9 >/dev/null & {script.lstrip()}", time.monotonic()  # a helper has its stderr
    made = [over_ssh.Supervised(Orders(detached=True, **NO_TEXTS), ["sh", "-c", script])]
    with pytest.raises(UnavailableError, match=why):
        over_ssh.supervise_all(made, stdout=1, patience=90.0 if signalled else 30.0, on_start=begun)
    assert (len(started), time.monotonic() - began < 8) == (1 + signalled, True)


def test_members_that_came_up_at_another_try_run_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(over_ssh, "FIRST_PAUSE", 0.002)
    made, why = list[over_ssh.Supervised](), "kex_exchange_identification: read"
    for number in range(2):
        script = SSHD.format(log=tmp_path / f"{number}", times=number, why=why)
        script = script.replace("echo done", "echo ready; read go; echo done")
        made.append(over_ssh.Supervised(Orders(member=number, **NO_TEXTS), ["sh", "-c", script]))
    with Path("/dev/full").open("wb", buffering=0) as full:
        assert over_ssh.supervise_all(made, stdout=1, stderr=full.fileno(), patience=60.0) == [0, 0]
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "[0] done", "[1] done"]


@pytest.mark.parametrize(("detached", "local"), [(0, 0), (1, 1), (1, 0)])
def test_the_helper_of_a_shared_connection_is_not_waited_for(
    detached: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds standard error open, which may be ours."""
    orders = Orders(detached=bool(detached), local=bool(local), **NO_TEXTS)
    script = f"echo what a profile writes; sleep 9 >/dev/null & {GREETS}"
    made, began = [over_ssh.Supervised(orders, ["sh", "-c", script])], time.monotonic()
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        assert over_ssh.supervise_all(made, stdout=1, patience=60.0) == [0]
        with suppress(OSError):
            full.close()
    assert time.monotonic() - began < 8


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("begun", "members", "detached", "said"),
    [
        ("", 1, False, "nothing was started on beta"),
        (GREETS, 2, False, "nothing was started on beta, beta"),
        (GREETS, 1, False, "the command is stopped on beta"),
        (f"{GREETS}; echo ready; read go", 2, False, "the command is stopped on beta, beta"),
        (GREETS, 1, True, ""),
    ],
)
def test_who_ends_a_command_elsewhere_is_not_told_of_a_lost_connection(
    begun: str,
    members: int,
    detached: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The signal ends ssh, which is how the command is stopped."""
    ssh, one_kills = tmp_path / "ssh", f"mkdir {tmp_path}/sent 2>/dev/null && kill {os.getpid()}; wait"
    silent = "go" in begun  # the services, once the members have ended
    traps = f"sleep 60 >/dev/null 2>&1 &\ntrap 'kill $!; exit {3 if silent else 255}' TERM"
    ssh.write_text(f"#!/bin/sh\n{traps}\n{begun}\n{one_kills}")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def look(_: jobs.Job) -> api.Reservation:
        if silent:
            raise UnavailableError("nothing answers")
        return api.Reservation()

    monkeypatch.setattr(jobs.Job, "look", look)
    numbers = (None,) if members == 1 else range(members)
    made = [Orders(**{**NO_TEXTS, "node": "beta"}, member=one, detached=detached) for one in numbers]
    how: Any = {"forward": (), "stdout": None, "recorded": lambda _: nullcontext(), "once": False}
    with nullcontext() if said else pytest.raises(UnavailableError, match="connection to beta ended"):
        assert run._start(None, HELD, made, None, **how) == 128 + signal.SIGTERM
        assert capfd.readouterr().err == f"gpuscalectl run: SIGTERM: {said}\n"


def test_output_of_members_without_lines_is_not_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a progress bar; to look at all of it for each piece took a minute for 30 MB."""
    monkeypatch.setattr(over_ssh, "CHUNK", 10)
    with TemporaryFile() as source, TemporaryFile() as kept:
        source.write(b"12345\n" + b"x" * 50 + b"\nend")
        source.seek(0)
        over_ssh._copy(None, source, kept.fileno(), b"[0] ", [], bytearray())
        kept.seek(0)
        lines = kept.read().splitlines()
    assert max(map(len, lines)) <= len("[0] ") + 20
    assert b"".join(line.removeprefix(b"[0] ") for line in lines) == b"12345" + b"x" * 50 + b"end"


@pytest.mark.timeout(30)
def test_standard_error_waits_for_a_slow_reader_and_not_for_a_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `less`: the last 75 kB of 126 kB were lost."""
    monkeypatch.setattr(over_ssh, "LINGER", 0.01)
    script = f"sleep 25 >/dev/null & {GREETS}; yes | head -c 126060 >&2"
    made = [over_ssh.Supervised(Orders(detached=True, **NO_TEXTS), ["sh", "-c", script])]
    reader, writer = os.pipe()
    outputs = {"stdout": 1, "stderr": writer, "patience": 20.0}
    with os.fdopen(reader, "rb") as shown, os.fdopen(writer, "wb"):
        running = threading.Thread(target=over_ssh.supervise_all, args=(made,), kwargs=outputs, daemon=True)
        running.start()
        running.join(1.0)
        assert running.is_alive()
        assert shown.read(126060).count(b"y") == 63030
        running.join(10.0)
        assert not running.is_alive()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("supervises", [True, False], ids=["run", "logs"])
@pytest.mark.parametrize("gone", [False, True], ids=["disk", "reader"])
def test_output_of_members_that_cannot_be_written_ends_them(supervises: bool, gone: bool) -> None:
    """A full disk, or a reader that is gone: they would wait for ever for somebody to take it, or seem to lose their host."""
    script = f"{GREETS}; echo ready; read go; exec yes"
    members = [("sh", "-c", script if supervises else "yes")] * 2
    reader, writer = os.pipe()
    os.close(reader)
    with (
        os.fdopen(writer, "wb", buffering=0) if gone else Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="Broken pipe" if gone else "No space left"),
    ):
        _write(members, file.fileno(), supervises=supervises)


def _write(members: list[tuple[str, ...]], full: int, *, supervises: bool) -> None:
    if supervises:
        orders = [Orders(member=number, **NO_TEXTS) for number in range(len(members))]
        made = [over_ssh.Supervised(one, [*words]) for one, words in zip(orders, members, strict=True)]
        over_ssh.supervise_all(made, stdout=full, stderr=full, patience=20.0)
    else:
        read = [Member(number, "beta", [*words]) for number, words in enumerate(members)]
        over_ssh.write_together(read, full, in_turn=True)
