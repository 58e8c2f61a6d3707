"""What a page shows of answers and of errors, without a browser."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import chain, repeat
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from nicegui import Client, app, ui
from nicegui.app.app import State
from nicegui.elements.mixins.text_element import TextElement
from starlette.requests import Request

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.audit import v1 as audit_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import InvalidArgumentError, NotFoundError, UnavailableError
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Role
from gpuscale.dashboard import frame
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.feed import CONNECTING
from gpuscale.dashboard.frame import DashboardSite
from gpuscale.dashboard.pages import audit, endpoints, recordings, reservations, usage
from gpuscale.dashboard.visitors import VisitorActions, VisitorSession
from tests.support.cli import python
from tests.support.waiting import eventually


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Generator[Client]:
    """A page as of a browser that is connected."""
    monkeypatch.setattr("nicegui.core.loop", asyncio.get_running_loop())
    monkeypatch.setattr(app, "_state", State.STARTED)
    page = Client(
        ui.page(""), request=Request({"type": "http", "path": "/", "query_string": b"", "headers": []})
    )
    monkeypatch.setattr(page, "connected", AsyncMock())
    try:
        with page:
            yield page
    finally:
        page.delete()


async def test_a_decision_that_cannot_be_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page showed the error until it was loaded anew once."""
    monkeypatch.setattr(endpoints, "REFRESH", 0.01)
    failed = asyncio.Event()

    async def answer(_: object) -> Any:
        if not failed.is_set():
            raise UnavailableError("the gateway is away")
        return autoscaler_api.GetDecisionResponse(decision=autoscaler_api.Decision(summary="from 1 to 2"))

    site = Mock(client=Mock(decisions=Mock(GetDecision=answer)), actions=lambda: None)
    site.facts.problems, site.facts.wrong = {}, []

    def shows(text: str) -> bool:
        labels = (one for one in page.elements.values() if isinstance(one, ui.label))
        return any(one.text == text for one in labels)

    with opened(monkeypatch) as page:
        endpoints.decision_page(site, "chat", "7")
        await eventually(lambda: shows("cannot read the decision: the gateway is away"))
        failed.set()
        await eventually(lambda: shows("from 1 to 2"))


async def test_only_what_is_a_visitors_own_can_be_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may not release a reservation is not told its fence; the button was on all of them once."""
    own, others = (allocator_api.Reservation(name=f"reservations/{name}") for name in ("own", "others"))
    told = [allocator_api.Reservation(name=own.name, fence=7), others]
    own.job.title = "night"
    actions = Mock(ask=AsyncMock(return_value=told), signed_out=False)
    site = DashboardSite(Facts(reservations=[own, others]), Mock(), "", lambda: actions, Mock())
    with opened(monkeypatch) as page:
        reservations.reservations_page(site)
        [table] = [one for one in page.elements.values() if isinstance(one, ui.table)]
        await eventually(
            lambda: {row["name"]: row["act"] for row in table.rows} == {"own": ["release"], "others": []}
        )
        assert [row["notes"] for row in table.rows] == ["night", ""], "people know their jobs by their titles"


async def test_a_reservation_that_is_not_there_has_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page said of the job that it had not started yet."""
    actions = Mock(ask=AsyncMock(side_effect=NotFoundError("no reservation r1")), signed_out=False)
    with opened(monkeypatch) as page:
        reservations.reservation_page(DashboardSite(Facts(), Mock(), "", lambda: actions, Mock()), "r1")
        [job] = [one for one in page.elements.values() if isinstance(one, TextElement) and one.text == "Job"]
        await eventually(lambda: actions.ask.await_count > 0)
        assert not all(one.visible for one in job.ancestors())


async def test_a_running_recording_is_shown_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch tells of its start and end alone: it had 9 samples for as long as it ran."""
    begun = monitor_api.Recording(name="recordings/r", state="STATE_RUNNING", sample_count=9, gpus=[{}])
    begun.gpus[0].name = "nodes/n/gpus/gpu-a"
    now = monitor_api.Recording(sample_count=93)
    now.MergeFrom(monitor_api.Recording(name=begun.name, state=begun.state, gpus=begun.gpus))
    now.gpus[0].sample_count = 92
    listing = AsyncMock(return_value=monitor_api.ListRecordingsResponse(recordings=[now]))
    client = Mock(
        recordings=Mock(ListRecordings=listing),
        history=Mock(QueryHistory=AsyncMock(return_value=monitor_api.QueryHistoryResponse())),
    )
    gone = monitor_api.Recording(name="recordings/gone", state="STATE_RUNNING")
    site = DashboardSite(Facts(recordings=[gone, begun]), client, "", lambda: None, Mock())

    async def shows(build: Callable[[DashboardSite], None], samples: int) -> None:
        with opened(monkeypatch) as page:
            build(site)
            [table] = [one for one in page.elements.values() if isinstance(one, ui.table)]

            def shown() -> bool:
                site.facts.changed()
                return any(row["samples"] == samples for row in table.rows)

            await eventually(shown)

    await shows(recordings.recordings_page, 93)
    asked = {one.args[0].filter for one in listing.await_args_list}
    assert asked == {"state = RUNNING"}, "not for each: one of them may be deleted meanwhile"
    await shows(partial(recordings.recording_page, recording="r"), 92)
    assert listing.await_args.args[0].filter == 'name = "recordings/r"'
    client.history.QueryHistory.reset_mock()
    listing.return_value = monitor_api.ListRecordingsResponse()
    with opened(monkeypatch):
        recordings.recording_page(site, "r")
        await eventually(lambda: client.history.QueryHistory.await_count)


async def test_an_order_of_replicas_is_what_the_field_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number with too many digits did nothing, and 2.7 asked for 2 and then showed 3."""
    site = DashboardSite(Facts(), Mock(), "", Mock, Mock())
    with opened(monkeypatch) as page:
        endpoints.endpoint_acts(site, lambda: None)
        [order] = [one for one in page.elements.values() if isinstance(one, ui.number)]
        for typed, shown in ((1e11, 100_000), (-1.0, 0), (2.7, 3)):
            order.value = typed
            assert order.value == shown
        [button] = [
            one for one in page.elements.values() if isinstance(one, ui.button) and one.text == "order"
        ]
        assert button.enabled
        order.value = None
        assert not button.enabled, "an empty field orders nothing; the button did nothing and said nothing"


@pytest.mark.parametrize("role", [Role.VIEWER, Role.ADMIN])
async def test_what_a_role_may_not_read_is_not_offered(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer read `no call matches` below the refusal, was led to a log that is refused, and had a column for buttons."""
    actions = VisitorActions(Mock(), VisitorSession("token", math.inf, role), SystemClock())
    late = chain(repeat(UnavailableError("too late"), 3), repeat([]))
    monkeypatch.setattr(VisitorActions, "ask", AsyncMock(side_effect=late))
    monkeypatch.setattr(audit, "REFRESH", 0.01)
    site = DashboardSite(Facts(), Mock(), "", lambda: actions, Mock())
    with opened(monkeypatch) as page:
        audit.audit_page(site)
        endpoints.replica_page(site, "chat", "r1")
        reservations.reservations_page(site)
        found = list(page.elements.values())
        table, held = [one for one in found if isinstance(one, ui.table)]
        assert any(column["name"] == "act" for column in held.columns) == (role is Role.ADMIN)
        [log] = [one for one in found if isinstance(one, ui.link) and one.text.startswith("view or save")]
        await eventually(lambda: (table.visible, log.visible) == (role is Role.ADMIN,) * 2)
        labels = [one.text for one in found if isinstance(one, ui.label)]
        assert any(one.startswith("sign in as an admin") for one in labels) == (role is Role.VIEWER)


async def test_the_audit_log_is_asked_for_again_where_that_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after its first answer; and a filter that is refused is not asked for again each 5 s."""
    actions = VisitorActions(Mock(), VisitorSession("token", math.inf, Role.ADMIN), SystemClock())
    away, refused = UnavailableError("the gateway is away"), InvalidArgumentError("it is too long")
    ask = AsyncMock(side_effect=[[], away, away, refused])
    monkeypatch.setattr(VisitorActions, "ask", ask)
    monkeypatch.setattr(audit, "REFRESH", 0.011)
    with opened(monkeypatch) as page:
        audit.audit_page(DashboardSite(Facts(), Mock(), "", lambda: actions, Mock()))
        [wanted] = [one for one in page.elements.values() if isinstance(one, ui.input)]
        [timer] = [
            one
            for one in page.elements.values()
            if isinstance(one, ui.timer) and one.interval == audit.REFRESH
        ]
        await eventually(lambda: not timer.active)
        wanted.value = "Reserve"
        await eventually(lambda: (ask.await_count, timer.active) == (4, False))


async def test_no_part_of_the_audit_log_is_passed_over_for_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [audit_api.ListAuditEventsResponse(next_page_token=one) for one in ("a", "b", "c", "d", "e")]
    read = AsyncMock(side_effect=[*pages[:3], UnavailableError("the gateway is away"), *pages[2:4]])
    actions = VisitorActions(Mock(), VisitorSession("token", math.inf, Role.ADMIN), SystemClock())
    client, clicks = Mock(audit=Mock(ListAuditEvents=read)), dict[str, Any]()
    monkeypatch.setattr(VisitorActions, "ask", lambda _, act: act(client))
    monkeypatch.setattr(ui.button, "on_click", lambda button, act: clicks.update({button.text: act}))
    monkeypatch.setattr(audit, "REFRESH", 0.01)
    monkeypatch.setattr(audit, "MOST_PIECES", 2)
    with opened(monkeypatch):
        audit.audit_page(DashboardSite(Facts(), Mock(), "", lambda: actions, Mock()))
        await eventually(lambda: read.await_count == 2)
        await clicks["older"]()
        await eventually(lambda: read.await_count >= 6)
    assert [one.args[0].page_token for one in read.await_args_list] == ["", "a", "b", "c", "b", "c"]


@pytest.mark.parametrize(
    ("problem", "badge"), [(None, "live"), (CONNECTING, "connecting"), ("refused", "connection lost")]
)
async def test_what_nobody_has_looked_at_is_not_live(
    monkeypatch: pytest.MonkeyPatch, problem: str | None, badge: str
) -> None:
    """After a weekend its first visitor saw Friday's GPUs as live."""
    facts = Facts(problems={} if problem is None else {"bookings": CONNECTING, "nodes": problem})
    with opened(monkeypatch) as shown:
        with frame.page(DashboardSite(facts, Mock(), "", lambda: None, Mock()), "Fleet"):
            pass
        labels = {one.text for one in shown.elements.values() if isinstance(one, ui.label)}
    assert badge in labels


SLOWLY = """
from unittest.mock import Mock
from nicegui import binding
from gpuscale.dashboard.web import application
application(Mock(), None, names=None, compress=False)
binding.time = Mock(time=Mock(side_effect=[0.0, 1.0, 1.0]))
binding._refresh_step()
"""
"""What NiceGUI does with each page, while the machine does something else."""


async def test_a_page_that_is_left_open_shows_no_charts_of_an_endpoint_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = Facts(endpoints=[autoscaler_api.Endpoint(name="endpoints/chat")])
    client = Mock(decisions=Mock(ListDecisions=AsyncMock(), QuerySignals=AsyncMock()))
    site = DashboardSite(facts, client, "", lambda: None, Mock())
    shown: list[Callable[[], None]] = []
    monkeypatch.setattr(endpoints, "live", lambda _, show: shown.append(show))
    with opened(monkeypatch) as page:
        endpoints.endpoint_page(site, "chat")
        [chart, *_] = [one for one in page.elements.values() if isinstance(one, ui.echart)]

        def visible() -> bool:
            shown[0]()
            return all(one.visible for one in chart.ancestors())

        assert visible()
        texts = [one for one in page.elements.values() if isinstance(one, TextElement)]
        [what_if] = [one for one in texts if one.text == "What if"]
        assert not all(one.visible for one in what_if.ancestors()), "there is no slider to move yet"
        facts.endpoints = []
        assert not visible()


def test_a_busy_host_is_nothing_to_warn_of() -> None:
    ran = python(SLOWLY)
    assert (ran.code, ran.err) == (0, "")


async def test_who_signed_in_sees_the_own_usage_until_the_end_of_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was that of the dashboard's token: none. And the last day that was chosen did not count."""
    told = allocator_api.QueryUsageResponse(rows=[allocator_api.UsageRow(user="ann")])
    query = AsyncMock(return_value=told)
    actions = Mock(ask=lambda act: act(Mock(usage=Mock(QueryUsage=query))), signed_out=False)
    with opened(monkeypatch) as page:
        usage.usage_page(DashboardSite(Facts(), Mock(), "", lambda: actions, Mock()))
        *_, until = [one for one in page.elements.values() if isinstance(one, ui.input)]
        [table] = [one for one in page.elements.values() if isinstance(one, ui.table)]
        until.value = "9999-12-31"
        await eventually(lambda: [row["whose"] for row in table.rows] == ["ann"])
        await eventually(lambda: query.call_args.args[0].until.ToJsonString() == "9999-12-31T23:59:59Z")
        assert query.call_args.args[0].since.ToDatetime(UTC) < datetime.now(UTC), (
            "of what was, not of what will be"
        )
        until.value = "2020-01-31"
        await eventually(lambda: query.call_args.args[0].since.ToJsonString() == "2020-01-01T00:00:00Z")
