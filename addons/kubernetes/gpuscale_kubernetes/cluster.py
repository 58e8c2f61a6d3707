"""The calls of the Kubernetes API that the adapter makes, and their errors.

All calls are for one namespace, with a time-out. A call that the API server refuses or does not answer raises
`EngineUnavailableError`; "not found" is an answer.
"""

# lightkube writes `dict` where it means dict[str, str].
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, ConfigError, KubeConfig
from lightkube.models.authorization_v1 import ResourceAttributes, SelfSubjectAccessReviewSpec
from lightkube.models.core_v1 import Container, ContainerState, PodCondition, PodSpec, PodStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.authorization_v1 import SelfSubjectAccessReview
from lightkube.resources.core_v1 import Pod as ClusterPod
from lightkube.types import PatchType

from gpuscale.autoscaler.adapters.engine import EngineUnavailableError, LaunchRefusedError, ReplicaOrder
from gpuscale.common import names
from gpuscale.common.errors import FailedPreconditionError
from gpuscale_kubernetes.bare import make_pod
from gpuscale_kubernetes.pods import (
    ADAPTER,
    COST,
    ENDPOINT,
    REPLICA,
    STOPPING,
    KubernetesTemplate,
    NotAllowedError,
    Pod,
    PodWorkload,
)

TIMEOUT = 10.0
"""Seconds that an answer may take."""
FIELD_MANAGER = "gpuscale"
HASH = "pod-template-hash"
LOWEST_COST = "-2147483648"
DEFAULT_GRACE = 30
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, CONFLICT, INVALID = 400, 401, 403, 404, 409, 422
_ENDED = frozenset({"Succeeded", "Failed"})


class Cluster:
    """One namespace of a cluster, with the pods that have the label of `adapter`.

    Every method raises EngineUnavailableError if there is no answer: nobody knows what is there, or whether it was done.
    """

    def __init__(self, client: AsyncClient, adapter: str, gpu_resource: str) -> None:
        self._client = client
        self._adapter = adapter
        self._gpu_resource = gpu_resource
        self._version = ""

    async def workload(self, name: str) -> PodWorkload:
        """A Deployment; if it does not exist, that is its problem."""
        with _errors(f"read Deployment {name}"):
            try:
                found = await self._client.get(Deployment, name)
            except ApiError as error:
                if error.status.code != NOT_FOUND:
                    raise
                problem = f"there is no Deployment {name} in namespace {self._client.namespace}"
                return PodWorkload(name, problem=problem)
            return to_workload(found, self._adapter, self._gpu_resource)

    async def pods(self) -> list[Pod]:
        """Every pod with the label of this adapter that something of ours may have made."""
        with _errors("list pods"):
            answer = self._client.list(ClusterPod, labels={ADAPTER: self._adapter}, chunk_size=500)
            found = [pod async for pod in answer]
            self._version = answer.resourceVersion
        return [pod for pod in map(to_pod, found) if pod is not None]

    async def changed(self, seconds: float) -> None:
        """Wait until a pod changes after the last `pods`, or for so long.

        Raises:
            EngineUnavailableError: the pods cannot be watched.
        """
        events = self._client.watch(
            ClusterPod,
            labels={ADAPTER: self._adapter},
            resource_version=self._version,
            server_timeout=int(seconds) + 1,
        )
        if not isinstance(events, AsyncGenerator):
            raise TypeError
        with _errors("watch pods"):
            async with aclosing(events):
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await anext(events, None)

    async def check_right(self, verb: str, resource: str) -> None:
        """Check that the adapter's account may do this in the namespace.

        Raises:
            NotAllowedError: it may not.
        """
        asked = ResourceAttributes(verb=verb, resource=resource, namespace=self._client.namespace)
        with _errors(f"say whether {resource} may be used"):
            review = SelfSubjectAccessReview(spec=SelfSubjectAccessReviewSpec(resourceAttributes=asked))
            answer = await self._client.create(review)
        if answer.status is None or not answer.status.allowed:
            raise NotAllowedError(
                f"the account must have the right to {verb} {resource} in namespace {self._client.namespace}"
            )

    async def mark(self, pod: Pod) -> bool:
        """Mark a pod with its replica, and with whether it should be ended first; False if the pod is gone."""
        ids = names.match(names.REPLICA, pod.replica)
        patch = {
            "metadata": {
                "uid": pod.uid,  # a pod of that name that was made since is another one
                "labels": {ENDPOINT: ids["endpoint"] if ids else None},
                "annotations": {
                    REPLICA: pod.replica or None,
                    STOPPING: "true" if pod.stopping else None,
                    COST: None if pod.costly else LOWEST_COST,
                },
            }
        }
        call = self._client.patch(ClusterPod, pod.name, patch, patch_type=PatchType.MERGE)
        return await _change(f"mark pod {pod.name}", call)

    async def scale(self, workload: PodWorkload, replicas: int, *, dry_run: bool = False) -> bool:
        """Ask for so many pods, unless the workload was changed since it was read; False if it was."""
        patch = {"metadata": {"resourceVersion": workload.version}, "spec": {"replicas": replicas}}
        call = self._client.patch(
            Deployment.Scale, workload.name, patch, patch_type=PatchType.MERGE, dry_run=dry_run
        )
        return await _change(f"scale Deployment {workload.name}", call)

    async def create(
        self,
        name: str,
        template: KubernetesTemplate,
        order: ReplicaOrder,
        nodes: tuple[str, ...],
        *,
        dry_run: bool = False,
    ) -> None:
        """Create the pod of a replica by the template of that name, preferring these nodes; harmless if it exists.

        Raises:
            LaunchRefusedError: it can never be created.
        """
        with _errors(f"read Deployment {template.workload}"):
            like = await self._client.get(Deployment, template.workload)
        pod = make_pod(like, name, template, order, self._adapter, self._gpu_resource, nodes)
        with _errors("create a pod"):
            try:
                await self._client.create(pod, dry_run=dry_run)
            except ApiError as error:
                # A webhook that denies it without saying more makes it a bad request.
                if error.status.code in {BAD_REQUEST, FORBIDDEN, INVALID}:
                    why = error.status.message or str(error)
                    raise LaunchRefusedError(f"the cluster refuses its pod: {why}") from error
                if error.status.code != CONFLICT or error.status.reason != "AlreadyExists":
                    raise

    async def delete(self, pod: Pod, grace: int | None) -> None:
        """Ask a pod to end within `grace` seconds, by default its own; harmless if it is gone."""
        call = self._client.delete(ClusterPod, pod.name, grace_period=grace)
        await _change(f"delete pod {pod.name}", call)


@asynccontextmanager
async def open_cluster(
    kubeconfig: Path | None, context: str, namespace: str, *, adapter: str, gpu_resource: str
) -> AsyncGenerator[Cluster]:
    """A cluster, by a kubeconfig file or, without one, as a pod inside of it.

    Raises:
        FailedPreconditionError: the file, or the pod's service account, cannot be used.
    """
    try:
        if kubeconfig is None:
            found = KubeConfig.from_service_account().get()
        else:
            found = KubeConfig.from_file(kubeconfig).get(context or None)
        client = AsyncClient(
            found,
            namespace=namespace or None,
            timeout=httpx2.Timeout(TIMEOUT),
            field_manager=FIELD_MANAGER,
            trust_env=False,
        )
    except (ConfigError, OSError, KeyError, ValueError, msgspec.MsgspecError) as error:
        where = f"{kubeconfig}" if kubeconfig else "the pod's service account"
        raise FailedPreconditionError(
            f"cannot use {where} to reach the cluster: {error}", reason="KUBECONFIG_UNUSABLE"
        ) from error
    async with client:
        yield Cluster(client, adapter, gpu_resource)


async def _change(doing: str, call: Awaitable[object]) -> bool:
    """Make a change; False if its object is gone, or was changed since it was read."""
    with _errors(doing):
        try:
            await call
        except ApiError as error:
            if error.status.code not in {NOT_FOUND, CONFLICT}:
                raise
            return False
    return True


@contextmanager
def _errors(doing: str) -> Generator[None]:
    """Turn all errors into EngineUnavailableError: whatever is wrong with an answer, the state is unknown."""
    try:
        yield
    except ApiError as error:
        why = f"the cluster refuses to {doing}: {error.status.message}"
        if error.status.code in {UNAUTHORIZED, FORBIDDEN}:
            raise NotAllowedError(why) from error
        raise EngineUnavailableError(why) from error
    except (
        httpx2.HTTPError,
        httpx2.InvalidURL,
        msgspec.MsgspecError,
        ConfigError,
        OSError,
        ValueError,
    ) as error:
        raise EngineUnavailableError(f"cannot {doing}: {str(error) or type(error).__name__}") from error


def to_pod(pod: ClusterPod) -> Pod | None:
    """A pod of ours; None for one that belongs to something else, whatever its labels say."""
    meta, status = pod.metadata, pod.status
    if meta is None or status is None or not meta.name or not meta.uid:
        return None
    owner = owner_of(meta)
    if owner is None:
        return None
    marks = meta.annotations or {}
    replica = marks.get(REPLICA, "")
    over, deleted = status.phase in _ENDED, meta.deletionTimestamp is not None
    return Pod(
        name=meta.name,
        uid=meta.uid,
        owner=owner,
        replica=replica if names.match(names.REPLICA, replica) else "",  # anybody may write there
        stopping=STOPPING in marks,
        costly=marks.get(COST) != LOWEST_COST,
        going=deleted,
        over=over,
        ready=not over and _condition(status, "Ready", "True") is not None,
        reason=_reason(status, over=over),
        exit_code=_exit_code(status) if over or deleted else None,
        created=meta.creationTimestamp.isoformat() if meta.creationTimestamp else "",
    )


def owner_of(meta: ObjectMeta) -> str | None:
    """The Deployment that made a pod; empty for a pod that nothing made; None for any other.

    The ReplicaSets of a Deployment are named after it and after the hash that their pods carry (apps/v1), so no right to
    read ReplicaSets is needed.
    """
    owner = next((reference for reference in meta.ownerReferences or () if reference.controller), None)
    if owner is None:
        return ""
    suffix = f"-{(meta.labels or {}).get(HASH)}"
    if owner.kind == "ReplicaSet" and owner.name.endswith(suffix):
        return owner.name.removesuffix(suffix)
    return None


def to_workload(found: Deployment, adapter: str, gpu_resource: str) -> PodWorkload:
    """A Deployment, and why it cannot be used if so.

    Raises:
        ValueError: the cluster showed no such thing.
    """
    meta, spec = found.metadata, found.spec
    if meta is None or not meta.name or not meta.resourceVersion:
        raise ValueError("it has no name or no version")
    template, problem = spec.template, ""
    labels = (template.metadata or ObjectMeta()).labels or {}
    if labels.get(ADAPTER) != adapter:
        problem = f"the pod template of Deployment {meta.name} lacks the label {ADAPTER}={adapter}"
    pods = template.spec or PodSpec(containers=[])
    grace = pods.terminationGracePeriodSeconds
    return PodWorkload(
        meta.name,
        replicas=1 if spec.replicas is None else spec.replicas,
        version=meta.resourceVersion,
        problem=problem,
        trouble=_trouble(found),
        gpu_count=sum(_gpu_count(container, gpu_resource) for container in pods.containers),
        grace=DEFAULT_GRACE if grace is None else grace,
        probed=any(container.readinessProbe for container in pods.containers),
    )


def _gpu_count(container: Container, gpu_resource: str) -> int:
    limits = container.resources.limits if container.resources else None
    count = str((limits or {}).get(gpu_resource, "0"))
    return int(count) if count.isdecimal() else 0


def _trouble(workload: Deployment) -> str:
    """Why a Deployment makes no pods, in its own words; empty if it does, or does not say."""
    if workload.status is None:
        return ""
    for condition in workload.status.conditions or ():
        if condition.type == "ReplicaFailure" and condition.status == "True":
            return condition.message or condition.reason or ""
    return ""


def _reason(status: PodStatus, *, over: bool) -> str:
    """Why a pod is in its state: its own reason, what a container waits for or how it ended, or the scheduler's."""
    if reason := _text(status.reason, status.message):
        return reason
    for container in status.containerStatuses or ():
        state = container.state or ContainerState()
        if state.waiting and state.waiting.reason:
            return f"container {container.name}: {_text(state.waiting.reason, state.waiting.message)}"
        if state.terminated and over:
            return f"container {container.name} ended with exit code {state.terminated.exitCode}"
    unscheduled = _condition(status, "PodScheduled", "False")
    return _text(unscheduled.reason, unscheduled.message) if unscheduled else ""


def _condition(status: PodStatus, name: str, value: str) -> PodCondition | None:
    """The condition of that name, if it has that value."""
    conditions = {condition.type: condition for condition in status.conditions or ()}
    found = conditions.get(name)
    return found if found and found.status == value else None


def _text(reason: str | None, message: str | None) -> str:
    return ": ".join(text for text in (reason, message) if text)


def _exit_code(status: PodStatus) -> int | None:
    """The exit code of the first program that failed, else of the first program."""
    ended = [item.state.terminated for item in status.containerStatuses or () if item.state]
    codes = [end.exitCode for end in ended if end]
    return next((code for code in codes if code), codes[0] if codes else None)
