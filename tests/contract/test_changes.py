"""What RPCs that change something do alike: only validate, go by an etag, and say what is not there."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cancelling import Room
from tests.contract.test_cancelled_calls import (
    CASES,
    MUTATING,
    REQUESTS,
    forget_volatile,
    lists,
    new_id,
    none_is_being_deleted,
    told,
)
from tests.support.clock import ManualClock
from tests.support.waiting import eventually


def having(field: str) -> list[str]:
    return [method for method in CASES if field in REQUESTS[method].DESCRIPTOR.fields_by_name]


@asynccontextmanager
async def prepared(folder: Path, method: str) -> AsyncGenerator[tuple[Room, Any]]:
    """A room in which the request can be made."""
    opening, prepare = CASES[method]
    state = folder / "state"
    state.mkdir(mode=0o700)
    async with opening(state, ManualClock()) as room:
        yield room, REQUESTS[method](**await prepare(room, 1))


OF_AN_EVALUATION = {"granted_replicas", "starting_replicas", "latest_decision", "summary"}


@pytest.mark.parametrize("method", having("validate_only"))
async def test_what_is_only_validated_changes_nothing(tmp_path: Path, method: str) -> None:
    """It is answered as the change is, its request id may still be used, and what is there then is not made again."""
    async with prepared(tmp_path, method) as (room, request):
        before, answers = await lists(room), list[Any]()
        for only in (True, False):
            request.validate_only = only
            answers.append(await room.call(MUTATING[method], request))
            assert (await lists(room) == before) is only
        ignored = {"etag", "create_time", "update_time"} | OF_AN_EVALUATION
        if "QueueWatcher" in method:  # whose broker may be found away between the two calls
            ignored |= {"status"}
        for answer in answers:
            forget_volatile(answer, ignored)
        if "Node" not in method:  # which is answered only with a cordon that is there
            assert answers[0] == answers[1]
        if method.startswith("Create") and method != "CreateRule":  # the same rule is there already
            request.validate_only, request.request_id = True, new_id()
            assert "StatusCode.ALREADY_EXISTS" in await told(room, method, request)


ETAGS = [*having("etag"), *(one for one in CASES if one.startswith("Update") and one not in having("etag"))]


@pytest.mark.parametrize("method", ETAGS)
async def test_only_what_has_the_etag_is_changed(tmp_path: Path, method: str) -> None:
    async with prepared(tmp_path, method) as (room, request):
        before = await lists(room)
        parts = (request, *(value for field, value in request.ListFields() if field.message_type))
        part = next(one for one in parts if "etag" in one.DESCRIPTOR.fields_by_name)
        part.etag = "0" * 32
        assert "StatusCode.ABORTED: ETAG_MISMATCH: " in await told(room, method, request)
        assert await lists(room) == before
        name = request.parent if method == "CreateRule" else part.name.partition("/rules/")[0]
        found = (one for answer in before for _, all_ in answer.ListFields() for one in all_)
        [part.etag] = [one.etag for one in found if one.name == name]
        assert "StatusCode" not in await told(room, method, request)


@pytest.mark.parametrize("method", having("allow_missing"))
async def test_what_is_not_there_is_told_unless_it_may_be_missing(tmp_path: Path, method: str) -> None:
    async with prepared(tmp_path, method) as (room, request):
        assert method == "ForgetAdapter" or "StatusCode" not in await told(room, method, request)
        if method == "DeleteEndpoint":
            await eventually(lambda: none_is_being_deleted(room))
        request.name += "x" * (method == "ForgetAdapter")
        assert "StatusCode.NOT_FOUND" in await told(room, method, request)
        request.allow_missing = True
        assert "StatusCode" not in await told(room, method, request)
