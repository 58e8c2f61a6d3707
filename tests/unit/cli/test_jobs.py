"""Jobs: what is shown of a command line, and what is kept of an output."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any, Self

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands import detached_jobs, holding, processes, run, supervise
from gpuscale.client import jobs, over_ssh
from gpuscale.client.orders import GREETING, Orders, shown
from gpuscale.client.over_ssh import Member
from gpuscale.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GpuscaleError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.wire import to_duration

NO_TEXTS = dict.fromkeys(("node", "address", "authority"), "")
HELD = api.Reservation(ttl=to_duration(600), remaining=to_duration(600))


@pytest.mark.parametrize(
    "command",
    [
        ("train", "--api-key", "hunter2", "--steps", "5"),
        ("train", "--hf_token=hunter2", "--steps", "5"),
        ("sh", "-c", "export DB_PASSWORD=hunter2; train --steps 5"),
        ("sh", "-c", "WANDB_API_KEY='hunter2' train --steps 5"),
        ("train", "amqp://me:hunter2@host/", "--steps", "5"),
        ("train", "--env=MY_TOKEN=hunter2", "--steps", "5"),
    ],
)
def test_what_is_named_like_a_secret_is_not_shown(command: tuple[str, ...]) -> None:
    line = shown(command)
    assert [part for part in ("***", "train", "--steps 5") if part not in line] == []
    assert "hunter2" not in line


@pytest.mark.timeout(20)
@pytest.mark.parametrize("word", ["a", "-", "token", "a-"])
def test_a_long_word_is_shown_at_once(word: str) -> None:
    """As of a script in one argument: its time grew with the square of its length, to minutes."""
    assert shown(["sh", "-c", word * 20_000, "x"]).endswith("...")


def test_orders_may_be_as_long_as_a_command_line() -> None:
    """Linux takes 2 MiB, of which JSON writes six letters for one at most."""
    assert len(Orders(command=["\x01" * (2 << 20)], **NO_TEXTS).line()) < supervise.MOST_ORDERS


def test_the_newest_of_an_output_is_kept_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(detached_jobs, "MOST_BYTES", 100)
    orders = Orders(reservation="reservations/r1", fence=1, command=("true",), **NO_TEXTS)
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    kept = tmp_path / "gpuscale" / "jobs" / "r1-0"
    kept.mkdir(parents=True)
    folder = detached_jobs.JobFolder(orders)
    assert (kept / "output").read_bytes() == b""  # for who attaches to it
    for number in range(30):
        os.write(folder.writing, b"%09d\n" % number)
        assert folder.last_lines()[-1] == f"{number:09d}"  # also what is not copied yet
    os.close(folder.writing)
    parts = [(kept / name).read_text().split() for name in ("output.1", "output")]
    assert [int(one) for part in parts for one in part] == list(range(10, 30))


class Starting:
    """An allocator that answers nobody at first."""

    def __init__(self, unanswered: int, error: GpuscaleError | None = None) -> None:
        self.unanswered = self.unreleased = unanswered
        self.error = error or UnavailableError("starting")
        self.told: list[int] = []

    def RenewReservation(self, request: Any, **_: object) -> api.RenewReservationResponse:
        if self.unanswered:
            self.unanswered -= 1
            raise self.error
        self.told.append(request.member.exit_code)
        return api.RenewReservationResponse(reservation=api.Reservation(remaining=to_duration(300)))

    def ReleaseReservation(self, *_: object, **__: object) -> api.ReleaseReservationResponse:
        if self.unreleased:
            self.unreleased -= 1
            raise self.error
        return api.ReleaseReservationResponse()


@pytest.mark.parametrize(
    "error", [UnavailableError("starting"), ResourceExhaustedError("too many calls", reason="OVERLOADED")]
)
def test_an_allocator_that_starts_hears_how_a_command_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: GpuscaleError
) -> None:
    monkeypatch.setattr(holding, "RETRY", 0.0)
    orders = Orders(reservation="reservations/r1", fence=1, command=("true",), reports=True, **NO_TEXTS)
    allocator = Starting(unanswered=3, error=error)
    holder = holding.LeaseHolder(orders, [allocator])
    holder.started(7)
    holder.ended(137, "")
    assert allocator.told == [137]
    holder.release()
    assert allocator.unreleased == 0
    assert capsys.readouterr().err == ""
    allocator.unanswered, allocator.unreleased, allocator.error = 1, 1, FailedPreconditionError("it is over")
    holder.ended(0, "")
    holder.release()
    assert capsys.readouterr().err.count("it is over") == 2, "said, and not asked again"
    allocator.unanswered, allocator.error = 3, error  # as while a link is down
    holding.LeaseHolder(orders, [allocator]).killed(138)
    assert allocator.told[-1] == 138


def test_the_end_of_a_job_is_told_while_its_lease_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.append(now.pop() + seconds))
    attached = Starting(unanswered=0)
    holder = holding.LeaseHolder(Orders(reservation="reservations/r1", reports=True, **NO_TEXTS), [attached])
    holder.started(7)
    holder.renew(1.0)
    for code, attached.unanswered in ((3, 50), (4, 1000)):
        holder.ended(code, "")
    assert (attached.told, attached.unanswered > 900) == ([0, 3], True)
    said = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert said[:2] == ["gpuscalectl run: nobody knows yet how the command ended"] * 2
    assert (len(said), now[0] - holder.ends[0] < holding.RARELY) == (3, True)
    orders = Orders(reservation="reservations/r1", fence=1, reports=True, detached=True, **NO_TEXTS)
    allocator = Starting(unanswered=0)
    holder = holding.LeaseHolder(orders, [allocator])
    holder.started(7)
    holder.renew(1.0)
    for code, allocator.unanswered in ((3, 80), (4, 1000)):  # the more rarely, the longer it lasts
        holder.ended(code, "")
    assert (allocator.told, allocator.unanswered > 900) == ([0, 3], True)
    assert 0 <= now[0] - holder.ends[0] - holding.OF_DETACHED < holding.RARELY
    lasts, allocator.unanswered = now[0] + 300, 0

    def guarding() -> int | None:
        if not (child := os.fork()):
            return None
        os.waitpid(child, 0)
        allocator.unanswered = 1000
        return 137

    def renewing(holder: holding.LeaseHolder, **_: object) -> None:
        holder.renew(1.0)
        os._exit(0)

    monkeypatch.setattr(supervise, "_read_orders", lambda: orders)
    monkeypatch.setattr(supervise, "_ways", lambda _: nullcontext(([allocator], None)))
    monkeypatch.setattr(supervise, "run_under", renewing)
    monkeypatch.setattr(processes, "guard", guarding)
    assert supervise._supervise(job=True) == 137, "whose guard never renewed the lease itself"
    assert 0 <= now[0] - lasts - holding.OF_DETACHED < holding.RARELY


@pytest.mark.parametrize(("manages", "scoped"), [("exec true", True), ("exit 1", False)])
def test_a_detached_job_gets_a_scope_of_systemd_where_its_user_may_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manages: str, scoped: bool
) -> None:
    """A double of systemd-run: it says what it was asked, and becomes the command, as with --scope; or has no user manager."""
    double, said, orders = (tmp_path / name for name in ("systemd-run", "said", "orders"))
    become = 'while [ "$1" != -- ]; do shift; done; shift'
    double.write_text(f'#!/bin/sh\necho "$*" >>{said}\n{become}\n[ $1 = true ] && {manages}\nexec "$@"\n')
    double.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    supervisor = ("sh", "-c", f'echo "$@" >{orders}; cat >>{orders}; printf 1', "sh")
    monkeypatch.setattr(detached_jobs, "SUPERVISOR", supervisor)
    begun: Any = subprocess.Popen
    made: list[Any] = []

    def begin(*words: Any, **how: Any) -> Any:
        made.append(begun(*words, **how))
        return made[-1]

    monkeypatch.setattr(subprocess, "Popen", begin)
    told = Orders(reservation="reservations/r1", fence=1, command=("train",), **NO_TEXTS)
    assert detached_jobs.detach(told) == 0
    with made[-1]:  # which goes on, where it is one
        pass
    name, line = orders.read_text().splitlines()
    assert (name, f"{line}\n".encode()) == ("--job r1-0", told.line())
    asked = [one.partition(" -- ") for one in said.read_text().splitlines()]
    assert {one[0] for one in asked} == {"--user --scope --quiet --collect"}
    assert [one[2].split()[0] for one in asked] == (["true", "sh"] if scoped else ["true"])


def test_who_starts_a_job_in_its_turn_keeps_the_lease_until_every_member_tells_of_its_start() -> None:
    """Else a host that dies while ssh has not answered yet would keep its GPUs for as long as a start may take."""
    asked: list[float] = []
    over = threading.Event()

    class Holder:
        def renew(self, timeout: float) -> api.Reservation:
            asked.append(timeout)
            if len(asked) == 5:
                over.set()
            found = api.Reservation()
            for number in range(2):
                member = found.job.members.add(member=number)
                if len(asked) > number:
                    member.start_time.GetCurrentTime()
            return found

    detached_jobs.keep_until_started(Holder(), 0.08, 2, over)
    assert len(asked) == 2


def test_a_starter_whose_service_stays_away_says_so_ever_more_rarely_and_ends_with_the_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]

    class Holder:
        orders = Orders(**NO_TEXTS)

        def renew(self, _timeout: float) -> api.Reservation:
            raise UnavailableError("connection refused")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    waiting = api.Reservation(state="STATE_WAITING", remaining=to_duration(86_400), ttl=to_duration(60))
    assert detached_jobs.start_granted(Holder(), waiting) == 0
    said = capsys.readouterr().err.splitlines()
    assert 10 <= len(said) <= 20
    assert "trying again for up to 1d" in said[0] or "trying again for up to 24h" in said[0]
    assert said[-1].endswith("gave up, since the wait is over: connection refused")
    assert now[0] == pytest.approx(1000 + 86_460, abs=2)


class Noticing:
    """A holder whose renewals tell of a notice for each reason in turn, and of none where it is empty."""

    member = None
    next_node = ""

    def __init__(self, reasons: list[str], *, detached: bool = False) -> None:
        self.orders = Orders(on_move=signal.SIGUSR1, detached=detached, **NO_TEXTS)
        self.asked_at = time.monotonic()
        self._reasons = iter(reasons)

    def renew(self, _timeout: float) -> api.Reservation:
        why = next(self._reasons)
        found = api.Reservation(end_reason=why)
        found.expire_time.FromSeconds(200)
        if why:
            found.revoke_time.FromSeconds(190)
        return found


@pytest.mark.parametrize(
    ("reasons", "sent", "stopped"),
    [
        (["", "a", "a", "a"], 1, "a; it was sent SIGUSR1 to save its work"),
        (["a", "", ""], 1, ""),
        (["a", "", "b", "b"], 2, "b; it was sent SIGUSR1 to save its work"),
        (["", ""], 0, ""),
    ],
)
def test_each_notice_is_one_signal_and_one_that_is_withdrawn_leaves_no_reason(
    monkeypatch: pytest.MonkeyPatch, reasons: list[str], sent: int, stopped: str
) -> None:
    signals = list[int]()
    holder = Noticing(reasons)
    keeper = supervise.Keeper(holder, HELD, None, signals.append)
    for _ in range(len(reasons)):
        keeper._renewed()
    assert (signals, keeper.stopped) == ([signal.SIGUSR1] * sent, stopped)
    assert keeper.leaves is bool(sent), "one that is withdrawn meanwhile finds it saving its work"
    monkeypatch.setattr(supervise.Keeper, "_stop_by", lambda *_: None)
    keeper._stop("somebody stopped it")
    assert (keeper.leaves, keeper.stopped) == (False, "somebody stopped it")


def test_a_command_that_ends_with_its_caller_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It seemed to fail by itself: FAILED with 143 or 141, and no reason."""
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    monkeypatch.setattr(supervise.Keeper, "_stop_by", lambda *_: None)
    keeper = supervise.Keeper(Noticing([]), HELD, None)
    reader, writer = os.pipe()
    os.close(reader)
    keeper._follow(writer)
    os.close(writer)
    assert keeper.stopped == "the connection to who started it ended"


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


@pytest.mark.parametrize(("detached", "local", "ours"), [(0, 0, True), (1, 1, True), (1, 0, False)])
def test_ssh_may_ask_a_person_unless_it_is_tried_again(
    detached: int, local: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a touch of a FIDO key; and the helper of a shared connection, which holds standard error open, is not waited for."""
    orders = Orders(detached=bool(detached), local=bool(local), **NO_TEXTS)
    script = f"echo what a profile writes; sleep 9 >/dev/null & {GREETS}"
    made, started = [over_ssh.Supervised(orders, ["sh", "-c", script])], list[subprocess.Popen[bytes]]()
    began = time.monotonic()
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr("sys.stderr", full)
        assert over_ssh.supervise_all(made, stdout=1, patience=60.0, on_start=started.append) == [0]
        with suppress(OSError):
            full.close()
    assert (started[0].stderr is None, time.monotonic() - began < 8) == (ours, True)


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


def test_a_restart_of_the_service_ends_no_wait_for_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/cli.md promises; however long it takes, but no longer than the wait."""
    states, reason = iter(("STARTING", "", "RUNNING", "", "", "SUCCEEDED")), "NO_ANSWER"

    def look(_: jobs.Job) -> api.Reservation:
        if not (state := next(states)):
            raise UnavailableError("nothing answers", reason=reason)
        one = api.Reservation(job=api.Job(state=f"STATE_{state}"))
        if state == "SUCCEEDED":
            one.job.exit_code = 0
            one.end_time.GetCurrentTime()
        return one

    monkeypatch.setattr(jobs.Job, "look", look)
    monkeypatch.setattr(jobs, "PERIOD", 0.0)
    job, told = jobs.Job(None, "reservations/r1"), list[str]()
    assert job.until_begun(tell=told.append).job.state == api.Job.STATE_RUNNING
    states = iter(("RUNNING", "", "", "SUCCEEDED"))
    assert job.until_ended(None, told.append).job.state == api.Job.STATE_SUCCEEDED
    assert told.count("nothing answers") == 3
    states = iter(("RUNNING", ""))
    with pytest.raises(DeadlineExceededError):
        job.until_ended(0.0)

    async def look_later(_: jobs.AsyncJob) -> api.Reservation:
        return look(job)

    monkeypatch.setattr(jobs.AsyncJob, "look", look_later)
    for reason in ("NO_ANSWER", "UNKNOWN_AUTHORITY"):
        for wait in (job.wait, lambda: asyncio.run(jobs.AsyncJob(None, job).wait())):
            states = iter(("RUNNING", "", "SUCCEEDED"))
            with pytest.raises(UnavailableError) if reason != "NO_ANSWER" else nullcontext():
                assert wait() == 0
    states, reason = iter(("WAITING", "", "RUNNING")), "NO_ANSWER"
    told.clear()
    assert job.begun_anew(-1, told.append) is not None
    assert told == ["nothing answers"]


def test_ctrl_z_says_how_long_the_lease_lasts_that_is_not_renewed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: sent.append(number))
    keeper = supervise.Keeper(Noticing([]), HELD, None, sent.append)
    keeper.told_to_pause(signal.SIGTSTP, None)
    assert sent == [signal.SIGSTOP]
    assert "`fg` or `bg` within 9m" in capsys.readouterr().err


def test_a_job_is_told_to_move_only_once_it_could_start_at_its_new_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[str] = []

    class Early:
        def __init__(self, node: str, _user: str, _forward: object) -> None:
            tries.append(node)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def take(self, orders: Orders) -> object:
            assert (orders.node, orders.local, len(signals)) == ("beta", False, 0)
            return self if len(tries) == 3 else None

    monkeypatch.setattr(over_ssh, "EarlyStart", Early)
    monkeypatch.setattr(supervise, "PREPARE_AGAIN", 0.0)
    signals, told = list[int](), threading.Event()

    def send(number: int) -> None:
        signals.append(number)
        told.set()

    holder = Noticing(["moved"], detached=True)
    holder.next_node = "beta"
    keeper = supervise.Keeper(holder, HELD, None, send)
    keeper._renewed()
    assert told.wait(30)
    assert (signals, tries) == ([signal.SIGUSR1], ["beta"] * 3)


def test_a_start_is_told_once_and_of_a_job_that_was_moved_meanwhile_its_killed_supervisor_tells_nothing() -> (
    None
):
    """Who guards it starts it again then."""
    told: list[api.RenewReservationRequest] = []

    class Moving:
        def RenewReservation(self, request: Any, **_: object) -> api.RenewReservationResponse:
            told.append(request)
            return api.RenewReservationResponse(reservation=api.Reservation(job=api.Job(attempt=2)))

        def ReleaseReservation(self, *_: object, **__: object) -> api.ReleaseReservationResponse:
            raise AssertionError("it is another attempt's")

    orders = Orders(command=("true",), reports=True, on_move=signal.SIGUSR1, **NO_TEXTS)
    holder = holding.LeaseHolder(orders, [Moving()])
    holder.killed(137)
    assert ([one.HasField("member") for one in told], holder.moved is not None) == ([False], True)
    other = holding.LeaseHolder(orders, [Moving()])
    other.started(7)
    other.ended(0, "saved", leaves=True)
    assert (told[-1].ended_attempt, told[-1].member.pid, other.all_ended) == (1, 7, False)


def test_a_job_whose_program_is_missing_tells_why_it_has_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody saw what its supervisor said, where the job waited or was started elsewhere."""
    told: list[tuple[int, str]] = []

    class Holder:
        orders = Orders(command=("no-such-program", "--token", "t"), **NO_TEXTS)

        def started(self, pid: int) -> None:
            assert pid == 0

        def ended(self, code: int, why: str) -> None:
            told.append((code, why))
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "which ends it where nobody answers"

    monkeypatch.setattr(processes, "start", lambda *_, **__: processes.NOT_FOUND)
    assert supervise._run(Holder(), api.Reservation(), stdout=None) == 127
    assert told == [(127, "it did not start: no-such-program was not found")]


def test_a_stop_that_takes_too_long_says_what_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "the allocator cannot write its state"

    class GetReservation:
        def __call__(self, request: api.GetReservationRequest) -> api.GetReservationResponse:
            job = api.Job(state=api.Job.STATE_RUNNING)
            return api.GetReservationResponse(reservation=api.Reservation(name=request.name, job=job))

        def with_call(self, request: api.GetReservationRequest) -> tuple[api.GetReservationResponse, Any]:
            return self(request), SimpleNamespace(trailing_metadata=lambda: ((PROBLEM_KEY, problem),))

    monkeypatch.setattr(jobs, "STOP_SECONDS", -1.0)
    monkeypatch.setattr(jobs.Job, "_on_nodes", lambda *_: ())
    client: Any = SimpleNamespace(allocator=SimpleNamespace(GetReservation=GetReservation()))
    with pytest.raises(DeadlineExceededError) as caught:
        jobs.Job(client, "reservations/r1").stop()
    assert caught.value.message == f"reservations/r1 has not ended after -1 s: {problem}"


def test_who_may_not_stop_a_job_is_told_who_may() -> None:
    found = api.Reservation(name="reservations/r1", owner="ann", holder="ann@laptop")
    member = Member(0, "beta", ("ssh", "beta", "kill 5"))
    for code in (jobs.NO_FOLDER, over_ssh.SSH_FAILED):
        said = jobs._not_there(found, member, code, "stop").message
        assert said.endswith("Its owner ann or an admin can end it: gpuscalectl release r1")
        assert "release" not in jobs._not_there(found, member, code, "read").message
    said = jobs._not_there(found, member, jobs.NO_FOLDER, "read").message
    assert "If `run -d` started it, its owner ann (ann@laptop) finds it" in said
    assert said.endswith("in `gpuscalectl get job r1 -o yaml`; else it wrote to their terminal")


@pytest.mark.parametrize(
    ("old", "new", "last", "shown"),
    [
        (b"", b"one\ntwo\n", 8, b"one\ntwo\n"),
        (b"", b"one\ntwo\n", 7, b"two\n"),
        (b"zero\no", b"ne\ntwo\n", 8, b"one\ntwo\n"),
        (b"", b"progress", 4, b"ress"),
        (b"", b"progress\n", 4, b"ess\n"),
    ],
)
def test_what_is_shown_of_a_long_output_begins_with_a_line(
    old: bytes, new: bytes, last: int, shown: bytes, tmp_path: Path
) -> None:
    (tmp_path / "output.1").write_bytes(old)
    (tmp_path / "output").write_bytes(new)
    for follow in (False, True)[: 1 + (not old)]:
        script = jobs._shell_reading("r1", follow=follow, last=last, lines=None)
        ran = subprocess.run(("sh", "-c", script), cwd=tmp_path, capture_output=True, check=True)
        assert ran.stdout == shown
        cut = b"earlier output is left out; more of it: gpuscalectl logs --tail N r1\n"
        assert ran.stderr == (cut if len(old + new) > last else b"")


def test_output_of_members_without_lines_is_not_kept_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a progress bar; to look at all of it for each piece took a minute for 30 MB."""
    monkeypatch.setattr(over_ssh, "CHUNK", 10)
    with TemporaryFile() as source, TemporaryFile() as kept:
        source.write(b"12345\n" + b"x" * 50 + b"\nend")
        source.seek(0)
        over_ssh._copy(None, source, kept.fileno(), b"[0] ", [])
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
