"""Settings of `gpuscale-kubernetes-adapter`; `gpuscale.common.config.settings` says where they come from."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuscale.autoscaler.adapters.engines.kubernetes.pods import Kind
from gpuscale.autoscaler.adapters.engines.kubernetes.template import KubernetesTemplate
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.autoscaler.adapters.templates import parse_arguments
from gpuscale.common.names import is_id


class KubernetesTemplateSettings(BaseModel):
    """One table [kubernetes_templates.NAME]: whose pods are the replicas; one of deployment, stateful_set and pods_of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    deployment: str = ""
    """A Deployment that is there: its pods are the replicas, and it is scaled."""
    stateful_set: str = ""
    """A StatefulSet that is there: the same, but it ends the newest pod and never another."""
    pods_of: str = ""
    """A Deployment that is there: the adapter makes the pods itself, after its pod template."""
    parameters: dict[str, str] = Field(default_factory=dict[str, str])
    """What its pods were made for: endpoints must ask for these very values. Not with pods_of."""
    args: tuple[str, ...] = ()
    """Arguments of the pod's first container, with placeholders; only with pods_of."""
    rank_nodes: bool = True
    """Prefer the nodes that the allocator ranks best; only with pods_of."""

    @field_validator("args")
    @classmethod
    def _check_args(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        parse_arguments(args)
        return args

    @model_validator(mode="after")
    def _check_way(self) -> Self:
        if sum(bool(one) for one in (self.deployment, self.stateful_set, self.pods_of)) != 1:
            raise ValueError("set one of deployment, stateful_set and pods_of")
        if self.args and not self.pods_of:
            raise ValueError("args needs pods_of: the pods of a Deployment are made by the Deployment")
        if self.parameters and self.pods_of:
            raise ValueError("with pods_of, parameters fill the placeholders of args")
        return self

    def template(self, name: str) -> KubernetesTemplate:
        """The template that this table describes."""
        kind = Kind.DEPLOYMENT if self.deployment else Kind.STATEFUL_SET if self.stateful_set else Kind.PODS
        return KubernetesTemplate(
            name,
            kind,
            self.deployment or self.stateful_set or self.pods_of,
            parameters=self.parameters,
            arguments=parse_arguments(self.args),
            rank_nodes=self.rank_nodes,
        )


class KubernetesAdapterSettings(EngineAdapterSettings):
    """What the Kubernetes adapter is told before it starts; the upstream is the autoscaler, and the allocator if named."""

    section: ClassVar[str] = "kubernetes_adapter"

    kubeconfig: Path | None = Field(
        None, description="kubeconfig file; none inside of the cluster, where the service account is used"
    )
    context: str = Field("", description="context of the kubeconfig file; its current one when empty")
    namespace: str = Field(
        "", description="namespace of the replicas; that of the account or context when empty"
    )
    gpu_resource: str = Field("nvidia.com/gpu", description="resource that counts GPUs in this cluster")
    allocator_address: str = Field(
        "", description="address of the allocator, which ranks nodes for pods_of; not asked when empty"
    )
    kubernetes_templates: dict[str, KubernetesTemplateSettings] = Field(
        default_factory=dict[str, KubernetesTemplateSettings], description="templates by name"
    )

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        used: dict[tuple[Kind, str], str] = {}
        for name in self.kubernetes_templates:
            if not is_id(name):
                raise ValueError(f"kubernetes_templates.{name}: the name of a template must be an id")
            template = self.kubernetes_templates[name].template(name)
            what = (template.kind, template.workload)
            if template.kind is not Kind.PODS and used.setdefault(what, name) != name:
                raise ValueError(
                    f"kubernetes_templates.{name}: {template.kind.value} {template.workload} is already"
                    f" that of {used[what]}"
                )
        return self

    def templates(self) -> dict[str, KubernetesTemplate]:
        """The templates, by name."""
        return {name: table.template(name) for name, table in self.kubernetes_templates.items()}
