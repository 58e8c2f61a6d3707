"""The ECS adapter against a double of AWS: up and down, adopted after kill -9, and an API that is away."""

from collections import Counter
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import Autoscaler, endpoint, running
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.moto_server import CONTAINER, CREDENTIALS, FAMILY, REGION, MotoServer, why_unavailable
from tests.support.program import Program, engine_program
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from types_boto3_ecs import ECSClient
    from types_boto3_ecs.type_defs import TaskTypeDef

WHY = why_unavailable()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))

State = api.Replica.State
MODULE = "ecs"
PATIENCE = 120.0
CONFIG = """
[ecs_adapter]
autoscaler_address = "{address}"
adapter = "ecs.a"
data_dir = "{folder}/adapter"
region = "{region}"
cluster = "{cluster}"
endpoint_url = "{url}"
poll_seconds = 0.5
log_level = "error"

[ecs_templates.worker]
task_definition = "{family}"
container = "{container}"
command = ["serve", "--queue", "{{queue}}"]
launch_type = "FARGATE"
"""


class Site:
    """An autoscaler, an adapter that is a process, and the cluster."""

    def __init__(self, autoscaler: Autoscaler, adapter: Program, client: "ECSClient", cluster: str) -> None:
        self.autoscaler = autoscaler
        self.adapter = adapter
        self.client = client
        self.cluster = cluster

    def tasks(self) -> list["TaskTypeDef"]:
        """Every task of the cluster."""
        arns = self.client.list_tasks(cluster=self.cluster)["taskArns"]
        if not arns:
            return []
        return self.client.describe_tasks(cluster=self.cluster, tasks=arns, include=["TAGS"])["tasks"]

    def own(self) -> list["TaskTypeDef"]:
        """Those of the adapter that run."""
        return [task for task in alive(self.tasks()) if task.get("startedBy") != "somebody"]

    def stop(self, task: "TaskTypeDef") -> None:
        """Stop a task, as somebody else would."""
        self.client.stop_task(cluster=self.cluster, task=task.get("taskArn", ""), reason="by an operator")

    async def failed(self, words: str) -> bool:
        """Whether a replica has failed for a reason with these words."""
        found = await self.autoscaler.replicas(ended=True)
        return any(one.state == State.STATE_FAILED and words in one.reason for one in found)

    async def settle(self, **states: int) -> list[api.Replica]:
        """Wait until so many replicas that have not ended are in each state, and none in another."""

        async def as_said() -> list[api.Replica]:
            found = await self.autoscaler.replicas()
            counted = Counter(State.Name(one.state).removeprefix("STATE_") for one in found)
            assert counted == states, found
            return found or [api.Replica()]

        return await eventually(as_said, timeout=PATIENCE, interval=0.2)


@pytest.fixture(scope="module")
def aws() -> Generator[MotoServer]:
    with MotoServer() as server:
        yield server


@asynccontextmanager
async def site(aws: MotoServer, folder: Path) -> AsyncGenerator[Site]:
    """An endpoint `e` of replicas with a GPU each, on an adapter that is not started yet, and a cluster of its own."""
    cluster = f"c{uuid4().hex}"
    client = aws.prepare(cluster)
    async with serving(FakeAllocator({})) as allocator, running(folder / "state", allocator) as autoscaler:
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                address=autoscaler.address,
                folder=folder,
                region=REGION,
                cluster=cluster,
                url=aws.url,
                family=FAMILY,
                container=CONTAINER,
            )
        )
        await autoscaler.create(endpoint(gpus=1, parameters={"queue": "jobs"}))
        async with engine_program(MODULE, config, CREDENTIALS) as adapter:
            yield Site(autoscaler, adapter, client, cluster)
    client.close()


def alive(tasks: list["TaskTypeDef"]) -> list["TaskTypeDef"]:
    return [task for task in tasks if task.get("lastStatus") == "RUNNING"]


async def test_one_three_one_and_a_task_that_somebody_stops_is_replaced(
    aws: MotoServer, tmp_path: Path
) -> None:
    async with site(aws, tmp_path) as one:
        foreign = one.client.run_task(
            cluster=one.cluster, taskDefinition=FAMILY, launchType="FARGATE", startedBy="somebody"
        )["tasks"][0].get("taskArn")
        await one.adapter.start()
        await one.autoscaler.set_replicas(1)
        await one.settle(READY=1)
        await one.autoscaler.set_replicas(3)
        replicas = await one.settle(READY=3)
        found = one.own()
        tags = [{tag.get("key"): tag.get("value") for tag in task.get("tags", [])} for task in found]
        assert {tag["gpuscale:replica"] for tag in tags} == {replica.name for replica in replicas}
        assert {task.get("startedBy") for task in found} == {"gpuscale/ecs/a"}
        [override] = found[0].get("overrides", {}).get("containerOverrides", [])
        assert override.get("command") == ["serve", "--queue", "jobs"]
        assert override.get("resourceRequirements") == [{"type": "GPU", "value": "1"}]

        one.stop(found[0])
        await eventually(lambda: one.failed("by an operator"), timeout=PATIENCE)
        await one.settle(READY=3)

        await one.autoscaler.set_replicas(1)
        await one.settle(READY=1)
        ended = [end for end in await one.autoscaler.replicas(ended=True) if end.state == State.STATE_STOPPED]
        assert [replica.exit_code for replica in ended] == [0, 0]
        assert len(one.own()) == 1
        assert len(one.tasks()) == 5
        assert foreign in {task.get("taskArn") for task in alive(one.tasks())}


async def test_an_adapter_that_dies_right_after_it_asked_finds_its_tasks_again(
    aws: MotoServer, tmp_path: Path
) -> None:
    async with site(aws, tmp_path) as one:
        await one.adapter.start(failpoints="adapter.engine.after_apply=kill")
        await one.autoscaler.set_replicas(2)
        assert await one.adapter.ended() == -9
        await one.adapter.start()
        await one.settle(READY=2)
        await one.autoscaler.set_replicas(1)
        await one.settle(READY=1)
        assert len(one.tasks()) == 2
