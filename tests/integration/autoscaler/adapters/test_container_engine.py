"""The container adapter's engine against Docker's API: started once, nothing foreign touched, and silence told from nothing."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container import docker_api, engine
from gpuscale.autoscaler.adapters.engines.container.containers import STARTING, UNTOLD, container_name, labels
from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api
from gpuscale.autoscaler.adapters.engines.container.engine import (
    NO_GPUS,
    ContainerEngine,
    ContainerSettings,
    open_container_engine,
)
from gpuscale.autoscaler.adapters.settings import Host
from gpuscale.autoscaler.adapters.templates import Launch
from gpuscale.common.runtime.tasks import SystemClock
from tests.support.docker_double import Container, DockerDouble
from tests.support.waiting import eventually

ORDER = ReplicaOrder("endpoints/e/replicas/one", "endpoints/e", {})
ONE, TWO, THREE = (f"endpoints/e/replicas/{name}" for name in ("one", "two", "three"))
NAME = container_name("here", ONE)
START = Start(ORDER, "worker")
ON_GPUS = Start(replace(ORDER, gpu_uuids=("GPU-a",), gpu_count=1, fence=7), "worker")


class ScriptedAdmission(Admission):
    """Says what a test wants: before the start, and once the process is known."""

    def __init__(self, before: str = "", after: str = "") -> None:
        super().__init__(None, required=False)
        self.before = before
        self.after = after
        self.pids: list[int | None] = []

    async def refusal(self, work: ReplicaOrder | Launch, pid: int | None = None) -> str:
        self.pids.append(pid)
        return self.before if pid is None else self.after


@dataclass
class Site:
    """An engine, and the adapter's view of it."""

    double: DockerDouble
    engine: ContainerEngine
    admission: ScriptedAdmission

    @property
    def own(self) -> Container:
        """The replica's container."""
        found = self.double.named(NAME)
        assert found is not None
        return found


@asynccontextmanager
async def adapting(
    double: DockerDouble, folder: Path, *, pull: bool = True, finishing: Iterable[str] = ()
) -> AsyncGenerator[Site]:
    """A run of the adapter's engine."""
    templates = {
        name: {"image": f"{name}:1", "pull": "missing" if pull else "never", "stop_signal": "SIGINT"}
        for name in ("worker", "far")
    }
    settings = ContainerSettings.model_validate(
        {"adapter": "here", "data_dir": "d", "allowed_images": ["*"], "container_templates": templates}
    )
    admission = ScriptedAdmission()
    address = f"unix://{folder / 'docker.sock'}"
    async with (
        open_docker_api(address, "here") as api,
        open_container_engine(settings, admission, api, finishing) as made,
    ):
        yield Site(double, made, admission)


@asynccontextmanager
async def site(folder: Path, *, pull: bool = True) -> AsyncGenerator[Site]:
    """An engine and one run of the adapter on it."""
    double = DockerDouble()
    async with double.served(folder / "docker.sock"), adapting(double, folder, pull=pull) as one:
        yield one


async def test_a_life_of_a_container(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        assert await at.engine.observe() == {}
        assert await at.engine.apply([START]) == {}
        seen = (await at.engine.observe())[ONE]
        assert (seen.life, seen.pid) == (WorkerLife.READY, 4711)
        await at.engine.apply([Finish(ONE, 5.0)])
        assert at.own.signals == ["SIGINT"]
        await at.engine.apply([Kill(ONE)])
        seen = (await at.engine.observe())[ONE]
        assert (seen.life, seen.exit_code) == (WorkerLife.ENDED, 137)
        await at.engine.apply([Kill(ONE), Finish(ONE)])
        await at.engine.apply([Remove(ONE)])
        await at.engine.apply([Remove(ONE)])
        assert await at.engine.observe() == {}
        assert at.double.containers == {}


@pytest.mark.parametrize("conflict", [409, 500], ids=["docker", "podman"])
async def test_a_start_that_comes_again_makes_and_starts_nothing_twice(tmp_path: Path, conflict: int) -> None:
    async with site(tmp_path) as at:
        at.double.conflict = conflict
        for state in ("running", "exited"):
            assert await at.engine.apply([START]) == {}
            at.double.change(at.own, state)
        assert await at.engine.apply([START]) == {}
        assert at.own.state == "exited", "what has ended is not started again"
        assert at.double.count("/start") == 1
        assert len(at.double.containers) == 1


async def test_a_start_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    """Between making and starting a container the adapter may die; the next run goes on from there."""
    async with site(tmp_path) as at:
        at.double.add(NAME, {"Labels": {**labels("here", ORDER), "of.the.image": "x"}}, "created")
        assert (await at.engine.observe())[ONE].life is WorkerLife.WAITING
        assert await at.engine.apply([START]) == {}
        assert (await at.engine.observe())[ONE].life is WorkerLife.READY
        assert len(at.double.containers) == 1


async def test_what_was_made_for_an_older_fence_is_made_anew(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        old = replace(ORDER, gpu_uuids=("GPU-old",), fence=6)
        at.double.add(NAME, {"Labels": labels("here", old)}, "created")
        for _ in range(2):
            assert await at.engine.apply([ON_GPUS]) == {}
        assert at.own.state == "running"
        assert at.own.config["Labels"] == labels("here", ON_GPUS.order)


async def test_nothing_foreign_is_shown_or_touched(tmp_path: Path) -> None:
    """Not by its name, not by its labels, and not where the engine lists what was not asked for."""
    async with site(tmp_path) as at:
        at.double.ignores_filters = True
        foreign = [
            at.double.add("postgres", {}),
            at.double.add("committed", {"Labels": labels("here", ORDER)}),
            at.double.add("other", {"Labels": labels("there", ORDER)}),
            at.double.add(NAME, {"Labels": {"gpuscale.adapter": "here"}}, "exited"),
        ]
        assert await at.engine.observe() == {}
        refused = await at.engine.apply([START])
        assert "the name is taken" in refused[ONE]
        await at.engine.apply([Finish(ONE), Kill(ONE), Remove(ONE)])
        assert [one.signals for one in foreign] == [[], [], [], []]
        assert set(at.double.containers) == {one.id for one in foreign}


async def test_an_image_that_is_missing_is_pulled_meanwhile(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        at.double.registry.add("far:1")
        start = Start(ORDER, "far")
        other = Start(replace(ORDER, replica=TWO), "far")
        assert await at.engine.apply([start, other]) == {}
        waits = (await at.engine.observe())[ONE]
        assert waits.life is WorkerLife.WAITING
        assert "far:1 is being pulled" in waits.reason
        assert await at.engine.apply([start]) == {}
        at.double.pull_gate.set()
        await at.engine.watch()

        async def runs() -> bool:
            assert await at.engine.apply([start, other]) == {}
            return {one.life for one in (await at.engine.observe()).values()} == {WorkerLife.READY}

        await eventually(runs)
        assert len(at.double.containers) == 2
        assert at.double.count("/images/create") == 1


async def test_an_image_that_cannot_be_had_is_said_to_be_so(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        at.double.pull_gate.set()
        start = Start(ORDER, "far")
        refused: dict[str, str] = {}

        async def said() -> bool:
            refused.update(await at.engine.apply([start]))
            return bool(refused)

        await eventually(said)
        assert refused[ONE] == "its image far:1 cannot be pulled: denied"
        assert await at.engine.observe() == {}


async def test_one_that_should_stop_while_its_image_comes_is_dropped(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        await at.engine.apply([Start(ORDER, "far")])
        await at.engine.apply([Remove(ONE)])
        assert await at.engine.observe() == {}


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ('could not select device driver "nvidia" with capabilities: [[gpu]]', "NVIDIA container runtime"),
        ("exec: no such file", "cannot be started: exec: no such file"),
    ],
    ids=["no runtime", "no program"],
)
async def test_why_it_cannot_be_started_is_told_and_nothing_is_left(
    tmp_path: Path, fault: str, text: str
) -> None:
    async with site(tmp_path) as at:
        at.double.start_fault = fault
        assert text in (await at.engine.apply([START]))[ONE]
        assert at.double.containers == {}


async def test_an_engine_that_forgets_the_gpus_starts_nothing(tmp_path: Path) -> None:
    """Podman drops the request without a word; the replica would run without the GPUs that it holds."""
    async with site(tmp_path) as at:
        at.double.forgets_gpus = True
        assert await at.engine.apply([ON_GPUS]) == {ONE: NO_GPUS}
        assert at.double.containers == {}
        assert at.double.count("/start") == 0


async def test_the_agent_admits_it_before_it_starts_and_learns_its_process(tmp_path: Path) -> None:
    refusal = "the node's agent refuses: the fence is old"
    async with site(tmp_path) as at:
        at.admission.before = refusal
        assert await at.engine.apply([ON_GPUS]) == {ONE: refusal}
        assert (at.double.containers, at.double.count("/start")) == ({}, 0)
        at.admission.before, at.admission.after = "", refusal
        assert await at.engine.apply([ON_GPUS]) == {}
        assert at.admission.pids == [None, None, 4711]
        host = at.own.config["HostConfig"]
        assert isinstance(host, dict)
        assert host["DeviceRequests"][0]["DeviceIDs"] == ["GPU-a"]
        seen = (await at.engine.observe())[ONE]
        assert (seen.life, seen.reason) == (WorkerLife.ENDED, refusal), "one that runs is ended"


@pytest.mark.parametrize("lists_health", [True, False], ids=["docker", "podman"])
async def test_health_makes_it_ready_and_ends_it(tmp_path: Path, lists_health: bool) -> None:
    async with site(tmp_path) as at:
        at.double.lists_health = lists_health
        await at.engine.apply([START])
        for health, life in (("starting", WorkerLife.STARTING), ("healthy", WorkerLife.READY)):
            at.double.change(at.own, "running", health=health)
            assert (await at.engine.observe())[ONE].life is life
        at.double.change(at.own, "running", health="unhealthy")
        await at.engine.observe()
        seen = (await at.engine.observe())[ONE]
        assert (seen.life, seen.reason) == (WorkerLife.ENDED, "its health check failed too often")


async def test_one_that_finishes_its_work_need_not_be_well_for_the_next_run_either(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        await at.engine.apply([START])
        await at.engine.observe()
        at.double.kill_fault = 500
        with pytest.raises(EngineUnavailableError, match="cannot be sent"):
            await at.engine.apply([Finish(ONE)])
        at.double.change(at.own, "exited")
        assert await at.engine.apply([Finish(ONE)]) == {}, "what has ended need not hear of it"
        at.double.kill_fault = 0
        at.double.change(at.own, "running", health="unhealthy")
        await at.engine.observe()
        async with adapting(at.double, tmp_path, finishing=[ONE]) as later:
            await later.engine.observe()
            assert at.own.signals == []
        async with adapting(at.double, tmp_path) as other:
            await other.engine.observe()
            assert at.own.signals == ["SIGKILL"]


async def test_one_listing_and_no_look_at_what_did_not_change(tmp_path: Path) -> None:
    async with site(tmp_path) as at:
        orders = [replace(ORDER, replica=f"endpoints/e/replicas/r{number}") for number in range(20)]
        await at.engine.apply([Start(order, "worker") for order in orders])
        await at.engine.observe()
        at.double.calls.clear()
        for _ in range(3):
            assert len(await at.engine.observe()) == 20
        assert at.double.calls == ["GET /containers/json"] * 3
        at.double.change(next(iter(at.double.containers.values())), "exited", 3)
        await at.engine.observe()
        assert len(at.double.calls) == 5


@pytest.mark.parametrize("fault", ["500", "503", "404", "hang", "garbage"])
async def test_an_engine_that_does_not_tell_is_not_an_engine_without_containers(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(tmp_path) as at:
        await at.engine.apply([START])
        await at.engine.observe()
        at.double.fault = fault
        monkeypatch.setattr(docker_api, "LIST_TIMEOUT", 0.3)
        with pytest.raises(EngineUnavailableError):
            await at.engine.observe()
        monkeypatch.undo()
        at.double.fault = ""
        assert (await at.engine.observe())[ONE].life is WorkerLife.READY


async def test_an_engine_that_went_away_is_found_again(tmp_path: Path) -> None:
    double = DockerDouble()
    async with adapting(double, tmp_path) as at:
        with pytest.raises(EngineUnavailableError):
            await at.engine.observe()
        async with double.served(tmp_path / "docker.sock"):
            await at.engine.apply([START])
            assert (await at.engine.observe())[ONE].life is WorkerLife.READY
        with pytest.raises(EngineUnavailableError):
            await at.engine.apply([Kill(ONE)])
        with pytest.raises(EngineUnavailableError):
            await at.engine.observe()
        async with double.served(tmp_path / "docker.sock"):
            assert (await at.engine.observe())[ONE].life is WorkerLife.READY


async def test_a_refused_create_is_final_and_says_why(tmp_path: Path) -> None:
    async with site(tmp_path, pull=False) as at:
        assert "does not allow pulling" in (await at.engine.apply([Start(ORDER, "far")]))[ONE]
        assert at.double.count("/images/create") == 0
        at.double.create_fault = 400
        assert await at.engine.apply([START]) == {ONE: "its container cannot be created: cannot make it"}
        assert (await at.engine.apply([Start(ORDER, "none")]))[ONE] == "this adapter has no template none"


async def test_an_event_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "POLL", 600.0)
    async with site(tmp_path) as at:
        await at.engine.apply([START])

        async def tell() -> None:
            while True:
                at.double.happened()
                await asyncio.sleep(0.05)

        telling = asyncio.create_task(tell())
        try:
            await at.engine.watch()
        finally:
            telling.cancel()


@pytest.mark.parametrize(("check", "probes"), [({"command": ["probe"]}, True), ({"command": []}, False)])
async def test_it_tells_truly_what_it_can_do(check: dict[str, object], probes: bool) -> None:
    table = {"image": "worker:1", "health_check": check}
    told = {"node": "n", "data_dir": "d", "allowed_images": ["*"], "container_templates": {"worker": table}}
    async with ContainerSettings.model_validate(told).open_engine(Host(SystemClock())) as opened:
        assert opened.node == "n"
        assert opened.capabilities == api.AdapterCapabilities(picks_victims=True, drains=True, probes=probes)


@asynccontextmanager
async def two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Site]:
    """Two containers that run, on an engine that is waited for a moment only."""
    async with site(folder) as at:
        await at.engine.apply([START, Start(replace(ORDER, replica=TWO), "worker")])
        assert set((await at.engine.observe()).values()) == {Sighting(WorkerLife.READY, pid=4711)}
        monkeypatch.setattr(docker_api, "ONE_TIMEOUT", 3.0)
        yield at


async def test_a_container_that_cannot_be_killed_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in their crew (test_crew.py)."""
    async with two(tmp_path, monkeypatch) as at:
        at.double.stuck.add(NAME)
        with pytest.raises(StepsFailedError, match="exit event") as caught:
            await at.engine.apply([Kill(ONE), Kill(TWO), Start(replace(ORDER, replica=THREE), "none")])
        assert set(caught.value.failed) == {ONE}
        assert caught.value.refused == {THREE: "this adapter has no template none"}
        seen = await at.engine.observe()
        assert (seen[ONE].life, seen[TWO].life) == (WorkerLife.READY, WorkerLife.ENDED)


async def test_a_container_that_hangs_is_alone_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a look at it nor a signal to it is answered; the rest is known, and is ended when it should be."""
    async with two(tmp_path, monkeypatch) as at:
        at.double.hung.add(NAME)
        for one in at.double.containers.values():
            at.double.change(one, "running", health="starting")
        for _ in range(2):
            seen = await at.engine.observe()
            assert (seen[ONE].life, seen[ONE].reason) == (WorkerLife.STARTING, UNTOLD)
            assert seen[TWO].life is WorkerLife.STARTING
        with pytest.raises(StepsFailedError) as caught:
            await at.engine.apply([Finish(ONE), Kill(TWO)])
        assert set(caught.value.failed) == {ONE}
        at.double.hung.clear()
        seen = await at.engine.observe()
        assert (seen[ONE].reason, seen[TWO].life) == (STARTING, WorkerLife.ENDED)


async def test_a_container_that_was_given_up_is_killed_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two(tmp_path, monkeypatch) as at:
        at.double.stuck.add(NAME)
        at.double.change(at.own, "running", health="unhealthy")
        for _ in range(2):
            assert (await at.engine.observe())[TWO].life is WorkerLife.READY
        at.double.hung.add(NAME)  # it does not even say no
        assert (await at.engine.observe())[TWO].life is WorkerLife.READY
        at.double.hung.clear()
        at.double.stuck.clear()
        at.own.health = ""
        await at.engine.observe()
        assert at.own.signals == ["SIGKILL"]
        assert (await at.engine.observe())[ONE].reason == "its health check failed too often"
