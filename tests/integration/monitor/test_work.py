"""AdmitWork over real gRPC: the fence on disk before the answer, and only what the host has. Whose processes are: test_truth_of_use.py."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import FAILPOINTS
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.agent.work import FILE_NAME, AdmissionFile
from gpuscale.monitor.model import readings
from gpuscale.monitor.model.admission import Admissions
from tests.support.clock import WALL_START
from tests.support.monitor import FakeGpus, collected, confirming_allocator, serving_agent
from tests.support.monitor_values import identity

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.work_service_pb2_grpc import WorkServiceAsyncStub

FIRST, SECOND = simulated_uuid("alpha", 0), simulated_uuid("alpha", 1)


@asynccontextmanager
async def work(state_dir: Path | None) -> AsyncGenerator["WorkServiceAsyncStub", None]:
    """The service of an agent with two simulated GPUs that keeps its fences there."""
    async with (
        confirming_allocator() as allocator,
        serving_agent(state_dir=state_dir, simulated_gpu_count=2, allocator=allocator) as address,
        open_channel(address) as channel,
    ):
        agent: AgentServiceAsyncStub = monitor_api.AgentServiceStub(channel)
        await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=30)
        yield monitor_api.WorkServiceStub(channel)


async def admit(service: "WorkServiceAsyncStub", fence: int, *uuids: str, pid: int | None = None) -> None:
    request = monitor_api.AdmitWorkRequest(
        gpu_uuids=uuids, fence=fence, reservation=f"reservations/r{fence}", pid=pid
    )
    with rpc_errors():
        await service.AdmitWork(request, timeout=30)


async def refused(
    service: "WorkServiceAsyncStub", fence: int, *uuids: str, pid: int | None = None
) -> GpuscaleError:
    with pytest.raises(GpuscaleError) as error:
        await admit(service, fence, *uuids, pid=pid)
    return error.value


async def test_a_lower_fence_is_refused_and_says_the_highest_also_where_none_is_kept() -> None:
    async with work(None) as service:
        await admit(service, 7, FIRST, SECOND)
        await admit(service, 7, FIRST)
        await admit(service, 9, FIRST)
        error = await refused(service, 6, SECOND)
        assert (error.reason, error.metadata["highest_fence"]) == ("FENCE_TOO_LOW", "7")
        assert "if the allocator lost its state, set its fences_above to 9 or more" in error.message
        await admit(service, 8, SECOND)


async def test_fences_outlast_the_agent_which_shares_their_directory_with_no_other(tmp_path: Path) -> None:
    async with work(tmp_path) as service:
        await admit(service, 7, FIRST)
        with pytest.raises(FailedPreconditionError) as failed:
            async with work(tmp_path):
                pass
    assert failed.value.reason == "DIRECTORY_LOCKED"
    async with work(tmp_path) as service:
        assert (await refused(service, 6, FIRST)).reason == "FENCE_TOO_LOW"
        await admit(service, 1, SECOND)


async def test_what_the_host_does_not_have_cannot_be_admitted(tmp_path: Path) -> None:
    async with work(tmp_path) as service:
        assert (await refused(service, 1, "GPU-of-another-host")).reason == "NOT_FOUND"
        assert (await refused(service, 1, FIRST, pid=4_194_304)).reason == "PROCESS_GONE"
        await admit(service, 1, FIRST, pid=os.getpid())


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"version": 2, "fen',
        '{"version": 2, "boot_id": "boot", "fences": {"a": 3}, "workers": [5]}',
        '{"version": 2, "boot_id": "boot", "fences": [], "workers": []}',
        '{"version": 2, "boot_id": "boot", "fences": {"a": null}, "workers": []}',
        '{"version": 2, "boot_id": "boot", "fences": {}, "workers": [{"pid": 1, "started": 2, "fence": 3, "gpus": []}]}',
        '{"version": 3, "boot_id": "boot", "fences": {}, "workers": []}',
    ],
)
def test_a_torn_file_and_one_of_another_form_are_not_taken_for_one_without_fences(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(FailedPreconditionError) as failed:
        AdmissionFile(tmp_path, "boot").load()
    assert failed.value.reason == "STATE_UNREADABLE"
    assert (tmp_path / FILE_NAME).read_text() == text


async def test_what_cannot_be_written_is_not_admitted(tmp_path: Path) -> None:
    async with work(tmp_path) as service:
        await admit(service, 7, FIRST)
        draft = (tmp_path / FILE_NAME).with_suffix(".new")
        draft.unlink()
        draft.mkdir()
        assert (await refused(service, 9, FIRST)).reason == "STATE_UNAVAILABLE"
        draft.rmdir()
        await admit(service, 8, FIRST)
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_processes_of_an_earlier_boot_are_forgotten_and_fences_are_not(tmp_path: Path) -> None:
    AdmissionFile(tmp_path, "boot 1").save(Admissions({"a": 3}))
    assert AdmissionFile(tmp_path, "boot 2").load() == Admissions({"a": 3})


async def test_a_quarantine_is_shown_on_its_gpu_alone() -> None:
    quarantine = readings.Quarantine("XID 79", WALL_START)
    first, second = (await collected(FakeGpus(), {identity(1).uuid.lower(): quarantine})).gpus
    assert (first.quarantine, second.quarantine) == (None, quarantine)


@pytest.mark.parametrize("moment", ["before_write", "after_write"])
async def test_an_agent_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path, moment: str) -> None:
    """Admitted before: still there. Killed after the write and before the answer: admitted, which is the safe side."""
    script = (
        "from pathlib import Path; from gpuscale.monitor.model.admission import Admissions;"
        "from gpuscale.monitor.agent.work import AdmissionFile;"
        f"AdmissionFile(Path({str(tmp_path)!r}), 'boot').save(Admissions({{'a': 9}}))"
    )
    AdmissionFile(tmp_path, "boot").save(Admissions({"a": 3}))
    environment = {**os.environ, FAILPOINTS: f"agent.admit.{moment}=kill"}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, env=environment)
    async with asyncio.timeout(60.0):
        assert await process.wait() == -9
    found = AdmissionFile(tmp_path, "boot").load()
    assert found == Admissions({"a": 3 if moment == "before_write" else 9})
