"""The Slurm adapter on a real Slurm: eight replicas up and down, one preempted, adopted, and a controller that dies."""

import re
from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import Engine, Finish, ReplicaOrder, Sighting, Start, WorkerLife
from gpuscale.autoscaler.adapters.engines.slurm.engine import SlurmSettings
from gpuscale.autoscaler.adapters.settings import Host
from gpuscale.common.runtime.tasks import SystemClock
from tests.support.autoscaler_app import Autoscaler, endpoint, running
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import Program, engine_program
from tests.support.slurm import SlurmCluster, why_unavailable
from tests.support.waiting import eventually

WHY = why_unavailable()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

State = api.Replica.State
MODULE = "slurm"
GPUS = 8
PATIENCE = 120.0
WORKER = 'trap "exit 0" TERM; echo $GPUSCALE_REPLICA >> "$1"; sleep 1000 & wait'
CONFIG = """
[slurm_adapter]
autoscaler_address = "{address}"
adapter = "slurm-a"
data_dir = "{folder}/adapter"
slurm_conf = "{conf}"
poll_seconds = 0.4
log_level = "error"

[slurm_templates.worker]
command = ["/bin/sh", "-c", '{worker}', "worker", "{starts}"]
working_dir = "{folder}"
output = "{folder}/output"
"""


class Site:
    """An autoscaler, an adapter that is a process, and what its replicas wrote when they began."""

    def __init__(self, autoscaler: Autoscaler, adapter: Program, starts: Path) -> None:
        self.autoscaler = autoscaler
        self.adapter = adapter
        self._starts = starts

    @property
    def starts(self) -> Counter[str]:
        """How often each replica's program began."""
        return Counter(self._starts.read_text().split() if self._starts.exists() else [])

    async def told(self, words: str) -> bool:
        """Whether a replica, of those that ended too, has these words for its reason."""
        return any(words in replica.reason for replica in await self.autoscaler.replicas(ended=True))

    async def settle(self, **states: int) -> list[api.Replica]:
        """Wait until so many replicas that have not ended are in each state, and none in another."""

        async def as_said() -> list[api.Replica] | None:
            found = await self.autoscaler.replicas()
            counted = Counter(State.Name(one.state).removeprefix("STATE_") for one in found)
            assert counted == states, found
            return found or [api.Replica()]

        return await eventually(as_said, timeout=PATIENCE, interval=0.3)


@pytest.fixture(scope="module")
def slurm() -> Generator[SlurmCluster]:
    with SlurmCluster(GPUS) as cluster:
        yield cluster


@asynccontextmanager
async def site(slurm: SlurmCluster, folder: Path) -> AsyncGenerator[Site]:
    """An endpoint `e` of replicas with a GPU each, on an adapter that is not started yet; no job is left."""
    starts = folder / "starts"
    async with serving(FakeAllocator({})) as allocator, running(folder / "state", allocator) as autoscaler:
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                address=autoscaler.address, folder=folder, conf=slurm.conf, worker=WORKER, starts=starts
            )
        )
        await autoscaler.create(endpoint(high=GPUS + 1, gpus=1))
        try:
            async with engine_program(MODULE, config, {}) as adapter:
                yield Site(autoscaler, adapter, starts)
        finally:
            slurm.empty()


def living(slurm: SlurmCluster) -> list[str]:
    """Names of the jobs that run or wait."""
    return [name for _, name, state in slurm.jobs() if state in {"PENDING", "RUNNING", "COMPLETING"}]


async def test_eight_replicas_up_a_ninth_pends_one_is_preempted_and_all_down_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    async with site(slurm, tmp_path) as one:
        await one.adapter.start()
        await one.autoscaler.set_replicas(GPUS)
        await one.settle(READY=GPUS)
        gpus = re.findall(r"GRES=gpu:1\(IDX:(\d+)\)", slurm.run("scontrol", "--detail", "show", "job"))
        assert sorted(gpus) == [str(index) for index in range(GPUS)]

        await one.autoscaler.set_replicas(GPUS + 1)
        await one.settle(READY=GPUS, STARTING=1)
        await eventually(lambda: one.told("pending: Resources"), timeout=PATIENCE)
        await one.autoscaler.set_replicas(GPUS)
        await one.settle(READY=GPUS)

        urgent = ("--partition=urgent", "--gres=gpu:1", "--job-name=urgent", f"--output={tmp_path}/urgent")
        slurm.run("sbatch", *urgent, f"--chdir={tmp_path}", "--wrap=sleep 1000")
        await eventually(lambda: one.told("preempted by another job"), timeout=PATIENCE)
        await one.settle(READY=GPUS - 1, STARTING=1)
        slurm.run("scancel", "--name=urgent")
        await one.settle(READY=GPUS)
        assert len(one.starts) == GPUS + 1

        await one.autoscaler.set_replicas(0)
        await one.settle()
        ended = await one.autoscaler.replicas(ended=True)
        assert Counter(State.Name(replica.state) for replica in ended) == {
            "STATE_STOPPED": 9,
            "STATE_FAILED": 1,
        }
        assert [replica.exit_code for replica in ended if replica.HasField("exit_code")] == [0] * GPUS
        assert set(one.starts.values()) == {1}
        assert living(slurm) == []


@asynccontextmanager
async def own_engine(slurm: SlurmCluster, folder: Path) -> AsyncGenerator[Engine]:
    """The engine alone, in this process."""
    table = {
        "command": ["/bin/sh", "-c", WORKER, "worker", str(folder / "starts")],
        "working_dir": folder,
        "output": str(folder / "output"),
    }
    told = {
        "adapter": "slurm",
        "data_dir": folder,
        "slurm_conf": slurm.conf,
        "slurm_templates": {"worker": table},
    }
    async with SlurmSettings.model_validate(told).open_engine(Host(SystemClock())) as opened:
        yield opened.engine


async def test_what_the_name_of_another_job_says_is_not_believed(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm takes ends of lines in names, and squeue writes them as they are: the adapter sees what is there all the same."""
    for name in ("two\nlines", "end\n", "forged\n7|RUNNING|0|5:00|None|gpuscale:slurm:e:one|\n"):
        slurm.run("sbatch", "--hold", f"--job-name={name}", "--wrap=true", f"--chdir={tmp_path}")
    assert "forged" in slurm.run("squeue", "--noheader", "--format=%j")
    try:
        async with own_engine(slurm, tmp_path) as engine:
            assert await engine.observe() == {}
    finally:
        slurm.empty()


async def test_a_job_that_was_submitted_twice_runs_once_and_a_young_one_hears_of_its_end(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The answer to the first submission was lost; and Slurm drops signals for a job that has only just begun."""
    async with own_engine(slurm, tmp_path) as engine:
        replica = "endpoints/e/replicas/twice"
        start = Start(ReplicaOrder(replica, "endpoints/e", {}, gpu_count=1), "worker")
        await engine.apply([start])
        await engine.apply([start])

        async def seen(life: WorkerLife) -> Sighting | None:
            found = (await engine.observe()).get(replica)
            return found if found and found.life is life else None

        await eventually(lambda: seen(WorkerLife.READY), timeout=PATIENCE)
        await engine.apply([Finish(replica)])
        ended = await eventually(lambda: seen(WorkerLife.ENDED), timeout=PATIENCE)
        assert ended.exit_code == 0
        states = [state for _, name, state in slurm.jobs() if name.endswith(":twice")]
        assert sorted(states) == ["CANCELLED", "COMPLETED"]
        assert (tmp_path / "starts").read_text().split() == [replica]


async def test_a_controller_that_is_killed_loses_and_doubles_nothing(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    async with site(slurm, tmp_path) as one:
        await one.adapter.start()
        await one.autoscaler.set_replicas(GPUS)
        await one.settle(READY=GPUS)
        # What the controller had not saved it forgets: a job that is made later stands there only together with them.
        slurm.run("sbatch", "--hold", "--job-name=marker", "--wrap=true", f"--chdir={tmp_path}")
        await eventually(lambda: slurm.saved("marker"), timeout=PATIENCE)
        slurm.kill_controller()
        await one.autoscaler.set_replicas(GPUS - 2)
        slurm.start_controller()
        replicas = await one.settle(READY=GPUS - 2)
        slurm.run("scancel", "--name=marker")
        assert {replica.name for replica in replicas} <= one.starts.keys()
        assert len(one.starts) == GPUS
        assert set(one.starts.values()) == {1}
        assert len([name for name in living(slurm) if name != "marker"]) == GPUS - 2
