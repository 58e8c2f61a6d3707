"""One command for several things: all are found first; then each for itself, and the first failure is the exit code."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.cli.commands import logs
from gpuscale.common import errors
from tests.contract.cli import canned_gateway as canned
from tests.support.cli import Ran

OK, OTHER, USAGE, NOT_FOUND, CONFLICT, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, 4, 7, 130
ENDPOINTS = ("endpoints/a", "endpoints/b", "endpoints/c")
FULL = {
    ("delete", "endpoint"): "endpoints/{}",
    ("delete", "watcher"): "watchers/{}",
    ("delete", "rule"): "endpoints/jobs/rules/{}",
    ("delete", "quota"): "quotas/{}",
    ("delete", "booking"): "bookings/{}",
    ("forget", "adapter"): "adapters/{}",
    ("forget", "node"): "nodes/{}",
    ("release",): "reservations/{}",
    ("renew",): "reservations/{}",
    ("cordon",): "nodes/{}",
    ("uncordon",): "nodes/{}",
    ("drain",): "nodes/{}",
}
"""By command, the names of what it is done to."""
KEYS = {
    "watcher": "queueWatchers",
    **dict.fromkeys(("release", "renew"), "reservations"),
    **dict.fromkeys(("cordon", "uncordon", "drain"), "cordons"),
}


@pytest.fixture(autouse=True)
def world(world: canned.World) -> canned.World:
    """With two of each."""
    world.things |= {name: autoscaler_api.Endpoint(name=name) for name in ENDPOINTS}
    world.things |= {f"watchers/{one}": autoscaler_api.QueueWatcher(name=f"watchers/{one}") for one in "ab"}
    for name in ("reservations/a", "reservations/b"):
        world.things[name] = type(canned.RESERVATION)(name=name, fence=len(world.things))
    world.things |= {f"nodes/{one}": type(canned.NODE)(name=f"nodes/{one}") for one in "ab"}
    quotas = [type(canned.QUOTA)(name=f"quotas/{one}", tenant=one) for one in "ab"]
    world.things.update({one.name: one for one in quotas})
    world.things |= {f"bookings/{one}": type(canned.BOOKING)(name=f"bookings/{one}") for one in "ab"}
    return world


def changes(world: canned.World) -> list[Any]:
    meant = [one for one in world.requests if not getattr(one, "validate_only", False)]
    return [one for one in meant if not type(one).__name__.startswith(("Get", "List"))]


def problems(ran: Ran) -> list[tuple[str, str]]:
    """(name, reason) of each failure."""
    found = [json.loads(line)["error"] for line in ran.err.splitlines()]
    return [(one["name"], one["reason"]) for one in found]


@pytest.mark.parametrize("command", FULL, ids=" ".join)
def test_each_is_done_and_listed(ctl: Any, world: canned.World, command: tuple[str, ...]) -> None:
    prefix = "jobs/" if command[-1] == "rule" else ""
    yes = ("-y",) if command[0] == "delete" or command[-1] == "adapter" else ()
    ran = ctl(*command, f"{prefix}a", f"{prefix}b", *yes, "-o", "json")
    assert (ran.code, ran.err) == (OK, "")
    [listed] = json.loads(ran.out).items()
    assert listed[0] == KEYS.get(command[-1], f"{command[-1]}s")
    asked = changes(world)
    names = [FULL[command].format(one) for one in "ab"]
    assert [one.name for one in asked] == names
    if command not in {("cordon",), ("drain",)}:  # the canned answer of which is always of the same node
        assert [one["name"] for one in listed[1]] == names
    if command in {("release",), ("renew",)}:
        assert [one.fence for one in asked] == [world.things[name].fence for name in names]


@pytest.mark.parametrize("command", [one for one in FULL if one != ("forget", "adapter")], ids=" ".join)
def test_where_one_is_not_there_nothing_is_done(
    ctl: Any, world: canned.World, command: tuple[str, ...]
) -> None:
    for method in ("CordonNode", "UncordonNode", "DrainNode", "GetRule"):
        real = world.overrides.get(method)
        assert real is None
        world.overrides[method] = unless_missing(method, world)
    prefix = "jobs/" if command[-1] == "rule" else ""
    yes = ("-y",) if command[0] == "delete" else ()
    ran = ctl(*command, f"{prefix}a", f"{prefix}missing", f"{prefix}b", *yes)
    assert (ran.code, ran.out, changes(world)) == (NOT_FOUND, "", [])
    first, last = ran.err.splitlines()
    assert "missing" in first
    assert "not found" in first
    assert last == "nothing was changed"


def unless_missing(method: str, world: canned.World) -> Any:
    """The canned answer, but for names that end in `missing`."""
    usual = canned.service(world)._responses[method]

    def answer(request: Any, context: Any) -> Any:
        if request.name.endswith("missing"):
            canned.fail(context, errors.NotFoundError(f"{request.name} not found"))
        return usual(request, context)

    return answer


def test_a_failure_holds_up_no_other(ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(world, monkeypatch, READ)
    ran = ctl("delete", "endpoints", "a", "b", "c", "-y")
    assert ran.code == CONFLICT
    assert "endpoints/a" in world.things
    assert not {"endpoints/b", "endpoints/c"} & world.things.keys()
    assert ran.out.splitlines() == [
        f"{name} is deleted once its replicas have finished" for name in ENDPOINTS[1:]
    ]
    assert ran.err.splitlines() == ["error: endpoints/a: it is read"]


def refuse(
    world: canned.World, monkeypatch: pytest.MonkeyPatch, *refused: tuple[str, str, errors.GpuscaleError]
) -> None:
    """Let these calls, by method and name, fail with these errors."""
    answers = world.answer

    def answer(method: str, request: Any, context: Any) -> None:
        asked = (method, getattr(request, "name", ""))
        world.refuse = {of: error for of, name, error in refused if (of, name) == asked}
        answers(method, request, context)

    monkeypatch.setattr(world, "answer", answer)


READ = ("DeleteEndpoint", "endpoints/a", errors.FailedPreconditionError("it is read"))


@pytest.mark.parametrize(
    ("form", "payload"),
    [
        ("json", '{\n  "endpoints": [\n    {\n      "name": "endpoints/c"\n    }\n  ]\n}\n'),
        ("jsonl", '{"name": "endpoints/c"}\n'),
        ("name", "endpoints/c\n"),
    ],
)
def test_the_payload_is_what_was_done(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch, form: str, payload: str
) -> None:
    refuse(world, monkeypatch, READ)
    ran = ctl("delete", "endpoint", "a", "endpoints/c", "-y", "-o", form)
    assert (ran.code, ran.out) == (CONFLICT, payload)
    if form != "name":
        assert problems(ran) == [("endpoints/a", "FAILED_PRECONDITION")]


@pytest.mark.parametrize(
    ("failing", "error", "code"),
    [
        ("", Exception(), OK),
        ("b", errors.UnavailableError("its host is away", reason="NO_SUPERVISOR"), UNAVAILABLE),
        ("a", errors.UnavailableError("nobody answers"), UNAVAILABLE),
        ("a", KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_jobs_are_stopped_together_and_told_in_the_order_typed(
    ctl: Any, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException, code: int
) -> None:
    """Each may take its ten seconds to end, even if nobody answers for one of them."""
    together = threading.Barrier(3, timeout=20)
    asked = allocator_api.GetReservationRequest(name=canned.RESERVATION.name)

    def found(client: Any, typed: str) -> Any:
        def stop() -> Any:
            together.wait()
            if typed == failing:
                raise error
            while code == INTERRUPTED:  # until the client is closed, which is told as no error of theirs
                client.allocator.GetReservation(asked)
            return type(canned.RESERVATION)(name=f"reservations/{typed}")

        return SimpleNamespace(stop=stop)

    monkeypatch.setattr(logs, "find", found)
    ran = ctl("stop", "job", "a", "b", "c", "-o", "name")
    names = [f"reservations/{one}" for one in "abc" if one != failing and code != INTERRUPTED]
    assert (ran.code, ran.out.split(), "closed" in ran.err) == (code, names, False)


def test_the_first_failure_is_the_exit_code(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(
        world,
        monkeypatch,
        ("DeleteQueueWatcher", "watchers/a", errors.FailedPreconditionError("it is read")),
        ("DeleteQueueWatcher", "watchers/b", errors.NotFoundError("there is none")),
    )
    ran = ctl("delete", "watcher", "a", "b", "-y", "-o", "json")
    assert (ran.code, ran.out) == (CONFLICT, "")
    assert problems(ran) == [("watchers/a", "FAILED_PRECONDITION"), ("watchers/b", "NOT_FOUND")]


def test_an_error_says_whose_it_is(ctl: Any, world: canned.World) -> None:
    world.refuse["CordonNode"] = errors.DeadlineExceededError("too late")
    ran = ctl("cordon", "host-1", "host-2")
    assert ran.err == "error: nodes/host-1: too late\nerror: nodes/host-2: too late\nnothing was changed\n"


def test_where_nothing_answers_the_others_are_not_asked(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for an answer in vain. What was done before is written."""
    away = errors.UnavailableError("failed to connect to all addresses")
    refuse(world, monkeypatch, ("DeleteEndpoint", "endpoints/b", away))
    ran = ctl("delete", "endpoint", "a", "b", "c", "-y", "-o", "name")
    assert (ran.code, ran.out) == (UNAVAILABLE, "endpoints/a\n")
    assert "nothing answers" in ran.err
    assert "endpoints/c" in world.things


def test_all_names_are_read_before_anything_is_done(ctl: Any, world: canned.World) -> None:
    ran = ctl("delete", "endpoint", "a", "NO NAME", "-y")
    assert (ran.code, world.requests) == (USAGE, [])


@pytest.mark.parametrize(
    "command",
    [("release", "a", "b", "--fence", "1"), ("delete", "rule", "jobs/a", "jobs/b", "-y", "--etag", "e")],
    ids=" ".join,
)
def test_what_is_true_of_one_is_not_taken_for_several(
    ctl: Any, world: canned.World, command: tuple[str, ...]
) -> None:
    ran = ctl(*command)
    assert (ran.code, world.requests) == (USAGE, [])
    assert " takes one " in ran.err


@pytest.mark.parametrize(("answer", "code"), [("y\n", OK), ("n\n", OTHER), ("\n", OTHER), ("", INTERRUPTED)])
def test_a_person_is_asked_once_for_all(ctl: Any, world: canned.World, answer: str, code: int) -> None:
    """The question goes to standard error: standard output stays the payload."""
    ran = ctl("delete", "endpoint", "a", "b", stdin=answer, person=True)
    assert ran.code == code
    assert ran.err.count("Delete endpoints/a, endpoints/b?") == 1
    assert ("endpoints/a" in world.things) == (code != OK)
    line = "is deleted once its replicas have finished"
    assert ran.out == (f"endpoints/a {line}\nendpoints/b {line}\n" if code == OK else "")


GPU = canned.UUIDS[1].lower()


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (("a",), "nodes/a"),
        (("node", "a"), "nodes/a"),
        (("nodes/a",), "nodes/a"),
        (("no/a",), "nodes/a"),
        (("node", "node"), "nodes/node"),
        (("host-1/1",), f"nodes/host-1/gpus/{GPU}"),
        (("gpu", "host-1/1"), f"nodes/host-1/gpus/{GPU}"),
        ((f"host-1/{canned.UUIDS[1]}",), f"nodes/host-1/gpus/{GPU}"),
        ((canned.UUIDS[1],), f"nodes/host-1/gpus/{GPU}"),
        ((GPU,), f"nodes/host-1/gpus/{GPU}"),
        ((f"gpu/{canned.UUIDS[1]}",), f"nodes/host-1/gpus/{GPU}"),
        ((f"nodes/host-1/gpus/{GPU}",), f"nodes/host-1/gpus/{GPU}"),
    ],
)
@pytest.mark.parametrize("verb", ["cordon", "uncordon", "drain"])
def test_exactly_what_is_named_is_marked(
    ctl: Any, world: canned.World, verb: str, typed: tuple[str, ...], name: str
) -> None:
    assert ctl(verb, *typed).code == OK
    assert [one.name for one in changes(world)] == [name]


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (("gpu", "a"), USAGE, "'a' is not a gpu"),
        (("node", "host-1/0"), USAGE, "'host-1/0' is not a node"),
        (("host-1/9",), NOT_FOUND, "GPU host-1/9 not found"),
        ((f"{canned.UUIDS[0][:-1]}f",), NOT_FOUND, "not found"),
        (("host-1/x/y",), USAGE, "is not a valid name"),
    ],
)
def test_what_names_nothing_marks_nothing(
    ctl: Any, world: canned.World, typed: tuple[str, ...], code: int, said: str
) -> None:
    ran = ctl("cordon", *typed)
    assert (ran.code, changes(world)) == (code, [])
    assert said in ran.err
