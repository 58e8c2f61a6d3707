"""Tasks of ECS: how a template starts one, and what each says of its replica. Pure.

A request overrides the command, variables and GPUs of one container; everything else is in the task definition. Statuses and
stop codes are those of the task lifecycle in Amazon's developer guide for ECS.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.autoscaler.adapters.templates import Arguments, check_environment, fill_arguments

if TYPE_CHECKING:
    from types_boto3_ecs.type_defs import ContainerOverrideTypeDef, RunTaskRequestTypeDef

REPLICA_TAG = "gpuscale:replica"
ADAPTER_TAG = "gpuscale:adapter"
CHECKED_TAG = "gpuscale:health-check"
"""Marks a task whose container has a health check in its task definition."""

_RUNNING = "RUNNING"
_OVER = frozenset({"STOPPED", "DELETED"})
_FIRST_SIGNAL, _LAST_SIGNAL = 129, 192
"""Exit codes of a program that a signal ended: 128 and the signal's number."""


LaunchType = Literal["EC2", "FARGATE", "EXTERNAL"]

PYTHON = "python3"
"""What {python} stands for in a container, which does not hold the adapter's interpreter."""
VISIBLE_GPUS = "NVIDIA_VISIBLE_DEVICES"
NO_GPUS = "void"
"""Hides all GPUs of the host from an image with `all`, such as CUDA's."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_:/.-]+$", max_length=512)]


class NoRoomError(Exception):
    """ECS does not start the task now, such as for want of a GPU; the text says why, for a person."""


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


def sighting(task: Task) -> Sighting:
    """What a task says of its replica."""
    if task.over:
        why = ": ".join(filter(None, (task.stop_code, task.reason)))
        if task.exit_code is None:
            return Sighting(WorkerLife.ENDED, None, why or "its task stopped")
        signalled = _FIRST_SIGNAL <= task.exit_code <= _LAST_SIGNAL
        code = 128 - task.exit_code if signalled else task.exit_code
        how = f"ended by signal {-code}" if signalled else f"exit code {code}"
        return Sighting(WorkerLife.ENDED, code, f"{how}; {why}" if why else how)
    if task.status != _RUNNING:
        return Sighting(WorkerLife.STARTING, reason=f"its task is {task.status.lower()}")
    if task.health == "UNHEALTHY" or (task.checked and task.health != "HEALTHY"):
        return Sighting(WorkerLife.STARTING, reason="its health check has not succeeded")
    return Sighting(WorkerLife.READY)


class TaskTemplate(BaseModel):
    """One table [ecs_templates.NAME]: how replicas of endpoints that name it become tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    task_definition: Name
    """Family, family:revision or ARN of the task definition."""
    container: Name
    """The container of it that the rest is about."""
    command: Arguments = ()
    """In place of the container's own command; placeholders as for processes, {python} is python3."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set; secrets belong in the task definition, since everybody who may describe tasks sees these."""
    launch_type: LaunchType | None = None
    """EC2, FARGATE or EXTERNAL; the cluster's default when neither this nor a capacity provider is set."""
    capacity_provider: str = Field("", max_length=255)
    """What it runs on, instead of a launch type."""
    platform_version: str = Field("", max_length=64)
    """Of Fargate."""
    subnets: tuple[Name, ...] = Field((), max_length=16)
    """For a task definition whose network mode is awsvpc."""
    security_groups: tuple[Name, ...] = Field((), max_length=5)
    """The same; the VPC's default when empty."""
    assign_public_ip: bool = False
    """The same."""
    has_health_check: bool = False
    """Whether the container has a health check in its task definition: READY then means that it succeeded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_environment(self.env, ())
        if VISIBLE_GPUS in self.env:
            raise ValueError(f"{VISIBLE_GPUS} is set by ECS and the adapter")
        if self.launch_type and self.capacity_provider:
            raise ValueError("set launch_type or capacity_provider, not both")
        if not self.subnets and (self.security_groups or self.assign_public_ip):
            raise ValueError("security_groups and assign_public_ip need subnets")
        return self


def run_request(
    name: str, template: TaskTemplate, order: ReplicaOrder, adapter: str, cluster: str
) -> RunTaskRequestTypeDef:
    """The request that starts the task of a replica by the template of that name, the same each time.

    Raises:
        LaunchRefusedError: the order does not fit the template.
    """
    marks = {ADAPTER_TAG: adapter, REPLICA_TAG: order.replica}
    if template.has_health_check:
        marks[CHECKED_TAG] = "yes"
    variables = {**template.env, **order.variables()}
    if not order.gpu_count:
        variables[VISIBLE_GPUS] = NO_GPUS  # ECS picks the GPUs; a container that asks for none must see none
    override: ContainerOverrideTypeDef = {
        "name": template.container,
        "environment": [{"name": variable, "value": value} for variable, value in sorted(variables.items())],
    }
    if command := fill_arguments(name, template.command, order, PYTHON):
        override["command"] = list(command)
    if order.gpu_count:
        override["resourceRequirements"] = [{"type": "GPU", "value": str(order.gpu_count)}]
    request: RunTaskRequestTypeDef = {
        "cluster": cluster,
        "taskDefinition": template.task_definition,
        "count": 1,
        "clientToken": client_token(adapter, order.replica),
        "startedBy": started_by(adapter),
        "tags": [{"key": key, "value": value} for key, value in marks.items()],
        "overrides": {"containerOverrides": [override]},
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
                "assignPublicIp": "ENABLED" if template.assign_public_ip else "DISABLED",
            }
        }
    return request
