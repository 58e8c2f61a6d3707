"""What is told of reservations and policies, to which targets, and to which addresses nothing is sent."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from gpuscale.allocator.domain import notifications
from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.usecases.notifying import Notifying
from tests.support.allocator_values import NOW, WALL, gpu, node, order, plain_node, reserved

JOB = ReservedJob("train", "python train.py")
_LEDGER = Ledger(new_id=lambda _: "r1")
HELD = _LEDGER.confirm(
    _LEDGER.grant(replace(order(), holder="ann", job=JOB), [reserved("GPU-1")], now=NOW, wall=WALL)
)
ENDED = JobMember(0, "n0", started=WALL, ended=WALL, exit_code=3)


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("100.64.0.1", False),  # of carriers
        ("169.254.169.254", False),  # metadata of clouds
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("192.168.7.1", True),  # allowed here
        ("::ffff:192.168.7.1", True),
    ],
)
def test_only_public_and_allowed_addresses_are_sent_to(address: str, sent: bool) -> None:
    assert notifications.permitted(address, notifications.networks(["192.168.7.0/24"])) is sent


def test_each_change_is_told_once() -> None:
    leaving = replace(HELD, revoke_at=NOW + 600, end_reason="policy idle: idle for 2 h")
    (ending,) = notifications.of_change(HELD, leaving, NOW, WALL)
    assert (ending.kind, ending.holder) == (notifications.EventKind.ENDING, "ann")
    assert "reservations/r1 of ann (train) will be revoked in 10 min: policy idle" in ending.text
    assert notifications.of_change(leaving, replace(leaving, deadline=NOW + 900), NOW, WALL) == []
    job = replace(JOB, members=(ENDED,))
    (ended,) = notifications.of_change(HELD, replace(HELD, job=job), NOW, WALL)
    assert (ended.kind, ended.exit_code) == (notifications.EventKind.JOB_ENDED, 3)
    assert notifications.of_change(replace(HELD, job=job), replace(HELD, job=job), NOW, WALL) == []
    over = replace(HELD, state=State.RELEASED)
    assert notifications.of_change(None, over, NOW, WALL) == []
    assert [
        one.kind for one in notifications.of_change(None, replace(over, state=State.LOST), NOW, WALL)
    ] == [notifications.EventKind.LOST]


def test_a_target_is_told_of_what_it_wants() -> None:
    event = notifications.NotifiedEvent(
        notifications.EventKind.POLICY, "reservations/r1", "text", WALL, holder="ann", policy="idle"
    )
    assert notifications.Webhook("u").wants(event)
    assert notifications.Webhook("u", holders=frozenset({"ann"}), policies=frozenset({"idle"})).wants(event)
    assert not notifications.Webhook("u", kinds=frozenset({notifications.EventKind.LOST})).wants(event)
    assert not notifications.Webhook("u", holders=frozenset({"bob"})).wants(event)
    assert not notifications.Webhook("u", policies=frozenset({"long"})).wants(event)
    assert "secret" not in repr(notifications.Webhook("https://chat/secret", "secret"))


async def test_a_look_at_the_nodes_costs_what_is_wrong_there_and_not_what_is_there() -> None:
    store, clock = AsyncMock(), SimpleNamespace(now=lambda: NOW, wall=lambda: WALL)
    notifying = Notifying(Mock(specs=list), store, cast("Any", clock), ())
    sick, name = gpu("GPU-sick", quarantine="XID 48"), "nodes/n1/gpus/gpu-sick"
    notifying._told = {name}  # in the life before, and it ended meanwhile; another ends before anybody looks
    for quarantines in ([""], ["XID 48"], [""], ["XID 48", ""]):
        for one in quarantines:
            notifying.seen([plain_node("n0", 1000), node("n1", replace(sick, quarantine=one))])
        assert list(notifying._bad) == [name]
        await notifying._tell_of_nodes()
    over = [], [name]
    assert [call.args[1:] for call in store.post.mock_calls] == [over, ([name], []), over]
