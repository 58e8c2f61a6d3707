"""Tasks of ECS, and what each says of a replica. Pure.

Statuses, stop codes and their order are those of the task lifecycle in Amazon's developer guide for ECS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpuscale.autoscaler.adapters.engine import Life, Sighting
from gpuscale.autoscaler.adapters.templates import Placeholder, ReplicaOrder, fill_arguments

REPLICA_TAG = "gpuscale:replica"
ADAPTER_TAG = "gpuscale:adapter"
CHECKED_TAG = "gpuscale:health-check"
"""Marks a task whose container has a health check in its task definition."""

_RUNNING = "RUNNING"
_OVER = frozenset({"STOPPED", "DELETED"})
_FIRST_SIGNAL, _LAST_SIGNAL = 129, 192
"""Exit codes by which a container engine says that a signal ended the program: 128 and the signal's number."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that runs a replica.

    Attributes:
        arn: its name in AWS, never given out again.
        replica: endpoints/{endpoint}/replicas/{replica}.
        status: the last that ECS knows.
        created: when ECS took it, in seconds since 1970.
        checked: whether its container has a health check.
        health: what that says.
        exit_code: of the container, once it ended, as ECS has it.
        stop_code: what stopped it, in ECS' word.
        reason: why it stopped, in ECS' words.
    """

    arn: str
    replica: str
    status: str
    created: float = 0.0
    checked: bool = False
    health: str = "UNKNOWN"
    exit_code: int | None = None
    stop_code: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in _OVER


def started_by(adapter: str) -> str:
    """What ECS notes as the starter of an adapter's tasks: it takes no dots, and no id holds a slash."""
    return f"gpuscale/{adapter.replace('.', '/')}"


def client_token(adapter: str, replica: str) -> str:
    """The same for every request for a replica, so that ECS starts it once: at most 64 characters."""
    return hashlib.sha256(f"{adapter} {replica}".encode()).hexdigest()


def first(tasks: Iterable[Task]) -> Task:
    """Of tasks of one replica the one that counts: the oldest."""
    return min(tasks, key=lambda task: (task.created, task.arn))


def sighting(task: Task) -> Sighting:
    """What a task says of its replica."""
    if task.over:
        code = _exit_code(task.exit_code)
        return Sighting(Life.ENDED, code, _why_ended(task, code))
    if task.status != _RUNNING:
        return Sighting(Life.STARTING, reason=f"its task is {task.status.lower()}")
    if task.health == "UNHEALTHY" or (task.checked and task.health != "HEALTHY"):
        return Sighting(Life.STARTING, reason="its health check has not succeeded")
    return Sighting(Life.READY)


def _exit_code(code: int | None) -> int | None:
    """With a signal as a negative number."""
    if code is not None and _FIRST_SIGNAL <= code <= _LAST_SIGNAL:
        return 128 - code
    return code


def _why_ended(task: Task, code: int | None) -> str:
    said = (
        f"{task.stop_code}: {task.reason}"
        if task.stop_code and task.reason
        else task.stop_code or task.reason
    )
    if code is None:
        return said or "its task stopped"
    how = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
    return f"{how}; {said}" if said else how


if TYPE_CHECKING:
    from types_boto3_ecs.type_defs import ContainerOverrideTypeDef, RunTaskRequestTypeDef

LaunchType = Literal["EC2", "FARGATE", "EXTERNAL"]

PYTHON = "python3"
"""What {python} stands for in a container; the adapter's own interpreter is not in there."""
VISIBLE_GPUS = "NVIDIA_VISIBLE_DEVICES"
NO_GPUS = "void"
"""Keeps an image that says `all`, as CUDA's do, from every GPU of its host."""


@dataclass(frozen=True, slots=True)
class TaskTemplate:
    """How replicas of one template become tasks.

    Attributes:
        name: what endpoints know it by.
        task_definition: its family, family:revision or ARN.
        container: which container of it the rest is about.
        command: in place of the container's own; empty to keep that.
        env: variables set for it.
        launch_type: where it runs, or none.
        capacity_provider: what it runs on, or none.
        platform_version: of Fargate, or none.
        subnets: for a task definition whose network mode is awsvpc.
        security_groups: the same.
        public_ip: whether it gets a public address, the same.
        has_health_check: whether the container has a health check, which makes it READY.
    """

    name: str
    task_definition: str
    container: str
    command: tuple[tuple[str | Placeholder, ...], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    launch_type: LaunchType | None = None
    capacity_provider: str = ""
    platform_version: str = ""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    public_ip: bool = False
    has_health_check: bool = False


def run_request(
    template: TaskTemplate, order: ReplicaOrder, adapter: str, cluster: str
) -> RunTaskRequestTypeDef:
    """The request that starts the task of a replica, the same each time.

    Raises:
        LaunchRefusedError: the order does not fit the template.
    """
    marks = {ADAPTER_TAG: adapter, REPLICA_TAG: order.replica}
    if template.has_health_check:
        marks[CHECKED_TAG] = "yes"
    request: RunTaskRequestTypeDef = {
        "cluster": cluster,
        "taskDefinition": template.task_definition,
        "count": 1,
        "clientToken": client_token(adapter, order.replica),
        "startedBy": started_by(adapter),
        "tags": [{"key": key, "value": value} for key, value in marks.items()],
        "overrides": {"containerOverrides": [_override(template, order)]},
    }
    if template.launch_type:
        request["launchType"] = template.launch_type
    if template.capacity_provider:
        request["capacityProviderStrategy"] = [{"capacityProvider": template.capacity_provider, "weight": 1}]
    if template.platform_version:
        request["platformVersion"] = template.platform_version
    if template.subnets:
        request["networkConfiguration"] = {
            "awsvpcConfiguration": {
                "subnets": list(template.subnets),
                "securityGroups": list(template.security_groups),
                "assignPublicIp": "ENABLED" if template.public_ip else "DISABLED",
            }
        }
    return request


def _override(template: TaskTemplate, order: ReplicaOrder) -> ContainerOverrideTypeDef:
    """ECS picks the GPUs and says which; a container that asks for none must see none."""
    variables = {**template.env, "GPUSCALE_ENDPOINT": order.endpoint, "GPUSCALE_REPLICA": order.replica}
    if not order.gpu_count:
        variables[VISIBLE_GPUS] = NO_GPUS
    command = fill_arguments(template.name, template.command, order, PYTHON)
    override: ContainerOverrideTypeDef = {
        "name": template.container,
        "environment": [{"name": name, "value": value} for name, value in sorted(variables.items())],
    }
    if command:
        override["command"] = list(command)
    if order.gpu_count:
        override["resourceRequirements"] = [{"type": "GPU", "value": str(order.gpu_count)}]
    return override
