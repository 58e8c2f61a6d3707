"""`wait` ends when things are as they should be, and says why they are not yet; `events` tells what happened."""

from __future__ import annotations

import json
import signal
from copy import deepcopy
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ruamel.yaml import YAML

from gpuscale.cli.commands import wait
from gpuscale.cli.console import lookup as streams
from gpuscale.cli.console import terminal
from gpuscale.cli.console.terminal import Progress
from gpuscale.client import jobs
from gpuscale.common import errors
from tests.contract.cli import canned_gateway as canned
from tests.support.waiting import eventually_sync

EVER = "100000d"


def endpoint(world: canned.World, **status: Any) -> None:
    """Let the endpoint stand so."""
    copy = deepcopy(world.things["endpoints/jobs"])
    for field, value in status.items():
        setattr(copy.status, field, value)
    world.things[copy.name] = copy


def decided(world: canned.World) -> None:
    """Let there be one more decision."""
    copy = deepcopy(canned.DECISION)
    copy.name = "endpoints/jobs/decisions/d2"
    world.things[copy.name] = copy


def test_an_endpoint_is_waited_for_until_it_is_ready(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    canned.script(monkeypatch, wait, lambda: None, lambda: endpoint(world, ready_replicas=3))
    ran = ctl("wait", "ep", "jobs")
    assert (ran.code, ran.out) == (0, "endpoints/jobs ready\n")
    lines = ran.err.splitlines()
    assert len(lines) == 1, "what has not changed is not said again"
    assert lines[0].startswith("waiting ")
    assert "jobs for ready: 2 of 3 replicas ready: wants 3, 2 fit on the GPUs there are" in lines[0]


def test_a_wait_that_sigterm_ends_says_so(ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its line on a terminal was left unfinished, and a log told nothing."""
    canned.script(monkeypatch, wait, lambda: signal.raise_signal(signal.SIGTERM))
    ran = ctl("wait", "ep", "jobs")
    assert (ran.code, ran.err.splitlines()[-1]) == (143, "SIGTERM ended the wait")


def test_the_timeout_is_of_all_jobs_together(ctl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them used to have it anew."""
    now, ends = [0.0], {"reservations/first": 2.0, "reservations/second": 4.0}

    def look(job: jobs.Job) -> canned.allocator_api.Reservation:
        found = canned.allocator_api.Reservation(name=job.name)
        if now[0] >= ends[job.name]:
            found.end_time.GetCurrentTime()
        return found

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    for module in (jobs, wait):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(jobs.Job, "look", look)
    monkeypatch.setattr(wait, "find", lambda client, name: jobs.Job(client, f"reservations/{name}"))
    ran = ctl("wait", "jobs", "first", "second", "--timeout", "3s")
    assert (ran.code, now) == (6, [3.5]), ran.err


@pytest.mark.parametrize("typed", ["r1", "--timeout 5m r1", "-o json r1", "job r1 --for state=SUCCEEDED"])
def test_a_job_is_waited_for_wherever_its_name_is_typed(ctl: Any, world: canned.World, typed: str) -> None:
    """As data it is data."""
    job = deepcopy(canned.RESERVATION)
    job.job.state, job.job.exit_code = job.job.STATE_FAILED, 3
    job.end_time.GetCurrentTime()
    world.things[job.name] = job
    ran = ctl("wait", *typed.split())
    assert (ran.code, ran.err) == (3, "")
    if "json" in typed:
        assert [one["name"] for one in json.loads(ran.out)["jobs"]] == [job.name]
    else:
        assert ran.out == "reservations/r1 FAILED\n"


def test_a_state_of_a_job_is_not_waited_for_in_silence(ctl: Any, world: canned.World) -> None:
    """It waited for the end instead."""
    job = deepcopy(canned.RESERVATION)
    job.job.state = job.job.STATE_RUNNING
    world.things[job.name] = job
    ran = ctl("wait", "job", "r1", "r2", "--for", "state=STARTING", "--timeout", "0s")
    assert (ran.code, "wait reservation r1 r2 --for job.state=STARTING" in ran.err) == (2, True)
    assert ctl("wait", "reservation", "r1", "--for", "job.state=RUNNING").code == 0


@pytest.mark.parametrize(("state", "told"), [("STOPPED", "stopped"), ("FAILED", "had ended: FAILED")])
def test_a_job_that_had_ended_is_not_said_to_be_stopped(
    ctl: Any, world: canned.World, state: str, told: str
) -> None:
    job = deepcopy(canned.RESERVATION)
    job.job.state = job.job.State.Value(f"STATE_{state}")
    job.end_time.GetCurrentTime()
    world.things[job.name] = job
    assert ctl("stop", "job", "r1").out == f"reservations/r1 {told}\n"
    world.things["reservations/r2"] = other = deepcopy(job)
    other.name = "reservations/r2"
    ran = ctl("stop", "job", "r1", "reservations/r2")
    assert (ran.code, ran.out) == (0, f"reservations/r1 {told}\nreservations/r2 {told}\n")
    assert [
        one["name"] for one in json.loads(ctl("stop", "r1", "reservations/r2", "-o", "json").out)["jobs"]
    ] == [job.name, other.name]
    ran = ctl("stop", "r1", "r3")
    assert (ran.code, ran.out, "nothing was changed" in ran.err) == (3, "", True), (
        "a loop's last name was mistyped"
    )


@pytest.mark.parametrize(
    ("typed", "then"),
    [
        ("endpoint jobs --for=status.ready_replicas=3", {"ready_replicas": 3}),
        ("endpoints/jobs --for=status.desiredReplicas=7", {"desired_replicas": 7}),
        ("ep jobs --for=status.readyReplicas>=3", {"ready_replicas": 4}),
        ("ep jobs --for ready>=3", {"ready_replicas": 3}),
        ("ep jobs --for ready<2,desired>2", {"ready_replicas": 1}),
        ("ep jobs --for=deleted", None),
    ],
)
def test_any_field_can_be_waited_for(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch, typed: str, then: dict[str, int] | None
) -> None:
    canned.script(
        monkeypatch, wait, lambda: endpoint(world, **then) if then else world.things.pop("endpoints/jobs")
    )
    ran = ctl("wait", *typed.split(), "-o", "json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert (found == {"deleted": [typed.split()[0 if "/" in typed else 1]]}) == (then is None)


@pytest.mark.parametrize(
    "noun", ["node host-1", "gpu " + canned.UUIDS[0], "rsv r1", "rep jobs/p1", "qw jobs"]
)
def test_other_kinds_have_a_state_that_is_ready(ctl: Any, noun: str) -> None:
    assert ctl("wait", *noun.split()).code == 0


def test_a_wait_that_is_over_is_6_and_says_why(ctl: Any) -> None:
    ran = ctl("wait", "endpoint", "jobs", "--timeout", "0s", "-o", "json")
    assert (ran.code, ran.out) == (6, "")
    error = json.loads(ran.err)["error"]
    assert error["reason"] == "NOT_READY"
    assert "2 of 3 replicas ready: wants 3" in error["message"]


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("endpoint nobody", 3, "not found"),
        ("endpoint jobs --for status.redyReplicas=1", 2, "did you mean readyReplicas?"),
        ("endpoint jobs --for =", 2, "--for"),
        ("endpoint jobs --for ready>=many", 2, "--for: 'ready>=many': 'many' is not a number"),
        ("endpoint jobs --for name>=3", 2, "--for: name has no amount"),
        ("endpoint jobs --for redy>=3", 2, "did you mean ready?"),
        ("quota x", 2, "cannot wait for"),
        ("endpoint", 2, "NAME"),
    ],
)
def test_what_cannot_be_waited_for(ctl: Any, typed: str, code: int, said: str) -> None:
    ran = ctl("wait", *typed.split())
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_on_a_terminal_progress_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    told = Progress()
    told.tell("first")
    told.tell("second", lambda _: " (more)")
    told.end()
    assert capsys.readouterr().err == "\r\x1b[Kwaiting 0ms, first\r\x1b[Kwaiting 0ms, second (more)\n"


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As of an editor, which shows what would overwrite the line; none while only figures of the reason change."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    monkeypatch.setenv("TERM", "dumb")
    told = Progress()
    for why in ("used 4.1 of 4 hours", "used 4.2 of 4 hours", "no room"):
        told.tell(why)
    told.end()
    assert capsys.readouterr().err == "waiting 0ms, used 4.1 of 4 hours\nwaiting 0ms, no room\n"


def test_the_time_goes_on_while_nothing_new_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A server tells whoever waits in its queue something new every 30 s at most: the line said 6ms until then."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(terminal, "time", SimpleNamespace(monotonic=count(7.0).__next__))
    monkeypatch.setattr(terminal, "REDRAW", 0.01)
    told, shown = Progress(), ""

    def drawn() -> bool:
        nonlocal shown
        shown += capsys.readouterr().err
        return "waiting 49s, next in the queue (in 11 s)" in shown

    told.tell("next in the queue", lambda gone: f" (in {20 - gone:.0f} s)", waited=40.0)
    eventually_sync(drawn)
    told.end()
    assert capsys.readouterr().err.endswith("\n")


def test_a_reason_that_is_wider_than_the_terminal_is_told_once_and_above(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A line that goes on in the next cannot be written over: each look left two more lines."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    monkeypatch.setenv("COLUMNS", "40")
    told, why = Progress(), "no room now: the nearest has 2 of 4 GPUs"
    told.tell(why, lambda _: " (about 9 s)")
    told.tell(why.replace("2 of", "3 of"), lambda _: " (about 8 s)")
    told.tell("it starts")
    told.end()
    lines = capsys.readouterr().err.replace("\r\x1b[K", "|").splitlines()
    assert lines == [
        "|no room now: the nearest has 2 of 4 GPUs",
        "|waiting 0ms (about 9 s)|waiting 0ms (about 8 s)|waiting 0ms, it starts",
    ]


def a_lost_reservation(world: canned.World) -> None:
    """Of 2020, lost in April 2022."""
    lost = canned.allocator_api.Reservation(name="reservations/r0", holder="ann", end_reason="gone")
    lost.state = lost.STATE_LOST
    lost.create_time.FromSeconds(1_600_000_000)
    lost.end_time.FromSeconds(1_650_000_000)
    world.things[lost.name] = lost


@pytest.mark.parametrize(
    ("state", "code", "why", "told"),
    [
        ("SUCCEEDED", 0, "", "released: its job SUCCEEDED: exit code 0"),
        ("FAILED", 137, "", "released: its job FAILED: exit code 137 (often SIGKILL)"),
        (
            "STOPPED",
            143,
            "stopped by ann",
            "released: its job STOPPED: exit code 143 (often SIGTERM): stopped by ann",
        ),
        ("STOPPED", 0, "it was lost: preempted", "released: its job STOPPED: exit code 0: preempted"),
        ("LOST", None, "", "released: its job LOST: nobody renewed its lease"),
    ],
)
def test_an_event_tells_how_a_job_ended(
    ctl: Any, world: canned.World, state: str, code: int | None, why: str, told: str
) -> None:
    """As `get job` does, and each reason once."""
    one = deepcopy(canned.RESERVATION)
    one.state, one.job.state = one.STATE_RELEASED, one.job.State.Value(f"STATE_{state}")
    one.end_time.GetCurrentTime()
    one.job.members[0].end_reason, one.end_reason = why, why.rpartition(": ")[2]
    if code is not None:
        one.job.exit_code = code
    world.things[one.name] = one
    happened = json.loads(ctl("events", "--kind", "reservation", "-o", "json").out)["events"]
    assert happened[-1]["what"].removesuffix(": its node died or could not reach the services") == told


def test_what_happened_is_one_list_by_time(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that does not answer is said, and does not hide what the others know."""
    a_lost_reservation(world)
    world.refuse["ListHealthEvents"] = errors.UnimplementedError("an old server")
    ran = ctl("events", "--since", EVER, "-o", "json")
    found = json.loads(ran.out)["events"]
    assert [(one["kind"], one["name"]) for one in found] == [
        ("reservation", "reservations/r0"),
        ("reservation", "reservations/r0"),
        ("decision", "endpoints/jobs/decisions/d1"),
        ("replica", "endpoints/jobs/replicas/p1"),
        ("reservation", "reservations/r1"),
    ]
    assert found[1]["what"] == "lost: gone"
    assert found[1]["time"] == "2022-04-15T05:20:00.000Z"
    assert "2 -> 3 wanted, 2 granted" in found[2]["what"]
    assert "health events are unknown" in json.loads(ran.err)["note"]
    assert ctl("events", "--since", EVER, "--kind", "replica").out.splitlines()[1].split()[3] == "replica"
    monkeypatch.setattr("gpuscale.cli.console.output.terminal_width", lambda: 80)
    decided = ctl("events", "--since", EVER, "--kind", "decision", "--utc").out.splitlines()[1]
    assert decided.split()[3] == "jobs/d1", "what commands take as its name, which leaves room"
    assert ctl("events", "--kind", "decision").err == "none\n"


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("endpoints/jobs", "ep/jobs", "jobs"), ["decision", "replica"]),
        (("endpoints/jobs/replicas/p1", "ep/jobs/rep/p1", "jobs/p1"), ["replica"]),
        (("reservations/r1", "r1", "job/r1", "night run", "jobs/night run"), ["reservation"]),
        (("night",), []),
    ],
)
def test_events_are_about_any_name_that_other_commands_take(
    ctl: Any, world: canned.World, names: tuple[str, ...], kinds: list[str]
) -> None:
    titled = deepcopy(canned.RESERVATION)
    titled.job.title = "night run"
    world.things[titled.name] = titled
    for name in names:
        about = ctl("events", "--since", EVER, "--about", name, "-o", "jsonl").out.splitlines()
        assert [json.loads(line)["kind"] for line in about if "health" not in line] == kinds, name


@pytest.mark.parametrize("name", ["endpoints/jobs", "job", "host-9/0", "GPU-6a"])
def test_events_that_are_about_nothing_say_so(ctl: Any, world: canned.World, name: str) -> None:
    """And no more: what has that name may be of a service that is down, of a kind without events, or not called so here."""
    world.refuse["ListNodes"] = errors.InternalError("broken")
    ran = ctl("events", "--since", EVER, "--kind", "health", "--about", name)
    assert (ran.code, ran.err) == (0, f"none about {name}\n")


def test_what_was_over_at_once_began_before(ctl: Any, world: canned.World) -> None:
    event = deepcopy(canned.EVENT)
    event.severity = canned.monitor_api.HealthSeverity.HEALTH_SEVERITY_WARNING
    event.resolved_time.CopyFrom(event.start_time)
    world.things[event.name] = event
    ran = ctl("events", "--since", EVER, "--kind", "health", "-o", "json")
    assert [one["what"] for one in json.loads(ran.out)["events"]] == ["warning: hot", "over: hot"]


def attempt(node: str, at: int, **known: Any) -> Any:
    """An attempt of a job that began then, was asked to save its work after 20 s, and left 10 s later."""
    made = canned.allocator_api.JobMember(node=f"nodes/{node}", **known)
    for field, later in (("start_time", 0), ("signal_time", 20), ("end_time", 30)):
        getattr(made, field).FromSeconds(1_600_000_000 + at + later)
    return made


def test_a_job_that_moves_is_granted_asked_to_save_ended_and_granted_again(
    ctl: Any, world: canned.World
) -> None:
    one = deepcopy(canned.RESERVATION)
    one.create_time.FromSeconds(1_600_000_000)
    one.job.attempt = 2
    one.job.earlier.append(attempt("host-0", 5, end_reason="moved for b"))
    one.job.members[0].start_time.FromSeconds(1_600_000_090)
    world.things[one.name] = one

    def told() -> list[str]:
        ran = ctl("events", "--since", EVER, "--kind", "reservation", "-o", "json")
        return [event["what"] for event in json.loads(ran.out)["events"]]

    moved = [
        "granted to training: 1 GPU of host-0",
        "its job was asked to save its work: host-0",
        "its job left host-0: moved for b",
    ]
    assert told() == [*moved, "granted again to training: 1 GPU of host-1"]
    one.grant_time.FromSeconds(1_600_000_004)
    assert told()[:2] == ["asked for by training", moved[0]], "it waited first"
    one.ClearField("grant_time")
    del one.gpus[:], one.job.members[:]
    one.asked_gpu_count, one.state = 2, one.STATE_WAITING
    assert told() == [moved[0].replace("1 GPU", "2 GPUs"), *moved[1:]], "it waits"
    assert ctl("get", "job", one.name).out.splitlines()[1].split()[5:8] == ["0", "of", "2"]
    one.job.attempt = 10
    assert told()[0] == "granted to training", "the first attempt is forgotten"
    del one.job.earlier[:]
    one.job.attempt = 1
    one.job.members.append(attempt("host-0", 5))
    assert told()[1:] == [moved[1]], "it saves its work"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("--since 2022-01-01 --until 2023-01-01", ["lost: gone"]),
        ("--since 2022-04-15T05:20:00Z --until 2022-04-15T05:20:00Z", ["lost: gone"]),
        ("--at 2022-04-15T05:24:59Z", ["lost: gone"]),
        ("--at 2022-04-15T05:15:01Z", ["lost: gone"]),
        ("--at 2022-04-15T05:25:01Z", []),
        ("--at 2022-04-15T05:14:59Z", []),
        ("--until 2022-01-01", ["asked for by ann"]),
    ],
)
def test_of_what_lasted_only_what_happened_then_is_told(
    ctl: Any, world: canned.World, typed: str, found: list[str]
) -> None:
    """--at is 5 minutes around that time."""
    a_lost_reservation(world)
    ran = ctl("events", *typed.split(), "-o", "json")
    assert [one["what"] for one in json.loads(ran.out)["events"]] == found, ran.err


def test_watched_events_are_written_once(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    canned.script(monkeypatch, streams, lambda: None, lambda: decided(world))
    ran = ctl("events", "--watch", "--since", EVER, "--kind", "decision")
    assert ran.out.split()[0] == "TIME"
    assert [line.split()[4] for line in ran.out.splitlines()[1:]] == ["jobs/d1", "jobs/d2"]
    assert ran.code == 130
    assert ctl("events", "--watch", "-o", "json").code == 2
    del world.things["endpoints/jobs/decisions/d2"]
    canned.script(monkeypatch, streams, lambda: None, lambda: decided(world))
    shown = ctl("events", "--watch", "--since", EVER, "--kind", "decision", "-o", "yaml").out
    documents = YAML(typ="safe", pure=True).load_all(shown)
    assert [one["events"][0]["name"].rpartition("/")[2] for one in documents] == ["d1", "d2"]


def test_watched_events_outlive_a_restart(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every other watch; what is away is said once."""

    def away() -> None:
        world.refuse["ListDecisions"] = errors.UnavailableError("failed to connect")

    def back() -> None:
        del world.refuse["ListDecisions"]
        decided(world)

    canned.script(monkeypatch, streams, away, lambda: None, back)
    ran = ctl("events", "--watch", "--since", EVER, "--kind", "decision")
    assert ran.code == 130
    assert ran.err.count("decision events are unknown: failed to connect") == 1
    assert "jobs/d2" in ran.out


def test_what_is_waited_for_may_be_away_for_a_while(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        world.refuse["GetEndpoint"] = errors.UnavailableError("the autoscaler is stopping")

    def back() -> None:
        del world.refuse["GetEndpoint"]
        endpoint(world, ready_replicas=3)

    canned.script(monkeypatch, wait, away, back)
    ran = ctl("wait", "ep", "jobs")
    assert (ran.code, ran.out) == (0, "endpoints/jobs ready\n")
    assert "the autoscaler is stopping" in ran.err


def test_check_says_why_it_waits(ctl: Any, world: canned.World) -> None:
    answers = iter([False, True])
    response = canned.allocator_api.WaitForAvailabilityResponse
    world.overrides["WaitForAvailability"] = lambda request, context: response(
        available=next(answers) or request.timeout.seconds > 1,
        message="1 of 2 GPUs fit",
        waited=request.timeout,
    )
    ran = ctl("check", "--gpus", "2", "--wait", "60s")
    assert ran.code == 0
    assert "1 of 2 GPUs fit" in ran.err


def test_a_wait_that_is_refused_or_never_answered_ends_at_once(ctl: Any, world: canned.World) -> None:
    for error, code in (
        (errors.UnavailableError("it is stopping"), 7),
        (errors.PermissionDeniedError("no"), 8),
    ):
        world.refuse["GetEndpoint"] = error
        assert ctl("wait", "ep", "jobs").code == code


def test_a_list_without_a_watch_is_not_read_without_a_pause(
    ctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused = list[float]()

    def pause(_: object, every: float, **_more: object) -> None:
        paused.append(every)
        raise KeyboardInterrupt

    monkeypatch.setattr(streams.Streams, "pause", pause)
    assert ctl("get", "adapters", "-w", "--every", "0s").code == 130
    assert paused == [0.2]
