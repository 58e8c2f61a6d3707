"""Which address a call goes to, and when it is made again."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_sync_channel, split_addresses
from gpuscale.common.rpc.status import to_rpc_status
from gpuscale.common.rpc.wrapped_channel import LONGEST_CALL, PATIENCE, Leader, Trail, following

NEVER_SENT = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


def answered(error: errors.GpuscaleError) -> grpc.aio.AioRpcError:
    """A failed call that a server of ours answered."""
    status = to_rpc_status(error)
    trailing = grpc.aio.Metadata(*status.trailing_metadata)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), trailing, details=status.details)


def of_grpc(error: errors.GpuscaleError) -> grpc.aio.AioRpcError:
    """A failed call that gRPC itself ended."""
    status = to_rpc_status(error)
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=status.details)


def not_leader(leader: str = "") -> grpc.aio.AioRpcError:
    return answered(
        errors.UnavailableError("x", reason="NOT_LEADER", metadata={"leader": leader} if leader else {})
    )


def trail(leader: Leader, *, again: bool = True, timeout: float | None = 60.0) -> Trail:
    return Trail(leader, timeout, again=again)


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("a:1", ("a:1",)),
        ("a:1,b:2", ("a:1", "b:2")),
        (" a:1 , [::1]:2 ", ("a:1", "[::1]:2")),
        *((one, (one,)) for one in ("[::1]:7070", "unix:/run/x.sock", "unix-abstract:x", "dns:///a:1")),
        (f"unix:/{'x' * 106}", (f"unix:/{'x' * 106}",)),
    ],
)
def test_addresses_stand_between_commas(text: str, addresses: tuple[str, ...]) -> None:
    assert split_addresses(text) == addresses


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1", "has no port: write HOST:PORT, such as 127.0.0.1:7070"),
        ("gateway", "has no port: write HOST:PORT, such as gateway:7070"),
        ("[::1]", "has no port: write HOST:PORT, such as [::1]:7070"),
        (":99999", "has the port '99999': a port is a number from 1 to 65535"),
        ("gateway:0", "has the port '0'"),
        ("gateway:http", "has the port 'http'"),
        (":7070", "has no host: write HOST:PORT, such as 127.0.0.1:7070"),
        ("::1:7070", "is ambiguous: write an IPv6 address in brackets"),
        ("http://gateway:7070/", "has http:// before it: write gateway:7070"),
        ("a:1,b", "the address 'b' has no port"),
        (f"unix:/{'x' * 107}", "has 108 bytes: the path of a unix socket has at most 107"),
        (f"unix:///{'x' * 107}", "has 108 bytes"),
        *((several, "must name different addresses") for several in ("a:1,", ",a:1", "a:1,,b:2", "a:1,a:1")),
    ],
)
def test_what_is_wrong_with_an_address_is_said(address: str, says: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        open_sync_channel(address)
    assert says in caught.value.message


def test_a_standby_that_knows_the_leader_is_believed() -> None:
    leader = Leader(["a", "b", "c"])
    call = trail(leader)
    assert call.after(not_leader("c")) == 0.0
    assert (call.index, leader.index) == (2, 2)


@pytest.mark.parametrize("hint", ["", "elsewhere:1", "a"])
def test_without_a_leader_that_is_one_of_ours_the_next_is_asked(hint: str) -> None:
    leader = Leader(["a", "b", "c"])
    assert trail(leader).after(not_leader(hint)) == 0.0
    assert leader.index == 1


def test_calls_that_fail_together_move_on_by_one_address() -> None:
    leader = Leader(["a", "b", "c"])
    together = [trail(leader) for _ in range(5)]
    for call in together:
        assert call.after(not_leader()) == 0.0
    assert leader.index == 1
    assert {call.index for call in together} == {1}


def test_a_late_failure_at_an_address_that_was_left_changes_nothing() -> None:
    leader = Leader(["a", "b", "c"])
    late = trail(leader)
    assert trail(leader).after(not_leader("c")) == 0.0
    assert late.after(not_leader()) == 0.0
    assert (leader.index, late.index) == (2, 2)


def test_when_every_address_has_refused_there_is_a_pause() -> None:
    """As long as no standby has taken over, nobody is asked over and over without one."""
    call = trail(Leader(["a", "b"]))
    pauses = [call.after(not_leader()) for _ in range(6)]
    assert [pause for pause in pauses[::2] if pause] == []
    assert all(pause is not None and 0 <= pause <= 1.0 for pause in pauses)
    assert any(pauses[1::2])


@pytest.mark.parametrize(("timeout", "again"), [(0.4, False), (60.0, True)])
def test_no_round_begins_that_its_deadline_would_cut_short(timeout: float, again: bool) -> None:
    """All of them refused; the answer would be that the time is over, and not that nothing listens."""
    call = trail(Leader(["a", "b"]), timeout=timeout)
    assert call.after(of_grpc(errors.UnavailableError(NEVER_SENT))) == 0.0, (
        "the other one is asked, however late"
    )
    assert (call.after(of_grpc(errors.UnavailableError(NEVER_SENT))) is not None) == again


def test_a_connection_that_was_never_made_is_no_execution() -> None:
    leader = Leader(["a", "b"])
    assert trail(leader).after(of_grpc(errors.UnavailableError(NEVER_SENT))) == 0.0
    assert leader.index == 1


@pytest.mark.parametrize(
    "error",
    [
        of_grpc(errors.UnavailableError("Socket closed")),
        of_grpc(errors.UnavailableError("recvmsg:Connection reset by peer")),
        of_grpc(errors.DeadlineExceededError("Deadline Exceeded")),
        answered(errors.UnavailableError("stopping", reason="SHUTTING_DOWN")),
        answered(errors.UnavailableError("led until now", reason="LEAD_LOST")),
        answered(errors.UnavailableError(NEVER_SENT)),
    ],
    ids=["closed", "reset", "deadline", "stopping", "lead lost", "upstream of the server"],
)
def test_a_call_that_may_have_been_done_is_not_repeated_but_later_ones_go_elsewhere(
    error: grpc.aio.AioRpcError,
) -> None:
    leader = Leader(["a", "b"])
    assert trail(leader).after(error) is None
    assert leader.index == 1


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFoundError("x"),
        errors.UnavailableError("x", reason="STATE_UNAVAILABLE"),
        errors.UnavailableError("x", reason="UPSTREAM_UNAVAILABLE"),
        errors.DeadlineExceededError("x", reason="NO_ACKNOWLEDGEMENT"),
    ],
    ids=lambda error: error.reason,
)
def test_an_answer_of_the_leader_is_an_answer(error: errors.GpuscaleError) -> None:
    leader = Leader(["a", "b"])
    assert trail(leader).after(answered(error)) is None
    assert leader.index == 0


def test_a_stream_of_requests_is_not_repeated_but_moves_later_calls() -> None:
    leader = Leader(["a", "b"])
    assert trail(leader, again=False).after(not_leader()) is None
    assert leader.index == 1


def test_a_stream_that_has_begun_is_not_repeated() -> None:
    leader = Leader(["a", "b"])
    call = trail(leader)
    call.began()
    assert call.after(not_leader()) is None
    assert leader.index == 1


def test_no_call_outlives_its_deadline() -> None:
    call = trail(Leader(["a", "b"]), timeout=0.0)
    assert call.timeout == 0.0
    assert call.after(not_leader()) is None


@pytest.mark.parametrize("timeout", [None, 3600.0])
def test_a_call_without_a_near_deadline_gives_up_too(
    monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    call = trail(Leader(["a", "b"]), timeout=timeout)
    assert (call.timeout is None) == (timeout is None)
    assert call.after(not_leader()) == 0.0
    later = time.monotonic() + PATIENCE
    monkeypatch.setattr("gpuscale.common.rpc.wrapped_channel.time.monotonic", lambda: later)
    assert call.after(not_leader()) is None


TOO_MANY = of_grpc(errors.UnavailableError("Too many pings"))


@pytest.mark.parametrize(
    ("error", "later", "calm"),
    [
        (TOO_MANY, LONGEST_CALL - 1, True),
        (TOO_MANY, LONGEST_CALL + 1, False),
        (of_grpc(errors.UnavailableError("Socket closed")), 1.0, True),
        (answered(errors.UnavailableError("stopping", reason="SHUTTING_DOWN")), 1.0, False),
        (not_leader("b"), 1.0, False),
    ],
    ids=["soon", "an hour later", "closed", "stopping", "standing by"],
)
def test_an_address_is_pinged_less_often_until_a_later_release_may_be_there(
    monkeypatch: pytest.MonkeyPatch, error: grpc.aio.AioRpcError, later: float, calm: bool
) -> None:
    leader, now = Leader(["a", "b"]), time.monotonic()
    for one in (TOO_MANY, error):
        leader.index = 0
        trail(leader).after(one)
    then = now + later
    monkeypatch.setattr("gpuscale.common.rpc.wrapped_channel.time.monotonic", lambda: then)
    assert (leader.is_calm(0), leader.is_calm(1)) == (calm, False)


class Silent:
    """A channel whose server never answers, or fails each call; `called` has the names of those that were called."""

    def __init__(self, name: str, called: list[str], error: grpc.RpcError | None = None) -> None:
        self._name = name
        self._called = called
        self._error = error

    def unary_unary(self, *_: object, **__: object) -> Callable[..., asyncio.Future[bytes]]:
        def call(*_: object, **__: object) -> asyncio.Future[bytes]:
            self._called.append(self._name)
            made = asyncio.get_running_loop().create_future()
            if self._error is not None:
                made.set_exception(self._error)
            return made

        return call

    async def close(self, _grace: float) -> None: ...


@pytest.mark.parametrize(("timeout", "next_one"), [(0.0, "b"), (60.0, "a"), (None, "a")])
async def test_an_address_that_was_silent_until_the_caller_gave_up_is_left(
    timeout: float | None, next_one: str
) -> None:
    """The caller of a gateway gives up at the deadline that the gateway's own call has too, and mostly comes first."""
    called = list[str]()

    def open_one(address: str, **_: object) -> Any:
        return Silent(address[0], called)

    method = following(("a:1", "b:1"), open_one).unary_unary("/x")
    for _ in range(2):
        call = asyncio.ensure_future(method(b"", timeout=timeout))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert called == ["a", next_one]


async def test_a_channel_with_fewer_pings_that_cannot_be_opened_is_tried_again_by_the_next_call() -> None:
    opened, called = list[str](), list[str]()

    def open_one(address: str, *, follows: bool) -> Any:
        opened.append(f"{address[0]} {follows}")
        if len(opened) == 3:
            raise errors.FailedPreconditionError("the certificate is being replaced", reason="TLS_FILES")
        return Silent(opened[-1], called, TOO_MANY)

    method = following(("a:1", "b:1"), open_one).unary_unary("/x")
    for error in (grpc.RpcError, grpc.RpcError, errors.FailedPreconditionError, grpc.RpcError):
        with pytest.raises(error):
            await method(b"")
    assert called == ["a True", "b True", "a False"]
