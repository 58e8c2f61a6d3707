"""A fleet that is killed: agents come back by themselves, and recordings go on where they were."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import RunningFleet
from tests.support.ports import free_port
from tests.support.waiting import eventually

ONLINE = api.NodeState.NODE_STATE_ONLINE


class Programs:
    """A fleet with a data directory, and perhaps an agent that streams to it."""

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self._fleet = self.fleet()

    def agent(self) -> None:
        """Start an agent that streams to it."""
        self._start(
            *("agent", "--listen", "127.0.0.1:0", "--node", "alpha", "--source", "simulated"),
            *("--period-seconds", "0.25", "--fleet-address", self.address),
        )

    def fleet(self) -> subprocess.Popen[bytes]:
        """Start the fleet."""
        self._fleet = self._start("fleet", "--listen", self.address, "--data-dir", str(self.folder))
        return self._fleet

    def kill_fleet(self) -> None:
        self._fleet.kill()
        self._fleet.wait()

    def end(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()

    def _start(self, program: str, *flags: str) -> subprocess.Popen[bytes]:
        code = f"import sys; from gpuscale.monitor.app.{program} import main; sys.exit(main())"
        process = subprocess.Popen([sys.executable, "-c", code, *flags], stderr=subprocess.DEVNULL)
        self._all.append(process)
        return process


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    found = Programs(tmp_path / "fleet")
    yield found
    found.end()


async def test_recordings_survive_a_killed_fleet(programs: Programs) -> None:
    """One that ended is the same to the last figure; one that runs goes on; a deleted one stays away."""
    programs.agent()
    async with open_channel(programs.address) as channel:
        stub, running = (api.RecordingServiceStub(channel), RunningFleet.over(programs.address, channel))

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
        programs.kill_fleet()
        programs.fleet()
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
