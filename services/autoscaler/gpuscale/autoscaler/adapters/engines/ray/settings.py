"""Settings of `gpuscale-ray-adapter`, and what its templates make of a replica."""

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuscale.autoscaler.adapters.engines.ray.messages import RayLaunch
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.autoscaler.adapters.templates import (
    PYTHON,
    LaunchRefusedError,
    Placeholder,
    ReplicaOrder,
    check_environment,
    fill_arguments,
    parse_command,
)
from gpuscale.common.names import is_id

FINEST_DIGITS = 4
"""Digits behind the point: Ray counts no finer parts of a resource."""
_OWN_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})


class RayTemplateSettings(BaseModel):
    """One table [ray_templates.NAME]: how replicas of endpoints that name it are started in Ray."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...]
    """The program, an absolute path on Ray's nodes or {python}, the interpreter of Ray's workers; and its arguments."""
    working_dir: str = ""
    """Where it is started on its node; by default where Ray's worker runs."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set. Of the node's own the command has PATH, HOME and LANG."""
    pass_env: tuple[str, ...] = ()
    """Variables to hand on from the adapter's own environment; Ray keeps them with the actor."""
    num_cpus: float = Field(1.0, ge=0, le=10_000)
    """Logical CPUs that a replica holds."""
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    """Further resources of Ray that a replica holds, such as one that only some nodes have."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        parsed = parse_command(command)
        if any(part == Placeholder("python") for argument in parsed[1:] for part in argument):
            raise ValueError("{python} stands for the program alone")
        return command

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        check_environment(self.env, self.pass_env)
        for name, amount in {"num_cpus": self.num_cpus, **self.resources}.items():
            if round(amount, FINEST_DIGITS) != amount:
                raise ValueError(f"{name}: Ray counts no finer than {10**-FINEST_DIGITS:g}")
        for name, amount in self.resources.items():
            if name in _OWN_RESOURCES or not name.strip() or not 0 < amount <= 1_000_000:
                raise ValueError(
                    f"resources.{name}: must be a resource that Ray does not know by itself, above 0"
                )
        return self


class RayAdapterSettings(EngineAdapterSettings):
    """What the Ray adapter is told before it starts."""

    section: ClassVar[str] = "ray_adapter"

    address: str = Field(
        "auto",
        min_length=1,
        description="address of the cluster: HOST:PORT, ray://HOST:PORT, or auto for this host's",
    )
    namespace: str = Field("gpuscale", min_length=1, description="namespace of Ray that the replicas live in")
    ray_templates: dict[str, RayTemplateSettings] = Field(
        default_factory=dict[str, RayTemplateSettings], description="how replicas are started, by template"
    )

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        for name in self.ray_templates:
            if not is_id(name):
                raise ValueError(f"ray_templates.{name}: the name of a template must be an id")
        return self


def ray_launch(
    name: str,
    templates: Mapping[str, RayTemplateSettings],
    order: ReplicaOrder,
    environment: Mapping[str, str],
) -> RayLaunch:
    """What Ray is told of a replica.

    Args:
        name: its template.
        templates: all there are.
        order: which replica, with which values.
        environment: the adapter's own.

    Raises:
        LaunchRefusedError: there is no such template, it asks Ray for nothing, or its values are of no use.
    """
    template = templates.get(name)
    if template is None:
        raise LaunchRefusedError(f"the adapter has no template {name}")
    missing = [one for one in template.pass_env if one not in environment]
    if missing:
        raise LaunchRefusedError(
            f"template {name} hands on {missing[0]}, which the adapter's environment does not have"
        )
    # Which GPUs it gets only Ray knows, and sets CUDA_VISIBLE_DEVICES by; there is no reservation, and no fence.
    own = {"GPUSCALE_ENDPOINT": order.endpoint, "GPUSCALE_REPLICA": order.replica}
    made = RayLaunch(
        argv=fill_arguments(name, parse_command(template.command), order, PYTHON),
        env={**{one: environment[one] for one in template.pass_env}, **template.env, **own},
        working_dir=template.working_dir,
        cpus=template.num_cpus,
        gpus=order.gpu_count,
        resources=template.resources,
    )
    if not made.bundle:
        raise LaunchRefusedError(
            f"template {name} asks Ray for nothing: give it num_cpus, or the endpoint GPUs"
        )
    return made
