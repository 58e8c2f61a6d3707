"""One command for several things: each for itself, and what failed is said of each and is the exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common import errors
from tests.support import canned_gateway as canned
from tests.support.cli import Ran, run_cli

OK, OTHER, USAGE, NOT_FOUND, CONFLICT, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 3, 4, 7, 130
ENDPOINTS = ("endpoints/a", "endpoints/b", "endpoints/c")
FULL = {
    ("delete", "endpoint"): "endpoints/{}",
    ("delete", "watcher"): "watchers/{}",
    ("delete", "rule"): "endpoints/jobs/rules/{}",
    ("delete", "quota"): "{}",
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


@pytest.fixture
def gateway() -> Iterator[tuple[str, canned.World]]:
    with canned.canned_gateway() as running:
        yield running


@pytest.fixture
def world(gateway: tuple[str, canned.World]) -> canned.World:
    world = gateway[1]
    world.things |= {name: autoscaler_api.Endpoint(name=name) for name in ENDPOINTS}
    world.things |= {f"watchers/{one}": autoscaler_api.QueueWatcher(name=f"watchers/{one}") for one in "ab"}
    for name in ("reservations/a", "reservations/b"):
        world.things[name] = type(canned.RESERVATION)(name=name, fence=len(world.things))
    return world


@pytest.fixture
def ctl(gateway: tuple[str, canned.World], world: canned.World) -> Any:
    del world

    def run(*arguments: str, **more: Any) -> Ran:
        return run_cli("--address", gateway[0], *arguments, **more)

    return run


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
    asked = [
        one for one in world.requests if not type(one).__name__.startswith("Get")
    ]  # fences are looked up
    names = [FULL[command].format(one) for one in "ab"]
    assert [getattr(one, "name", "") or one.tenant for one in asked] == names
    if command not in {("cordon",), ("drain",)}:  # the canned answer of which is always of the same node
        assert [one.get("name") or one["tenant"] for one in listed[1]] == names
    if command in {("release",), ("renew",)}:
        assert [one.fence for one in asked] == [world.things[name].fence for name in names]


def test_a_failure_holds_up_no_other(ctl: Any, world: canned.World) -> None:
    ran = ctl("delete", "endpoints", "a", "nothing", "b", "missing", "-y")
    assert ran.code == NOT_FOUND
    assert not {"endpoints/a", "endpoints/b"} & world.things.keys()
    assert "endpoints/c" in world.things
    assert ran.out.splitlines() == [
        f"{name} is deleted once its replicas have finished" for name in ENDPOINTS[:2]
    ]
    assert ran.err.splitlines() == [
        "error: endpoints/nothing not found",
        "error: endpoints/missing not found",
    ]


@pytest.mark.parametrize(
    ("form", "payload"),
    [
        ("json", '{\n  "endpoints": [\n    {\n      "name": "endpoints/c"\n    }\n  ]\n}\n'),
        ("jsonl", '{"name": "endpoints/c"}\n'),
        ("name", "endpoints/c\n"),
    ],
)
def test_the_payload_is_what_was_done(ctl: Any, form: str, payload: str) -> None:
    ran = ctl("delete", "endpoint", "nothing", "endpoints/c", "-y", "-o", form)
    assert (ran.code, ran.out) == (NOT_FOUND, payload)
    if form != "name":
        assert problems(ran) == [("endpoints/nothing", "NOT_FOUND")]


def test_the_first_failure_is_the_exit_code(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = iter([errors.FailedPreconditionError("it is read"), errors.NotFoundError("there is none")])
    answers = world.answer

    def answer(method: str, request: Any, context: Any) -> None:
        if method == "DeleteQueueWatcher":
            world.refuse[method] = next(refused)
        answers(method, request, context)

    monkeypatch.setattr(world, "answer", answer)
    ran = ctl("delete", "watcher", "a", "b", "-y", "-o", "json")
    assert (ran.code, ran.out) == (CONFLICT, "")
    assert problems(ran) == [("watchers/a", "FAILED_PRECONDITION"), ("watchers/b", "NOT_FOUND")]


def test_an_error_says_whose_it_is(ctl: Any, world: canned.World) -> None:
    world.refuse["CordonNode"] = errors.DeadlineExceededError("too late")
    ran = ctl("cordon", "host-1", "host-2")
    assert ran.err == "error: nodes/host-1: too late\nerror: nodes/host-2: too late\n"


def test_where_nothing_answers_the_others_are_not_asked(
    ctl: Any, world: canned.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would wait for an answer in vain. What was done before is written."""
    answers = world.answer

    def answer(method: str, request: Any, context: Any) -> None:
        if request.name == "endpoints/b":
            world.refuse[method] = errors.UnavailableError("gone")
        answers(method, request, context)

    monkeypatch.setattr(world, "answer", answer)
    ran = ctl("delete", "endpoint", "a", "b", "c", "-y", "-o", "name")
    assert (ran.code, ran.out) == (UNAVAILABLE, "endpoints/a\n")
    assert "nothing answers" in ran.err
    assert "endpoints/c" in world.things
    world.refuse.clear()
    ran = ctl("delete", "endpoint", "nothing", "b", "-y", "-o", "json")
    assert (ran.code, ran.out) == (NOT_FOUND, ""), "the first failure"
    assert "nothing answers" in ran.err


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
    assert "is for one" in ran.err


@pytest.mark.parametrize(("answer", "code"), [("y\n", OK), ("n\n", OTHER), ("", INTERRUPTED)])
def test_one_question_is_asked_for_all(ctl: Any, world: canned.World, answer: str, code: int) -> None:
    ran = ctl("delete", "endpoint", "a", "b", stdin=answer, person=True)
    assert ran.code == code
    assert ran.err.count("Delete endpoints/a, endpoints/b?") == 1
    assert ("endpoints/a" in world.things) == (code != OK)
