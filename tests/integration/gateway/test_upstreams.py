"""The log of a gateway says that an upstream is away and that it is back, however many calls there are."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.forwarder import PERIOD, Forwarder, Lanes, Outage, Upstream
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.security.auth import Authenticator
from tests.integration.gateway.raw_service import FLEET, SERVER_STREAM, UNARY, RawService, ending
from tests.support.clock import ManualClock


class Log:
    """What was logged of outages: (event, calls that got no line)."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "gpuscale.common.rpc.forwarder")
        self._caplog = caplog

    def taken(self) -> list[tuple[str, int]]:
        found: list[Any] = [
            record.msg for record in self._caplog.records if record.name.endswith(".forwarder")
        ]
        self._caplog.clear()
        assert {one["upstream"] for one in found} <= {"fleet"}
        return [(one["event"], one["not_shown"]) for one in found]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


FAILED, BACK = "upstream failed", "upstream answers again"


def test_an_upstream_that_is_away_is_said_once_in_each_period(log: Log) -> None:
    clock = ManualClock()
    outage = Outage(clock.now)
    for _ in range(100):
        outage.failed("fleet", UNARY, "connection refused")
        clock.advance(PERIOD / 20)
    assert log.taken() == [(FAILED, 0), *[(FAILED, 19)] * 4]
    outage.answered()
    outage.answered()
    assert log.taken() == [(BACK, 19)]
    clock.advance(PERIOD)
    outage.failed("fleet", UNARY, "connection refused")
    assert log.taken() == [(FAILED, 0)], "of another outage"


def test_an_upstream_that_fails_now_and_then_gets_no_more_lines(log: Log) -> None:
    clock = ManualClock()
    outage = Outage(clock.now)
    for _ in range(100):
        outage.failed("fleet", UNARY, "connection reset")
        outage.answered()
        clock.advance(PERIOD / 20)
    assert log.taken() == [(FAILED, 0), (BACK, 0), *[(FAILED, 19), (BACK, 0)] * 4]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def through(clock: ManualClock) -> AsyncIterator[grpc.aio.Channel]:
    """A channel through a gateway to a service that does as each call says."""
    upstream, server = (Server(ServerOptions(), Authenticator()) for _ in range(2))
    upstream.add_generic(RawService(), [FLEET])
    address, front = upstream.bind(), server.bind()
    async with upstream, open_channel(address) as channel:
        fleet = Upstream("fleet", channel, Lanes(lambda: channel), private=True, outage=Outage(clock.now))
        server.add_generic(Forwarder({FLEET: fleet}), [FLEET])
        async with server, open_channel(front) as to_the_gateway:
            yield to_the_gateway


@pytest.mark.parametrize("answer", ["OK", "INVALID_ARGUMENT"])
@pytest.mark.parametrize(("path", "kind"), [(UNARY, "unary_unary"), (SERVER_STREAM, "unary_stream")])
async def test_calls_of_both_kinds_tell(
    through: grpc.aio.Channel, log: Log, clock: ManualClock, path: str, kind: str, answer: str
) -> None:
    """A refusal is an answer too."""
    unary = path == UNARY
    requests = {
        "OK": b"a" if unary else b"1 4",
        "INVALID_ARGUMENT": b"invalid" if unary else b"0 4 invalid",
        "UNAVAILABLE": b"closing" if unary else b"0 4 closing",
    }

    async def call(wanted: str) -> None:
        error = await ending(getattr(through, kind)(path)(requests[wanted], timeout=60))
        assert (error.code().name if error else "OK") == wanted

    await call(answer)
    assert log.taken() == []
    for _ in range(2):
        for _ in range(5):
            await call("UNAVAILABLE")
        assert log.taken() == [(FAILED, 0)]
        for _ in range(2):
            await call(answer)
        assert log.taken() == [(BACK, 4)]
        clock.advance(PERIOD)
