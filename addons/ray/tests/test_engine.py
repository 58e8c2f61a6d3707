"""Replicas in a real Ray cluster with four logical GPUs."""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from addons.ray.tests.ray_cluster import RayCluster, ray_cluster
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.adapters.engine import (
    Desired,
    EngineUnavailableError,
    Finish,
    Remove,
    ReplicaOrder,
    Start,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.journal import Journal
from gpuscale.autoscaler.adapters.steps import KILLED
from gpuscale.autoscaler.domain.replicas import ENDED, Goal, ReplicaReport, ReplicaState
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale_ray.engine import RayDriver, RayEngine, RayTemplate
from gpuscale_ray.messages import RayLaunch, RayOrder, RayQuestion, Verb
from tests.support.autoscaler_app import endpoint, running
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import Program
from tests.support.waiting import eventually

LONG = 100.0
"""Seconds to wait for on a host that is loaded."""
UNKNOWN = ReplicaReport(ReplicaState.UNKNOWN)
WORKER = """
import os, signal, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if sys.argv[2] == "broken":
    sys.exit(3)
with open(sys.argv[1] + "/" + os.environ["GPUSCALE_REPLICA"].rpartition("/")[2], "a") as note:
    note.write(os.environ["CUDA_VISIBLE_DEVICES"] + " " + os.environ.get("SECRET", "") + ";")
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster() -> Generator[RayCluster]:
    with ray_cluster() as one:
        yield one


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where workers note which GPUs they have."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def template(notes: Path, **fields: object) -> RayTemplate:
    command = ["{python}", str(notes.parent / "worker.py"), str(notes), "{how}"]
    return RayTemplate.model_validate({"command": command, **fields})


def desired(
    name: str, goal: Goal = Goal.RUN, *, how: str = "well", gpus: int = 1, of: str = "worker"
) -> Desired:
    parameters = {} if of == "absent" else {"how": how}
    order = ReplicaOrder(f"endpoints/e/replicas/{name}", "endpoints/e", parameters, gpu_count=gpus)
    return Desired(order, goal, of, 1.0 if how == "stubborn" else None)


@asynccontextmanager
async def working(
    cluster: RayCluster, notes: Path, adapter: str, **templates: RayTemplate
) -> AsyncGenerator[EngineCrew]:
    """A crew on the cluster; what it started goes on when it ends."""
    templates = {"worker": template(notes)} | templates
    with patch.dict(os.environ, cluster.environment):
        driver = RayDriver(cluster.address, notes.parent.name, adapter)
        engine = RayEngine(driver, templates, {"SECRET": "s"})
        journal = Journal(notes.parent / "journal")
        crew = EngineCrew(engine, journal, journal.load(), SystemClock(), asyncio.Event())
        try:
            async with TaskScope() as tasks:
                tasks.spawn("crew", crew.run())
                yield crew
        except BaseException:  # the next attempt needs the GPUs
            left = (await driver.ask(RayQuestion())).groups
            await driver.ask(RayQuestion(tuple(RayOrder(Verb.REMOVE, group.replica) for group in left)))
            raise
        finally:
            await driver.close()


async def told(crew: EngineCrew, name: str, state: ReplicaState, words: str = "") -> ReplicaReport:
    def found() -> ReplicaReport | None:
        report = (crew.reports() or {}).get(f"endpoints/e/replicas/{name}")
        right = report is not None and report.state is state and words in report.reason
        return report if right else None

    try:
        report = await eventually(found, timeout=LONG)
    except AssertionError as error:
        raise AssertionError(f"{name} is not {state}: {crew.reports()}") from error
    assert report is not None
    return report


async def emptied(crew: EngineCrew, *names: str) -> None:
    """Have these ended and forgotten, so that their GPUs are free."""
    crew.apply([desired(name, Goal.STOP, how="stubborn") for name in names])
    await eventually(
        lambda: all(one.state in ENDED for one in (crew.reports() or {"": UNKNOWN}).values()), timeout=LONG
    )
    crew.apply([desired(name, Goal.FORGET) for name in names])
    await eventually(lambda: crew.reports() == {}, timeout=LONG)


async def test_the_fifth_on_four_gpus_waits_is_said_to_wait_and_is_placed_once_one_ends(
    cluster: RayCluster, notes: Path
) -> None:
    names = ["a", "b", "c", "d", "e"]
    async with working(cluster, notes, "five", worker=template(notes, pass_env=["SECRET"])) as crew:
        crew.apply([desired(name) for name in names[:4]])
        for name in names[:4]:
            await told(crew, name, ReplicaState.READY)
        await eventually(lambda: sum(bool(note.read_text()) for note in notes.iterdir()) == 4, timeout=LONG)
        assert sorted(note.read_text() for note in notes.iterdir()) == ["0 s;", "1 s;", "2 s;", "3 s;"]
        crew.apply([desired(name) for name in names])
        await told(crew, "e", ReplicaState.STARTING, "waits for Ray (NO_RESOURCES)")
    async with working(cluster, notes, "five") as crew:  # the next one finds them, the one that waits too
        await told(crew, "e", ReplicaState.STARTING, "waits for Ray")
        crew.apply([*(desired(name) for name in names[1:]), desired("a", Goal.STOP)])
        ended = await told(crew, "a", ReplicaState.STOPPED)
        assert ended.exit_code == 0  # it was asked, and finished
        crew.apply([*(desired(name) for name in names[1:]), desired("a", Goal.FORGET)])
        await told(crew, "e", ReplicaState.READY)
        await eventually(lambda: (notes / "e").exists() and (notes / "e").read_text(), timeout=LONG)
        assert (notes / "e").read_text() == (notes / "a").read_text()  # the very GPU that became free
        assert all(note.read_text().count(";") == 1 for note in notes.iterdir())  # nothing was started twice
        await emptied(crew, *names[1:])


async def test_how_a_command_ends_is_told(cluster: RayCluster, notes: Path) -> None:
    lost = template(notes, working_dir="/does/not/exist")
    huge = template(notes, resources={"a-rack-that-is-not-there": 1})
    async with working(cluster, notes, "ends", lost=lost, huge=huge) as crew:
        crew.apply(
            [
                desired("broken", how="broken", gpus=0),
                desired("stubborn", how="stubborn", gpus=0),
                desired("lost", of="lost"),
                desired("huge", of="huge"),
                desired("unknown", of="nothing-of-the-kind"),
            ]
        )
        assert (await told(crew, "broken", ReplicaState.FAILED)).exit_code == 3
        await told(crew, "lost", ReplicaState.FAILED, "No such file or directory")
        await told(crew, "unknown", ReplicaState.FAILED, "no template nothing-of-the-kind")
        await told(crew, "huge", ReplicaState.STARTING, "waits for Ray (INFEASIBLE)")
        await told(crew, "stubborn", ReplicaState.READY)
        await eventually(
            lambda: (notes / "stubborn").exists() and (notes / "stubborn").read_text(), timeout=LONG
        )
        assert (notes / "stubborn").read_text() == " ;"  # no GPU, and no secret
        crew.apply(
            [
                desired("stubborn", Goal.STOP, how="stubborn"),
                desired("huge", Goal.STOP, of="huge"),
            ]
        )
        assert (await told(crew, "stubborn", ReplicaState.STOPPED, KILLED)).exit_code == -9
        await told(crew, "huge", ReplicaState.STOPPED, "dropped")
        await emptied(crew, "broken", "lost", "unknown", "stubborn", "huge")


async def test_a_cluster_that_does_not_answer_says_nothing(cluster: RayCluster, notes: Path) -> None:
    """Silence is no empty list; and what ran, runs."""
    with patch.dict(os.environ, cluster.environment):
        driver = RayDriver(cluster.address, notes.parent.name, "silent")
        engine = RayEngine(driver, {"worker": template(notes)}, {})
        order = desired("a").order

        async def runs() -> bool:
            return [one.life for one in (await engine.observe()).values()] == [WorkerLife.READY]

        async def ended() -> bool:
            return [one.life for one in (await engine.observe()).values()] == [WorkerLife.ENDED]

        try:
            assert await engine.apply([Start(order, "worker")]) == {}
            await eventually(runs, timeout=LONG)
            with (
                cluster.paused(),
                patch(f"{RayDriver.__module__}.ANSWER_TIMEOUT", 2.0),
                pytest.raises(EngineUnavailableError, match="did not answer within 2 s"),
            ):
                await engine.observe()
            assert await runs()
            assert await engine.apply([Start(order, "worker"), Finish("endpoints/e/replicas/none")]) == {}
            assert await runs()
            fine = RayLaunch(("/bin/true",), {}, resources={"too-fine": 0.00001})
            answer = await driver.ask(
                RayQuestion(
                    (
                        RayOrder(Verb.START, "endpoints/e/replicas/none", fine),
                        RayOrder(Verb.FINISH, order.replica),
                    )
                )
            )
            assert set(answer.failed) == {
                "endpoints/e/replicas/none"
            }  # and the driver goes on, and the rest is done
            await engine.apply([Remove("endpoints/e/replicas/none")])
            await eventually(ended, timeout=LONG)
            await engine.apply([Remove(order.replica)])
            assert await engine.observe() == {}
            assert (notes / "a").read_text().count(";") == 1
        finally:
            await driver.close()


async def test_the_program_gives_out_rays_gpus_and_finds_its_replicas_again(
    cluster: RayCluster, notes: Path, tmp_path: Path
) -> None:
    """Without any reservation; killed with -9, it adopts what runs, and nothing is started twice."""
    config = tmp_path / "ray.toml"
    config.write_text(
        f'[ray_adapter]\naddress = "{cluster.address}"\nadapter = "rays"\nnamespace = "{tmp_path.name}"\ndata_dir = "{tmp_path}/data"\n'
        f'[ray_templates.worker]\ncommand = ["{{python}}", "{tmp_path}/worker.py", "{notes}", "{{how}}"]\n'
    )
    allocator = FakeAllocator({})
    wanted = endpoint(low=2, high=2, gpus=2, parameters={"how": "well"})
    async with (
        serving(allocator) as address,
        running(tmp_path / "state", address) as autoscaler,
        Program(
            *("gpuscale.autoscaler.adapters.main", "ray", "--config", str(config)),
            *("--autoscaler-address", autoscaler.address),
            environment=cluster.environment,
        ) as adapter,
    ):

        async def well() -> list[str]:
            replicas = await autoscaler.replicas()
            right = {(one.state, one.adapter) for one in replicas} == {
                (api.Replica.STATE_READY, "adapters/rays")
            }
            return sorted(one.name for one in replicas) if right and len(replicas) == 2 else []

        await adapter.start()
        await autoscaler.create(wanted)
        before = await eventually(well, timeout=LONG)
        await adapter.kill()

        async def unknown() -> bool:
            return {one.state for one in await autoscaler.replicas()} == {api.Replica.STATE_UNKNOWN}

        await eventually(unknown, timeout=LONG)
        await adapter.start()
        assert await eventually(well, timeout=LONG) == before
        assert (await autoscaler.status()).ready_replicas == 2
        await autoscaler.delete()

        async def gone() -> bool:
            return not await autoscaler.replicas()

        await eventually(gone, timeout=LONG)
    assert allocator.calls["Reserve"] == 0
    assert sorted(note.read_text() for note in notes.iterdir()) == ["0,1 ;", "2,3 ;"]
