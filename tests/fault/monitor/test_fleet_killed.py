"""A fleet that is killed: agents come back by themselves, and recordings go on where they were."""

from pathlib import Path

from gpuscale.api.monitor import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import RunningFleet
from tests.support.ports import free_port
from tests.support.program import Program
from tests.support.waiting import eventually

ONLINE = api.NodeState.NODE_STATE_ONLINE


async def test_recordings_survive_a_killed_fleet(tmp_path: Path) -> None:
    """One that ended is the same to the last figure; one that runs goes on; a deleted one stays away."""
    address = f"127.0.0.1:{free_port()}"
    with_data = ("--listen", address, "--data-dir", str(tmp_path / "fleet"))
    own = ("--listen", "127.0.0.1:0", "--node", "alpha", "--source", "simulated", "--fleet-address", address)
    async with (
        Program("gpuscale.monitor.app.fleet", *with_data, environment={}) as fleet,
        Program("gpuscale.monitor.app.agent", *own, "--period-seconds", "0.25", environment={}) as agent,
        open_channel(address) as channel,
    ):
        await fleet.start()
        await agent.start()
        stub, running = api.RecordingServiceStub(channel), RunningFleet.over(address, channel)

        async def begin(key: str) -> api.Recording:
            request = api.StartRecordingRequest(
                recording_id=key,
                request_id=f"00000000-0000-4000-8000-{key:0>12}",
                names=["nodes/alpha"],
                interval=to_duration(0.25),
            )
            return (await stub.StartRecording(request, timeout=20)).recording

        async def sampled(key: str, above: int) -> api.Recording | None:
            request = api.GetRecordingRequest(name=f"recordings/{key}")
            found = (await stub.GetRecording(request, timeout=20)).recording
            return found if found.sample_count > above else None

        await running.until_up()
        await running.until("alpha", ONLINE)
        for key in ("1", "2", "3"):
            await begin(key)
        await eventually(lambda: sampled("1", 2), timeout=60)
        ended = (
            await stub.StopRecording(api.StopRecordingRequest(name="recordings/1"), timeout=20)
        ).recording
        await stub.DeleteRecording(api.DeleteRecordingRequest(name="recordings/3"), timeout=20)
        await fleet.kill()
        await fleet.start()
        await running.until_up()
        listed = await stub.ListRecordings(api.ListRecordingsRequest(), timeout=20)
        assert [one.name for one in listed.recordings] == ["recordings/1", "recordings/2"]
        again = listed.recordings[0]
        assert (again.gpus, again.state) == (ended.gpus, ended.state)
        assert abs(seconds(again.duration) - seconds(ended.duration)) < 1e-3
        before = listed.recordings[1].sample_count
        assert listed.recordings[1].state == api.Recording.STATE_RUNNING
        await running.until("alpha", ONLINE)
        assert await eventually(lambda: sampled("2", before + 2), timeout=60)
        assert (await begin("2")).sample_count > before, "the same request begins nothing new"
