"""Visitors: sign-in with a bearer token, where the settings require it, and what they do with it.

A token is tried on the gateway, so that exactly those who may call the gateway may sign in. It stays in the memory of this program;
the browser gets a random secret in an HttpOnly cookie. A restart signs everyone out.

Where the gateway requires no token (`gpuscalectl up`), visitors sign in by a one-time link, kept in a file of the user's.
"""

from __future__ import annotations

import asyncio
import html
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from google.protobuf import field_mask_pb2
from nicegui import ui
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import AsyncClient, GpuscaleError, PermissionDeniedError, UnauthenticatedError
from gpuscale.common.rpc.status import ROLE_KEY
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.secrets import LINK_PATH, write_link
from gpuscale.common.security.auth import Role, find_method
from gpuscale.common.sizes import counted

T = TypeVar("T")

CALENDAR = "/calendar/"
"""Path of the calendar of bookings, which needs no sign-in."""
LENGTH = 12 * 3600.0
"""Seconds after which a visitor has to sign in again."""
MOST = 1_000
"""Most sessions at a time; a new one replaces the oldest."""


@dataclass(slots=True)
class VisitorSession:
    """A signed-in visitor, until `end` (seconds of the same clock as `now`), which is 0 once it was ended."""

    token: str
    end: float
    role: Role | None = None


class Sessions:
    """All open sessions, by a random secret."""

    def __init__(self) -> None:
        self._open: dict[str, VisitorSession] = {}

    def begin(self, secret: str, token: str, now: float, role: Role | None = None) -> None:
        """Remember a token and its role, if known, under a random secret."""
        self._open = {key: one for key, one in self._open.items() if one.end > now}
        while len(self._open) >= MOST:
            self._open.pop(next(iter(self._open))).end = 0.0
        self._open[secret] = VisitorSession(token, now + LENGTH, role)

    def find(self, secret: str, now: float) -> VisitorSession | None:
        """A session; None if there is none or it has ended."""
        found = self._open.get(secret)
        return found if found is not None and found.end > now else None

    def by_token(self, now: float) -> dict[str, list[VisitorSession]]:
        """The sessions of each token."""
        found: dict[str, list[VisitorSession]] = {}
        for one in self._open.values():
            if one.end > now:
                found.setdefault(one.token, []).append(one)
        return found


Connect = Callable[[str], AsyncClient]
"""Opens a client that sends a token."""
MARKS: Mapping[str, str] = {
    "cordon": "No new work is placed there; running work stays.",
    "drain": "Holders there have 10 minutes to leave.",
    "uncordon": "New work may be placed there; a drain ends.",
}
"""What a visitor may do to a node or GPU, and the effect; methods of NodeService are named after it."""


@dataclass(frozen=True)
class VisitorActions:
    """Calls on behalf of a visitor."""

    connect: Connect  # opens a client
    session: VisitorSession
    clock: Clock
    at_home: bool = False  # whether the visitor is the user of this process, and may read the user's files

    @property
    def marks(self) -> list[str]:
        """What the role allows to do to a node or GPU."""
        return [act for act in MARKS if self.may(f"allocator.v1.NodeService/{act.capitalize()}Node")]

    def may(self, method: str) -> bool:
        """Whether the role allows a method; what is not known is tried."""
        known, role = find_method(f"/gpuscale.api.{method}"), self.session.role
        return role is None or known is None or known.role is None or role >= known.role

    @property
    def signed_out(self) -> bool:
        """Whether the session has ended: signed out on another page, or expired."""
        return self.session.end <= self.clock.now()

    async def ask(self, act: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Call the gateway as the visitor. Raises GpuscaleError: the call failed, or the visitor is signed out."""
        if self.signed_out:
            raise UnauthenticatedError("signed out: sign in again")
        async with self.connect(self.session.token) as client:
            return await act(client)

    async def release(self, one: allocator_api.Reservation) -> None:
        """Release a reservation, after confirmation."""
        name = one.name.removeprefix("reservations/")

        async def give_back(client: AsyncClient, _: str) -> None:
            # The fence is read as the visitor: the dashboard's own role may not see it.
            found = await client.allocator.GetReservation(allocator_api.GetReservationRequest(name=one.name))
            request = allocator_api.ReleaseReservationRequest(name=one.name, fence=found.reservation.fence)
            await client.allocator.ReleaseReservation(request)

        question = f"Release {name}, held by {one.holder}? Processes on its GPUs lose them."
        await self._act(question, give_back, f"{name} is released")

    async def mark(self, name: str, act: str) -> None:
        """Cordon, drain or uncordon a node or GPU, after confirmation; the first two with a reason."""
        method, lifts = f"{act.capitalize()}Node", act == "uncordon"

        def call(client: AsyncClient, why: str) -> Awaitable[object]:
            kind = getattr(allocator_api, f"{method}Request")
            request = kind(name=name) if lifts else kind(name=name, reason=why)
            found: Awaitable[object] = getattr(client.nodes, method)(request)
            return found

        question = f"{act.capitalize()} {name}? {MARKS[act]}"
        await self._act(question, call, f"{act}: {name}", reasoned=not lifts)

    async def pause(self, one: autoscaler_api.Endpoint) -> None:
        """Pause or resume an endpoint, after confirmation."""
        changed = autoscaler_api.Endpoint(name=one.name)
        changed.spec.paused = not one.spec.paused
        mask = field_mask_pb2.FieldMask(paths=["spec.paused"])
        request = autoscaler_api.UpdateEndpointRequest(endpoint=changed, update_mask=mask)
        word = "Pause" if changed.spec.paused else "Resume"
        leads_to = "It keeps its replicas, whatever its rules say." if changed.spec.paused else ""
        question, done = f"{word} {one.name}? {leads_to}", f"{word}: {one.name}"
        await self._act(question, lambda client, _: client.endpoints.UpdateEndpoint(request), done)

    async def set_replicas(self, one: autoscaler_api.Endpoint, replicas: int, group: str) -> None:
        """Order a number of replicas (of a capability set), after confirmation; fails if the number has changed meanwhile."""
        groups = {each.id: each.desired_replicas for each in one.status.capability_sets}
        request = autoscaler_api.SetReplicasRequest(
            name=one.name,
            replicas=replicas,
            current_replicas=groups.get(group, one.status.desired_replicas),
            capability_set=group,
        )
        of = f"{one.name} {group}".rstrip()
        question = f"Order {counted(replicas, 'replica')} of {of}? It wants {request.current_replicas} now."
        done = f"{counted(replicas, 'replica is', 'replicas are')} wanted now"
        await self._act(question, lambda client, _: client.endpoints.SetReplicas(request), done)

    async def _act(
        self,
        question: str,
        act: Callable[[AsyncClient, str], Awaitable[object]],
        done: str,
        *,
        reasoned: bool = False,
    ) -> None:
        """Ask to confirm, for a reason too if `reasoned`; then make the call with that reason, and show how it ended."""
        with ui.dialog() as dialog, ui.card():
            ui.label(question)
            reason = ui.input("why, for others to read").classes("full-width") if reasoned else None
            ui.label("Your name goes into the audit log.").classes("gs-quiet")
            with ui.row():
                ui.button("Yes", on_click=partial(dialog.submit, result=True))
                ui.button("No", on_click=partial(dialog.submit, result=False)).props("flat")
        confirmed: object = await dialog
        why = "" if reason is None else str(reason.value)
        if not dialog.is_deleted:  # the page was left meanwhile
            dialog.delete()
        if confirmed is not True:
            return
        page, failed = ui.context.client, ""
        try:
            await self.ask(lambda client: act(client, why))
        except GpuscaleError as error:
            failed = error.message
        if not page.is_deleted:
            ui.notify(failed or done, type="negative" if failed else "positive")


COOKIE = "gpuscale_session"
PATH = "/sign-in"
LONGEST_FORM = 16_384
TRIED_AT_ONCE = 8
"""Most tokens tried on the gateway at a time."""
RECHECK = 60.0
"""Seconds between checks of visitors' tokens: as long as streams outlive a revoked token."""
NO_TOKEN = ""
"""The token of a visitor who signed in by link."""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>sign in · gpuscale</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body {{ font: 16px system-ui, sans-serif; max-width: 24rem; margin: 15vh auto; padding: 0 1rem }}
input, button {{ font: inherit; width: 100%; box-sizing: border-box; padding: .5rem; margin-top: .5rem }}
p {{ color: #b3261e }}</style>
<h1>gpuscale</h1>{way}<p role="alert">{problem}</p></html>"""
_FORM = """<form method="post" action="/sign-in"><label>Token
<input name="token" type="password" autocomplete="current-password" autofocus required></label>
<button>Sign in</button></form>"""
_BY_LINK = """Open the link that gpuscalectl up prints when it starts. A link works once, and signs this browser in for 12 hours.
The next one is in the file<br><code>{file}</code>"""


@dataclass(frozen=True)
class Visitors:
    """Signs visitors in, and makes calls for them."""

    connect: Connect  # opens a client of the gateway that sends a token
    clock: Clock  # measures the length of sessions
    secure: bool  # cookies are for HTTPS only
    link_file: Path | None = None  # holds the sign-in link; None: sign-in by token
    sessions: Sessions = field(default_factory=Sessions)  # open sessions
    # bounds how many tokens are tried at a time
    trying: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TRIED_AT_ONCE))

    def session(self, headers: Headers) -> VisitorSession | None:
        """The session of the sender of these headers; None if not signed in."""
        return self.sessions.find(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), self.clock.now())

    def actions(self, headers: Headers | None = None) -> VisitorActions | None:
        """Calls for the sender of these headers, or for the visitor of the page being built."""
        found = self.session(ui.context.client.request.headers if headers is None else headers)
        if found is None:
            return None
        return VisitorActions(self.connect, found, self.clock, at_home=self.link_file is not None)

    def take_link(self, secret: str) -> bool:
        """Whether this is the secret of the current link, which a new one replaces. Raises OSError: the link stays valid."""
        if self.link_file is None:
            return False
        link = self.link_file.read_text()
        if not secrets.compare_digest(link.rpartition("/")[2].strip().encode(), secret.encode()):
            return False
        write_link(self.link_file, urlsplit(link).netloc)
        return True

    async def try_token(self, token: str) -> Role | None:
        """Try a token with one call; returns its role, if told. Raises GpuscaleError: the gateway rejects it or does not answer."""
        async with self.trying, self.connect(token) as client:
            call = client.fleet.ListNodes(monitor_api.ListNodesRequest(page_size=1))
            await call
            return Role.__members__.get(str(dict(await call.trailing_metadata()).get(ROLE_KEY, "")))

    async def recheck(self) -> None:
        """For ever: sign out visitors whose token the gateway rejects, and follow the roles of the others.

        While it is unreachable, nothing changes.
        """
        while True:
            await asyncio.sleep(RECHECK)
            for token, sessions in self.sessions.by_token(self.clock.now()).items():
                try:
                    role = await self.try_token(token)
                except (UnauthenticatedError, PermissionDeniedError):
                    for one in sessions:
                        one.end = 0.0
                except GpuscaleError:
                    continue
                else:
                    for one in sessions:
                        one.role = role


def signed_in(app: ASGIApp, visitors: Visitors) -> ASGIApp:
    """Require sign-in for every page and socket."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path"))
        free = scope["type"] == "lifespan" or path == PATH or path.startswith((LINK_PATH, CALENDAR))
        if free or visitors.session(Headers(scope=scope)) is not None:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await RedirectResponse(PATH, status_code=303)(scope, receive, send)

    return serve


def require_sign_in(app: FastAPI, visitors: Visitors) -> None:
    """Put sign-in in front of `app`."""
    way = _FORM if visitors.link_file is None else _BY_LINK.format(file=html.escape(str(visitors.link_file)))

    def page(problem: str = "", code: int = 200) -> Response:
        return HTMLResponse(_PAGE.format(way=way, problem=problem), status_code=code)

    def let_in(token: str, role: Role | None = None) -> Response:
        secret = secrets.token_urlsafe(32)
        visitors.sessions.begin(secret, token, visitors.clock.now(), role)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(
            COOKIE, secret, max_age=int(LENGTH), httponly=True, samesite="strict", secure=visitors.secure
        )
        return answer

    async def show() -> Response:
        return page()

    async def come_by_link(secret: str) -> Response:
        return let_in(NO_TOKEN) if visitors.take_link(secret) else page("This link was already used.", 403)

    async def sign_in(request: Request) -> Response:
        if int(request.headers.get("content-length") or LONGEST_FORM + 1) > LONGEST_FORM:
            return page("This is not a token.", 413)
        token = (await request.form()).get("token")
        if not isinstance(token, str) or not token.strip():
            return page("Enter a token.", 400)
        try:
            role = await visitors.try_token(token.strip())
        except GpuscaleError as error:
            return page(f"Sign-in failed: {type(error).__name__.removesuffix('Error')}.", 403)
        return let_in(token.strip(), role)

    async def sign_out(request: Request) -> Response:
        if (session := visitors.session(request.headers)) is not None:
            session.end = 0.0
        answer = RedirectResponse(PATH, status_code=303)
        answer.delete_cookie(COOKIE)
        return answer

    app.get(PATH)(show)
    if visitors.link_file is None:
        app.post(PATH)(sign_in)
    else:
        app.get(LINK_PATH + "{secret}")(come_by_link)
    app.post("/sign-out")(sign_out)
    app.add_middleware(signed_in, visitors=visitors)
