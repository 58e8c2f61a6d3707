"""The ECS engine against a double of AWS: up and down, found again by the next run, and nothing of others touched."""

import asyncio
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from unittest.mock import patch
from uuid import uuid4

import pytest

from addons.ecs.tests.moto_server import CONTAINER, CREDENTIALS, FAMILY, REGION, MotoServer, why_unavailable
from gpuscale.autoscaler.adapters.engine import Engine, Finish, ReplicaOrder, Start, WorkerLife
from gpuscale.autoscaler.adapters.settings import Host
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale_ecs.engine import EcsSettings
from tests.support.fixtures import need

NAMES = [f"endpoints/e/replicas/{name}" for name in ("one", "two", "three")]
TEMPLATE = {
    "task_definition": FAMILY,
    "container": CONTAINER,
    "command": ["serve", "--queue", "{queue}"],
    "launch_type": "FARGATE",
}


@pytest.fixture(scope="module")
def aws() -> Generator[MotoServer]:
    need(why_unavailable())
    with MotoServer() as server:
        yield server


@asynccontextmanager
async def opened(aws: MotoServer, cluster: str) -> AsyncGenerator[Engine]:
    """A run of the adapter's engine."""
    told = {
        "adapter": "ecs.a",
        "data_dir": "d",
        "region": REGION,
        "cluster": cluster,
        "endpoint_url": aws.url,
        "ecs_templates": {"worker": TEMPLATE},
    }
    with patch.dict(os.environ, CREDENTIALS):
        async with EcsSettings.model_validate(told).open_engine(Host(SystemClock())) as found:
            yield found.engine


async def test_up_and_down_by_two_runs_of_the_adapter(aws: MotoServer) -> None:
    cluster = f"c{uuid4().hex}"
    client = await asyncio.to_thread(aws.prepare, cluster)
    client.run_task(cluster=cluster, taskDefinition=FAMILY, launchType="FARGATE", startedBy="somebody")
    starts = [
        Start(ReplicaOrder(name, "endpoints/e", {"queue": "jobs"}, gpu_count=1), "worker") for name in NAMES
    ]
    async with opened(aws, cluster) as engine:
        assert await engine.apply(starts) == {}
        assert {seen.life for seen in (await engine.observe()).values()} == {WorkerLife.READY}
    tasks = client.describe_tasks(
        cluster=cluster, tasks=client.list_tasks(cluster=cluster)["taskArns"], include=["TAGS"]
    )["tasks"]
    own = {
        tag.get("value"): task for task in tasks for tag in task.get("tags", []) if tag.get("value") in NAMES
    }
    assert (len(tasks), own.keys()) == (4, set(NAMES))
    assert {task.get("startedBy") for task in own.values()} == {"gpuscale/ecs/a"}
    [override] = own[NAMES[0]].get("overrides", {}).get("containerOverrides", [])
    assert override.get("command") == ["serve", "--queue", "jobs"]
    assert override.get("resourceRequirements") == [{"type": "GPU", "value": "1"}]

    client.stop_task(cluster=cluster, task=own[NAMES[0]].get("taskArn", ""), reason="by an operator")
    async with opened(aws, cluster) as engine:
        assert (await engine.observe()).keys() == set(NAMES), "the next run finds them by their tags"
        assert await engine.apply([*starts, Finish(NAMES[1])]) == {}
        seen = await engine.observe()
        assert "by an operator" in seen[NAMES[0]].reason
        assert [(seen[name].life, seen[name].exit_code) for name in NAMES[1:]] == [
            (WorkerLife.ENDED, 0),
            (WorkerLife.READY, None),
        ]
    assert len(client.list_tasks(cluster=cluster, desiredStatus="RUNNING")["taskArns"]) == 2
    client.close()
