"""Whose token is taken, and for how long."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock

import pytest
from nicegui import Client, ui
from starlette.datastructures import Headers

from gpuscale import client as library
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client.connection import connect_async
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Role
from gpuscale.dashboard.pages.endpoints import WhatIf
from gpuscale.dashboard.pages.reservations import all_output
from gpuscale.dashboard.visitors import COOKIE, VisitorActions, Visitors, VisitorSession
from gpuscale.testing import FakeServer
from tests.support.waiting import eventually

SIGNED_IN = VisitorSession("token", math.inf)


def visitors_of(server: FakeServer, asked: list[str] | None = None) -> Visitors:
    def connect(token: str) -> library.AsyncClient:
        if asked is not None:
            asked.append(token)
        return connect_async(server.address, token=token)

    return Visitors(connect, SystemClock(), secure=False)


@pytest.mark.parametrize("token", ["two\nlines", "t\u00f6ken"])
async def test_what_is_no_token_is_refused(token: str) -> None:
    """It was a fault of the server once, with a traceback in its log for each that anybody sent."""
    with FakeServer() as server, pytest.raises(library.InvalidArgumentError):
        await visitors_of(server).try_token(token)


@pytest.mark.parametrize(
    ("error", "left"),
    [(library.UnauthenticatedError("revoked"), set[str]()), (library.UnavailableError("away"), {"token"})],
    ids=["revoked", "gateway away"],
)
async def test_a_visitor_whose_token_is_revoked_is_signed_out(
    error: library.GpuscaleError, left: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.dashboard.visitors.RECHECK", 0.01)
    asked: list[str] = []
    with FakeServer() as server:
        server.fail("ListNodes", error)
        visitors = visitors_of(server, asked)
        visitors.sessions.begin("mine", "token", visitors.clock.now())
        checking = asyncio.create_task(visitors.recheck())
        try:
            await eventually(lambda: bool(asked))
            visitors.sessions.begin("yours", "other", visitors.clock.now())
            await eventually(lambda: asked.count("other") >= 2)
        finally:
            checking.cancel()
        assert visitors.sessions.by_token(visitors.clock.now()).keys() - {"other"} == left


async def test_a_changed_role_shows_without_another_sign_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuscale.dashboard.visitors.RECHECK", 0.01)
    with FakeServer() as server:  # which says ADMIN
        visitors = visitors_of(server)
        visitors.sessions.begin("secret", "token", visitors.clock.now(), Role.VIEWER)
        checking = asyncio.create_task(visitors.recheck())
        try:
            session = visitors.sessions.find("secret", visitors.clock.now())
            assert session is not None
            await eventually(lambda: session.role is Role.ADMIN)
        finally:
            checking.cancel()


async def test_hands_are_tied_once_the_visitor_is_signed_out() -> None:
    """Of the pages that are still open, too."""
    with FakeServer() as server:
        visitors = visitors_of(server)
        assert await visitors.try_token("token") is Role.ADMIN
        visitors.sessions.begin("secret", "token", visitors.clock.now())
        actions = visitors.actions(Headers({"cookie": f"{COOKIE}=secret"}))
        assert actions is not None
        assert not actions.signed_out
        actions.session.end = 0.0
        assert actions.signed_out
        with pytest.raises(library.UnauthenticatedError, match="sign in again"):
            await actions.ask(AsyncMock())


async def test_only_the_user_of_this_process_reads_what_its_jobs_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with FakeServer() as server, server.connect() as client, client.reserve(1) as lease:
        name = lease.name.removeprefix("reservations/")
        folder = tmp_path / "gpuscale" / "jobs" / f"{name}-0"
        actions = {
            home: VisitorActions(visitors_of(server).connect, SIGNED_IN, SystemClock(), at_home=home)
            for home in (True, False)
        }
        with pytest.raises(library.NotFoundError, match="no output is kept on this host"):
            await all_output(actions[True], name)
        folder.mkdir(parents=True)
        (folder / "output.1").write_bytes(b"x" * 100_000)
        (folder / "output").write_bytes(b"the end")
        assert b"".join(await all_output(actions[True], name)) == b"x" * 100_000 + b"the end"
        with pytest.raises(library.NotFoundError, match=f"gpuscalectl logs {name}"):
            await all_output(actions[False], name)


@pytest.mark.parametrize("left_at", ["call", "question", "slider"])
async def test_a_page_that_is_left_while_it_waits_is_no_error(
    left_at: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings and tracebacks of what it wanted to show filled the log once."""
    monkeypatch.setattr("nicegui.core.loop", asyncio.get_running_loop())
    monkeypatch.setattr("nicegui.helpers.warnings._shown_warnings", set[str]())  # each is said once
    asked, left = asyncio.Event(), asyncio.Event()

    async def answer(_: object) -> Any:
        asked.set()
        await left.wait()
        return autoscaler_api.EvaluateResponse()

    api = MagicMock(decisions=Mock(Evaluate=answer), nodes=Mock(CordonNode=answer))
    api.__aenter__.return_value = api
    page = Client(ui.page(""))
    actions = VisitorActions(lambda _: api, SIGNED_IN, SystemClock())

    async def act() -> None:
        with page:
            if left_at == "slider":
                what_if = WhatIf(Mock(client=api), "endpoints/chat")
                await what_if.moved("depth", ui.slider(min=0, max=1), ui.label())
            else:
                await actions.mark("nodes/a", "cordon")

    async with asyncio.timeout(30):
        acting = asyncio.create_task(act())
        if left_at != "slider":
            await eventually(lambda: any(isinstance(one, ui.dialog) for one in page.elements.values()))
        if left_at == "call":
            [question] = [one for one in page.elements.values() if isinstance(one, ui.dialog)]
            question.submit(result=True)
        if left_at != "question":
            await asked.wait()
        page.delete()
        left.set()
        await acting
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []
