"""Settings of `gpuscale-ecs-adapter`; `gpuscale.common.config.settings` says where they come from."""

from typing import Annotated, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from gpuscale.autoscaler.adapters.engines.ecs.tasks import VISIBLE_GPUS, LaunchType, TaskTemplate
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.autoscaler.adapters.templates import check_environment, parse_arguments
from gpuscale.common.names import is_id

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_:/.-]+$", max_length=512)]


class EcsTemplateSettings(BaseModel):
    """One table [ecs_templates.NAME]: how replicas of endpoints that name it become tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    task_definition: Name
    """Family, family:revision or ARN of the task definition."""
    container: Name
    """The container of it that the rest is about."""
    command: tuple[str, ...] = ()
    """In place of the container's own command; placeholders as for processes, {python} is python3."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set; secrets belong in the task definition, since everybody who may describe tasks sees these."""
    launch_type: LaunchType | None = None
    """EC2, FARGATE or EXTERNAL; the cluster's default when neither this nor a capacity provider is set."""
    capacity_provider: str = Field("", max_length=255)
    """What it runs on, in place of a launch type."""
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

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        parse_arguments(command)
        return command

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

    def template(self, name: str) -> TaskTemplate:
        """The template that this table describes."""
        return TaskTemplate(
            name=name,
            task_definition=self.task_definition,
            container=self.container,
            command=parse_arguments(self.command),
            env=self.env,
            launch_type=self.launch_type,
            capacity_provider=self.capacity_provider,
            platform_version=self.platform_version,
            subnets=self.subnets,
            security_groups=self.security_groups,
            public_ip=self.assign_public_ip,
            has_health_check=self.has_health_check,
        )


class EcsAdapterSettings(EngineAdapterSettings):
    """What the ECS adapter is told before it starts; the upstream is the autoscaler. Credentials come by AWS' chain."""

    section: ClassVar[str] = "ecs_adapter"

    region: str = Field(
        "", max_length=64, description="region of the cluster; by AWS' usual chain when empty"
    )
    cluster: str = Field("default", min_length=1, max_length=255, description="name or ARN of the cluster")
    endpoint_url: str = Field("", description="address of ECS in place of the region's own")
    poll_seconds: float = Field(3.0, ge=0.2, le=5, description="seconds between two looks at the cluster")
    ecs_templates: dict[str, EcsTemplateSettings] = Field(
        default_factory=dict[str, EcsTemplateSettings], description="templates of tasks by name"
    )

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        for name in self.ecs_templates:
            if not is_id(name):
                raise ValueError(f"ecs_templates.{name}: the name of a template must be an id")
        return self
