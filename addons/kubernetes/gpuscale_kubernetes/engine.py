"""The engine: replicas are pods that a Deployment makes, or that the adapter makes itself."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    LaunchRefusedError,
    ReplicaOrder,
    Sighting,
    Start,
    Step,
    StepOutcomes,
    StepwiseEngine,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.settings import EngineSettings, Host, OpenEngine
from gpuscale.autoscaler.adapters.templates import BUILTIN, parse_arguments, placeholders, template_named
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, hit_async
from gpuscale_kubernetes.pods import (
    CorrectionTimer,
    KubernetesTemplate,
    NotAllowedError,
    Pod,
    PodWorkload,
    arrange,
    check_order,
    count,
    gone,
    sighting,
)

if TYPE_CHECKING:
    from gpuscale_kubernetes.cluster import Cluster

RankNodes = Callable[[int], Awaitable[tuple[str, ...]]]
"""The names of nodes with so many idle GPUs, best first; none if unknown."""

FOR_EVER = 31_536_000
"""Seconds (a year) that a pod has to finish if its endpoint sets no limit."""
AT_ONCE = 1
"""Seconds to end a pod now; with 0 the cluster would forget a pod that may still run."""
QUIET = 4.0
"""Seconds between two looks while nothing is under way and no pod changes."""
BUSY = 1.0

_log = get_logger(__name__)


class KubernetesSettings(EngineSettings):
    """Settings of the Kubernetes adapter. It also calls the allocator if `allocator_address` is set."""

    section: ClassVar[str] = "kubernetes_adapter"
    kind: ClassVar[str] = "kubernetes"
    description: ClassVar[str] = "Runs replicas as pods of a Kubernetes cluster."
    library: ClassVar[str] = "lightkube"
    templates_field: ClassVar[str] = "kubernetes_templates"

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
    kubernetes_templates: dict[str, KubernetesTemplate] = Field(
        default_factory=dict[str, KubernetesTemplate], description="templates by name"
    )

    @model_validator(mode="after")
    def _check_workloads(self) -> Self:
        used: dict[str, str] = {}
        for name, template in self.kubernetes_templates.items():
            if template.deployment and (first := used.setdefault(template.deployment, name)) != name:
                whose = f"Deployment {template.deployment} is already that of {first}"
                raise ValueError(f"kubernetes_templates.{name}: {whose}")
        return self

    @asynccontextmanager
    async def open_engine(self, host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The pods of this adapter, which go on when it ends.

        Raises:
            FailedPreconditionError: the cluster's credentials, or a template, cannot be used.
        """
        from gpuscale_kubernetes.bare import AllocatorRanking
        from gpuscale_kubernetes.cluster import open_cluster

        templates = self.kubernetes_templates
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                open_cluster(
                    self.kubeconfig,
                    self.context,
                    self.namespace,
                    adapter=self.adapter,
                    gpu_resource=self.gpu_resource,
                )
            )
            rank = None
            if self.allocator_address:
                allocator = await stack.enter_async_context(self.open_channel(self.allocator_address))
                rank = AllocatorRanking(allocator).best
            workloads = await check_templates(cluster, templates)
            capabilities = api.AdapterCapabilities(
                gives_gpus=True,
                picks_victims=True,
                drains=True,
                probes=bool(workloads) and all(workload.probed for workload in workloads.values()),
            )
            yield OpenEngine(KubernetesEngine(cluster, templates, host.clock, rank), capabilities)


class KubernetesEngine(StepwiseEngine):
    """One namespace of a cluster; pods that the engine makes itself prefer the nodes of `rank`."""

    def __init__(
        self,
        cluster: Cluster,
        templates: Mapping[str, KubernetesTemplate],
        clock: Clock,
        rank: RankNodes | None = None,
    ) -> None:
        self._cluster = cluster
        self._templates = templates
        self._rank = rank
        self._clock = clock
        self._told = False
        self._waiting: dict[str, str] = {}  # by replica: its template
        # By template; dropped once it was changed, until it is seen again.
        self._workloads: dict[str, PodWorkload] = {}
        self._pods: dict[str, Pod] = {}  # by replica
        self._nobodys: dict[str, list[Pod]] = {}  # by template
        self._ended: dict[str, Sighting] = {}
        self._notes: dict[str, str] = {}  # by workload: that somebody else scaled it
        self._unscaled: dict[str, str] = {}  # by template: why it could not be scaled
        self._corrections = {name: CorrectionTimer() for name in templates}

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`; pods that came meanwhile are given to the replicas that wait for one."""
        # Workloads first: one that made a pod between the two questions has a new version by then, and is not changed.
        self._workloads = {
            name: await self._cluster.workload(template.workload)
            for name, template in self._templates.items()
        }
        pods = await self._cluster.pods()
        before, self._nobodys = self._pods, {}
        self._pods = {pod.replica: pod for pod in pods if not pod.owner and pod.replica}
        for name, template in self._templates.items():
            if not template.pods_of:
                await self._mark_pods(name, template.workload, pods, before)
        for name in before.keys() - self._pods.keys():
            self._ended.setdefault(name, gone(before[name]))
        for name in self._pods:
            self._waiting.pop(name, None)
            self._ended.pop(name, None)
        found = {
            name: Sighting(WorkerLife.WAITING, reason=self._why(template))
            for name, template in self._waiting.items()
        }
        found |= self._ended
        return found | {
            name: sighting(pod, self._notes.get(pod.owner, "")) for name, pod in self._pods.items()
        }

    async def _mark_pods(
        self, template: str, workload: str, pods: Sequence[Pod], before: Mapping[str, Pod]
    ) -> None:
        """Mark the pods of a workload as the replicas that they are."""
        own = {pod.uid: pod for pod in pods if pod.owner == workload}
        served = {pod.uid: name for name, pod in before.items() if pod.owner == workload and pod.serving}
        lost = [name for uid, name in served.items() if uid not in own]
        waiting = [name for name, waits_for in self._waiting.items() if waits_for == template]
        for pod in arrange(own.values(), waiting, lost):
            await self._mark(template, own[pod.uid], pod)

    async def _mark(self, template: str, was: Pod, pod: Pod) -> None:
        """Mark a pod unless it has these marks already, and remember the result."""
        if pod.replica and pod.replica != was.replica:
            _log.info("pod is a replica", pod=pod.name, replica=pod.replica)
        if pod != was and not await self._cluster.mark(pod):
            pod = was
        if pod.replica and (pod.active or pod.replica not in self._pods):
            self._pods[pod.replica] = pod
        elif pod.active:
            self._nobodys.setdefault(template, []).append(pod)

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`."""
        self._told = True
        outcomes = StepOutcomes()
        for step in steps:
            await self.take(step, outcomes)
        await hit_async("kubernetes.apply.before_scale")
        await self._settle()
        return outcomes.result()

    async def watch(self) -> None:
        """As `Engine.watch`; what earlier steps still need is done first."""
        await self._settle()
        under_way = self._waiting or any(pod.stopping or pod.going for pod in self._pods.values())
        await self._cluster.changed(BUSY if under_way else QUIET)

    async def start(self, step: Start) -> None:
        """As `StepwiseEngine.start`: create the pod of a replica that has none, or let it wait for one."""
        replica, template = step.replica, template_named(self._templates, step.template)
        workload = self._workloads.get(step.template)
        if workload is None or replica in self._pods:
            return
        try:
            check_order(template, workload, step.order)
            if template.pods_of:
                nodes: tuple[str, ...] = ()
                if self._rank is not None and template.rank_nodes and step.order.gpu_count:
                    nodes = await self._rank(step.order.gpu_count)
                await self._cluster.create(step.template, template, step.order, nodes)
        except LaunchRefusedError:
            self._waiting.pop(replica, None)
            raise
        self._waiting[replica] = step.template

    async def finish(self, step: Finish) -> None:
        """As `StepwiseEngine.finish`. The pod of a workload has the time of its pod template."""
        name, drain_timeout = step.replica, step.drain_timeout
        pod = self._pods.get(name)
        if pod is None or not pod.active:
            return
        if not pod.owner:
            marked = replace(pod, stopping=True)
            await self._cluster.mark(marked)
            grace = FOR_EVER if drain_timeout is None else max(AT_ONCE, math.ceil(drain_timeout))
            await self._cluster.delete(pod, grace)
            self._pods[name] = marked
            return
        if pod.stopping:
            return
        workloads = [workload for workload in self._workloads.values() if workload.name == pod.owner]
        if workloads and (drain_timeout is None or drain_timeout > workloads[0].grace):
            _log.warning(
                "the pod has less time to finish than the endpoint gives it",
                replica=name,
                pod=pod.name,
                seconds=workloads[0].grace,
                drain_timeout=drain_timeout,
            )
        marked = replace(pod, stopping=True, costly=False)
        if await self._cluster.mark(marked):
            self._pods[name] = marked

    async def kill(self, replica: str) -> None:
        """As `StepwiseEngine.kill`. The cluster ends the pod of a workload when its own time to finish is over."""
        pod = self._pods.get(replica)
        if pod is not None and not pod.owner and not pod.over:
            await self._cluster.delete(pod, AT_ONCE)

    async def remove(self, replica: str) -> None:
        """As `StepwiseEngine.remove`."""
        self._ended.pop(replica, None)
        self._waiting.pop(replica, None)
        pod = self._pods.get(replica)
        if pod is None or not pod.over:
            return
        if pod.owner:
            await self._cluster.mark(replace(pod, replica="", stopping=False))
        else:
            await self._cluster.delete(pod, AT_ONCE)
        del self._pods[replica]

    async def _settle(self) -> None:
        """Ask every workload for as many pods as are wanted of it, but not before the first steps arrived.

        A workload that cannot be scaled does not hold up the others: it is tried again anyway.
        """
        if not self._told:
            return
        for name in list(self._workloads):
            template, workload = self._templates[name], self._workloads[name]
            if template.pods_of or workload.problem:
                continue
            try:
                await self._scale(name, workload)
            except EngineUnavailableError as error:
                if self._unscaled.get(name) != str(error):
                    _log.warning("the workload is not scaled", workload=workload.name, why=str(error))
                self._unscaled[name] = str(error)
            else:
                self._unscaled.pop(name, None)

    async def _scale(self, name: str, workload: PodWorkload) -> None:
        """Ask a workload for as many pods as are wanted of it; in time, also undo what somebody else asked it for."""
        mine = [pod for pod in self._pods.values() if pod.owner == workload.name]
        nobodys = self._nobodys.get(name, [])
        waiting = sum(template == name for template in self._waiting.values())
        asked = count(workload, [*mine, *nobodys], waiting)
        replicas = asked.replicas
        note = ""
        if foreign := asked.foreign:
            scaled = f"Deployment {workload.name} was scaled by somebody else"
            note = f"{scaled}: {foreign} of its pods are not ours"
            if note != self._notes.get(workload.name):
                pods = workload.replicas
                _log.warning(
                    "somebody else scaled the workload", workload=workload.name, pods=pods, not_ours=foreign
                )
        self._notes[workload.name] = note
        if self._corrections[name].over(self._clock.now(), foreign=foreign > 0):
            for pod in nobodys:
                await self._cluster.mark(replace(pod, costly=False))
            replicas = workload.replicas - foreign
        if replicas is None:
            return
        del self._workloads[name]
        done = await self._cluster.scale(workload, replicas)
        await hit_async("kubernetes.apply.after_scale")
        if done:
            _log.info("scaled", workload=workload.name, before=workload.replicas, pods=replicas)
        else:
            _log.info("the workload was changed meanwhile; looking again", workload=workload.name)

    def _why(self, template: str) -> str:
        """What the replicas of a template without a pod wait for."""
        workload = self._workloads.get(template)
        if workload is None or self._templates[template].pods_of:
            return "its pod is not there yet"
        if template in self._unscaled:
            return self._unscaled[template]
        return workload.trouble or f"Deployment {workload.name} has not made its pod yet"


async def check_templates(
    cluster: Cluster, templates: Mapping[str, KubernetesTemplate]
) -> Mapping[str, PodWorkload]:
    """Find out, without changing anything, whether every template can be used.

    Returns:
        The workloads by template; none if the cluster does not answer: it may do so later.

    Raises:
        FailedPreconditionError: a template cannot be used, or the adapter's account lacks a right.
    """
    found: dict[str, PodWorkload] = {}
    name = ""
    try:
        await cluster.pods()
        await cluster.check_right("watch", "pods")
        await cluster.check_right("patch", "pods")
        for name, template in sorted(templates.items()):
            workload = found[name] = await cluster.workload(template.workload)
            used = placeholders(parse_arguments(template.args))
            order = ReplicaOrder(
                "endpoints/dry-run/replicas/dry-run",
                "endpoints/dry-run",
                {**template.parameters, **dict.fromkeys(sorted(used - BUILTIN), "0")},
                gpu_count=workload.gpu_count,
            )
            check_order(template, workload, order)
            if template.pods_of:
                await cluster.check_right("delete", "pods")
                await cluster.create(name, template, order, (), dry_run=True)
            else:
                await cluster.scale(workload, workload.replicas, dry_run=True)
    except (NotAllowedError, LaunchRefusedError) as error:
        where = f"template {name}: " if name else ""
        raise FailedPreconditionError(f"{where}{error}", reason="TEMPLATE_UNUSABLE") from error
    except EngineUnavailableError as error:
        _log.warning("templates are not checked, the cluster does not answer", why=str(error))
        return {}
    return found
