"""What the adapter's own file says of a task, and the request that starts one. Pure.

A request holds the command, variables and GPUs of one container; everything else stands in the task definition, which is
the account's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gpuscale.autoscaler.adapters.engines.ecs.tasks import (
    ADAPTER_TAG,
    CHECKED_TAG,
    REPLICA_TAG,
    client_token,
    started_by,
)
from gpuscale.autoscaler.adapters.templates import Placeholder, ReplicaOrder, fill_arguments

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
