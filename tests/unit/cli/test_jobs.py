"""Jobs: what is shown of a command line, what is kept of an output, and what their supervisors tell."""

import asyncio
import os
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands import detached_jobs, holding, processes, supervise
from gpuscale.client import jobs, over_ssh
from gpuscale.client.orders import Orders, shown
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
