"""kill -9 at the worst moments: what was acknowledged is kept, what was not is whole or gone, and repeats are safe."""

import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import to_duration, to_timestamp
from tests.support.allocator import Reservation
from tests.support.allocator_process import Site, site
from tests.support.fake_fleet import NodeState, gpu_message, node_message
from tests.support.waiting import eventually
from tests.support.webhook import Hook, webhook

LONG = 600.0
"""Seconds of leases that outlast all lives."""


async def test_a_grant_that_a_crash_interrupted_is_whole_or_gone_and_made_once(tmp_path: Path) -> None:
    """One life after the other dies inside a grant; the last one answers all the requests again."""
    survives = {
        "allocator.reserve.before_commit": False,
        "allocator.store.before_commit": False,
        "allocator.store.after_commit": True,
        "allocator.reserve.before_reply": True,
    }
    requests: dict[str, str] = {}
    async with site(tmp_path, gpus=8) as place:
        # The first sight of the node is a write too, so a life without failpoints comes first.
        life, successor = await place.start(), place.prepare(f"{next(iter(survives))}=kill")
        await life.kill()
        for point, following in pairwise([*survives, ""]):
            await place.go(successor)
            requests[point] = str(uuid4())
            successor, dying = place.prepare(f"{following}=kill" if following else ""), successor
            with pytest.raises(UnavailableError):
                await place.client.reserve(2, request_id=requests[point], ttl=LONG)
            assert (await dying.ended())[0] == -9
        await place.go(successor)
        kept = {one.request_id: one for one in await place.client.live()}
        assert [point for point, request in requests.items() if request in kept] == [
            point for point, survived in survives.items() if survived
        ]
        assert all(len(one.gpus) == 2 for one in kept.values())
        for request_id in requests.values():
            again = await place.client.reserve(2, request_id=request_id, ttl=LONG)
            assert request_id not in kept or kept[request_id].name == again.name
        assert len(await place.client.live()) == 4


async def test_a_release_that_a_crash_interrupted_happened_or_did_not_and_may_be_repeated(
    tmp_path: Path,
) -> None:
    states = {
        "allocator.end.before_commit": Reservation.STATE_ACTIVE,
        "allocator.store.after_commit": Reservation.STATE_RELEASED,
    }
    async with site(tmp_path, gpus=8) as place:
        life, successor = await place.start(), place.prepare(f"{next(iter(states))}=kill")
        granted = [await place.client.reserve(4, ttl=LONG) for _ in states]
        await life.kill()
        for one, following in zip(granted, [*states, ""][1:], strict=True):
            await place.go(successor)
            successor, dying = place.prepare(f"{following}=kill" if following else ""), successor
            with pytest.raises(UnavailableError):
                await place.client.release(one)
            assert (await dying.ended())[0] == -9
        # Of a copy: whoever closes the file last writes the log into it, which is for the successor to do.
        copy = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copy"))
        with closing(sqlite3.connect(copy / "allocator.db")) as database:
            counted = database.execute(
                "SELECT DISTINCT reservation_id FROM usage WHERE outcome <> ''"
            ).fetchall()
        assert [f"reservations/{one}" for [one] in counted] == [granted[1].name], (
            "used, in the same transaction"
        )
        assert (tmp_path / "allocator.db-wal").stat().st_size
        await place.go(successor)
        assert [(await place.client.get(one.name)).state for one in granted] == list(states.values())
        assert {(await place.client.release(one)).state for one in granted} == {Reservation.STATE_RELEASED}
        assert (await place.client.reserve(8)).fence > granted[1].fence


async def test_a_job_that_a_crash_interrupted_as_it_left_its_gpus_begins_anew_once(tmp_path: Path) -> None:
    """Before it is on disk it is as it was; after that it waits, holds nothing, and is granted GPUs in the next life."""
    async with site(tmp_path, gpus=2) as place:
        life, successor = await place.start(), place.prepare("allocator.change.before_commit=kill")
        made = await place.client.reserve(job=api.Job(command="train"), movable=to_duration(60), ttl=LONG)
        await life.kill()
        for following in ("allocator.restart.before_grant=kill", ""):
            await place.go(successor)
            successor, dying = place.prepare(following), successor
            with pytest.raises(UnavailableError):
                await left(place, made)
            assert (await dying.ended())[0] == -9
        await place.go(successor)
        await left(place, made)
        now = await eventually(
            lambda: place.client.get(made.name),
            lambda found: found if found.state == Reservation.STATE_ACTIVE else None,
        )
        assert (now.job.attempt, len(now.job.earlier), len(now.gpus)) == (2, 1, 1)
        assert now.fence > made.fence
        assert len((await place.client.reserve(1)).gpus) == 1, "the other GPU is free"
        await successor.kill()
        await place.start()
        assert (await place.client.get(made.name)).gpus == now.gpus


async def left(place: Site, made: Reservation) -> None:
    """Tell that the command of the first attempt has ended."""
    now = to_timestamp(datetime.now(UTC))
    member = api.JobMember(node="nodes/n0", pid=7, start_time=now, end_time=now, exit_code=0)
    request = api.RenewReservationRequest(name=made.name, fence=made.fence, member=member, ended_attempt=1)
    with rpc_errors():
        await place.client.stub.RenewReservation(request, timeout=60)


async def test_what_is_told_of_an_end_that_a_crash_followed_is_told_by_the_next_life(tmp_path: Path) -> None:
    async with webhook() as hook, site(tmp_path, gpus=1) as place:
        place.arguments += ["--notify-networks", "127.0.0.0/8"]
        life, dying = await place.start(), place.prepare("allocator.store.after_commit=kill")
        await tell(place, hook.address)
        one = await place.client.reserve(1, ttl=5)
        await life.kill()
        dying.go()  # it writes that the lease ran out, and tells nobody
        assert (await dying.ended())[0] == -9
        assert not hook.bodies
        await place.start()

        await eventually(lambda: told(hook, ("revoked", one.name)))


async def test_a_node_that_is_down_and_a_quarantine_are_told_once_though_a_crash_came_between(
    tmp_path: Path,
) -> None:
    gone = {"state": NodeState.NODE_STATE_OFFLINE, "count": 1}
    bad = gpu_message("n1-0")
    bad.quarantine = "XID 79"
    async with webhook() as hook, site(tmp_path, gpus=1, nodes=3) as place:
        place.arguments += ["--notify-networks", "127.0.0.0/8"]
        dying, successor = await place.start("allocator.notify.before_post=kill"), place.prepare()
        await tell(place, hook.address)
        place.fleet.put(node_message("n0", **gone), node_message("n1", bad))
        assert (await dying.ended())[0] == -9
        assert not hook.bodies
        await place.go(successor)
        first = ("node_down", "nodes/n0"), ("gpu_quarantined", "nodes/n1/gpus/n1-0")
        await eventually(lambda: told(hook, *first))
        await successor.kill()
        await place.start()
        place.fleet.put(node_message("n2", **gone))
        await eventually(lambda: told(hook, *first, ("node_down", "nodes/n2")))


async def tell(place: Site, address: str) -> None:
    target = api.NotificationTarget(name="targets/t", spec=api.NotificationTargetSpec(url=address))
    request = api.CreateNotificationTargetRequest(notification_target=target, request_id=str(uuid4()))
    await api.NotificationServiceStub(place.channel).CreateNotificationTarget(request, timeout=60)


async def told(hook: Hook, *events: tuple[str, str]) -> bool:
    """Whether these were told, and nothing else; a crash may repeat what was just told, by its id."""
    by_id = {event["id"]: (event["event"], event["subject"]) for event in hook.events}
    return sorted(by_id.values()) == sorted(events)
