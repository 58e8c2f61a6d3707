"""What the cluster says of pods and workloads, in the adapter's words. No I/O."""

# lightkube writes `dict` where it means dict[str, str].
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Mapping

from lightkube.models.apps_v1 import DeploymentCondition
from lightkube.models.core_v1 import ContainerStatus, PodCondition, PodTemplateSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.resources.core_v1 import Pod as ClusterPod

from gpuscale.autoscaler.adapters.engines.kubernetes.model import (
    ADAPTER,
    COST,
    REPLICA,
    STOPPING,
    Kind,
    Pod,
    Workload,
)
from gpuscale.autoscaler.adapters.engines.model import Life, Sighting
from gpuscale.common import names

HASH = "pod-template-hash"
LOWEST_COST = "-2147483648"
DEFAULT_GRACE = 30

_ENDED = frozenset({"Succeeded", "Failed"})


def to_pod(pod: ClusterPod) -> Pod | None:
    """A pod of ours; None for one that belongs to something else, whatever its labels say."""
    meta, status = pod.metadata, pod.status
    if meta is None or status is None or not meta.name or not meta.uid:
        return None
    owner = owner_of(meta)
    if owner is None:
        return None
    marks = meta.annotations or {}
    conditions = {one.type: one for one in status.conditions or ()}
    ready = conditions.get("Ready")
    containers = list(status.containerStatuses or ())
    over = status.phase in _ENDED
    return Pod(
        name=meta.name,
        uid=meta.uid,
        owner=owner,
        replica=_replica(marks.get(REPLICA, "")),
        stopping=STOPPING in marks,
        costly=marks.get(COST) != LOWEST_COST,
        going=meta.deletionTimestamp is not None,
        over=over,
        ready=not over and ready is not None and ready.status == "True",
        reason=_reason(status.reason, status.message, conditions, containers, over=over),
        exit_code=_exit_code(containers) if over or meta.deletionTimestamp is not None else None,
        created=meta.creationTimestamp.isoformat() if meta.creationTimestamp else "",
    )


def _replica(mark: str) -> str:
    """The replica that a mark names; none where somebody else wrote something there."""
    return mark if names.match(names.REPLICA, mark) else ""


def owner_of(meta: ObjectMeta) -> str | None:
    """The Deployment or StatefulSet that made a pod; empty for a pod that nothing made; None for any other.

    The ReplicaSets of a Deployment are named after it and after the hash that their pods carry (apps/v1), so no right to
    read ReplicaSets is needed.
    """
    owner = next((one for one in meta.ownerReferences or () if one.controller), None)
    if owner is None:
        return ""
    if owner.kind == "StatefulSet":
        return owner.name
    suffix = f"-{(meta.labels or {}).get(HASH)}"
    if owner.kind == "ReplicaSet" and owner.name.endswith(suffix):
        return owner.name.removesuffix(suffix)
    return None


def sighting(pod: Pod, note: str = "") -> Sighting:
    """A replica as its pod stands; `note` says what else is to be known of it."""
    if pod.over:
        return Sighting(Life.ENDED, pod.exit_code, pod.reason)
    if pod.going:
        why = "" if pod.stopping else "its pod is being deleted by somebody else or by the cluster"
        return Sighting(Life.STARTING, reason=why)
    reason = "; ".join(text for text in (pod.reason, note) if text)
    return Sighting(Life.READY if pod.ready else Life.STARTING, reason=reason)


def gone(pod: Pod) -> Sighting:
    """A replica whose pod was there and is not any more."""
    why = "" if pod.stopping else "its pod was deleted by somebody else or by the cluster"
    return Sighting(Life.ENDED, pod.exit_code, pod.reason if pod.over else why)


def to_workload(kind: Kind, found: Deployment | StatefulSet, adapter: str, gpu_resource: str) -> Workload:
    """A Deployment or a StatefulSet, and why it cannot be used if so.

    Raises:
        ValueError: the cluster showed no such thing.
    """
    meta, spec = found.metadata, found.spec
    if meta is None or not meta.name or not meta.resourceVersion:
        raise ValueError("it has no name or no version")
    template = spec.template
    labels = (template.metadata.labels if template.metadata else None) or {}
    problem = ""
    if labels.get(ADAPTER) != adapter:
        problem = f"the pod template of {kind.value} {meta.name} lacks the label {ADAPTER}={adapter}"
    grace = template.spec.terminationGracePeriodSeconds if template.spec else None
    return Workload(
        kind,
        meta.name,
        replicas=spec.replicas if spec.replicas is not None else 1,
        version=meta.resourceVersion,
        problem=problem,
        trouble=_trouble(found.status.conditions if isinstance(found, Deployment) and found.status else None),
        gpu_count=_gpu_count(template, gpu_resource),
        grace=DEFAULT_GRACE if grace is None else grace,
        probed=any(one.readinessProbe is not None for one in template.spec.containers)
        if template.spec
        else False,
    )


def _trouble(conditions: Iterable[DeploymentCondition] | None) -> str:
    for one in conditions or ():
        if one.type == "ReplicaFailure" and one.status == "True":
            return one.message or one.reason or ""
    return ""


def _gpu_count(template: PodTemplateSpec, gpu_resource: str) -> int:
    total = 0
    for container in template.spec.containers if template.spec else ():
        limits = (container.resources.limits if container.resources else None) or {}
        text = str(limits.get(gpu_resource, "0"))
        total += int(text) if text.isdecimal() else 0
    return total


def _reason(
    reason: str | None,
    message: str | None,
    conditions: Mapping[str, PodCondition],
    containers: Iterable[ContainerStatus],
    *,
    over: bool,
) -> str:
    """Why it stands as it does: of the whole pod, of a container that waits, or of the scheduler; in this order."""
    if reason or message:
        return ": ".join(text for text in (reason, message) if text)
    for one in containers:
        state = one.state
        if state is not None and state.waiting is not None and state.waiting.reason:
            waits = ": ".join(text for text in (state.waiting.reason, state.waiting.message) if text)
            return f"container {one.name}: {waits}"
        if over and state is not None and state.terminated is not None:
            return f"container {one.name} ended with exit code {state.terminated.exitCode}"
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled.status == "False":
        return ": ".join(text for text in (scheduled.reason, scheduled.message) if text)
    return ""


def _exit_code(containers: Iterable[ContainerStatus]) -> int | None:
    """Of the first program that failed, or of the first."""
    codes = [
        one.state.terminated.exitCode
        for one in containers
        if one.state is not None and one.state.terminated is not None
    ]
    return next((code for code in codes if code), codes[0] if codes else None)
