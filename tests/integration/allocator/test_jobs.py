"""Jobs: what supervisors report is kept with the reservation, through restarts and in the archive."""

from datetime import timedelta
from pathlib import Path

import pytest

from gpuscale.allocator.domain.jobs import JobMember, JobState, ReservedJob
from gpuscale.allocator.state import archive
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import seconds, to_duration, to_timestamp
from tests.support.allocator import Client, Reservation, reserve_request, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually

TRAIN = api.Job(title="train", command="python train.py --token '***'", user="ann")
STATES = api.Job.State


async def report(client: Client, one: Reservation, **known: object) -> Reservation:
    request = api.RenewReservationRequest(
        name=one.name, fence=one.fence, member=api.JobMember(node="nodes/n0", **known)
    )
    with rpc_errors():
        return (await client.stub.RenewReservation(request, timeout=60)).reservation


def fleet() -> FakeFleet:
    return FakeFleet(node_message("n0", count=8))


async def test_what_is_reported_of_a_job_outlives_the_allocator_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    start, end = (to_timestamp(clock.wall() + timedelta(seconds=one)) for one in (1, 9))
    async with running(tmp_path, fleet(), clock=clock) as client:
        held = await client.reserve(2, member_count=2, job=TRAIN)
        assert (held.job.state, held.job.title) == (STATES.STATE_STARTING, "train")
        await report(client, held, member=1, pid=7, start_time=start)
        known = await report(client, held, member=0, pid=6, start_time=start)
        assert known.job.state == STATES.STATE_RUNNING
        await report(client, held, member=0, pid=6, start_time=start, end_time=end, exit_code=3)
    async with running(tmp_path, fleet(), clock=clock) as client:
        job = (await client.get(held.name)).job
        assert (job.state, [one.pid for one in job.members]) == (STATES.STATE_RUNNING, [6, 7])
        await report(client, held, member=1, end_time=end, exit_code=143, end_reason="member 0 failed")
        ended = await client.release(held)
        assert (ended.job.state, ended.job.exit_code) == (STATES.STATE_FAILED, 3)
        assert (ended.end_reason, ended.job.command) == ("", TRAIN.command)
    monkeypatch.setattr(archive, "IN_MEMORY", 0)
    async with running(tmp_path, fleet(), clock=clock) as client:
        await eventually(
            lambda: client.page(show_ended=True), lambda page: page.reservations[0].job == ended.job
        )


async def test_a_renewal_that_comes_after_the_end_of_a_member_does_not_make_it_run_again(
    tmp_path: Path,
) -> None:
    """As one that waited at an agent while the allocator was away, and whose supervisor had asked another way since."""
    clock = ManualClock()
    start, end = (to_timestamp(clock.wall() + timedelta(seconds=one)) for one in (1, 9))
    async with running(tmp_path, fleet(), clock=clock) as client:
        held = await client.reserve(job=TRAIN)
        await report(client, held, pid=6, start_time=start, end_time=end, exit_code=3)
        late = await report(client, held, pid=6, start_time=start)
        assert (late.job.state, late.job.exit_code) == (STATES.STATE_FAILED, 3)


async def test_a_member_that_falls_silent_is_taken_for_lost_until_it_speaks(tmp_path: Path) -> None:
    clock = ManualClock()
    start = to_timestamp(clock.wall())
    async with running(tmp_path, fleet(), clock=clock) as client:
        held = await client.reserve(2, member_count=3, job=TRAIN, ttl=20)
        await report(client, held, member=0, pid=6, start_time=start)
        clock.advance(15)
        known = await report(client, held, member=1, pid=7, start_time=start, last_lines=["step 4"])
        assert [one.end_reason for one in known.job.members] == ["", "", ""]
    async with running(tmp_path, fleet(), clock=clock) as client:
        clock.advance(15)
        known = await report(client, held, member=1, pid=7, start_time=start, last_lines=["step 5"])
        silent = "nothing was heard of it for 20 s"
        assert [one.end_reason for one in known.job.members] == [silent, "", silent]
        assert known.job.state == STATES.STATE_RUNNING
        known = await report(client, held, member=0, pid=6, start_time=start)
        assert [one.end_reason for one in known.job.members] == ["", "", silent]
        clock.advance(21)
        await eventually(lambda: client.get(held.name), lambda found: found.job.state == STATES.STATE_LOST)
        assert (await client.get(held.name)).job.members[1].last_lines == ["step 5"]


async def test_watchers_are_told_what_is_reported(tmp_path: Path) -> None:
    async with running(tmp_path, fleet()) as client:
        held = await client.reserve(job=TRAIN)
        stream = client.stub.WatchReservations(api.WatchReservationsRequest(), timeout=20)
        assert (await anext(aiter(stream))).reservations[0].job.state == STATES.STATE_STARTING
        await report(client, held, member=0, start_time=held.create_time)
        assert (await anext(aiter(stream))).reservations[0].job.state == STATES.STATE_RUNNING


@pytest.mark.parametrize("job", [None, TRAIN], ids=["no job", "one member"])
async def test_a_member_that_is_not_there_is_refused(tmp_path: Path, job: api.Job | None) -> None:
    async with running(tmp_path, fleet()) as client:
        held = await client.reserve(job=job)
        with pytest.raises(InvalidArgumentError, match="has no job with a member 1") as refused:
            await report(client, held, member=1)
        assert refused.value.violations[0].field == "member"


@pytest.mark.parametrize(
    ("ends", "code", "state"),
    [
        ([(0, ""), (0, "")], 0, JobState.SUCCEEDED),
        ([(0, ""), (2, "")], 2, JobState.FAILED),
        ([(1, "stopped"), (5, "")], 5, JobState.FAILED),
        ([(143, "stopped"), (0, "")], 143, JobState.STOPPED),
        ([(0, "stopped"), (0, "stopped")], 0, JobState.STOPPED),
    ],
)
def test_the_exit_code_is_that_of_the_member_that_failed_by_itself(
    ends: list[tuple[int, str]], code: int, state: JobState
) -> None:
    at = ManualClock().wall()
    job = ReservedJob("", "sleep 9")
    for number, (one, why) in enumerate(ends):
        job = job.with_member(JobMember(number, "nodes/n0", 1, at, at, one, why), {}, 1.0, 60.0)
    assert (job.exit_code(2), job.state(2, live=True, lost=False)) == (code, state)
    assert job.exit_code(3) is None


def keeping(**fields: object) -> api.ReserveRequest:
    return reserve_request(8, **({"wait": to_duration(600), "job": TRAIN, "keep_place": True} | fields))


async def test_a_place_that_is_kept_outlives_caller_and_allocator_and_is_granted_once(tmp_path: Path) -> None:
    clock = ManualClock()
    request = keeping(ttl=60)
    async with running(tmp_path, fleet(), clock=clock) as client:
        held = await client.reserve(8)
        placed = await client.stub.Reserve(request)
        first = placed.reservation
        assert (first.state, list(first.gpus)) == (api.Reservation.STATE_WAITING, [])
        await client.stub.Reserve(keeping())
        await client.renew(held, ttl=3600)
    async with running(tmp_path, fleet(), clock=clock) as client:
        assert (await client.stub.Reserve(request)).reservation.name == first.name
        clock.advance(300)
        known = (await client.renew(first)).job
        assert (known.state, (await client.get(first.name)).job.queue_position) == (STATES.STATE_WAITING, 0)
        assert [one.job.queue_position for one in (await client.page()).reservations[1:]] == [0, 1]
        waits = await client.get(first.name)
        assert ("GPU" in waits.job.queue_reason, waits.asked_gpu_count) == (True, 8)
        await client.release(held)
        granted = await eventually(
            lambda: client.renew(first), lambda renewed: renewed if renewed.gpus else None
        )
        assert (granted.job.state, len(granted.gpus)) == (STATES.STATE_STARTING, 8)
        assert granted.grant_time.seconds - granted.create_time.seconds == 300
        assert granted.fence > first.fence
        assert seconds(granted.ttl) == 60
        assert (await client.stub.Reserve(request)).lease_token == placed.lease_token
        with pytest.raises(FailedPreconditionError, match="fence"):
            await client.release(first)
    async with running(tmp_path, fleet(), clock=clock) as client:
        with pytest.raises(ResourceExhaustedError):
            await client.reserve(1)
        ended = await client.release(granted)
        assert (ended.job.state, ended.grant_time) == (STATES.STATE_STOPPED, granted.grant_time)

        async def other_has_gpus() -> bool:
            [other] = (await client.page()).reservations
            return (other.state, len(other.gpus)) == (api.Reservation.STATE_ACTIVE, 8)

        await eventually(other_has_gpus)


async def test_a_place_goes_with_its_wait_or_its_release_and_is_refused_without_either(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, fleet(), clock=clock) as client:
        held = await client.reserve(8, ttl=3600)
        first = (await client.stub.Reserve(keeping())).reservation
        assert (await client.release(first)).job.state == STATES.STATE_STOPPED
        late = (await client.stub.Reserve(keeping(wait=to_duration(5)))).reservation
        clock.advance(6)
        await eventually(
            lambda: client.get(late.name), lambda found: found.end_reason == "it was not served in time"
        )
        assert (await client.get(late.name)).job.state == STATES.STATE_STOPPED
        await client.release(held)
        assert (await client.page()).reservations == []
        for lacking in ({"wait": None}, {"job": None}):
            with pytest.raises(InvalidArgumentError, match="keep_place"), rpc_errors():
                await client.stub.Reserve(keeping(**lacking))
