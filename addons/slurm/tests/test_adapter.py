"""The Slurm engine on a real Slurm: eight replicas up and down, one preempted, and a controller that dies."""

import re
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from addons.slurm.tests.slurm_cluster import SlurmCluster, why_unavailable
from gpuscale.autoscaler.adapters.engine import (
    Engine,
    EngineUnavailableError,
    Finish,
    ReplicaOrder,
    Sighting,
    Start,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.settings import Host
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale_slurm.engine import SlurmSettings
from tests.support.fixtures import need
from tests.support.waiting import eventually

GPUS = 8
PATIENCE = 120.0
WORKER = 'trap "exit 0" TERM; echo $GPUSCALE_REPLICA >> "$1"; sleep 1000 & wait'
NAMES = [f"endpoints/e/replicas/r{number}" for number in range(GPUS + 1)]
STARTS = [Start(ReplicaOrder(name, "endpoints/e", {}, gpu_count=1), "worker") for name in NAMES]


@pytest.fixture(scope="module")
def slurm() -> Generator[SlurmCluster]:
    need(why_unavailable())
    with SlurmCluster(GPUS) as cluster:
        yield cluster


@asynccontextmanager
async def own_engine(slurm: SlurmCluster, folder: Path, adapter: str) -> AsyncGenerator[Engine]:
    """The engine of an adapter that no other test has: Slurm goes on showing jobs that ended. None is left that lives."""
    table = {
        "command": ["/bin/sh", "-c", WORKER, "worker", str(folder / "starts")],
        "working_dir": folder,
        "output": str(folder / "output"),
    }
    told = {
        "adapter": adapter,
        "data_dir": folder,
        "slurm_conf": slurm.conf,
        "slurm_templates": {"worker": table},
    }
    try:
        async with SlurmSettings.model_validate(told).open_engine(Host(SystemClock())) as opened:
            yield opened.engine
    finally:
        slurm.empty()


async def settle(engine: Engine, reason: str = "", **lives: int) -> Mapping[str, Sighting]:
    """Wait until so many replicas are in each life, and one of them has these words for its reason."""

    async def as_said() -> Mapping[str, Sighting]:
        seen = await engine.observe()
        assert Counter(sighting.life.name for sighting in seen.values()) == lives, seen
        assert any(reason in sighting.reason for sighting in seen.values()), seen
        return seen

    return await eventually(
        as_said, timeout=PATIENCE, interval=0.3, retry_on=(AssertionError, EngineUnavailableError)
    )


def starts(folder: Path) -> Counter[str]:
    """How often each replica's program began."""
    return Counter((folder / "starts").read_text().split())


async def test_eight_replicas_up_a_ninth_pends_one_is_preempted_and_all_down_again(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    async with own_engine(slurm, tmp_path, "up") as engine:
        assert await engine.apply(STARTS[:GPUS]) == {}
        await settle(engine, READY=GPUS)
        gpus = re.findall(r"GRES=gpu:1\(IDX:(\d+)\)", slurm.run("scontrol", "--detail", "show", "job"))
        assert sorted(gpus) == [str(index) for index in range(GPUS)]

        await engine.apply(STARTS[GPUS:])
        await settle(engine, "pending: Resources", READY=GPUS, STARTING=1)
        await engine.apply([Finish(NAMES[-1])])
        await settle(engine, READY=GPUS, ENDED=1)

        urgent = ("--partition=urgent", "--gres=gpu:1", "--job-name=urgent", f"--output={tmp_path}/urgent")
        slurm.run("sbatch", *urgent, f"--chdir={tmp_path}", "--wrap=sleep 1000")
        seen = await settle(engine, "preempted by another job", READY=GPUS - 1, ENDED=2)
        slurm.run("scancel", "--name=urgent")
        left = [name for name, sighting in seen.items() if sighting.life is WorkerLife.READY]
        await engine.apply([Finish(name) for name in left])
        seen = await settle(engine, ENDED=GPUS + 1)
        assert [seen[name].exit_code for name in left] == [0] * (GPUS - 1)
        assert starts(tmp_path) == dict.fromkeys(NAMES[:-1], 1)


async def test_what_the_name_of_another_job_says_is_not_believed(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Slurm takes ends of lines in names, and squeue writes them as they are: the adapter sees what is there all the same."""
    for name in ("two\nlines", "end\n", "forged\n7|RUNNING|0|5:00|None|gpuscale:slurm:e:one|\n"):
        slurm.run("sbatch", "--hold", f"--job-name={name}", "--wrap=true", f"--chdir={tmp_path}")
    assert "forged" in slurm.run("squeue", "--noheader", "--format=%j")
    async with own_engine(slurm, tmp_path, "slurm") as engine:
        assert await engine.observe() == {}


async def test_a_job_that_was_submitted_twice_runs_once_and_a_young_one_hears_of_its_end(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    """The answer to the first submission was lost; and Slurm drops signals for a job that has only just begun."""
    async with own_engine(slurm, tmp_path, "again") as engine:
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
    async with own_engine(slurm, tmp_path, "killed") as engine:
        await engine.apply(STARTS[:GPUS])
        await settle(engine, READY=GPUS)
        # What the controller had not saved it forgets: a job that is made later stands there only together with them.
        slurm.run("sbatch", "--hold", "--job-name=marker", "--wrap=true", f"--chdir={tmp_path}")
        await eventually(lambda: slurm.saved("marker"), timeout=PATIENCE)
        slurm.kill_controller()
        ends = [Finish(name) for name in NAMES[:2]]
        with pytest.raises(EngineUnavailableError):
            await engine.apply(ends)
        slurm.start_controller()
        await settle(engine, READY=GPUS)
        await engine.apply([*STARTS[:GPUS], *ends])
        await settle(engine, READY=GPUS - 2, ENDED=2)
        assert starts(tmp_path) == dict.fromkeys(NAMES[:GPUS], 1)
