"""Tasks of ECS: what is asked for, how far one has come, and how it ended."""

from typing import Any

import pytest

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale_ecs.tasks import (
    Task,
    TaskTemplate,
    client_token,
    run_request,
    sighting,
    started_by,
)

ONE = "endpoints/e/replicas/one"


def order(gpus: int = 0, **parameters: str) -> ReplicaOrder:
    return ReplicaOrder(ONE, "endpoints/e", parameters, gpu_count=gpus)


def task(status: str, **fields: Any) -> Task:
    return Task("arn:1", ONE, status, **fields)


def test_what_is_asked_for_a_replica_with_gpus() -> None:
    template = TaskTemplate(
        task_definition="worker:3",
        container="main",
        command=("{python}", "-m", "w", "--queue={queue}"),
        env={"K": "V"},
        capacity_provider="gpus",
        subnets=("subnet-1",),
        security_groups=("sg-1",),
        has_health_check=True,
    )
    assert run_request("worker", template, order(2, queue="jobs"), "a.b", "c") == {
        "cluster": "c",
        "taskDefinition": "worker:3",
        "count": 1,
        "clientToken": client_token("a.b", ONE),
        "startedBy": "gpuscale/a/b",
        "tags": [
            {"key": "gpuscale:adapter", "value": "a.b"},
            {"key": "gpuscale:replica", "value": ONE},
            {"key": "gpuscale:health-check", "value": "yes"},
        ],
        "overrides": {
            "containerOverrides": [
                {
                    "name": "main",
                    "command": ["python3", "-m", "w", "--queue=jobs"],
                    "environment": [
                        {"name": "GPUSCALE_ENDPOINT", "value": "endpoints/e"},
                        {"name": "GPUSCALE_REPLICA", "value": ONE},
                        {"name": "K", "value": "V"},
                    ],
                    "resourceRequirements": [{"type": "GPU", "value": "2"}],
                }
            ]
        },
        "capacityProviderStrategy": [{"capacityProvider": "gpus", "weight": 1}],
        "networkConfiguration": {
            "awsvpcConfiguration": {
                "subnets": ["subnet-1"],
                "securityGroups": ["sg-1"],
                "assignPublicIp": "DISABLED",
            }
        },
    }


def test_one_that_asks_for_no_gpus_sees_none() -> None:
    template = TaskTemplate(
        task_definition="worker", container="main", launch_type="FARGATE", platform_version="1.4.0"
    )
    request = run_request("worker", template, order(), "a", "c")
    assert (request.get("launchType"), request.get("platformVersion")) == ("FARGATE", "1.4.0")
    [override] = request.get("overrides", {}).get("containerOverrides", [])
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in override.get("environment", [])
    assert "resourceRequirements" not in override
    assert "command" not in override


def test_two_adapters_never_mark_their_tasks_the_same() -> None:
    assert started_by("a.b") != started_by("a-b")
    assert client_token("a", ONE) != client_token("b", ONE)
    assert len(client_token("a", ONE)) == 64


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (task("PROVISIONING"), Sighting(WorkerLife.STARTING, reason="its task is provisioning")),
        (task("PENDING"), Sighting(WorkerLife.STARTING, reason="its task is pending")),
        (task("RUNNING"), Sighting(WorkerLife.READY)),
        (task("RUNNING", health="UNHEALTHY"), Sighting(WorkerLife.STARTING, reason="its health check has not succeeded")),
        (
            task("RUNNING", checked=True),
            Sighting(WorkerLife.STARTING, reason="its health check has not succeeded"),
        ),
        (task("RUNNING", checked=True, health="HEALTHY"), Sighting(WorkerLife.READY)),
        (task("DEPROVISIONING"), Sighting(WorkerLife.STARTING, reason="its task is deprovisioning")),
        (task("A_STATUS_OF_TOMORROW"), Sighting(WorkerLife.STARTING, reason="its task is a_status_of_tomorrow")),
    ],
)  # fmt: skip
def test_what_lives(found: Task, expected: Sighting) -> None:
    """A status that is not known to be an end is none: what may run is never taken for gone."""
    assert sighting(found) == expected


@pytest.mark.parametrize(
    ("fields", "code", "why"),
    [
        (
            {"exit_code": 3, "stop_code": "EssentialContainerExited", "reason": "Essential container in task exited"},
            3,
            "exit code 3; EssentialContainerExited: Essential container in task exited",
        ),
        ({"exit_code": 137, "reason": "OutOfMemoryError"}, -9, "ended by signal 9; OutOfMemoryError"),
        ({"exit_code": 0, "stop_code": "UserInitiated"}, 0, "exit code 0; UserInitiated"),
        (
            {"stop_code": "TaskFailedToStart", "reason": "CannotPullContainerError"},
            None,
            "TaskFailedToStart: CannotPullContainerError",
        ),
        ({"stop_code": "SpotInterruption"}, None, "SpotInterruption"),
        ({}, None, "its task stopped"),
    ],
)  # fmt: skip
def test_every_end_says_what_ecs_says(fields: dict[str, Any], code: int | None, why: str) -> None:
    assert sighting(task("STOPPED", **fields)) == Sighting(WorkerLife.ENDED, code, why)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"launch_type": "EC2", "capacity_provider": "p"}, "not both"),
        ({"assign_public_ip": True}, "need subnets"),
        ({"env": {"NVIDIA_VISIBLE_DEVICES": "all"}}, "set by ECS"),
        ({"env": {"GPUSCALE_REPLICA": "x"}}, "set by the adapter"),
        ({"command": ["{"]}, "brace"),
        ({"task_definition": "a b"}, "pattern"),
    ],
)
def test_a_table_of_no_use_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TaskTemplate.model_validate({"task_definition": "worker", "container": "main", **fields})
